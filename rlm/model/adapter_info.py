"""What is known of an adapter without loading it: its base and its training, from its run.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlm.cli import UsageError
from rlm.data import FORMATS, Format, read_system_prompt
from rlm.tools import Calculator

TRAINED_ADAPTER = Path("weights/final_rlm_lora")  # where train_grpo.py puts one
SHIPPED_ADAPTER = Path(__file__).parents[1] / TRAINED_ADAPTER  # in an installed wheel
# The default of what evaluates, asks and serves.
ADAPTER = (
    SHIPPED_ADAPTER
    if SHIPPED_ADAPTER.exists() and not TRAINED_ADAPTER.exists()
    else TRAINED_ADAPTER
)


@dataclass(frozen=True)
class AdapterInfo:
    """An adapter's base model and how it was trained; defaults where another tool made it.

    quantize: how the base was packed. reasoning_format: a name in `rlm.data.prompts.FORMATS`.
    system_prompt: a user's own; None: the format's. tool: as --tool names it.
    run: all of run.json.
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
    run: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> AdapterInfo:
        """Read the run.json beside an adapter, also one of an older version.

        Raises:
            UsageError: the file is there and is no JSON object.
        """
        file = path / "run.json"
        if not file.exists():
            return cls(path)
        try:
            run = dict(json.loads(file.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise UsageError(f"{file} is not valid JSON: {error}") from error
        config, names = run.get("config", {}), ("reasoning_format", "system_prompt", "tool")
        said = {name: config.get(name) for name in names}
        for name in ("base_model", "base_hash", "quantize", "dataset", "stage"):
            said[name] = run.get(name)
        if run.get("use_4bit"):  # what --quantize was called before
            said["quantize"] = said["quantize"] or "4bit"
        return cls(path, run=run, **{k: v for k, v in said.items() if v is not None})

    @property
    def questions(self) -> tuple[str, ...]:
        """A few questions of its data, for whoever wants to try it."""
        said = self.run.get("questions", ())
        return tuple(q for q in said if isinstance(q, str)) if isinstance(said, list) else ()

    def resolve_base(self, model: str | None = None, quantize: str = "auto") -> tuple[str, str]:
        """The base model and its quantization: as flags name them, else as in training.

        Raises:
            UsageError: neither names a base.
        """
        model = model or self.base_model
        if model is None:
            raise UsageError(
                f"{self.path} does not say what it was trained on; name it with --model"
            )
        return model, self.quantize if quantize == "auto" else quantize

    def resolve_format(self, asked: str | None = None) -> str:
        """The name of the tags: those of training, which are the only ones that it was taught.

        Raises:
            UsageError: others were asked for.
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
        """The tags and the system prompt of training."""
        return FORMATS[self.reasoning_format].with_prompt(self.system_prompt)

    def resolve_system_prompt(self, asked: str | None = None) -> str | None:
        """The system prompt that is asked for (a text or a file), else that of training."""
        return self.system_prompt if asked is None else read_system_prompt(asked)

    def resolve_data(self, dataset: str | None, columns: str | None) -> dict[str, str | None]:
        """The data set, and what its columns are: those of training if it is the same one."""
        same = dataset in (None, self.dataset)
        mapped = self.run.get("config", {}).get("columns") if same else None
        return {"dataset": dataset or self.dataset, "columns": columns or mapped}

    def resolve_rank(self, given: Mapping[str, Any]) -> dict[str, int]:
        """Return `lora_r` and `lora_alpha` of the adapter, which training from it cannot change.

        Args:
            given: the options that were set.

        Raises:
            UsageError: one of the two was set to another value.
        """
        file = self.path / "adapter_config.json"
        try:
            settings = dict(json.loads(file.read_text(encoding="utf-8")))
        except (ValueError, TypeError):
            return {}  # loading it says what is wrong
        own = {"lora_r": settings.get("r"), "lora_alpha": settings.get("lora_alpha")}
        for name, value in own.items():
            if value is not None and given.get(name, value) != value:
                raise UsageError(
                    f"--{name.replace('_', '-')} {given[name]}: the adapter {self.path} has "
                    f"{value}, and training keeps it; leave the option out, or train a new adapter"
                )
        return {name: value for name, value in own.items() if value is not None}

    def resolve_tool(self, asked: str = "auto") -> str:
        """The tool as --tool names it: the one asked for, or for "auto" that of training.

        Raises:
            UsageError: auto, and it is a tool of the user's own: no code is run because a file
                beside an adapter names it.
        """
        if asked != "auto":
            return asked
        if self.tool not in ("none", Calculator.name):
            raise UsageError(
                f"{self.path} was trained with the tool {self.tool}: name it again with --tool "
                "FILE.py:NAME, or leave it out with --tool none"
            )
        return self.tool
