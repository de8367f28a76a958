"""The adapter of the installed TRL, which calls two methods of its GRPOTrainer without a model.

`_generate_and_score_completions` computes the masks, advantages and importance ratios of given
completions, and `_compute_loss` computes the loss. Options that are set neither by a case nor by
`cases.LOSS` have TRL's default values.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import fields
from types import SimpleNamespace
from typing import Any, cast

import torch
import trl.trainer.grpo_trainer as SOURCE
from torch import Tensor
from trl.rewards.other_rewards import get_soft_overlong_punishment
from trl.trainer.grpo_config import GRPOConfig

LOSS_TYPES = {"sequence": "grpo", "token": "dapo", "constant": "dr_grpo"}
DEFAULTS = {option.name: option.default for option in fields(GRPOConfig)}


def adapter(formula: str, given: SimpleNamespace) -> Tensor | None:
    """Compute the result of a case with TRL's code."""
    if formula == "advantages":
        rewards = torch.tensor(given.rewards, dtype=torch.float32)  # (P, G)
        ids, scale = [[1]] * rewards.numel(), "group" if given.scale else "none"
        return _score(ids, rewards, scale_rewards=scale)["advantages"].view_as(rewards)
    if formula == "overlong":
        punish = get_soft_overlong_punishment(given.max_new_tokens, given.buffer)
        return torch.tensor(punish([[1] * length for length in given.lengths]))
    if formula == "mask":
        options = {"eos_token_ids": [given.end], "mask_truncated_completions": given.mask_truncated}
        tokenizer = SimpleNamespace(pad_token_id=given.pad)
        return _score(given.completions, _tokenizer=tokenizer, **options)["completion_mask"]
    offered = formula == "loss" and given.objective != "tapered"
    return _loss(given) if offered else None


class Accelerator:
    """A stand-in for `accelerate.Accelerator`."""

    device, process_index, sync_gradients = torch.device("cpu"), 0, True

    def __init__(self, processes: int) -> None:
        self.num_processes = processes

    def gather(self, x: Tensor) -> Tensor:
        return x.reshape(-1)

    def reduce(self, x: Tensor, reduction: str = "sum") -> Tensor:
        return x


def _trainer(
    processes: int = 1, args: dict[str, Any] | None = None, **own: Any
) -> SOURCE.GRPOTrainer:
    """Build a stand-in for the trainer object, with TRL's default values overridden by `own`."""
    options = DEFAULTS | (args or {})
    switched_off = ("_entropy_bonus_enabled", "use_adaptive_entropy", "aux_loss_enabled", "tools")
    rest = {
        "args": SimpleNamespace(**options),
        "accelerator": Accelerator(processes),
        "model": SimpleNamespace(training=True, is_gradient_checkpointing=False),
        "_metrics": {"train": defaultdict(list)},
        "_logs": defaultdict(list, rewards=defaultdict(list), extra=defaultdict(list)),
        "_pending_extra_logs": {},
        "_pending_metrics": {},
        **dict.fromkeys(("environment_factories", "environments", "pad_to_multiple_of")),
        **dict.fromkeys(switched_off, False),
    }
    # The object has every attribute that TRL's methods read.
    return cast("SOURCE.GRPOTrainer", SimpleNamespace(**options | rest | own))


def _score(
    completions: list[list[int]],
    rewards: Tensor | None = None,
    logprobs: tuple[Tensor | None, Tensor | None] = (None, None),
    **options: Any,
) -> dict[str, Tensor]:
    """Compute the masks, advantages and importance ratios of completions with TRL's code.

    Args:
        rewards: (P, G).
        logprobs: the old log-probabilities, then the sampler's.
    """
    rows = len(completions)
    rewards = torch.zeros(1, rows) if rewards is None else rewards
    old, sampled = logprobs
    sampled = None if sampled is None else sampled.tolist()
    generated = ([[5]] * rows, completions, None, [""] * rows, sampled, {}, None, None)
    trainer = _trainer(
        args={"steps_per_generation": 1, "gradient_accumulation_steps": 1},
        **{"_tokenizer": SimpleNamespace(pad_token_id=0), "eos_token_ids": [1]} | options,
        use_vllm=old is not None,
        num_generations=rewards.shape[1],
        reward_funcs=[None],
        reward_func_names=["reward"],
        reward_weights=torch.ones(1),
        _generate=lambda prompts: generated,
        _calculate_rewards=lambda *_: rewards.reshape(-1, 1),
        _get_per_token_logps_and_entropies=lambda *_, **__: (old, None, None),
    )
    score = SOURCE.GRPOTrainer._generate_and_score_completions
    return score(trainer, [{"prompt": ""} for _ in range(rows)])


def _loss(given: SimpleNamespace) -> Tensor:
    weighted, cap = given.objective == "weighted", given.importance_cap
    ones = torch.ones(given.mask.shape, dtype=torch.long)
    inputs = {
        **dict.fromkeys(("prompt_ids", "prompt_mask", "completion_ids"), ones),
        "completion_mask": given.mask.long(),
        "advantages": given.advantages,
        "old_per_token_logps": given.old_logprobs,
        "ref_per_token_logps": given.ref_logprobs,
        "num_items_in_batch": given.step_mask.sum(),
    }
    if cap:
        cut = {"vllm_importance_sampling_mode": "token_truncate"}
        cut["vllm_importance_sampling_clip_max"] = cap
        scored = _score(ones.tolist(), None, (given.old_logprobs, given.sampler_logprobs), **cut)
        inputs["importance_sampling_ratio"] = scored["importance_sampling_ratio"]
    trainer = _trainer(
        processes=given.processes,
        args={"steps_per_generation": given.micro_batches},
        beta=given.kl_weight,
        use_vllm=bool(cap),
        loss_type="cispo" if weighted else LOSS_TYPES[given.aggregation],
        importance_sampling_level=given.ratio,
        epsilon_low=given.clip_low,
        epsilon_high=given.clip_high + weighted,  # for CISPO, TRL expects 1 + ε
        max_completion_length=given.constant,
        current_gradient_accumulation_steps=given.micro_batches,
        _get_per_token_logps_and_entropies=lambda *_, **__: (given.logprobs, 0 * given.mask, None),
    )
    loss = SOURCE.GRPOTrainer._compute_loss(trainer, None, inputs)
    return loss / given.processes  # because DDP averages gradients
