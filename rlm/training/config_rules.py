"""Rules over several options of GRPO training: what one sets for others, and what contradicts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlm.data import dataset_name, dataset_parts
from rlm.training.algorithms import ALGORITHMS

if TYPE_CHECKING:
    from rlm.model import AdapterInfo

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


def set_clip_bounds(config: Any) -> None:
    """Spread a GRPOConfig's --clip-eps, and forget it: a later `replace` of it is refused.

    Raises:
        ValueError: it sets nothing, because both bounds are given.
    """
    bounds = [n for n in ("clip_eps_low", "clip_eps_high") if getattr(config, n) is None]
    if config.clip_eps is not None and not bounds:
        raise ValueError(
            "--clip-eps sets --clip-eps-low and --clip-eps-high where they are not given, and both "
            "are; leave it out"
        )
    for name in bounds:
        object.__setattr__(config, name, config.clip_eps)
    object.__setattr__(config, "clip_eps", None)


def follow_algorithm(config: Any) -> None:
    """Set what the algorithm of a GRPOConfig decides and no option does."""
    algorithm = ALGORITHMS[config.algorithm]
    token_level = config.fixed_length_normalizer is None and algorithm.aggregation == "token"
    by_constant = not config.token_level_loss and algorithm.aggregation == "constant"
    by_std = config.use_std_normalization
    advantage = config.advantage or algorithm.advantage
    if config.advantage is None and by_std is not None and by_std != (advantage == "std"):
        advantage = "std" if by_std else "centred"
    values = {
        "advantage": advantage,
        "use_std_normalization": advantage == "std",
        "negative_weight": algorithm.negative_weight,
        "distinct": algorithm.distinct,
        "token_level_loss": token_level,
        "fixed_length_normalizer": config.max_new_tokens if by_constant else None,
        "clip_eps_low": algorithm.clip_eps_low,
        "clip_eps_high": algorithm.clip_eps_high,
        "dynamic_sampling": algorithm.dynamic_sampling,
        "overlong_buffer": int(algorithm.overlong_share * config.max_new_tokens),
        "mini_batch_size": algorithm.mini_batch_size
        and min(algorithm.mini_batch_size, config.batch_size),
        "learning_rate": algorithm.learning_rate,
        "warmup_steps": algorithm.warmup_steps,
    }
    for name, value in values.items():
        if getattr(config, name) is None:
            object.__setattr__(config, name, value)


def refuse_contradictions(config: Any) -> None:
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
        "--top-p must be 1 and --top-k 0 in training: the loss assumes that completions are "
        "sampled from the whole distribution": config.top_p != 1 or config.top_k != 0,
        "--lora-dropout must be 0 in training: with dropout the trained model would not be the "
        "one that sampled": config.lora_dropout != 0,
        "--no-use-lora: only LoRA adapters are trained here, the base model is never changed": (
            not config.use_lora
        ),
        "--token-level-loss divides by the tokens of a step, --fixed-length-normalizer by a "
        "constant; give one of them": config.token_level_loss and config.fixed_length_normalizer,
        f"--overlong-buffer {config.overlong_buffer} is longer than --max-new-tokens "
        f"{config.max_new_tokens}: every completion would be punished": (
            config.overlong_buffer > config.max_new_tokens
        ),
        f"--advantage {config.advantage} and --use-std-normalization contradict each other; give "
        "one of them": config.use_std_normalization != (config.advantage == "std"),
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
