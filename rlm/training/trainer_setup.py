"""Sets up a GRPO trainer: its arguments, the adapter it starts from, its policy and sampler."""

from __future__ import annotations

import gc
import os
import uuid
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rlm.api_client import APIClient
from rlm.cli import UsageError, terminal
from rlm.data import stop_token_ids
from rlm.model import (
    HOW_TO_TRAIN_SFT,
    AdapterInfo,
    Device,
    adapter_mismatch,
    check_adapter,
    check_base,
    load_adapter,
    load_base,
    new_adapter,
    pick_device,
    pick_quantization,
    release_memory,
)
from rlm.sampling import Sampler, VLLMSampler, sampling_dtype, split_command
from rlm.tools import Tool, as_tool, load_tool
from rlm.training.config import DEFAULT_SFT_ADAPTER, GRPOConfig
from rlm.training.distributed import Distributed
from rlm.training.run_servers import RunServers

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedTokenizerBase


# Arguments of TRL's trainer and of seed implementations: what to write here.
ARGUMENTS = {
    "model": "model_name=, as text",
    "args": "config=GRPOConfig(...)",
    "reward_funcs": "reward_fn=: a function, or a list, of which the weighted mean is taken",
    "train_dataset": "trainer.train(dataset)",
    "eval_dataset": "trainer.train(dataset, eval_dataset)",
    "processing_class": "tokenizer=",
    "tools": "tool=: one object, which writes into completions (docs/how-to/tools.md)",
    "peft_config": "config=GRPOConfig(lora_r=..., lora_alpha=...)",
    "use_accelerate": "nothing: torchrun or accelerate launch starts several processes",
}


def check_arguments(model_name: object, config: object, others: Iterable[str]) -> None:
    """Refuse what a `train_grpo.GRPOTrainer` does not take, before anything is loaded.

    Raises:
        TypeError: the first of these; the message says what to write.
    """
    for name in others:
        known = "it takes model_name, config, reward_fn, tokenizer, device and tool"
        advice = f"write {ARGUMENTS[name]}" if name in ARGUMENTS else known
        raise TypeError(f"GRPOTrainer has no argument {name}: {advice}")
    if not isinstance(model_name, str | Path):
        kind = type(model_name).__name__
        raise TypeError(
            f"model_name is a {kind}: give a hub id or a directory; trainer.model is what it loads"
        )
    if not isinstance(config, GRPOConfig | None):
        kind = f"{type(config).__module__}.{type(config).__name__}"
        raise TypeError(f"config is a {kind}: give a rlm.GRPOConfig")


def resolve_start(
    config: GRPOConfig, tool: Tool | None, model: str, base_hash: str, processes: int
) -> tuple[GRPOConfig, Tool | None]:
    """Return the config as this base and this machine can have it, with a line for what changes,
    and the run's tool: `tool`, or else what --tool names.

    What `GRPOConfig.resolve` found for the command line stays; a config made in Python may have
    the default adapter, which is used only where it fits, or `quantize` auto.

    Raises:
        TypeError: `tool` is none.
        UsageError: an adapter that was asked for is not there or belongs to another base; there
            are more processes than problems in a step; other tags, or another rank, were asked for
            than it has; --tool names none.
        ValueError: vLLM samples, which takes no tool.
    """
    tool = load_tool(config.tool) if tool is None else as_tool(tool)
    config = replace(config, tool=tool.name if tool else "none")
    if config.batch_size < processes:
        too_small = f"--batch-size {config.batch_size} is too small"
        raise UsageError(f"{too_small}: {processes} processes need a problem each")
    if config.sampler == "vllm" and not config.sampler_url:
        split_command(config.vllm_command)  # now: loading the model may take minutes
    adapter, quantize = config.sft_adapter, pick_quantization(config.quantize)
    if adapter == DEFAULT_SFT_ADAPTER:
        if problem := adapter_mismatch(adapter, model, base_hash):
            terminal.line(f"starts from a new adapter: {problem}")
            adapter = None
    elif adapter is not None:
        check_adapter(adapter, HOW_TO_TRAIN_SFT)
        check_base(adapter, model, base_hash)
    start = AdapterInfo.load(adapter) if adapter else AdapterInfo(Path())
    for name, now in {"quantize": quantize, "tool": config.tool}.items() if adapter else ():
        if (then := getattr(start, name)) != now:
            terminal.line(f"{adapter} was trained with --{name} {then}, now --{name} {now}")
    if adapter is not None and config.system_prompt not in (None, start.system_prompt):
        terminal.line(f"{adapter} was trained with another system prompt than --system-prompt")
    config = replace(
        config,
        sft_adapter=adapter,
        quantize=quantize,
        use_4bit=quantize == "4bit",
        use_8bit=quantize == "8bit",
        reasoning_format=start.resolve_format(config.reasoning_format),
        system_prompt=start.resolve_system_prompt(config.system_prompt),
    )
    return start.with_rank(config) if adapter else config, tool


def load_policy(config: GRPOConfig, model: str, device: Device | None) -> PeftModel:
    """Load the base with the adapter to train on it, in eval mode."""
    gc.collect()  # SFT's trainer, where that ran in this process: a cycle of a gigabyte
    release_memory()
    device = device or pick_device(config.dtype)
    packing = {"quantize": config.quantize, "attn": config.attn_implementation}
    base = load_base(model, device, **packing)
    if config.sft_adapter:
        return load_adapter(base, config.sft_adapter, trainable=True)
    torch.manual_seed(config.seed)  # of the new adapter's matrices
    return new_adapter(base, r=config.lora_r, alpha=config.lora_alpha).eval()


def make_sampler(
    policy: PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    config: GRPOConfig,
    distributed: Distributed,
    tool: Tool | None = None,
) -> Sampler | VLLMSampler:
    """Make the sampler that the config asks for.

    Raises:
        UsageError: no server answers, or this model has no fast path and --sampler asks for it.
    """
    if config.sampler != "vllm":
        merged = {"merged": True, "unmerged": False}.get(config.sampler)
        dtype = sampling_dtype(policy, config.sampler_dtype)
        options = {"max_num_seqs": config.max_num_seqs, "merged": merged, "dtype": dtype}
        return Sampler(policy, tokenizer, **options, tool=tool)
    if config.quantize != "none" and "quantization" not in config.vllm_command:
        terminal.line(
            f"warning: --quantize {config.quantize} changes the model that is trained, but not the "
            "one that vLLM samples from (sampler/logprob_gap_mean shows how far they differ): use "
            "--quantize none"
        )

    def export() -> Path:
        path = config.run_dir / "sampler_adapter"
        # "auto" would ask the hub for the base's config each time.
        options = {"selected_adapters": ["default"], "save_embedding_layers": False}
        policy.save_pretrained(path, **options)
        return path

    servers = RunServers(policy, config, distributed)
    if config.sampler_url:
        key = "VLLM_API_KEY" if "VLLM_API_KEY" in os.environ else None
        urls = [url.strip() for url in config.sampler_url.split(",")]
        options = {"concurrency": config.max_num_seqs, "api_key_env": key}
        servers = [APIClient(url, **options) for url in urls]
    return VLLMSampler(
        servers,
        stop_token_ids(tokenizer, policy.generation_config),
        export,
        run=distributed.broadcast(uuid.uuid4().hex[:12]),
        is_main=distributed.is_main,
    )
