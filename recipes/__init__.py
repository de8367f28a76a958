"""The same GRPO loop with other actors. Recipes import `train_grpo` and `rlm`, never each other."""
