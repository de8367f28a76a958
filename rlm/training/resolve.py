"""Resolves the options of GRPO training: what the start adapter and this machine decide."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rlm.cli import UsageError, terminal
from rlm.model import (
    HOW_TO_TRAIN_SFT,
    AdapterInfo,
    adapter_mismatch,
    check_adapter,
    check_base,
    pick_quantization,
)
from rlm.sampling import split_command
from rlm.tools import Tool, as_tool, load_tool
from rlm.training.config import DEFAULT_SFT_ADAPTER, GRPOConfig


def check_arguments(model_name: object, config: object) -> None:
    """Refuse a loaded model and another library's config, before anything is loaded.

    Raises:
        TypeError: the message says what to write.
    """
    if not isinstance(model_name, str | Path):
        kind = type(model_name).__name__
        raise TypeError(
            f"model_name is a {kind}: give a hub id or a directory; trainer.model is what it loads"
        )
    if not isinstance(config, GRPOConfig | None):
        kind = f"{type(config).__module__}.{type(config).__name__}"
        raise TypeError(f"config is a {kind}: give a rlm.GRPOConfig")


def resolve_start(
    config: GRPOConfig, model: str, base_hash: str, tool: Tool | None, processes: int
) -> tuple[GRPOConfig, AdapterInfo, Tool | None]:
    """Return the config as this base and this machine can have it, with a line for what changes;
    the adapter to start from; and the run's tool: `tool`, or else what --tool names.

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
        model=model,
        sft_adapter=adapter,
        quantize=quantize,
        reasoning_format=start.resolve_format(config.reasoning_format),
        system_prompt=start.resolve_system_prompt(config.system_prompt),
    )
    return start.with_rank(config) if adapter else config, start, tool
