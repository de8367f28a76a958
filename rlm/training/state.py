"""The state of a GRPO run, which checkpoints save and restore exactly: the adapter's fp32 master
weights and loss scale, the optimizer, the validations and the counters."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from rlm.cli import UsageError, terminal, to_dict
from rlm.data import Problem
from rlm.model import ADAPTER_FILES, adapter_tensors
from rlm.runs import (
    RunDirectory,
    changed_inputs,
    check_space,
    checkpoint_tensors,
    data_id,
    differences,
    restore_tensors,
    resume_run,
    run_origin,
)
from rlm.training.batches import MicroBatch
from rlm.training.config import GRPOConfig
from rlm.training.distributed import Distributed
from rlm.training.logprobs import token_logprobs
from rlm.training.validation import Validations

if TYPE_CHECKING:
    from peft import PeftModel

    from rlm.sampling import TinkerEngine

# After this many updates in a row without a finite gradient, a checkpoint is restored.
MAX_CONSECUTIVE_SKIPS = 3
LOG_BYTES = 50 * 2**20  # disk space for the metrics, samples and figures of a run
# Options that may change when a run is resumed. Apart from rounding, training does not depend on
# them, or they select a model, an adapter or data whose hash is compared instead.
MAY_CHANGE = {
    *("resume", "model", "sft_adapter", "dataset", "max_samples", "eval_samples"),
    *("run_dir", "output", "save_every", "max_minutes", "tracker"),
    *("max_num_seqs", "sampler", "server", "train_batch_size"),
}
# Fields of TrainingState that a checkpoint stores as JSON and restores.
SAVED = ("skipped_total", "consecutive_skips", "last_finite", "lr_scale", "updates")
Learner: TypeAlias = "MixedPrecisionAdapter | TinkerEngine"  # trains here or on a server
GOOD_UPDATES = 200  # number of finite updates after which the loss scale is doubled
MAX_LOSS_SCALE = 2.0**16


@dataclass
class TrainingState:
    """The adapter, the optimizer, the validations and the best adapter so far.

    The state contains no random state, because the samples of a step depend only on the seed, the
    step and the weights.
    """

    weights: Learner
    optimizer: torch.optim.Optimizer
    base_hash: str
    distributed: Distributed = field(default_factory=Distributed)
    validations: Validations = field(default_factory=Validations)
    best: dict[str, Tensor] = field(default_factory=dict)
    skipped_total: int = 0  # number of updates skipped because their gradient was not finite
    consecutive_skips: int = 0  # number of updates skipped in a row
    last_finite: int = 0  # the last step with a finite gradient; the weights before it are good
    updates: int = 0  # number of updates so far, for the warmup
    keep: int = 2  # number of newest checkpoints to keep
    lr_scale: float = 1.0  # factor of the learning rate; `restore_if_diverged` halves it
    origin: dict[str, Any] = field(default_factory=dict)  # the config and the data of the run
    inputs: dict[str, str] = field(default_factory=dict)  # further inputs of a recipe → their hash
    _began: float = field(default_factory=time.monotonic)
    _seconds_before: float = 0.0  # seconds of the run before it was resumed

    @property
    def adapter(self) -> dict[str, torch.nn.Parameter]:
        """The fp32 master weights of the adapter, by name."""
        return self.weights.master_weights

    @property
    def minutes(self) -> float:
        """The minutes that this process has trained, which --max-minutes limits."""
        return (time.monotonic() - self._began) / 60

    @property
    def seconds(self) -> float:
        """The seconds spent on the run, including the time before the run was resumed."""
        return self._seconds_before + time.monotonic() - self._began

    def begin(
        self,
        run: RunDirectory,
        config: GRPOConfig,
        problems: Sequence[Problem],
        eval_problems: Sequence[Problem],
    ) -> int:
        """Write the first checkpoint, or load the newest one to resume; return the next step."""
        self._began = time.monotonic()
        if self.distributed.is_main:
            # A checkpoint contains the adapter, the best adapter and Adam's two moments. In
            # addition to the `keep` newest checkpoints, there may be a protected checkpoint, the
            # checkpoint that is being written, and the exported best and last adapters.
            size = 4 * sum(t.nbytes for t in self.adapter.values())
            check_space("--run-dir", run.path, (self.keep + 3) * size + LOG_BYTES)
            # An earlier run may have been moved away with this folder in it.
            config.output.parent.mkdir(parents=True, exist_ok=True)
            check_space("--output", config.output.parent, size)
        start_weights = config.sft_adapter and config.sft_adapter / ADAPTER_FILES[1]
        data = {
            split: data_id("problems", [[*vars(problem).values()] for problem in listed])
            for split, listed in (("training", problems), ("validation", eval_problems))
        }
        self.origin = run_origin(to_dict(config), self.base_hash, start_weights, **data)
        self.origin["inputs"] |= self.inputs
        self._compare_origins()
        if config.resume:
            step = self.restore(run)
        else:
            self.save(run, 0)
            step = 0
        run.begin(to_dict(config), step)  # last, so that a rejected run does not start a tracker
        return step

    def _compare_origins(self) -> None:
        """Check that all processes train the same run, because each process loads its own files.

        Raises:
            UsageError: the data, the options, the base model, the initial adapter or the user's
                code of this process differ from those of the main process.
        """
        main, mine = self.distributed.broadcast(self.origin), self.origin
        free = MAY_CHANGE - {"resume"}
        changes = differences(main, mine, free)
        changes += changed_inputs(main["inputs"], mine["inputs"])
        if main["base_hash"] != mine["base_hash"]:
            changes.append("the base model: other tensors under its name")
        if changes:
            raise UsageError(
                "the run on this machine differs from that of the main process "
                f"({'; '.join(changes)}): start all processes with the same options and files"
            )

    def count_update(self, step: int, *, skipped: bool) -> None:
        """Count an update of a step, and adapt the loss scale.

        `consecutive_skips` stays the same if too large a loss scale may have caused the skip.

        Args:
            skipped: whether the update was skipped because its gradient was not finite.
        """
        self.updates += 1
        self.skipped_total += skipped
        if not self.weights.adapt_loss_scale(skipped=skipped):
            self.consecutive_skips = self.consecutive_skips + 1 if skipped else 0
        if not skipped:  # so the weights before this step are good
            self.last_finite = step

    def restore_if_diverged(self, run: RunDirectory) -> None:
        """Restore the last good checkpoint if MAX_CONSECUTIVE_SKIPS updates in a row were skipped.

        The learning rate is halved. A checkpoint is good if a finite update was made from its
        weights; later weights may be the cause of the bad gradients. Training continues with the
        next step, because the same problems with the same weights would fail again.

        Raises:
            UsageError: there is no good checkpoint, or a checkpoint was already restored.
        """
        if self.consecutive_skips < MAX_CONSECUTIVE_SKIPS:
            return
        loaded = self._load_checkpoint(run, at_most=self.last_finite, set_aside=False)
        if self.lr_scale < 1 or loaded is None:
            raise UsageError(
                f"{self.consecutive_skips} updates in a row had no finite gradient, "
                + (
                    "even at half the learning rate"
                    if loaded
                    else "and there is no checkpoint to go back to"
                )
                + "; start again with a lower --learning-rate"
            )
        self._load(*loaded)
        self.consecutive_skips, self.lr_scale = 0, 0.5
        terminal.line(
            f"{MAX_CONSECUTIVE_SKIPS} updates in a row had no finite gradient: continuing from the "
            f"checkpoint of step {loaded[1]['step']} with half the learning rate"
        )

    def early_stopping_reason(self, step: int) -> str:
        """Return and print why the run must stop early; "" if there is no `Validations.fall`."""
        fall = self.validations.fall()
        if fall:
            terminal.line(
                f"stopped after step {step}: {fall}; check which completions the reward prefers "
                "(samples.jsonl), or lower --learning-rate"
            )
        return fall

    def keep_best(self) -> None:
        """Keep a copy of the adapter, which is the best so far."""
        self.weights.fetch()
        self.best = {name: tensor.detach().clone() for name, tensor in self.adapter.items()}

    @torch.no_grad()
    def put_on_model(self, adapter: Mapping[str, Tensor]) -> None:
        """Copy these tensors, which are named as in `self.adapter`, to the adapter of the model."""
        for name, tensor in adapter.items():
            self.adapter[name].copy_(tensor)
        self.weights.copy_to_model()

    def save(self, run: RunDirectory, next_step: int) -> None:
        """Write a checkpoint.

        Each checkpoint contains the best adapter, so the deletion of old checkpoints cannot delete
        the best adapter.
        """
        if not run.writes:
            return
        self.weights.fetch()
        tensors = checkpoint_tensors(self.adapter, self.optimizer)
        tensors |= {f"best/{name}": tensor for name, tensor in self.best.items()}
        state = {name: getattr(self, name) for name in ("origin", *SAVED, "seconds")}
        state["validations"] = asdict(self.validations)
        state["learner"] = self.weights.state_dict()
        run.checkpoints.save(next_step, tensors, state, keep=self.keep, protect=self.last_finite)

    def restore(self, run: RunDirectory) -> int:
        """Load the newest checkpoint and return the step to continue with."""
        tensors, state = resume_run(
            run.path,
            self._load_checkpoint(run),
            self.origin,
            self.adapter,
            may_change=MAY_CHANGE,
            expected_keys=(*SAVED, "learner"),
        )
        run.truncate(state["step"])
        for name in SAVED:
            setattr(self, name, state[name])
        self._seconds_before = state["seconds"]
        self._load(tensors, state)
        saved = Validations.from_dict(state["validations"])
        if saved.measure == self.validations.measure:
            self.validations = saved
            self.best = {
                k.removeprefix("best/"): t for k, t in tensors.items() if k.startswith("best/")
            }
        else:  # another reward, passed from Python
            terminal.line(
                "earlier validations are not compared with later ones: they measured the "
                f"{saved.measure}, not the {self.validations.measure}"
            )
        return state["step"]

    def _load_checkpoint(
        self, run: RunDirectory, **options: Any
    ) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Load a checkpoint in the main process, which has the run directory, and broadcast it."""
        is_main = self.distributed.is_main
        return self.distributed.broadcast(run.checkpoints.load(**options) if is_main else None)

    def _load(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        restore_tensors(tensors, self.adapter, self.optimizer)
        self.weights.load_state_dict(state["learner"])
        self.weights.copy_to_model()


class MixedPrecisionAdapter:
    """The trained LoRA matrices, in the dtype of the model and as fp32 master weights.

    A bf16 model is fast only if its adapter is in bf16 too. The updates are too small for bf16, so
    they are added to fp32 master weights. In an fp32 model, the model's weights and the master
    weights are the same tensors, and nothing is copied between them.

    The smallest positive fp16 number is 6e-8, and most gradients of a single token in a batch of
    ten thousand are smaller than this number. Therefore, with an fp16 model, `backward` multiplies
    the loss by `loss_scale`, and divides the gradients by it in fp32. If a gradient overflows, the
    update is skipped and `loss_scale` is halved. After GOOD_UPDATES finite updates in a row,
    `loss_scale` is doubled.
    """

    def __init__(self, policy: PeftModel) -> None:
        self.policy = policy
        self.model_weights = adapter_tensors(policy)
        self.master_weights = self.model_weights
        self.loss_scale = 2.0**14 if policy.dtype == torch.float16 else 1.0
        self.good_updates = 0  # number of finite updates in a row
        if policy.dtype != torch.float32:
            self.master_weights = {
                name: torch.nn.Parameter(tensor.detach().float())
                for name, tensor in self.model_weights.items()
            }
            for tensor in self.model_weights.values():
                tensor.data = tensor.data.to(policy.dtype)

    def token_logprobs(self, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """Compute the log-probability and the entropy of each completion token, each (n, T)."""
        return token_logprobs(self.policy, batch, temperature)

    def make_optimizer(self, learning_rate: float) -> torch.optim.Optimizer:
        """Make the optimizer that updates the master weights."""
        return torch.optim.Adam(self.master_weights.values(), lr=learning_rate)

    def fetch(self) -> None:
        """Do nothing, because the master weights are already on this machine."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state, in addition to the tensors of a checkpoint, as JSON values."""
        dtype = str(self.policy.dtype)
        return {"loss_scale": self.loss_scale, "good_updates": self.good_updates, "dtype": dtype}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the loss scale, unless the run was resumed in another dtype."""
        if state["dtype"] == str(self.policy.dtype):
            self.loss_scale, self.good_updates = state["loss_scale"], state["good_updates"]

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a micro-batch to that of the master weights, in fp32."""
        (loss * self.loss_scale).backward()
        if self.master_weights is self.model_weights:
            return
        for name, tensor in self.model_weights.items():
            if tensor.grad is not None:
                master = self.master_weights[name]
                new = tensor.grad.float() / self.loss_scale
                master.grad = new if master.grad is None else master.grad + new
                tensor.grad = None

    def adapt_loss_scale(self, *, skipped: bool) -> bool:
        """Adapt the loss scale after an update.

        Args:
            skipped: whether the update was skipped because its gradient was not finite.

        Returns:
            Whether the loss scale may have caused the overflow of the gradient.
        """
        at_fault = skipped and self.loss_scale > 1
        if at_fault:
            self.loss_scale /= 2
        self.good_updates = 0 if skipped else self.good_updates + 1
        if self.policy.dtype == torch.float16 and self.good_updates >= GOOD_UPDATES:
            self.loss_scale, self.good_updates = min(2 * self.loss_scale, MAX_LOSS_SCALE), 0
        return at_fault

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """Copy the master weights to the model."""
        if self.master_weights is not self.model_weights:
            for name, master in self.master_weights.items():
                self.model_weights[name].copy_(master)
