"""The config of an evaluation: each field is an option of eval.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlm.cli import UsageError, check_values, command_of, flag, required, terminal
from rlm.data import (
    FORMATS,
    Format,
    NamedDataset,
    data_files,
    has_test,
    parse_dataset,
    split_slice,
)
from rlm.model import ADAPTER, QUANTIZATIONS, AdapterInfo, check_adapter

ADAPTERS = {"SFT": ("sft_adapter", "train_sft"), "GRPO": ("adapter", "train_grpo")}
MAX_NEW_TOKENS = 256


@dataclass(frozen=True)
class EvaluateConfig:
    CHANGED_FIRST = (
        *("model", "dataset", "split", "max_samples", "sft_adapter", "adapter"),
        *("samples", "reward", "max_new_tokens", "output"),
    )

    model: str | None = flag(
        None,
        "base model: hub id, folder, or smollm2-135m",
        default_text="base model of the last adapter",
    )
    dataset: str | None = flag(
        None,
        "dataset of the evaluation problems, named as for training",
        default_text="dataset of the last adapter, else word-problems; if it has several parts, "
        "only those that do not need the hub",
    )
    split: str | None = flag(
        None,
        "split of the dataset, e.g. test[:200]",
        default_text="test; validation for your own file if it was used for training, and for a "
        "dataset without a test split",
    )
    columns: str | None = flag(
        None,
        "columns of a file or hub dataset, as for training",
        default_text="columns of the last adapter, if it was trained on this dataset",
    )
    max_samples: int | None = flag(
        200, "evaluate at most this many problems of each dataset; none: all", min=1
    )
    sft_adapter: Path | None = flag(
        Path("weights/sft_lora"), "adapter of the SFT row; none: no SFT row"
    )
    adapter: Path | None = flag(ADAPTER, "adapter of the GRPO row; none: no GRPO row")
    base_only: bool = flag(False, "evaluate only the base model; requires --model")
    few_shot: int = flag(
        4,
        "number of worked examples in the prompt of a second base model row; 0: no such row",
        min=0,
    )
    samples: int = flag(
        0, "number k of samples per problem for mean@k, maj@k and pass@k; 0: none", min=0
    )
    temperature: float = flag(1.0, "sampling temperature for --samples", above=0)
    reward: str | None = flag(
        None,
        "also report the mean of this reward: FILE.py:NAME or steps, as for training",
        default_text="none, or steps if the last adapter was trained with this reward",
    )
    max_new_tokens: int = flag(
        MAX_NEW_TOKENS,
        "maximum completion length in tokens",
        min=1,
        default_text=f"{MAX_NEW_TOKENS}, or the value from training if it is larger",
    )
    reasoning_format: str | None = flag(
        None,
        "tags around the reasoning and the answer",
        choices=tuple(FORMATS),
        default_text="tags of the last adapter, else deepseek",
    )
    system_prompt: str | None = flag(
        None,
        "system prompt, as a text or a file",
        default_text="system prompt of the last adapter",
    )
    tool: str = flag(
        "none",
        "tool that writes into completions: calculator, FILE.py:NAME, or none",
        default_text="tool of the last adapter",
    )
    quantize: str = flag(
        "auto",
        "load the base model quantized with bitsandbytes; auto: as in training",
        choices=("auto", *QUANTIZATIONS),
    )
    audit_reward: bool = flag(
        False, "compare graders on the completions in --run-dir, without an evaluation"
    )
    run_dir: Path = flag(Path("runs/grpo"), "run directory for --audit-reward")
    seed: int = flag(0, "random seed for the problems, the worked examples and the sampling")
    output: Path = flag(
        Path("runs/evaluation"), "folder for the results, the plot and the completions"
    )
    resume: bool = flag(False, "evaluate only the rows that are missing or outdated in --output")

    def __post_init__(self) -> None:
        check_values(self)

    @classmethod
    def resolve(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Complete the given options from the run.json files of the adapters.

        `resolve_config` calls this method. Most defaults are the values of the last adapter; the
        help of an option states its default. A default adapter that does not exist is not
        evaluated.

        Raises:
            UsageError: an adapter that the user named does not exist; there is no adapter, and
                --base-only or --model is missing; or the tags or system prompts of the adapters
                differ.
        """
        if given.get("audit_reward"):
            return {"max_samples": None, **given}  # all samples of the run
        values, base_only = dict(given), given.get("base_only")
        infos: list[AdapterInfo] = []
        for name, (option, script) in ({} if base_only else ADAPTERS).items():
            path = values.setdefault(option, getattr(cls, option))
            if option not in given and not path.exists():
                how = f"{command_of(script)} creates this adapter"
                terminal.line(f"no {name} row: {path} does not exist; {how}")
                values[option] = None
            elif path:
                infos.append(AdapterInfo.load(check_adapter(path, f"run: {command_of(script)}")))
        if not infos and not (base_only and given.get("model")):
            raise UsageError(
                "no adapter to evaluate: train an adapter, or pass --base-only --model NAME"
            )
        infos = infos or [AdapterInfo(Path())]  # without an adapter, the defaults apply
        last = infos[-1]
        asked = given.get("model"), given.get("quantize", "auto")
        values["model"], values["quantize"] = last.resolve_base(*asked)
        values |= last.resolve_data(given.get("dataset"), given.get("columns"))
        values["dataset"] = values["dataset"] or "word-problems"
        if not given.get("dataset"):
            values["dataset"] = without_hub(values["dataset"])
            if all(isinstance(part, NamedDataset) for part in parse_dataset(values["dataset"])):
                values["columns"] = given.get("columns")  # the adapter's are for the parts left out
        values["split"] = given.get("split") or default_split(values["dataset"], infos)
        names = [info.resolve_format(given.get("reasoning_format")) for info in infos]
        prompts = [info.resolve_system_prompt(given.get("system_prompt")) for info in infos]
        differ = "different system prompts" if len({*prompts}) > 1 else ""
        differ = f"different tags ({', '.join(names)})" if len({*names}) > 1 else differ
        if differ:
            raise UsageError(
                f"the adapters were trained with {differ}: evaluate them one by one, with "
                "--sft-adapter none or --adapter none"
            )
        values["reasoning_format"], values["system_prompt"] = names[-1], prompts[-1]
        values["tool"] = last.resolve_tool(given.get("tool", "auto"))
        values["reward"] = given["reward"] if "reward" in given else reward_of(last)
        trained_with = [info.run.get("config", {}).get("max_new_tokens") or 0 for info in infos]
        values.setdefault("max_new_tokens", max(MAX_NEW_TOKENS, *trained_with))
        return values

    @property
    def format(self) -> Format:
        """The format of completions: the tags and the system prompt."""
        tags = required(self.reasoning_format, "--reasoning-format")
        return FORMATS[tags].with_prompt(self.system_prompt)

    @property
    def rows(self) -> str | None:
        """The rows on which the last adapter was trained.

        Validation is held out of these rows, unless it is published. None if the split is a slice
        or a test split, or if the adapter was trained on other data.
        """
        paths = [*self.adapters.values()]
        if not paths or not self.dataset or self.split not in ("train", "validation"):
            return None
        last = AdapterInfo.load(paths[-1])
        return rows_of(last) if is_trained_on(last, self.dataset) else None

    @property
    def adapters(self) -> dict[str, Path]:
        """The adapters to evaluate, by row name."""
        options = {} if self.base_only else ADAPTERS
        paths = {name: getattr(self, option) for name, (option, _) in options.items()}
        return {name: path for name, path in paths.items() if path}


def reward_of(adapter: AdapterInfo) -> str | None:
    """Return the built-in reward that the adapter was trained with, or None.

    The name of a user's own reward is only printed. Its code is not loaded, because code must not
    run merely because a file next to an adapter names it.
    """
    reward = adapter.run.get("config", {}).get("reward") or None
    if reward in (None, "steps"):
        return reward
    terminal.line(
        f"the adapter was trained with a custom reward: pass --reward {reward} to report its mean"
    )
    return None


def without_hub(dataset: str) -> str:
    """Remove the datasets that come from the hub from a mixture, and print their names.

    A command without --dataset therefore evaluates the same problems with and without network
    access. If all datasets of the mixture come from the hub, none is removed.
    """
    parts = parse_dataset(dataset)
    here = [str(part) for part in parts if not part.needs_hub]
    there = [str(part) for part in parts if part.needs_hub]
    if not here or not there:
        return dataset
    terminal.line(
        f"evaluated on {', '.join(here)} alone: {', '.join(there)} would need the Hugging Face "
        f"hub; pass --dataset {dataset} to evaluate on all of them"
    )
    return "+".join(here)


def is_trained_on(adapter: AdapterInfo, dataset: str) -> bool:
    """Return whether an adapter was trained on a dataset, or on one of its local files."""
    trained = data_files(adapter.dataset or "")
    # A missing file may have been moved, or its path may be relative to another folder.
    moved = {file.name for file in trained if not file.exists()}
    shared = any(file in trained or file.name in moved for file in data_files(dataset))
    return shared or dataset == adapter.dataset


def rows_of(adapter: AdapterInfo) -> str | None:
    """Return the value of --split with which an adapter was trained."""
    return adapter.run.get("config", {}).get("split")


def default_split(dataset: str, adapters: Sequence[AdapterInfo]) -> str:
    """Return the default split.

    The default is test, or validation if an adapter was trained on the file or on the test split
    (--split test[:400]), or if the dataset has no test split.
    """
    is_used = any(
        is_trained_on(info, dataset)
        and (data_files(dataset) or split_slice(rows_of(info) or "train")[0] == "test")
        for info in adapters
    )
    if not is_used and has_test(dataset):
        return "test"
    reason = "was used for training" if is_used else "has no test split"
    terminal.line(f"{dataset} {reason}: only its validation problems are evaluated")
    return "validation"


def pairs_to_compare(rows: Sequence[str], adapters: Mapping[str, Path]) -> list[tuple[str, str]]:
    """Return the pairs of rows to compare: each row with the row above it.

    The GRPO row is compared with the SFT row only if the run.json of the GRPO adapter records that
    GRPO started from this SFT adapter. Otherwise the GRPO row is compared with the base model, and
    a message is printed.

    Args:
        rows: the names of the rows, beginning with the base model.
        adapters: the folders of the adapters, by row name.
    """
    from rlm.model import adapter_hash

    pairs = [(rows[i], rows[i + 1]) for i in range(len(rows) - 1)]
    if not {"SFT", "GRPO"} <= adapters.keys():
        return pairs
    sft, grpo = adapters["SFT"], adapters["GRPO"]
    if AdapterInfo.load(grpo).run.get("start_adapter_hash") == adapter_hash(sft):
        return pairs
    terminal.line(
        f"GRPO is compared with the base model, not with SFT: no run.json records that {grpo} was "
        f"trained from {sft}"
    )
    return [("base", "GRPO") if pair == ("SFT", "GRPO") else pair for pair in pairs]
