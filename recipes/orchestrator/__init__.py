"""A model learns to design the agents that solve the problem."""
