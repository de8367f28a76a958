"""Fill in the unset options of SFT and GRPO from the initial adapter, the data and the machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rlm.cli import terminal
from rlm.data import Problem, check_dataset, parse_dataset
from rlm.model import AdapterInfo
from rlm.tools import load_tool

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Config = TypeVar("Config", bound="DataclassInstance")  # GRPOConfig or SFTConfig

# Defaults of --max-new-tokens; the solutions of generated problems have at most 84 tokens.
SHORT, ON_CPU, LONGEST = 96, 256, 512
MAX_NEW_TOKENS = (
    f"{SHORT} for word-problems and elementary, else {LONGEST} on a GPU and {ON_CPU} without one"
)
LARGE_MODEL = 300_000_000  # parameters; the usual defaults were measured with 135M parameters
LARGE = f"for a model of more than {LARGE_MODEL // 10**6}M parameters"
KEPT_AS = {"best": "adapter_best", "last": "adapter_last"}  # folders in --run-dir


def resolve(
    given: Mapping[str, Any],
    start: AdapterInfo | None,
    gpu_defaults: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the given options of a training config, with missing options filled in.

    The model, the data, the quantization, the tool, the rank, the tags and the system prompt come
    from the initial adapter. Without an initial adapter, the model, the data and the quantization
    depend on the machine.

    Args:
        given: the values that the user has set, by field.
        start: the metadata of the initial adapter, if there is an initial adapter.
        gpu_defaults: the defaults for a large model (see `defaults_by_size`). If None, as in calls
            from Python, no model and no data are selected.
    """
    from rlm.model import default_values, pick_quantization

    if gpu_defaults is not None:
        values = default_values(given, start)
        values = defaults_by_size(values, gpu_defaults) | values
    else:
        values = {**given, "quantize": pick_quantization(given.get("quantize", "none"))}
    if start is not None:
        values["tool"] = start.resolve_tool(given.get("tool", "auto"))
        values |= start.resolve_rank(given)
        if dataset := values.get("dataset"):
            values |= start.resolve_data(dataset, given.get("columns"))
    known = start or AdapterInfo(Path())
    values["reasoning_format"] = known.resolve_format(given.get("reasoning_format"))
    values["system_prompt"] = known.resolve_system_prompt(given.get("system_prompt"))
    return values


def defaults_by_size(values: Mapping[str, Any], gpu_defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the missing options whose defaults differ for a large model, and print the reason.

    The default learning rate depends only on the model; the other defaults apply only on a GPU. A
    hub model other than the embedded one counts as large, because its size is unknown before the
    download.
    """
    import torch

    from rlm.model import parameter_count

    on_gpu = torch.cuda.is_available()
    chosen = {
        name: value
        for name, value in gpu_defaults.items()
        if name not in values and (on_gpu or name == "learning_rate")
    }
    if not chosen or parameter_count(values["model"]) <= LARGE_MODEL:
        return {}
    named = ", ".join(f"{name} {value:g}" for name, value in chosen.items())
    terminal.line(f"chosen: {named} ({LARGE}{' on a GPU' if on_gpu else ''})")
    return chosen


def check_output_place(
    output: Path, run_dir: Path, start: Path | None, option: str, *, resume: bool
) -> None:
    """Check that the run replaces neither its initial adapter nor its own files.

    An existing `output` is moved to NAME.prev, and an earlier NAME.prev is deleted. Unless the run
    is resumed, the same happens to an existing `run_dir`.

    Args:
        start: the initial adapter, which `option` names.

    Raises:
        ValueError: the run would replace one of them.
    """
    place, run = output.resolve(), run_dir.resolve()
    replaced, put_away = _with_previous(place), _with_previous(run)
    if any(run.is_relative_to(moved) for moved in replaced):
        raise ValueError(
            f"--output {output} would replace --run-dir {run_dir} and all files of the run; use "
            f"another folder, such as --output {run_dir / 'adapter'}"
        )
    if start and any(start.resolve().is_relative_to(moved) for moved in replaced):
        raise ValueError(
            f"--output would overwrite {option}; use another folder, such as --output "
            "runs/mine/adapter"
        )
    if start and not resume and any(start.resolve().is_relative_to(moved) for moved in put_away):
        raise ValueError(
            f"{option} {start} is in --run-dir {run_dir} or in {run_dir}.prev, which a new run "
            "moves or deletes; use another --run-dir"
        )
    written = ("checkpoints", "sampler_adapter", *KEPT_AS.values())
    if any(place.is_relative_to(run / name) for name in written):
        raise ValueError(
            f"--output {output} is a folder that the run itself writes; choose another folder"
        )


def _with_previous(path: Path) -> tuple[Path, Path]:
    return path, path.with_name(f"{path.name}.prev")


def check_start(
    start: AdapterInfo | None,
    dataset: str | None,
    columns: str | None,
    rows: str | None,
    tool: str,
) -> list[Problem]:
    """Check the data and the tool before torch is imported.

    Args:
        rows: the value of --split.

    Returns:
        The problems in the user's own files (see `check_dataset`).
    """
    if start and dataset:
        columns = start.resolve_data(dataset, columns)["columns"]
    load_tool(tool)
    return check_dataset(dataset, columns, rows) if dataset else []


def follow_adapter(config: Config, start: AdapterInfo | None) -> Config:
    """Apply `resolve` to a config that was made in Python.

    An option that equals its default counts as unset, so the initial adapter's rank replaces the
    default rank. Only --quantize and --tool always count as set, even if they are "none".
    """
    usual = {o.name: o.default for o in fields(config) if o.name not in ("quantize", "tool")}
    given = {n: v for n, v in vars(config).items() if n not in usual or v != usual[n]}
    return replace(config, **resolve(given, start))


def choose_max_new_tokens(dataset: str | None) -> int:
    """Return the default of --max-new-tokens. A config made in Python may have no dataset."""
    if dataset and all(part.is_generated for part in parse_dataset(dataset)):
        return SHORT
    import torch

    return LONGEST if torch.cuda.is_available() else ON_CPU
