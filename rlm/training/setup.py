"""What a GRPO run starts from: model and data where no flag names them, adapter, problems."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rlm.api_client import APIClient
from rlm.cli import terminal
from rlm.cli.options import UsageError, changed, set_by_preset
from rlm.data.loaders import load_problems
from rlm.data.problem import Problem
from rlm.data.prompts import longest_prompts, stop_token_ids
from rlm.model import adapters
from rlm.model import base as models
from rlm.model import hardware as machine
from rlm.model.quantize import trained_on
from rlm.sampling import Sampler, VLLMSampler
from rlm.training.config import DEFAULT_SFT_ADAPTER, GPU_DEFAULTS, GRPOConfig
from rlm.training.memory_plan import MemoryPlan, plan_memory

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedTokenizerBase

TEACH = "run: python train_sft.py"


def settle(config: GRPOConfig) -> GRPOConfig:
    """The config with model and data where no flag named them.

    Raises:
        UsageError: the adapter to start from is not there. The default one is required only if no
            model is named: then training goes on where SFT ended.
    """
    adapter = config.sft_adapter
    if adapter == DEFAULT_SFT_ADAPTER and config.model is not None and not adapter.exists():
        adapter = None
    if adapter is not None:
        adapters.check_adapter(adapter, TEACH)
    start_run = adapters.read_run(adapter) if adapter is not None else None
    renamed = start_run and config.model not in (None, start_run.get("base_model"))
    # A copy of its base, or another one? Then nothing of it is taken, and `fit` says why.
    if renamed and adapter == DEFAULT_SFT_ADAPTER:
        other = _why_not(config.model, models.base_hash(config.model))
        start_run = None if other else start_run
    return machine.fill_in(config, GPU_DEFAULTS, start_run)


def load_data(config: GRPOConfig) -> tuple[list[Problem], list[Problem]]:
    """The problems to train on and to validate on."""
    train = load_problems(config.dataset, max_samples=config.max_samples, seed=config.seed)
    return train, load_problems(config.dataset, "validation", max_samples=config.eval_samples)


def fit(config: GRPOConfig, model: str, base_hash: str, processes: int) -> GRPOConfig:
    """The config as this machine and this model can have it, with a line for what changes.

    Raises:
        UsageError: an adapter that was asked for is not there or belongs to another base; there
            are more processes than problems in a step.
    """
    if config.batch_size < processes:
        raise UsageError(f"--batch-size {config.batch_size}: fewer than {processes} processes")
    if config.sft_adapter == DEFAULT_SFT_ADAPTER:
        problem = _why_not(model, base_hash)
        if problem:
            terminal.line(f"starts from a new adapter: {problem}; train_sft.py teaches the format")
            config = changed(config, sft_adapter=None)
    elif config.sft_adapter is not None:
        adapters.check_adapter(config.sft_adapter, TEACH)
        adapters.check_base(config.sft_adapter, model, base_hash)
    if "use_4bit" in set_by_preset(config) and config.use_4bit and not torch.cuda.is_available():
        terminal.line(
            "the preset's 4-bit base is for CUDA GPUs; here it would only be slow, so the base is "
            f"loaded in full ({machine.pick_device()}); --quantize 4bit packs it all the same"
        )
        config = changed(config, quantize="none", use_4bit=False)
    if config.sft_adapter is not None:
        packed = trained_on(adapters.read_run(config.sft_adapter))
        if packed != config.quantize:
            now = f"--quantize {config.quantize}"
            terminal.line(f"{config.sft_adapter} was trained with --quantize {packed}, now {now}")
    return config


def _why_not(model: str, base_hash: str) -> str:
    """Why the default adapter can not be taken; "" if it can."""
    if not DEFAULT_SFT_ADAPTER.exists():
        return f"{DEFAULT_SFT_ADAPTER} does not exist"
    try:
        adapters.check_adapter(DEFAULT_SFT_ADAPTER, TEACH)
        adapters.check_base(DEFAULT_SFT_ADAPTER, model, base_hash)
    except UsageError as error:
        return str(error)
    return ""


def load_policy(config: GRPOConfig, model: str, device: machine.Device | None) -> PeftModel:
    """The base with the adapter to train on it, in eval mode."""
    gc.collect()  # SFT's trainer, where that ran in this process: a cycle of a gigabyte
    machine.release_memory()
    device = device or machine.pick_device()
    base = models.load_base(model, device, quantize=config.quantize, attn=config.attn)
    if config.sft_adapter:
        return adapters.load_adapter(base, config.sft_adapter, trainable=True)
    torch.manual_seed(config.seed)  # of the new adapter's matrices
    return adapters.new_adapter(base, r=config.lora_r, alpha=config.lora_alpha).eval()


def make_sampler(
    policy: PeftModel, tokenizer: PreTrainedTokenizerBase, config: GRPOConfig, rank: int
) -> Sampler | VLLMSampler:
    """The sampler that the config asks for.

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
        policy.save_pretrained(path, selected_adapters=["default"])
        return path

    key = "VLLM_API_KEY" if "VLLM_API_KEY" in os.environ else None
    client = APIClient(config.sampler_url, concurrency=config.max_num_seqs, api_key_env=key)
    return VLLMSampler(client, stop_token_ids(tokenizer, policy.generation_config), export)


def plan(trainer: Any, problems: Sequence[Problem], evaluated: int) -> MemoryPlan:
    """The memory plan of a `train_grpo.GRPOTrainer` on these problems, and a line that says it."""
    prompts = longest_prompts(trainer.render, problems)
    master_weights = list(trainer.adapter.values())
    found = plan_memory(
        trainer.policy, master_weights, trainer.sampler, trainer.config, prompts, evaluated
    )
    terminal.line(f"memory: {found}")
    return found


def within(
    problems: Sequence[Problem], render: Callable[[Problem], Sequence[int]], limit: int | None
) -> list[Problem]:
    """The problems whose prompts have at most `limit` tokens; a line says how many have not.

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
