"""The same GRPO loop, other actors. Recipes import `train_grpo` and `rlm`, never each other."""
