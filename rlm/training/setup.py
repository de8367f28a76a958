"""Loads what a GRPO run starts from: problems, base and adapter, sampler."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rlm.api_client import APIClient
from rlm.cli import UsageError, terminal
from rlm.data import Problem, load_problems, stop_token_ids
from rlm.model import (
    TEACH,
    AdapterInfo,
    Device,
    check_adapter,
    check_base,
    load_adapter,
    load_base,
    misfit,
    new_adapter,
    pick_device,
    pick_quantization,
    release_memory,
)
from rlm.sampling import Sampler, VLLMSampler
from rlm.training.config import DEFAULT_SFT_ADAPTER, GRPOConfig

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedTokenizerBase


def load_data(config: GRPOConfig) -> tuple[list[Problem], list[Problem]]:
    """Load the problems to train on and to validate on."""
    train = load_problems(config.dataset, max_samples=config.max_samples, seed=config.seed)
    return train, load_problems(config.dataset, "validation", max_samples=config.eval_samples)


def resolve_start(config: GRPOConfig, model: str, base_hash: str, processes: int) -> GRPOConfig:
    """Return the config as this base and this machine can have it, with a line for what changes.

    What `GRPOConfig.resolve` found for the command line stays; a config made in Python may have
    the default adapter, which is used only where it fits, or `quantize` auto.

    Raises:
        UsageError: an adapter that was asked for is not there or belongs to another base; there
            are more processes than problems in a step.
    """
    if config.batch_size < processes:
        raise UsageError(f"--batch-size {config.batch_size}: fewer than {processes} processes")
    adapter, quantize = config.sft_adapter, pick_quantization(config.quantize)
    if adapter == DEFAULT_SFT_ADAPTER:
        if problem := misfit(adapter, model, base_hash):
            terminal.line(f"starts from a new adapter: {problem}; train_sft.py teaches the format")
            adapter = None
    elif adapter is not None:
        check_adapter(adapter, TEACH)
        check_base(adapter, model, base_hash)
    if adapter is not None:
        before = AdapterInfo.load(adapter).quantize
        if before != quantize:
            now = f"--quantize {quantize}"
            terminal.line(f"{adapter} was trained with --quantize {before}, now {now}")
    use_4bit = quantize == "4bit"
    return replace(config, sft_adapter=adapter, quantize=quantize, use_4bit=use_4bit)


def load_policy(config: GRPOConfig, model: str, device: Device | None) -> PeftModel:
    """Load the base with the adapter to train on it, in eval mode."""
    gc.collect()  # SFT's trainer, where that ran in this process: a cycle of a gigabyte
    release_memory()
    device = device or pick_device()
    packing = {"quantize": config.quantize, "attn": config.attn_implementation}
    base = load_base(model, device, **packing)
    if config.sft_adapter:
        return load_adapter(base, config.sft_adapter, trainable=True)
    torch.manual_seed(config.seed)  # of the new adapter's matrices
    return new_adapter(base, r=config.lora_r, alpha=config.lora_alpha).eval()


def make_sampler(
    policy: PeftModel, tokenizer: PreTrainedTokenizerBase, config: GRPOConfig, rank: int
) -> Sampler | VLLMSampler:
    """Make the sampler that the config asks for.

    Args:
        rank: of this process: each has a directory of its own from which the server reads.

    Raises:
        UsageError: no server answers, or this model has no fast path and --sampler asks for it.
    """
    if config.sampler != "vllm":
        merged = {"merged": True, "unmerged": False}.get(config.sampler)
        return Sampler(policy, tokenizer, max_num_seqs=config.max_num_seqs, merged=merged)

    def export() -> Path:
        path = config.run_dir / f"sampler_adapter_{rank}"
        # "auto" would ask the hub for the base's config, each time.
        options = {"selected_adapters": ["default"], "save_embedding_layers": False}
        policy.save_pretrained(path, **options)
        return path

    key = "VLLM_API_KEY" if "VLLM_API_KEY" in os.environ else None
    client = APIClient(config.sampler_url, concurrency=config.max_num_seqs, api_key_env=key)
    return VLLMSampler(client, stop_token_ids(tokenizer, policy.generation_config), export)


def drop_long_prompts(
    problems: Sequence[Problem], render: Callable[[Problem], Sequence[int]], limit: int | None
) -> list[Problem]:
    """Keep the problems whose prompts have at most `limit` tokens, and say how many have not.

    Raises:
        UsageError: none has.
    """
    if limit is None:
        return list(problems)
    fitting = [problem for problem in problems if len(render(problem)) <= limit]
    if not fitting:
        raise UsageError(f"--max-prompt-length {limit}: every prompt is longer")
    if len(fitting) < len(problems):
        left_out = len(problems) - len(fitting)
        terminal.line(
            f"{left_out} of {len(problems)} problems left out: prompts over {limit} tokens"
        )
    return fitting
