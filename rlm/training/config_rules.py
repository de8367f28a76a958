"""Rules over several options of GRPO training: what one sets for others, and what contradicts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlm.data import dataset_name, dataset_parts
from rlm.training.algorithms import ALGORITHMS

if TYPE_CHECKING:
    from rlm.model import AdapterInfo
    from rlm.training.config import GRPOConfig

SHORT, ON_CPU, ON_GPU = 96, 256, 512  # tokens
GENERATED = {"word-problems", "elementary"}  # their worked solutions take at most 84 tokens
MAX_NEW_TOKENS = (
    f"{SHORT} for word-problems and elementary, else {ON_GPU} on a GPU and {ON_CPU} without one"
)

LORA_RATES = 1e-5, 2e-3  # below the first an adapter hardly moves, above the second it breaks
USUAL_RATES = "--learning-rate 1e-5 to 3e-4: about ten times that of full fine-tuning"
KEPT_AS = {"best": "adapter_best", "last": "adapter_last"}  # folders in --run-dir


def follow_start(
    given: Mapping[str, Any], start: AdapterInfo | None, gpu_defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what was given to a training config, and what the adapter to start from decides, else
    the machine: model, data, tool, rank, system prompt.

    Args:
        gpu_defaults: other values that change when a GPU's model is chosen.

    Raises:
        UsageError: what was given contradicts the adapter.
    """
    from rlm.model import AdapterInfo, default_values

    values = default_values(given, start, gpu_defaults)
    if start is not None:
        values["tool"] = start.resolve_tool(given.get("tool", "auto"))
        values |= start.resolve_rank(given)
        values |= start.resolve_data(values["dataset"], given.get("columns"))
    prompt = (start or AdapterInfo(Path())).resolve_system_prompt(given.get("system_prompt"))
    return values | {"system_prompt": prompt}


def choose_max_new_tokens(dataset: str) -> int:
    """Return how many tokens completions may have where no option says it."""
    import torch

    names = {dataset_name(part).partition(":")[0] for part in dataset_parts(dataset)}
    if names <= GENERATED:
        return SHORT
    return ON_GPU if torch.cuda.is_available() else ON_CPU


def judge_learning_rate(rate: float) -> tuple[str, str] | None:
    """Say what is wrong with a learning rate of GRPO on a LoRA adapter: "too low" or "too high",
    and why; None for one that has been seen to work."""
    slow, fast = LORA_RATES
    if rate < slow:
        return "too low", f"{rate:g} hardly moves a LoRA adapter"
    return ("too high", f"{rate:g} breaks a policy within a few steps") if rate > fast else None


def follow_algorithm(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a GRPOConfig, and what its algorithm decides where they are None."""
    if values["algorithm"] not in ALGORITHMS:  # refused by the config's own check
        return dict(values)
    algorithm = ALGORITHMS[values["algorithm"]]
    token_level = values["fixed_length_normalizer"] is None and algorithm.aggregation == "token"
    by_constant = not values["token_level_loss"] and algorithm.aggregation == "constant"
    decided = {
        "advantage": algorithm.advantage,
        "negative_weight": algorithm.negative_weight,
        "distinct": algorithm.distinct,
        "token_level_loss": token_level,
        "fixed_length_normalizer": values["max_new_tokens"] if by_constant else None,
        "clip_eps_low": algorithm.clip_eps_low,
        "clip_eps_high": algorithm.clip_eps_high,
        "dynamic_sampling": algorithm.dynamic_sampling,
        "overlong_buffer": int(algorithm.overlong_share * values["max_new_tokens"]),
        "mini_batch_size": algorithm.mini_batch_size,
        "learning_rate": algorithm.learning_rate,
        "warmup_steps": algorithm.warmup_steps,
    }
    missing = {name: value for name, value in decided.items() if values[name] is None}
    return {**values, **missing}


def refuse_contradictions(config: GRPOConfig) -> None:
    """Refuse options of a GRPOConfig that contradict each other, or that its loss rules out.

    Raises:
        ValueError: the first contradiction; the message says what to change.
    """
    looks, by_vllm = config.doctor or config.plan, config.sampler == "vllm"
    starts_server = by_vllm and config.sampler_url is None
    kept = {(config.run_dir / name).resolve() for name in KEPT_AS.values()}
    overwrites = config.output.resolve() == (config.sft_adapter or Path()).resolve()
    refused = {
        "--steps and --num-epochs contradict each other; give one of them": (
            config.steps is not None and config.num_epochs is not None
        ),
        "--kl-target needs a --kl-weight above 0 to start from": (
            config.kl_target and not config.kl_weight
        ),
        "--token-level-loss divides by the tokens of a step, --fixed-length-normalizer by a "
        "constant; give one of them": config.token_level_loss and config.fixed_length_normalizer,
        f"--overlong-buffer {config.overlong_buffer} is longer than --max-new-tokens "
        f"{config.max_new_tokens}: every completion would be punished": (
            config.overlong_buffer > config.max_new_tokens
        ),
        f"--mini-batch-size {config.mini_batch_size} is more than --batch-size "
        f"{config.batch_size}": (config.mini_batch_size or 0) > config.batch_size,
        "--sampler-url needs --sampler vllm": config.sampler_url is not None and not by_vllm,
        "--vllm-command needs --sampler vllm, and no --sampler-url": (
            config.vllm_command != "vllm serve" and not starts_server
        ),
        "--tool does not work with --sampler vllm: vLLM cannot write into a completion while it "
        "is generated": config.tool != "none" and by_vllm,
        "--doctor and --plan look at a start; leave out --resume": looks and config.resume,
        "--doctor and --plan are two commands; give one of them": config.doctor and config.plan,
        "--plan times our own sampler; leave out --sampler vllm": config.plan and by_vllm,
        "--output would overwrite --sft-adapter; type another folder, such as --output "
        "runs/mine/adapter": overwrites and not looks,  # these write nothing
        f"--output {config.output} is a folder that the run writes itself; name another": (
            config.output.resolve() in kept and not looks
        ),
    }
    for reason, is_so in refused.items():
        if is_so:
            raise ValueError(reason)
