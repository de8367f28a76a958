"""A script name from two other READMEs (docs/reference/names.md). Prints our commands instead."""

import sys

if __name__ == "__main__":
    sys.stderr.write(
        "error: here it is: python -m recipes.orchestrator.train for agents, python train_grpo.py "
        "for a model alone (all names: docs/reference/names.md)\n"
    )
    sys.exit(2)
