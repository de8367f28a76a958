"""What a training run carries from step to step, and how it is saved and restored exactly."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlm.cli import terminal
from rlm.cli.options import UsageError, to_dict
from rlm.data.problem import Problem
from rlm.model.adapters import ADAPTER_FILES, adapter_tensors
from rlm.runs.checkpoints import check_space, file_hash
from rlm.runs.directory import RunDirectory
from rlm.runs.resume import (
    data_id,
    differences,
    newest_checkpoint,
    optimizer_tensors,
    restore_optimizer,
)
from rlm.training.config import GRPOConfig
from rlm.training.distributed import Distributed

if TYPE_CHECKING:
    from peft import PeftModel

GIVE_UP_AFTER = 3  # updates in a row without a finite gradient
LOG_BYTES = 50 * 2**20  # metrics, samples and pictures of a run
# Options that may differ when a run is resumed: what is learned does not depend on them, or (model,
# data set) a hash of what they name is compared instead.
MAY_CHANGE = {
    *("resume", "accept_changes", "model", "dataset", "max_samples", "eval_samples"),
    *("max_prompt_length", "use_4bit"),  # the data's hash and --quantize say it
    *("run_dir", "output", "save_every", "keep_checkpoints", "sample_every", "max_minutes"),
    *("max_num_seqs", "sampler", "sampler_url", "train_batch_size", "train_batch_tokens"),
    *("checkpointing", "attn_implementation", "tracker", "use_wandb"),
}
# What of the state a checkpoint's JSON holds: what must be the same, and what goes on from there.
IDENTITY = ("base_hash", "origin")
PROGRESS = (
    *("best_accuracy", "best_step", "skipped_total", "consecutive_skips"),
    *("last_finite", "lr_scale", "kl_weight"),
)


class TrainedAdapter:
    """The LoRA matrices that training changes: the model's, and their fp32 master weights.

    A model that computes in bf16 computes fast only if its adapter is bf16 too; but updates
    are smaller than bf16's steps, so they are added to fp32 master weights. In fp32 both are the
    same tensors, and `accumulate` and `copy_to_model` do nothing.

    In fp16 the smallest number is 6e-8, and most gradients of one token among ten thousand lie
    below it: the loss is multiplied by `loss_scale` before the backward pass, and `accumulate`
    divides by it in fp32. What overflows then is not finite, and that update is skipped.
    """

    def __init__(self, policy: PeftModel) -> None:
        self.model_weights = adapter_tensors(policy)
        self.master_weights = self.model_weights
        self.loss_scale = 2.0**14 if policy.dtype == torch.float16 else 1.0
        if policy.dtype != torch.float32:
            self.master_weights = {
                name: torch.nn.Parameter(tensor.detach().float())
                for name, tensor in self.model_weights.items()
            }
            for tensor in self.model_weights.values():
                tensor.data = tensor.data.to(policy.dtype)

    def accumulate(self) -> None:
        """Add the gradients of a micro-batch to the master weights' (summed in fp32)."""
        if self.master_weights is self.model_weights:
            return
        for name, tensor in self.model_weights.items():
            if tensor.grad is not None:
                master = self.master_weights[name]
                new = tensor.grad.float() / self.loss_scale
                master.grad = new if master.grad is None else master.grad + new
                tensor.grad = None

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """The model computes with the master weights' from here on."""
        if self.master_weights is not self.model_weights:
            for name, master in self.master_weights.items():
                self.model_weights[name].copy_(master)


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
    consecutive_skips: int = 0
    last_finite: int = 0  # the last step that began with weights that gave a finite gradient
    updated: bool = False  # whether the step that runs has changed the weights
    lr_scale: float = 1.0  # of the learning rate; halved by `go_back`
    origin: dict[str, object] = field(default_factory=dict)  # config and data of the run
    _began: float = field(default_factory=time.monotonic)
    _seconds_before: float = 0.0  # of earlier processes, up to the checkpoint

    @property
    def adapter(self) -> dict[str, torch.nn.Parameter]:
        """Name → fp32 master."""
        return self.trained.master_weights

    @property
    def seconds(self) -> float:
        """Of the run, whatever processes it took."""
        return self._seconds_before + time.monotonic() - self._began

    def begin(
        self,
        run: RunDirectory,
        config: GRPOConfig,
        problems: Sequence[Problem],
        eval_problems: Sequence[Problem],
        distributed: Distributed,
    ) -> int:
        """Write the first checkpoint of a new run, or load the newest of this one.

        Returns:
            The step to go on with.

        Raises:
            UsageError: too little room on the disk; nothing to resume; or what would be resumed
                had other data, other options, another base or adapter.
        """
        self._began = time.monotonic()
        if distributed.is_main:
            # Adapter, best adapter and two moments; beside those kept, one that is protected and
            # the one that is being written.
            size = 4 * sum(t.numel() * t.element_size() for t in self.adapter.values())
            check_space("--run-dir", run.path, (config.keep_checkpoints + 2) * size + LOG_BYTES)
            check_space("--output", config.output.parent, size)
        start = config.sft_adapter
        self.origin = {
            "config": to_dict(config),
            "start": None if start is None else file_hash(start / ADAPTER_FILES[1]),
            "data": {"training": _identity(problems), "validation": _identity(eval_problems)},
        }
        if not config.resume:
            self.save(run, 0, keep=config.keep_checkpoints)
            step = 0
        elif distributed.is_main:  # the leader goes first: it renames what is damaged
            step = distributed.broadcast(self.restore(run))
        else:
            distributed.broadcast(0)
            step = self.restore(run)
        run.write_config(to_dict(config))
        run.track(config.tracker, to_dict(config))  # only now: what is refused is shown nowhere
        return step

    def count_update(self, *, skipped: bool) -> None:
        """Count an update whose gradient was not finite; a finite one ends the streak."""
        self.skipped_total += skipped
        self.consecutive_skips = self.consecutive_skips + 1 if skipped else 0
        self.updated |= not skipped

    def restore_if_diverged(self, run: RunDirectory, step: int) -> None:
        """After GIVE_UP_AFTER skipped updates: the last good weights, and half the learning rate.

        Good is a checkpoint from which an update was made: the weights after the last update may
        be what the first bad gradient came from. Training goes on with the next step: the same
        problems with the same weights would end the same way.

        Args:
            step: the one that ends now.

        Raises:
            UsageError: there is none, or this has happened before.
        """
        if self.updated:  # a step without a difference in any group says nothing of its weights
            self.last_finite, self.updated = step, False
        if self.consecutive_skips < GIVE_UP_AFTER:
            return
        loaded = run.checkpoints.load(at_most=self.last_finite, set_aside=False)
        if self.lr_scale < 1 or loaded is None:
            raise UsageError(
                f"{self.consecutive_skips} updates in a row had no finite gradient, "
                + ("at half the rate too" if loaded else "and there is no checkpoint to go back to")
                + "; start again with a lower --learning-rate"
            )
        self._load(loaded[0])
        self.consecutive_skips, self.lr_scale = 0, 0.5
        terminal.line(
            f"{GIVE_UP_AFTER} updates in a row had no finite gradient: weights of step "
            f"{loaded[1]['step']} again, half the learning rate from here on"
        )

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
        self.trained.copy_to_model()

    def save(self, run: RunDirectory, next_step: int, keep: int) -> None:
        """Write a checkpoint. The best adapter is in each, so no deletion can lose it."""
        if not run.writes:
            return
        tensors = {f"adapter/{name}": tensor.detach() for name, tensor in self.adapter.items()}
        tensors |= {f"best/{name}": tensor for name, tensor in self.best.items()}
        tensors |= optimizer_tensors(self.optimizer, list(self.adapter))
        run.sync_logs()
        run.checkpoints.save(
            next_step,
            tensors,
            {name: getattr(self, name) for name in (*IDENTITY, *PROGRESS, "seconds")},
            keep=keep,
            protect=self.last_finite,
        )

    def restore(self, run: RunDirectory) -> int:
        """Load the newest checkpoint; the step to go on with.

        Raises:
            UsageError: there is none, or it is of another base, adapter, config or data.
        """
        tensors, state = newest_checkpoint(run, IDENTITY)
        saved = {key: t.shape for key, t in tensors.items() if key.startswith("adapter/")}
        ours = {f"adapter/{name}": tensor.shape for name, tensor in self.adapter.items()}
        if state["base_hash"] != self.base_hash or saved != ours:
            raise UsageError(f"--resume: {run.path} was trained on another model or adapter")
        changes = differences(state["origin"], self.origin, MAY_CHANGE) if self.origin else []
        for change in changes:
            terminal.line(f"changed since: {change}")
        if changes and not self.origin["config"]["accept_changes"]:
            raise UsageError(
                f"--resume: {run.path} was begun otherwise ({'; '.join(changes)}); add "
                "--accept-changes to go on all the same, or leave out --resume to start anew"
            )
        for name in PROGRESS:
            setattr(self, name, state[name])
        self._seconds_before = state.get("seconds", 0.0)  # older checkpoints have none
        chosen = self.origin.get("config")
        if chosen and chosen["kl_weight"] != state["origin"]["config"]["kl_weight"]:
            self.kl_weight = chosen["kl_weight"]  # changed, and accepted
        self._load(tensors)
        self.best = {
            k.removeprefix("best/"): t for k, t in tensors.items() if k.startswith("best/")
        }
        run.truncate(state["step"])
        terminal.line(f"resumed {run.path} before step {state['step'] + 1}")
        return state["step"]

    @torch.no_grad()
    def _load(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in self.adapter.items():
            tensor.copy_(tensors[f"adapter/{name}"])
        self.trained.copy_to_model()
        restore_optimizer(self.optimizer, list(self.adapter), tensors)


def _identity(problems: Sequence[Problem]) -> str:
    return data_id("problems", [[p.id, p.question, p.answer] for p in problems])
