"""What a training run carries from step to step, and how it is saved and restored exactly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlm import terminal
from rlm.config import UsageError
from rlm.runs import RunDirectory


@dataclass
class TrainingState:
    """Adapter, optimizer and the best adapter so far.

    Nothing random is in it: what a step draws is a function of the seed and the step's number.
    """

    adapter: dict[str, torch.nn.Parameter]
    optimizer: torch.optim.Optimizer
    base_hash: str
    best_accuracy: float = -1.0
    best_step: int | None = None
    best: dict[str, Tensor] = field(default_factory=dict)
    skipped_total: int = 0  # updates without a finite gradient, which changed nothing
    skipped_in_a_row: int = 0

    def count_update(self, *, skipped: bool) -> int:
        """Count an update; how many were skipped in a row by now."""
        self.skipped_total += skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        return self.skipped_in_a_row

    def keep_if_best(self, accuracy: float, step: int) -> None:
        """Remember the adapter as it is, if no earlier one did better; of equals the later."""
        if accuracy >= self.best_accuracy:
            self.best_accuracy, self.best_step = accuracy, step
            self.best = {name: tensor.detach().clone() for name, tensor in self.adapter.items()}

    @torch.no_grad()
    def use_best(self) -> None:
        """Put the best adapter's tensors on the model; the present ones where none was kept."""
        for name, tensor in self.best.items():
            self.adapter[name].copy_(tensor)

    def save(self, run: RunDirectory, next_step: int, keep: int) -> None:
        tensors = {f"adapter/{name}": tensor.detach() for name, tensor in self.adapter.items()}
        tensors |= {f"best/{name}": tensor for name, tensor in self.best.items()}
        tensors |= _optimizer_tensors(self.optimizer, list(self.adapter))
        state = {
            "best_accuracy": self.best_accuracy,
            "best_step": self.best_step,
            "skipped_total": self.skipped_total,
            "base_hash": self.base_hash,
        }
        run.save_checkpoint(next_step, tensors, state, keep=keep)

    @torch.no_grad()
    def restore(self, run: RunDirectory) -> int:
        """Load the newest checkpoint; the step to go on with.

        Raises:
            UsageError: there is none, or it is of another base model or adapter.
        """
        loaded = run.load_checkpoint()
        if loaded is None:
            raise UsageError(f"--resume: no checkpoint in {run.path}")
        tensors, state = loaded
        saved = {key.removeprefix("adapter/") for key in tensors if key.startswith("adapter/")}
        if state["base_hash"] != self.base_hash or saved != set(self.adapter):
            raise UsageError(f"--resume: {run.path} was trained on another model or adapter")
        for name, tensor in self.adapter.items():
            tensor.copy_(tensors[f"adapter/{name}"])
        _restore_optimizer(self.optimizer, list(self.adapter), tensors)
        self.best = {
            k.removeprefix("best/"): t for k, t in tensors.items() if k.startswith("best/")
        }
        self.best_accuracy, self.best_step = state["best_accuracy"], state["best_step"]
        self.skipped_total = state["skipped_total"]
        run.truncate(state["step"])
        terminal.line(f"resumed {run.path} before step {state['step'] + 1}")
        return state["step"]


def _optimizer_tensors(optimizer: torch.optim.Optimizer, names: Sequence[str]) -> dict[str, Tensor]:
    """The optimizer's state as named tensors: "optimizer/<entry>/<parameter>"."""
    state = optimizer.state_dict()["state"]
    return {
        f"optimizer/{entry}/{names[index]}": torch.as_tensor(value)
        for index, entries in state.items()
        for entry, value in entries.items()
    }


def _restore_optimizer(
    optimizer: torch.optim.Optimizer, names: Sequence[str], tensors: Mapping[str, Tensor]
) -> None:
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        if key.startswith("optimizer/"):
            _, entry, name = key.split("/", 2)
            state.setdefault(names.index(name), {})[entry] = value
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
