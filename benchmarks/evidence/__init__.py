"""Evidence that GRPO learns: a grid of arms, controls and seeds.

    python -m benchmarks.evidence            # run all unfinished cells; may be killed at any time
    python -m benchmarks.evidence --list     # print which cells are done and which are left
    python -m benchmarks.evidence report     # write docs/results/six/README.md from finished cells

`plan` defines the arms and the sizes, with reasons.
"""
