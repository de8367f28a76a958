"""What a training run carries from step to step, and how it is saved and restored exactly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from peft import PeftModel
from torch import Tensor

from rlm import terminal
from rlm.config import UsageError
from rlm.models import adapter_tensors
from rlm.runs import RunDirectory


class TrainedAdapter:
    """The LoRA matrices that training changes: the model's, and the fp32 masters behind them.

    A model that computes in bf16 computes fast only if its adapter is bf16 too; but updates
    are smaller than bf16's steps, so they are added to fp32 masters. In fp32 both are the same
    tensors, and `collect` and `publish` do nothing.
    """

    def __init__(self, policy: PeftModel) -> None:
        self.computed = adapter_tensors(policy)
        self.masters = self.computed
        if policy.dtype != torch.float32:
            self.masters = {
                name: torch.nn.Parameter(tensor.detach().float())
                for name, tensor in self.computed.items()
            }
            for tensor in self.computed.values():
                tensor.data = tensor.data.to(policy.dtype)

    def collect(self) -> None:
        """Add the gradients of a micro-batch to the masters' (summed in fp32)."""
        if self.masters is self.computed:
            return
        for name, tensor in self.computed.items():
            if tensor.grad is not None:
                master = self.masters[name]
                new = tensor.grad.float()
                master.grad = new if master.grad is None else master.grad + new
                tensor.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        """The model computes with the masters' values from here on."""
        if self.masters is not self.computed:
            for name, master in self.masters.items():
                self.computed[name].copy_(master)


@dataclass
class TrainingState:
    """Adapter, optimizer and the best adapter so far.

    Nothing random is in it: what a step draws is a function of the seed and the step's number.
    """

    trained: TrainedAdapter
    optimizer: torch.optim.Optimizer
    base_hash: str
    kl_weight: float = 0.0  # changes where the run has a target
    best_accuracy: float = -1.0
    best_step: int | None = None
    best: dict[str, Tensor] = field(default_factory=dict)
    skipped_total: int = 0  # updates without a finite gradient, which changed nothing
    skipped_in_a_row: int = 0

    @property
    def adapter(self) -> dict[str, torch.nn.Parameter]:
        """Name → fp32 master."""
        return self.trained.masters

    def count_update(self, *, skipped: bool) -> int:
        """Count an update; how many were skipped in a row by now."""
        self.skipped_total += skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        return self.skipped_in_a_row

    def adapt_kl_weight(self, kl: float | None, target: float | None) -> None:
        """Raise the weight of the KL term where a step's KL is above its target, else lower it.

        weight · (1 + 0.1 · clip(kl / target - 1, -0.2, 0.2)): at most 2 % a step (Ziegler et al.,
        arXiv 1909.08593). Without a target it stays.

        Args:
            kl, target: nats per token; None: nothing was learned from, or there is no target.
        """
        if kl is not None and target is not None:
            self.kl_weight *= 1 + 0.1 * min(0.2, max(-0.2, kl / target - 1))

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
        self.trained.publish()

    def save(self, run: RunDirectory, next_step: int, keep: int) -> None:
        tensors = {f"adapter/{name}": tensor.detach() for name, tensor in self.adapter.items()}
        tensors |= {f"best/{name}": tensor for name, tensor in self.best.items()}
        tensors |= _optimizer_tensors(self.optimizer, list(self.adapter))
        state = {
            "best_accuracy": self.best_accuracy,
            "best_step": self.best_step,
            "kl_weight": self.kl_weight,
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
        self.trained.publish()
        _restore_optimizer(self.optimizer, list(self.adapter), tensors)
        self.best = {
            k.removeprefix("best/"): t for k, t in tensors.items() if k.startswith("best/")
        }
        self.best_accuracy, self.best_step = state["best_accuracy"], state["best_step"]
        self.skipped_total, self.kl_weight = state["skipped_total"], state["kl_weight"]
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
