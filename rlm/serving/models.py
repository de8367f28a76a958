"""Find the adapters that a server offers, and load them onto one base model, at start-up.

A request chooses from this fixed list by name, so no name can become a path.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlm.cli import UsageError, terminal
from rlm.data import Format, render_prompt
from rlm.grading import AnswerType
from rlm.model import (
    ADAPTER_FILES,
    EMBEDDED_MODEL,
    AdapterInfo,
    base_model_hash,
    check_adapter,
    check_base,
    load_adapter,
    load_base,
    lora_layers,
    pick_device,
    public_dataset,
)
from rlm.reasoner import HOW_TO_TRAIN
from rlm.runs import file_hash
from rlm.sampling import Sampler, common_prefix_length, sampling_dtype
from rlm.tools import Tool, load_tool

if TYPE_CHECKING:
    from peft import PeftModel

BASE = "base"  # the name that stands for the base model without an adapter
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_CAN_EXECUTE = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".py"}


@dataclass(frozen=True)
class ServedAdapter:
    """A named adapter; BASE has no path."""

    name: str
    path: Path | None
    sha256: str | None  # over its tensors
    stage: str  # base | sft | grpo | unknown
    format: Format
    tool: Tool | None = None
    answer_types: tuple[AnswerType, ...] = ("number",)  # those of training, `format`'s first
    dataset: str | None = None  # its training data, without this machine's paths
    questions: tuple[str, ...] = ()  # from that data, shown on the page


@dataclass(frozen=True)
class ServedModels:
    """A server's base model and its adapters."""

    base_model: str  # a value of --model
    base_hash: str
    quantize: str  # one of rlm.model.quantize.QUANTIZATIONS
    adapters: dict[str, ServedAdapter]
    default: str


@dataclass
class Replica:
    """An adapter (or the bare base) and its sampler."""

    sampler: Sampler
    activate: Callable[[], None]  # make it the active adapter of the shared model
    prefix: Sequence[int]  # the beginning that the prompts share


def find_models(
    adapter: Path,
    folder: Path | None,
    model: str | None,
    quantize: str = "auto",
    *,
    base: bool = False,
    tool: str = "auto",
) -> ServedModels:
    """Find the default adapter, the other adapters in a folder, and their base.

    Args:
        quantize: how the base is loaded; auto: as in training.
        base: leave the adapter out; its run.json still decides the base model and the tags.
        tool: the tool of all adapters, as in --tool; auto: each adapter's own.

    Raises:
        UsageError: an adapter is missing, could execute code, or belongs to another base.
    """
    paths = ([] if base else [adapter]) + _adapters_in(folder, None if base else adapter)
    for path in paths:
        check_adapter(path, HOW_TO_TRAIN if path == adapter else _without(path))
        _check_files(path, folder)
    infos = [AdapterInfo.load(path) for path in paths]
    own = _base_info(adapter, model) if base else infos[0]
    if infos and own.base_hash not in {info.base_hash for info in infos}:
        own = infos[0]  # with --base, the folder may have another base than the omitted adapter
    if not (paths or adapter.exists()):
        model = model or EMBEDDED_MODEL
    model = model or next((i.base_model for i in (own, *infos) if i.base_model), None)
    model, quantize = own.resolve_base(model, quantize)
    if base:
        try:
            check_adapter(adapter, f"the base model {model} is served")
        except UsageError as missing:
            terminal.line(f"warning: {missing}")
    model_hash = base_model_hash(model)
    named = None if tool == "auto" else load_tool(tool)

    def tool_of(info: AdapterInfo) -> Tool | None:
        return load_tool(info.resolve_tool()) if tool == "auto" else named

    asked = own.format, tool_of(own), own.answer_types  # the base uses its adapter's settings
    base_alone = ServedAdapter(BASE, None, None, "base", *asked)
    adapters = {BASE: replace(base_alone, questions=own.questions)}
    for path, info in zip(paths, infos, strict=True):
        with _adding("" if path == adapter else f"; or {_without(path)}"):
            check_base(path, model, model_hash)
            own_tool = tool_of(info)
        if path.name in adapters:
            raise UsageError(f"{path}: another adapter already has the name {path.name}")
        digest = file_hash(path / ADAPTER_FILES[1])
        asked = info.format, own_tool, info.answer_types
        served = ServedAdapter(path.name, path, digest, info.stage, *asked)
        learned = public_dataset(info.dataset) if info.dataset else None
        adapters[path.name] = replace(served, dataset=learned, questions=info.questions)
    return ServedModels(model, model_hash, quantize, adapters, BASE if base else adapter.name)


def _base_info(adapter: Path, model: str | None) -> AdapterInfo:
    """Return the info of an adapter that is left out; an empty one if it is damaged and --model
    names the base."""
    try:
        return AdapterInfo.load(adapter)
    except UsageError as error:
        if model is None:
            raise UsageError(f"{error}; name the base with --model") from error
        terminal.line(f"warning: {error}: the base model {model} is served")
        return AdapterInfo(adapter)


def _without(path: Path) -> str:
    return f"move it out of {path.parent} to serve the others"


@contextmanager
def _adding(hint: str) -> Iterator[None]:
    """Add a hint to an adapter's error."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{error}{hint}") from error


def _adapters_in(folder: Path | None, but: Path | None) -> list[Path]:
    if folder is None:
        return []
    # `save_adapter` keeps what it replaced as NAME.prev, and writes into .NAME.new.
    return sorted(
        path
        for path in folder.iterdir()
        if (path / ADAPTER_FILES[0]).is_file()
        and not path.name.startswith(".")
        and path.suffix != ".prev"
        and not (but and path.resolve() == but.resolve())
    )


def _check_files(path: Path, folder: Path | None) -> None:
    if not _NAME.fullmatch(path.name):
        raise UsageError(f"{path}: an adapter's name is made of letters, digits and . _ -")
    if folder is not None and path.parent == folder and path.resolve().parent != folder.resolve():
        raise UsageError(f"{path} is a link that leads out of {folder}")
    unsafe = [file.name for file in path.iterdir() if file.suffix in _CAN_EXECUTE]
    if unsafe:
        raise UsageError(f"{path} contains {unsafe[0]}, which could execute code; remove it")


def load_replicas(
    models: ServedModels, tokenizer: PreTrainedTokenizerBase, max_num_seqs: int
) -> dict[str, Replica]:
    """Load the base, the adapters, and a sampler for each of them and for the base alone.

    Raises:
        UsageError: loading fails, or an adapter has values that are not finite.
    """
    model = load_base(models.base_model, pick_device(), quantize=models.quantize)
    inner = {name: f"served_{i}" for i, name in enumerate(models.adapters)}  # PEFT forbids dots
    for name, adapter in models.adapters.items():
        if adapter.path is not None:
            is_default = name == models.default
            with _adding(f"; {HOW_TO_TRAIN if is_default else _without(adapter.path)}"):
                model = load_adapter(model, adapter.path, trainable=False, name=inner[name])
    set_adapter = _adapter_switch(model)
    replicas, share = {}, 1 / len(models.adapters)  # of memory: each has weights and KV cache
    for name, adapter in models.adapters.items():
        activate = partial(set_adapter, None if name == BASE else inner[name])
        activate()
        options = {"max_num_seqs": max_num_seqs, "dtype": sampling_dtype(model), "share": share}
        sampler = Sampler(model, tokenizer, **options)
        replicas[name] = Replica(sampler, activate, prompt_prefix(tokenizer, adapter.format))
    return replicas


def _adapter_switch(model: PreTrainedModel | PeftModel) -> Callable[[str | None], None]:
    """Return a `set_adapter` that does nothing if the adapter (None: none) is already active."""
    from peft import PeftModel  # imported here, because rlm.model must import bitsandbytes first

    layers = lora_layers(model)
    active: str | None = ""

    def set_adapter(name: str | None) -> None:
        nonlocal active
        if name != active and isinstance(model, PeftModel):
            for layer in layers:
                layer.enable_adapters(name is not None)
            if name is not None:
                model.set_adapter(name, inference_mode=True)
        active = name

    return set_adapter


def prompt_prefix(tokenizer: PreTrainedTokenizerBase, format: Format) -> Sequence[int]:
    """Return the common beginning of all prompts: the rendered system prompt."""
    prompts = [render_prompt(tokenizer, question, format) for question in ("a", "7")]
    return prompts[0][: common_prefix_length(prompts)]
