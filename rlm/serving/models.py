"""Find the adapters that a server offers, and load them onto one base model at start-up.

Requests select an adapter from this fixed list by its name. A name is never used as a path.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlm.cli import UsageError, terminal
from rlm.data import Format, render_prompt
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
)
from rlm.reasoner import TRAIN_OR_BASE
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
    """A named adapter, or the base model without an adapter (BASE)."""

    name: str
    info: AdapterInfo  # BASE has the settings of the default adapter, but the stage "base"
    sha256: str | None = None  # hash of the tensor file
    tool: Tool | None = None


@dataclass(frozen=True)
class ServedModels:
    """The base model and the adapters of a server."""

    base_model: str  # a value of --model
    base_hash: str
    quantize: str  # one of rlm.model.quantize.QUANTIZATIONS
    adapters: dict[str, ServedAdapter]
    default: str


@dataclass
class AdapterSampler:
    """The sampler of an adapter, or of the base model without an adapter."""

    sampler: Sampler
    activate: Callable[[], None]  # makes this adapter the active adapter of the shared model
    prefix: Sequence[int]  # token ids with which all prompts begin


def find_models(
    adapter: Path,
    folder: Path | None,
    model: str | None,
    quantize: str = "auto",
    *,
    base: bool = False,
    tool: str = "auto",
) -> ServedModels:
    """Find the default adapter, the other adapters in a folder, and their base model.

    Args:
        adapter: the default adapter.
        folder: a folder with further adapters.
        model: the base model; None: the base model that the adapters were trained on.
        quantize: quantization of the base model; "auto": as in training.
        base: serve the base model instead of `adapter`; the adapter's run.json still determines
            the base model and the tags.
        tool: the tool for all adapters, as in --tool; "auto": each adapter uses its own tool.

    Raises:
        UsageError: an adapter is missing, contains files that could execute code, or belongs to
            another base model, or `folder` contains no adapter.
    """
    paths = ([] if base else [adapter]) + _adapters_in(folder, None if base else adapter)
    for path in paths:
        check_adapter(path, TRAIN_OR_BASE if path == adapter else _without(path))
        _check_files(path, folder)
    infos = [AdapterInfo.load(path) for path in paths]
    own = _base_info(adapter, model) if base else infos[0]
    if infos and own.base_hash not in {info.base_hash for info in infos}:
        own = infos[0]  # with --base, the folder's adapters may have another base model
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
    load = cache(load_tool)  # the file of a tool is executed once
    alone = replace(own, stage="base", dataset=None)
    adapters = {BASE: ServedAdapter(BASE, alone, tool=load(own.resolve_tool(tool)))}
    for path, info in zip(paths, infos, strict=True):
        with _adding("" if path == adapter else f"; or {_without(path)}"):
            check_base(path, model, model_hash)
            own_tool = load(info.resolve_tool(tool))
        if path.name in adapters:
            raise UsageError(f"{path}: another adapter already has the name {path.name}")
        digest = file_hash(path / ADAPTER_FILES[1])
        adapters[path.name] = ServedAdapter(path.name, info, digest, own_tool)
    return ServedModels(model, model_hash, quantize, adapters, BASE if base else adapter.name)


def _base_info(adapter: Path, model: str | None) -> AdapterInfo:
    """Return the info of the default adapter, which --base does not serve.

    If the adapter is damaged and --model gives the base model, the info is empty.
    """
    try:
        return AdapterInfo.load(adapter)
    except UsageError as error:
        if model is None:
            raise UsageError(f"{error}; give the base model with --model") from error
        terminal.line(f"warning: {error}: the base model {model} is served")
        return AdapterInfo(adapter)


def _without(path: Path) -> str:
    return f"move it out of {path.parent} to serve the other adapters"


@contextmanager
def _adding(hint: str) -> Iterator[None]:
    """Append a hint to the message of a UsageError."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{error}{hint}") from error


def _adapters_in(folder: Path | None, but: Path | None) -> list[Path]:
    """Return the adapters in a folder, except the adapter `but`.

    Raises:
        UsageError: the folder contains no adapter.
    """
    if folder is None:
        return []
    # Skip the temporary folders of `save_adapter`: NAME.prev (the replaced adapter) and .NAME.new.
    found = sorted(
        path
        for path in folder.iterdir()
        if (path / ADAPTER_FILES[0]).is_file()
        and not path.name.startswith(".")
        and path.suffix != ".prev"
    )
    if not found:
        hint = ""
        if (folder / ADAPTER_FILES[0]).is_file():
            hint = f"; it is itself an adapter: pass its parent folder, {folder.parent}"
        raise UsageError(f"--adapters {folder}: this folder contains no adapters{hint}")
    return [path for path in found if not (but and path.resolve() == but.resolve())]


def _check_files(path: Path, folder: Path | None) -> None:
    if not _NAME.fullmatch(path.name):
        raise UsageError(
            f"{path}: an adapter name has at most 64 letters, digits and . _ -, and begins with a "
            "letter or digit; rename the folder"
        )
    if folder is not None and path.parent == folder and path.resolve().parent != folder.resolve():
        raise UsageError(f"{path} is a link to a folder outside {folder}")
    unsafe = [file.name for file in path.iterdir() if file.suffix in _CAN_EXECUTE]
    if unsafe:
        raise UsageError(f"{path} contains {unsafe[0]}, which could execute code; remove it")


def load_samplers(
    models: ServedModels, tokenizer: PreTrainedTokenizerBase, max_num_seqs: int
) -> dict[str, AdapterSampler]:
    """Load the base model and the adapters, and create a sampler for each entry of `adapters`.

    All samplers share one copy of the base model.

    Raises:
        UsageError: loading fails, or an adapter contains values that are not finite.
    """
    model = load_base(models.base_model, pick_device(), quantize=models.quantize)
    inner = {name: f"served_{i}" for i, name in enumerate(models.adapters)}  # PEFT forbids dots
    for name, adapter in models.adapters.items():
        if name != BASE:
            path, is_default = adapter.info.path, name == models.default
            with _adding(f"; {TRAIN_OR_BASE if is_default else _without(path)}"):
                model = load_adapter(model, path, trainable=False, name=inner[name])
    set_adapter = _adapter_switch(model)
    samplers, share = {}, 1 / len(models.adapters)  # fraction of the memory for each sampler
    for name, adapter in models.adapters.items():
        activate = partial(set_adapter, None if name == BASE else inner[name])
        activate()
        options = {"max_num_seqs": max_num_seqs, "dtype": sampling_dtype(model)[0], "share": share}
        sampler = Sampler(model, tokenizer, **options)
        prefix = prompt_prefix(tokenizer, adapter.info.format)
        samplers[name] = AdapterSampler(sampler, activate, prefix)
    return samplers


def _adapter_switch(model: PreTrainedModel | PeftModel) -> Callable[[str | None], None]:
    """Return a function that activates an adapter by name, or no adapter for None.

    The function returns at once if the adapter is already active.
    """
    from peft import PeftModel  # imported late: rlm.model must import bitsandbytes first

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
    """Return the token ids with which all prompts begin: the rendered system prompt."""
    prompts = [render_prompt(tokenizer, question, format) for question in ("a", "7")]
    return prompts[0][: common_prefix_length(prompts)]
