"""Measures the accuracy gain of training methods and controls at equal cost, over several seeds.

Each cell of the grid is the training run of one method (arm) with one seed.

    python -m benchmarks.evidence            # run all unfinished cells; may be killed at any time
    python -m benchmarks.evidence --list     # print which cells are done and which are left
    python -m benchmarks.evidence report     # write docs/results/six/README.md from finished cells

plan.py defines the methods and the sizes.
"""
