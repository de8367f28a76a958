"""TRL's SFTTrainer with our own loss and checkpoints. The loss computes the system prompt once per
micro-batch, and no logits of tokens that are not learned. A run that is resumed from a checkpoint
ends with exactly the same adapter as one that was never stopped.

TRL's own loss drops prompts before the matmul with the output embeddings only where Triton runs.
Elsewhere it scores every position and then drops masked ones (1.16, `_use_triton`). Two thirds of a
word problem's tokens are prompt, and that matmul takes a third of a small model's step.

transformers' own checkpoints contain pickles, may be half-written, and continue a second epoch with
other batches (5.23), because they lack the random state at the epoch's beginning.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedTokenizerBase, TrainerCallback, TrainerControl, TrainerState
from trl.trainer import sft_config, sft_trainer

from rlm.cli import terminal, to_dict
from rlm.data import IGNORE_INDEX
from rlm.model import ADAPTER_FILES, Device, adapter_tensors
from rlm.ops import ATTN_IMPLEMENTATION
from rlm.runs import (
    RunDirectory,
    check_space,
    checkpoint_tensors,
    data_id,
    restore_tensors,
    resume_run,
    run_origin,
)
from rlm.training.logprobs import token_logprobs
from rlm.training.memory_plan import plan_sft
from rlm.training.sft_config import SFTConfig
from rlm.training.sft_examples import Example, pack_examples
from rlm.training.state import LOG_BYTES

if TYPE_CHECKING:  # rlm.model has to import bitsandbytes before peft is imported
    from peft import PeftModel

LOGGED = {"loss/sft": "loss", "optim/grad_norm": "grad_norm", "optim/lr": "learning_rate"}
SAVE_SECONDS = 60.0  # log and save at the first step after this many seconds
KEEP = 2  # checkpoints
# Options that may differ when a run is resumed. Either training does not depend on them, or a hash
# of what they name is compared instead.
MAY_CHANGE = {
    *("resume", "model", "dataset", "max_samples", "keep_code", "max_length", "adapter"),
    *("eval_samples", "micro_batch", "max_minutes"),
    *("tracker", "output", "run_dir", "dry_run"),
}


class SFTTrainer(sft_trainer.SFTTrainer):
    """TRL's trainer with our own loss and resume."""

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Return the mean negative log-likelihood of the labels, equal to TRL's."""
        if return_outputs or model is not self.model:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        # Other attention kernels compute masked positions, most of a packed sequence.
        packed = model.config._attn_implementation == ATTN_IMPLEMENTATION
        batch = pack_examples(inputs, model.device.type, packed)
        logprobs, _ = token_logprobs(model, batch, 1.0)
        count = (inputs["labels"][:, 1:] != IGNORE_INDEX).sum()
        return -logprobs.sum() / (count if num_items_in_batch is None else num_items_in_batch)

    def mean_loss(self, examples: Sequence[Mapping[str, Sequence[int]]]) -> float:
        """Return the mean loss of the examples, in nats per learned token."""
        return self.evaluate(datasets.Dataset.from_list([dict(e) for e in examples]))["eval_loss"]

    def train_from(self, step: int) -> None:
        """Train from this step; `CheckpointCallback` restores its adapter and optimizer."""
        if step == 0:
            self.train()
            return
        state = TrainerState(global_step=step, train_batch_size=self.args.train_batch_size)
        state.compute_steps(self.args, max_steps=self.args.max_steps)
        with tempfile.TemporaryDirectory() as folder:  # the only state that transformers reads
            state.save_to_json(str(Path(folder) / "trainer_state.json"))
            self.train(resume_from_checkpoint=folder)

    def _load_from_checkpoint(self, *arguments: object, **options: object) -> None:
        """Skip the part of transformers' resume that looks for adapter files."""


def make_trainer(
    config: SFTConfig,
    device: Device,
    policy: PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: list[Example],
) -> SFTTrainer:
    """Make the trainer of a run."""
    micro_batch, checkpointing = plan_sft(policy, config, examples)
    steps, gpu = config.steps(len(examples)), device.type == "cuda"
    arguments = sft_config.SFTConfig(
        output_dir=str(config.run_dir),
        num_train_epochs=config.epochs_for(len(examples)),
        per_device_train_batch_size=micro_batch,
        per_device_eval_batch_size=micro_batch,
        gradient_accumulation_steps=config.batch_size // micro_batch,
        learning_rate=config.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=round(config.warmup_share * steps),
        max_grad_norm=1.0,
        logging_steps=max(1, steps // 20),
        logging_first_step=True,  # the first line estimates the time of the run
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        train_sampling_strategy="group_by_length",  # little padding
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
        # On a CPU, autocast takes twice as long as a bf16 model.
        bf16=gpu and policy.dtype == torch.bfloat16,
        fp16=gpu and policy.dtype == torch.float16,
        use_cpu=not gpu,
        gradient_checkpointing=checkpointing,
        seed=config.seed,
    )
    if arguments.device.type == "cuda":  # TrainingArguments counts all GPUs; use one
        arguments._n_gpu = 1
    trainer = SFTTrainer(
        model=policy,
        processing_class=tokenizer,
        train_dataset=datasets.Dataset.from_list(examples),
        args=arguments,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    # TRL casts the adapter of a quantized base to bf16, in which small updates round to 0.
    for tensor in policy.parameters():
        if tensor.requires_grad:
            tensor.data = tensor.data.float()
    return trainer


class CheckpointCallback(TrainerCallback):
    """Logs, saves our checkpoints and decides whether to stop, after each step."""

    def __init__(
        self,
        config: SFTConfig,
        run: RunDirectory,
        policy: PeftModel,
        base_hash: str,
        examples: Sequence[Example],
    ) -> None:
        """Begin the run, or load its newest checkpoint for the trainer.

        Raises:
            UsageError: too little disk space; no checkpoint to resume, or one of another run.
        """
        self.config, self.run, self.adapter = config, run, adapter_tensors(policy)
        self.steps, self.step = config.steps(len(examples)), 0  # total, and those done before
        self._seconds_before = 0.0
        self._loaded: dict[str, Tensor] = {}
        self._epoch_began = torch.get_rng_state()
        self._started = self._saved = time.monotonic()
        size = 3 * sum(t.numel() * t.element_size() for t in self.adapter.values())
        check_space("--run-dir", run.path, (KEEP + 1) * size + LOG_BYTES)
        rows = [[example["input_ids"], example["labels"]] for example in examples]
        start_weights = config.adapter / ADAPTER_FILES[1] if config.adapter else None
        data = {"training": data_id("examples", rows)}
        self.origin = run_origin(to_dict(config), base_hash, start_weights, **data)
        if config.resume:
            self._loaded, state = resume_run(
                run,
                run.checkpoints.load(),
                self.origin,
                self.adapter,
                may_change=MAY_CHANGE,
                defaults=to_dict(SFTConfig()),
                expected_keys=["schedule"],
            )
            self.step, self._schedule = state["step"], state["schedule"]
            self._seconds_before = state["seconds"]
        self._cuda_state = self._loaded.get("random/cuda") if torch.cuda.is_available() else None
        run.begin(to_dict(config))

    @property
    def seconds(self) -> float:
        """Seconds spent on the run, including earlier processes."""
        return self._seconds_before + time.monotonic() - self._started

    def mean_loss(self) -> float:
        """Return the mean loss of all steps; a log row has the mean since the previous row."""
        total, done = 0.0, 0
        for row in self.run.metrics():
            total += row["loss/sft"] * (row["step"] + 1 - done)
            done = row["step"] + 1
        return total / done

    def on_train_begin(self, *arguments: Any, **parts: Any) -> None:
        self._optimizer, self._scheduler = parts["optimizer"], parts["lr_scheduler"]
        optimizer, scheduler = self._optimizer, self._scheduler
        if self._loaded:
            restore_tensors(self._loaded, self.adapter, optimizer)
            scheduler.load_state_dict(self._schedule)
            for group, rate in zip(optimizer.param_groups, scheduler.get_last_lr(), strict=True):
                group["lr"] = rate

    def on_epoch_begin(self, args: Any, state: TrainerState, *control: Any, **parts: Any) -> None:
        # The epoch's order is drawn next. A resumed epoch draws the same order, skips the steps
        # that were done, and continues with the random state that was saved after them.
        if self._loaded:
            between = state.global_step % (self.steps // int(args.num_train_epochs)) == 0
            torch.set_rng_state(self._loaded["random/now" if between else "random/epoch"])
            if between:
                self._loaded = {}
        self._epoch_began = torch.get_rng_state()

    def on_step_begin(self, *arguments: Any, **parts: Any) -> None:
        if self._loaded:
            torch.set_rng_state(self._loaded["random/now"])
            self._loaded = {}
        if self._cuda_state is not None:
            torch.cuda.set_rng_state(self._cuda_state)
            self._cuda_state = None

    def on_step_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **parts: Any
    ) -> None:
        minutes, limit = (time.monotonic() - self._started) / 60, self.config.max_minutes
        if limit is not None and minutes >= limit:
            terminal.line(f"--max-minutes {limit:g} reached")
            control.should_training_stop = True
        control.should_training_stop |= self.run.interrupted
        control.should_log |= control.should_training_stop or state.global_step == self.steps
        control.should_log |= self._save_is_due()  # between the regular reports, too

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **parts: Any) -> None:
        logs, done = parts.get("logs") or {}, state.global_step
        if "loss" not in logs:
            return
        metrics = {ours: float(logs[theirs]) for ours, theirs in LOGGED.items() if theirs in logs}
        self.run.log({"step": done - 1, **metrics})
        a_step = (time.monotonic() - self._started) / (done - self.step)
        seconds = a_step * (self.steps - done)
        if limit := self.config.max_minutes:
            seconds = min(seconds, max(0.0, self._started + 60 * limit - time.monotonic()))
        left = terminal.time_left(seconds)
        terminal.line(f"step {done}/{self.steps}  loss {float(logs['loss']):.3f}  {left}")
        if done < self.steps and (self._save_is_due() or control.should_training_stop):
            self._save(done)

    def _save_is_due(self) -> bool:
        return time.monotonic() - self._saved >= SAVE_SECONDS

    def _save(self, step: int) -> None:
        tensors = checkpoint_tensors(self.adapter, self._optimizer)
        tensors |= {"random/epoch": self._epoch_began, "random/now": torch.get_rng_state()}
        if torch.cuda.is_available():  # dropout uses its generator
            tensors["random/cuda"] = torch.cuda.get_rng_state()
        schedule = self._scheduler.state_dict()
        state = {"origin": self.origin, "seconds": self.seconds, "schedule": schedule}
        self.run.checkpoints.save(step, tensors, state, keep=KEEP)
        self._saved = time.monotonic()
