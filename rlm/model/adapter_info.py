"""Reads the base model and the training settings of an adapter from its run.json file."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlm.cli import UsageError, command_of
from rlm.data import FORMATS, Format, read_system_prompt
from rlm.grading import ANSWER_TYPES, AnswerType
from rlm.model.quantize import QUANTIZATIONS
from rlm.tools import Calculator

TRAINED_ADAPTER = Path("weights/final_rlm_lora")  # where train_grpo.py saves its adapter
SHIPPED_ADAPTER = Path(sys.prefix, "share/rlm") / TRAINED_ADAPTER  # in an installed wheel
# The default adapter of evaluation, inference and server.
ADAPTER = (
    SHIPPED_ADAPTER
    if SHIPPED_ADAPTER.exists() and not TRAINED_ADAPTER.exists()
    else TRAINED_ADAPTER
)
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
HOW_TO_TRAIN_SFT = f"run: {command_of('train_sft')}"  # how to make an initial adapter
HOW_TO_TRAIN = f"{HOW_TO_TRAIN_SFT} && {command_of('train_grpo')}"
OUR_FOLDERS = ("weights", "runs")  # a missing path in these folders is never taken for a hub id


def check_adapter(path: Path, how_to_make: str) -> Path:
    """Check that the path contains an adapter's files, and return it.

    Raises:
        UsageError: a file is missing; the message explains how to get the adapter.
    """
    missing = [name for name in ADAPTER_FILES if not (path / name).is_file()]
    if missing and _is_base(path):
        base = f"{path} is a base model, not an adapter: pass it with --model"
        raise UsageError(f"{base}; to make an adapter, {how_to_make}")
    if missing and path.is_dir():
        below = [str(file.parent) for file in sorted(path.glob(f"[!.]*/{ADAPTER_FILES[0]}"))]
        if below:
            how_to_make = f"name a folder inside it: {', '.join(below)}"
        elif output := _settings(path / "config.json").get("output"):  # a run directory
            how_to_make = f"it is the directory of a run, whose adapter is saved in {output}"
        elif (path / "adapter_model.bin").is_file():
            how_to_make = (
                "it contains adapter_model.bin, which could run code when read; if you trust this "
                "file, convert it: PeftModel.from_pretrained(BASE, FOLDER).save_pretrained(NEW)"
            )
        elif others := sorted(file.name for file in path.glob("*.safetensors")):
            how_to_make = (
                f"it contains {', '.join(others)}, but only {ADAPTER_FILES[1]}, as written by "
                "PEFT's save_pretrained, can be read"
            )
        raise UsageError(f"adapter {path} has no {missing[0]}; {how_to_make}")
    if path.is_file():
        raise UsageError(
            f"adapter {path} is a file; name the folder that contains it: {path.parent}"
        )
    if missing:
        there = [str(file.parent) for file in sorted(path.parent.glob(f"[!.]*/{ADAPTER_FILES[1]}"))]
        there = [name for name in there if not name.endswith(".prev")]  # a replaced adapter
        if not there and ADAPTER.is_dir():  # an installed wheel's adapter is elsewhere
            there = [str(ADAPTER)]
        others = f" (there is {', '.join(there)})" if there else f" (in {Path.cwd()})"
        shown = others if there or not path.is_absolute() else ""
        raise UsageError(f"adapter {path} does not exist{shown}; {how_to_make}")
    return path


def _is_base(path: Path) -> bool:
    """Return whether a path without an adapter is the folder or the hub id of a base model."""
    if "model_type" in _settings(path / "config.json"):
        return True
    is_hub_id = re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)) and not path.parent.exists()
    return bool(is_hub_id and path.parts[0] not in OUR_FOLDERS)


def _settings(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or {} if the file contains no object or cannot be read."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


@dataclass(frozen=True)
class AdapterInfo:
    """The base model and the training settings of an adapter, as its run.json records them.

    If another tool made the adapter, there is no run.json, and most fields have their defaults.

    base_model: the name in run.json, or else the name in PEFT's adapter_config.json.
    quantize: the quantization of the base model in training.
    reasoning_format: a name in `rlm.data.prompts.FORMATS`.
    system_prompt: the user's system prompt; with None, that of the reasoning format was used.
    tool: the tool of training, as a value of --tool.
    answer_types: the answer types of the training data, the most frequent type first.
    run: the whole content of run.json.
    """

    path: Path
    base_model: str | None = None
    base_hash: str | None = None
    quantize: str = "none"
    dataset: str | None = None
    stage: str = "unknown"  # sft | grpo | orchestrator | …
    reasoning_format: str = "deepseek"
    system_prompt: str | None = None
    tool: str = "none"
    answer_types: tuple[AnswerType, ...] = ("number",)
    run: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> AdapterInfo:
        """Read the run.json beside an adapter, and the name of the adapter's base model.

        Raises:
            UsageError: the file cannot be read, it or its config is not a JSON object, or one of
                its values is unknown or of a wrong type.
        """
        file = path / "run.json"
        made_for = _settings(path / ADAPTER_FILES[0]).get("base_model_name_or_path")
        made_for = made_for if isinstance(made_for, str) and made_for else None
        if not file.exists():
            return cls(path, made_for)
        try:
            run = dict(json.loads(file.read_text(encoding="utf-8")))
        except OSError as error:
            raise UsageError(f"{file} cannot be read: {error.strerror}") from error
        except (ValueError, TypeError) as error:
            raise UsageError(f"{file} is not valid JSON: {error}") from error
        config = run.get("config", {})
        if not isinstance(config, dict):
            raise UsageError(f"{file}: config is {config!r:.60}, not a JSON object")
        said = {name: config.get(name) for name in ("reasoning_format", "system_prompt", "tool")}
        said |= {name: run.get(name) for name in ("base_hash", "quantize", "dataset", "stage")}
        said["base_model"] = run.get("base_model") or made_for
        for name, value in said.items():
            if not isinstance(value, str | None):
                raise UsageError(f"{file}: {name} is {value!r:.60}, not a string")
        for name, known in {"reasoning_format": FORMATS, "quantize": QUANTIZATIONS}.items():
            if said[name] not in (None, *known):
                valid = ", ".join(known)
                raise UsageError(f"{file}: {name} is {said[name]!r:.60}; valid values are {valid}")
        if kinds := run.get("answer_types"):
            if not isinstance(kinds, list) or any(kind not in ANSWER_TYPES for kind in kinds):
                known = ", ".join(ANSWER_TYPES)
                raise UsageError(f"{file}: answer_types are {kinds!r:.60}; valid types are {known}")
            said["answer_types"] = tuple(kinds)
        return cls(path, run=run, **{k: v for k, v in said.items() if v is not None})

    @property
    def questions(self) -> tuple[str, ...]:
        """A few example questions from the training data."""
        said = self.run.get("questions", ())
        return tuple(q for q in said if isinstance(q, str)) if isinstance(said, list) else ()

    def resolve_base(self, model: str | None = None, quantize: str = "auto") -> tuple[str, str]:
        """Return the base model and its quantization, from the flags or else from training.

        Raises:
            UsageError: no base model is named, or the base model of training is a folder that
                does not exist.
        """
        model = model or self.base_model
        if model is None:
            raise UsageError(f"{self.path} does not record its base model; pass it with --model")
        if model == self.base_model and Path(model).is_absolute() and not Path(model).exists():
            raise UsageError(
                f"{self.path} was trained on {model}, which does not exist here; pass the base "
                "model with --model"
            )
        return model, self.quantize if quantize == "auto" else quantize

    def resolve_format(self, asked: str | None = None) -> str:
        """Return the reasoning format named by --reasoning-format, or else that of training.

        Raises:
            UsageError: the adapter was trained with a different format than the option names.
        """
        was_taught = self.run.get("config", {}).get("reasoning_format")
        if asked and was_taught and asked != was_taught:
            raise UsageError(
                f"--reasoning-format {asked}: the adapter {self.path} was trained with "
                f"{was_taught}; leave the option out, or name another adapter (or none)"
            )
        return asked or self.reasoning_format

    @property
    def format(self) -> Format:
        """The reasoning format of training, with its system prompt and its main answer type."""
        format = FORMATS[self.reasoning_format].with_prompt(self.system_prompt)
        return format.with_answer_type(self.answer_types[0])

    def describe_prompts(self) -> str:
        """Return the section of a model card that quotes the system prompts of training."""
        formats = map(self.format.with_answer_type, self.answer_types)
        prompts = dict.fromkeys(format.system_prompt for format in formats)
        what = "this system prompt" if len(prompts) == 1 else "these system prompts"
        blocks = [f"```\n{prompt}\n```" for prompt in prompts]
        return "\n\n".join([f"It was trained with {what} and no other:", *blocks]) + "\n"

    def resolve_system_prompt(self, asked: str | None = None) -> str | None:
        """Return the system prompt in the option (a text or a file), or else that of training."""
        return self.system_prompt if asked is None else read_system_prompt(asked)

    def resolve_data(self, dataset: str | None, columns: str | None) -> dict[str, str | None]:
        """Return the dataset and its column map.

        The column map of training is used only if the dataset is that of training.
        """
        same = dataset in (None, self.dataset)
        mapped = self.run.get("config", {}).get("columns") if same else None
        return {"dataset": dataset or self.dataset, "columns": columns or mapped}

    def resolve_rank(self, given: Mapping[str, Any]) -> dict[str, int]:
        """Return `lora_r` and `lora_alpha` of the adapter, which further training cannot change.

        Args:
            given: the options that the user set.

        Raises:
            UsageError: the user set one of the two options to another value.
        """
        settings = _settings(self.path / ADAPTER_FILES[0])
        own = {"lora_r": settings.get("r"), "lora_alpha": settings.get("lora_alpha")}
        for name, value in own.items():
            if value is not None and given.get(name, value) != value:
                raise UsageError(
                    f"--{name.replace('_', '-')} {given[name]}: the adapter {self.path} has "
                    f"{value}, which training cannot change; leave the option out, or train a new "
                    "adapter"
                )
        return {name: value for name, value in own.items() if value is not None}

    def resolve_tool(self, asked: str = "auto") -> str:
        """Return the value for --tool; "auto" selects the tool of training.

        Raises:
            UsageError: "auto" would run a user's own code only because a file beside the adapter
                names this code.
        """
        if asked != "auto":
            return asked
        if self.tool not in ("none", Calculator.name):
            raise UsageError(
                f"{self.path} was trained with the tool {self.tool}: name it again with --tool "
                "FILE.py:NAME, or leave it out with --tool none"
            )
        return self.tool


def public_dataset(dataset: str) -> str:
    """Return the name of a dataset without the directories of this machine.

    >>> public_dataset("elementary+gsm8k:/home/me/data+/home/me/mine.jsonl")
    'elementary+gsm8k+mine.jsonl'
    """

    def public(part: str) -> str:
        name, _, rest = part.partition(":")
        if name.startswith(("/", ".", "~")) or Path(name).suffix:
            return Path(name).name
        return name if "/" in rest else part

    return "+".join(map(public, dataset.split("+")))
