"""Evidence that GRPO learns: a grid of arms, controls and seeds.

    python -m benchmarks.evidence            # all that is not done yet; may be killed at any time
    python -m benchmarks.evidence --list     # what is done and what is left
    python -m benchmarks.evidence report     # docs/results/six/README.md from the finished cells

`plan` has the arms and the sizes, with reasons.
"""
