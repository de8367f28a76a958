"""The rollout engine: many completions of many prompts, reproducible whatever shares the batch."""

from rlm.sampling.engine import Sampler
from rlm.sampling.params import Completion, Request, SamplingParams, Token, prompt_seed

__all__ = ["Completion", "Request", "Sampler", "SamplingParams", "Token", "prompt_seed"]
