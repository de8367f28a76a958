"""Recipe in which a model learns to design the agents that solve a problem."""
