"""Problems with gold answers, and the one function that renders a problem to prompt token ids."""

from rlm.data.loaders import load_gsm8k, load_jsonl, load_problems
from rlm.data.problem import Problem

__all__ = ["Problem", "load_gsm8k", "load_jsonl", "load_problems"]
