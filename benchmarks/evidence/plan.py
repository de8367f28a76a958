"""Defines the methods (*arms*), sizes and training runs (*cells*) of the grid.

A cell is one method with one seed. It trains an adapter, which is evaluated on all test sets; the
base model is evaluated without training. The seed determines the worked solutions, the practice
problems, the initial weights of the adapter and the sampling. All cells of a seed share their data
and their initial adapter.
"""

from __future__ import annotations

import fcntl
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from rlm.cli import UsageError, check_values, flag, to_dict
from rlm.model import EMBEDDED_MODEL, AdapterInfo
from rlm.runs import replace_json
from rlm.training import GRPOConfig


class Arm(NamedTuple):
    """Describes how a method trains, and its role in the report."""

    title: str
    # "base" (no training), "sft" (the initial adapter), "supervised" (more SFT), "rejection"
    # (rejection sampling), "harvest" (SFT on right completions of a GRPO run), "grpo" or "trl"
    kind: str
    needs: tuple[str, ...] = ()  # methods that must run first with the same seed
    # "baseline" (equal cost, equal information), "control" (must not gain), "algorithm" (another
    # algorithm, as many completions), "choice" (a variant of GRPO or TOPR) or "" (none of these)
    role: str = ""
    grpo: Mapping[str, Any] = {}  # options of GRPOConfig that differ from the grid's
    rounds: int = 1  # rounds of rejection sampling, each of which starts from the previous adapter
    flipped: float = 0.0  # share of flipped rewards; 0.5 makes the reward random
    shuffled: bool = False  # each problem has the reference answer of another problem
    early_stopping: bool = False  # GRPO validates during training, and stops if the accuracy falls


# TOPR makes an update every two groups. Its steps have twice as many problems, so it needs half as
# many steps for the same number of completions.
TOPR_STEP = 2
TOPR: dict[str, Any] = {
    "algorithm": "topr",
    "mini_batch_size": 2,
    "warmup_steps": 5,
    "learning_rate": 3e-4,
}
MINI_BATCHES = {name: value for name, value in TOPR.items() if name != "algorithm"}
VALIDATE_EVERY, VALIDATION_PROBLEMS = 3, 100  # steps between validations, problems in a validation
START = "sft"
OURS = "grpo"  # the method whose training time is the budget of the baselines
FLIPPED = (0.05, 0.1, 0.2)  # shares of flipped rewards, as with a verifier that makes mistakes
BEST = "topr"  # the default algorithm; if the grid contains it, the report shows its lead
# DAPO takes this share of a step's problems. It replaces groups with equal rewards (four in ten at
# the start), so that it samples about as many completions as GRPO.
DYNAMIC_SHARE = 0.6


def baseline(title: str, kind: str, **how: Any) -> Arm:
    return Arm(title, kind, (START, OURS), "baseline", **how)


def topr(title: str, role: str = "choice", **how: Any) -> Arm:
    return Arm(f"TOPR{title}", "grpo", (START,), role, TOPR, **how)


def control(title: str, **how: Any) -> Arm:
    return Arm(f"control: {title}", "grpo", (START,), "control", **how)


def with_flipped_rewards(share: float) -> dict[str, Arm]:
    title = f", {share:.0%}".replace("%", " % of the rewards flipped")
    how: dict[str, Any] = {"flipped": share, "early_stopping": True}
    return {
        f"flipped_{share}": Arm(f"GRPO{title}", "grpo", (START,), "choice", **how),
        f"topr_flipped_{share}": topr(title, **how),
    }


def algorithm(title: str, name: str) -> Arm:
    return Arm(title, "grpo", (START,), "algorithm", {"algorithm": name})


ARMS: dict[str, Arm] = {  # in the order in which a seed's cells run
    "base_zero": Arm("base, zero-shot", "base"),
    "base_few": Arm("base, few-shot", "base"),
    START: Arm("SFT (initial adapter)", "sft"),
    OURS: Arm("GRPO", "grpo", (START,)),
    "sft_continued": baseline("SFT continued, same seconds", "supervised"),
    "rejection": baseline("rejection sampling, same samples", "rejection"),
    "rejection_rounds": baseline("rejection sampling in 3 rounds", "rejection", rounds=3),
    "harvest": baseline("SFT on GRPO's right completions", "harvest"),
    "random_reward": control("random reward", flipped=0.5),
    "shuffled_golds": control("shuffled reference answers", shuffled=True),
    "rate_zero": control("learning rate 0", grpo={"learning_rate": 0.0}),
    "drgrpo": algorithm("Dr. GRPO", "drgrpo"),
    "dapo": algorithm("DAPO", "dapo"),
    "gspo": algorithm("GSPO", "gspo"),
    "cispo": algorithm("CISPO", "cispo"),
    BEST: topr(" in mini-batches"),
    "grpo_mini_batches": Arm(
        "GRPO with TOPR's mini-batches and learning rate", "grpo", (START,), "choice", MINI_BATCHES
    ),
    "topr_random_reward": topr(
        ", control: random reward", "control", flipped=0.5, early_stopping=True
    ),
    "topr_shuffled_golds": topr(
        ", control: shuffled reference answers", "control", shuffled=True, early_stopping=True
    ),
    "sft_all_solved": Arm("SFT on all solutions, same seconds", "supervised", (START, OURS)),
    "trl": Arm("TRL's GRPOTrainer", "trl", (START,)),
}
ARMS |= {name: arm for share in FLIPPED for name, arm in with_flipped_rewards(share).items()}


class Cell(NamedTuple):
    """Names a training run: a method (arm) and a seed."""

    arm: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.arm}-s{self.seed}"

    @property
    def needs(self) -> list[Cell]:
        return [Cell(arm, self.seed) for arm in ARMS[self.arm].needs]


def setting(default: Any, help: str, **bounds: Any) -> Any:
    """Declare a flag that is fixed within a grid, because it decides what a cell measures."""
    return flag(default, help, group="settings", **bounds)


def count(default: int, help: str, at_least: int = 1) -> Any:
    return setting(default, help, min=at_least)


@dataclass
class EvidenceConfig:
    command: str = flag("run", "command to run", choices=("run", "report"), positional=True)
    cells: tuple[str, ...] = flag((), "cells to run, e.g. grpo-s0, trl-*, *-s1 (empty: all)")
    list: bool = flag(False, "only list the finished and the unfinished cells")
    seeds: tuple[int, ...] = flag((0, 1, 2), "training seeds")
    grid: Path = flag(Path("runs/evidence"), "folder for the cells")
    docs: Path = flag(Path("docs/results/six"), "folder for the report")

    model: str = setting(EMBEDDED_MODEL, "hub id or folder of the base model")
    dataset: str = setting("word-problems", "dataset; gsm8k:FOLDER is checked by its hash")
    adapter: Path | None = flag(
        None, "initial adapter of all arms (none: SFT trains it)", group="settings"
    )
    solved: int = count(200, "number of worked solutions")
    sft_passes: int = count(2, "passes of SFT over the worked solutions")
    sft_rate: float = setting(1e-3, "learning rate of SFT", above=0)
    more_rate: float = setting(5e-4, "learning rate of SFT that starts from an adapter", above=0)
    sft_batch: int = count(16, "examples per SFT update")
    lora_r: int = count(16, "LoRA rank of the adapter")
    steps: int = count(6, "GRPO steps")
    batch_size: int = count(16, "problems per GRPO step")
    group_size: int = count(8, "completions per problem", at_least=2)
    learning_rate: float = setting(
        2e-4, "peak learning rate of GRPO, which then falls linearly", min=0
    )
    max_new_tokens: int = count(96, "maximum completion length in tokens")
    base_new_tokens: int = count(192, "maximum completion length of the base model")
    greedy_problems: int = count(80, "problems per test set")
    sampled_problems: int = count(16, "problems per test set on which sampled accuracy is measured")
    base_sampled: int = count(8, "problems per test set on which the base model is sampled")
    samples: int = count(16, "sampled completions per problem", at_least=2)
    curve_problems: int = count(40, "validation problems for the accuracy during training")
    curve_samples: int = count(2, "sampled validation completions per problem")
    curve_every: int = count(3, "GRPO steps between two validations")

    def __post_init__(self) -> None:
        check_values(self)
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ValueError("--seeds must be one or more different numbers")

    @property
    def tool(self) -> str:
        """The initial adapter's tool, for training and for the evaluation."""
        return AdapterInfo.load(self.adapter).tool if self.adapter else "none"

    # --- the cells ------------------------------------------------------------------------------

    def all_cells(self) -> list[Cell]:
        """Return all cells seed by seed, so that a stopped grid has complete seeds.

        The base model is not trained, so zero-shot and few-shot are one cell each, which is paired
        with every seed.
        """
        cells = [Cell(arm, 0) for arm in ARMS if ARMS[arm].kind == "base"]
        trained = [arm for arm in ARMS if ARMS[arm].kind != "base"]
        return cells + [Cell(arm, seed) for seed in self.seeds for arm in trained]

    def chosen_cells(self) -> list[Cell]:
        cells = self.all_cells()
        for pattern in self.cells:
            if not any(fnmatch(cell.name, pattern) for cell in cells):
                raise UsageError(
                    f"--cells {pattern}: no cell matches; --list shows the names of the cells"
                )
        if not self.cells:
            return cells
        return [c for c in cells if any(fnmatch(c.name, pattern) for pattern in self.cells)]

    def folder(self, cell: Cell) -> Path:
        return self.grid / "cells" / cell.name

    def settings(self) -> dict[str, Any]:
        """Return the settings that must not change within a grid."""
        free = {"command", "cells", "list", "seeds", "grid", "docs"}
        return {name: value for name, value in to_dict(self).items() if name not in free}

    def fix(self) -> None:
        """Write the settings of a new grid, or compare them with those of an existing grid."""
        file, settings = self.grid / "settings.json", self.settings()
        self.grid.mkdir(parents=True, exist_ok=True)
        with (self.grid / "lock").open("w") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)  # another process may start the same grid
            begun = read_json(file) if file.exists() else {}
            for name in settings.keys() & begun.keys():
                if begun[name] != settings[name]:
                    raise UsageError(
                        f"{self.grid} was started with --{name.replace('_', '-')} {begun[name]}, "
                        f"not {settings[name]}: pass another --grid"
                    )
            if not begun:
                replace_json(file, settings)

    def grpo_config(self, cell: Cell, start: Path) -> GRPOConfig:
        """Return our trainer's options for a cell; TRL's options are derived from them."""
        folder = self.folder(cell)
        options = {
            "model": self.model,
            "dataset": self.dataset,
            "sft_adapter": start,
            "steps": self.steps,
            "batch_size": self.batch_size,
            "group_size": self.group_size,
            "tool": self.tool,
            "max_new_tokens": self.max_new_tokens,
            "max_num_seqs": self.batch_size * self.group_size,
            "algorithm": "grpo",
            "learning_rate": self.learning_rate,
            "eval_every": 0,
            "save_every": self.curve_every,
            "seed": cell.seed,
            "run_dir": folder / "train",
            "output": folder / "adapter",
        }
        if ARMS[cell.arm].early_stopping:
            options |= {"eval_every": VALIDATE_EVERY, "eval_samples": VALIDATION_PROBLEMS}
        if "mini_batch_size" in ARMS[cell.arm].grpo:
            options["steps"] = math.ceil(self.steps / TOPR_STEP)
            options["batch_size"] = TOPR_STEP * self.batch_size
        config = GRPOConfig(**(options | dict(ARMS[cell.arm].grpo)))
        if config.resolved_algorithm.dynamic_sampling:
            return replace(config, batch_size=max(1, round(DYNAMIC_SHARE * self.batch_size)))
        return config


# Settings for GSM8K. The arms start from the shipped adapter and use its calculator, because so
# small a model learns too little from a few hundred solutions. All test problems are used.
GSM8K = {
    "adapter": Path("weights/final_rlm_lora"), "lora_r": 32, "solved": 64, "sft_passes": 1,
    "steps": 20, "learning_rate": 1e-4, "max_new_tokens": 160, "base_new_tokens": 256,
    "greedy_problems": 1319, "sampled_problems": 64, "base_sampled": 16, "samples": 8,
    "curve_problems": 20, "curve_samples": 1, "curve_every": 20,
}  # fmt: skip
PRESETS = {"gsm8k": GSM8K}


def made_once(file: Path, make: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """Return the file's contents; if the file does not exist, write the result of `make` first.

    The file is written atomically, so its existence marks finished work.
    """
    if not file.exists():
        replace_json(file, make())
    return read_json(file)


def read_json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8"))
