"""TRL's SFTTrainer with a custom loss and custom checkpoints.

The custom loss processes the system prompt once per micro-batch, and computes logits only for the
tokens of the completions. TRL's own loss leaves out the prompts before the matmul with the LM head
only if Triton is available. Otherwise TRL computes the logits of every position, and then drops the
masked positions (TRL 1.16, `_use_triton`). In a word problem, two thirds of the tokens belong to
the prompt. In a small model, this matmul takes a third of the time of a step.

With the custom checkpoints, a run that is resumed produces exactly the same adapter as a run that
was never stopped. The checkpoints of transformers contain pickles and may be half-written. Because
these checkpoints lack the random state at the beginning of an epoch, a resumed second epoch has
different batches (transformers 5.23).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import datasets
import torch
import transformers
from torch import Tensor
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)
from trl.trainer import sft_config, sft_trainer

from rlm.cli import UsageError, terminal, to_dict
from rlm.data import IGNORE_INDEX
from rlm.model import (
    ADAPTER_FILES,
    Device,
    adapter_tensors,
    announce_local_window,
    available_memory,
    context_window,
)
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
from rlm.training.memory_plan import HEADROOM, allocated, fit_micro_batch
from rlm.training.resolve import choose_max_new_tokens
from rlm.training.sft_config import SFTConfig
from rlm.training.sft_examples import Example, pack_examples
from rlm.training.state import LOG_BYTES

if TYPE_CHECKING:  # rlm.model has to import bitsandbytes before peft is imported
    from peft import PeftModel

LOGGED = {"loss/sft": "loss", "optim/grad_norm": "grad_norm", "optim/lr": "learning_rate"}
SAVE_SECONDS = 60.0  # minimum time between two checkpoints
KEEP = 2  # number of checkpoints that are kept
# Options that may change when a run is resumed. Training does not depend on them, or they select a
# model or data whose hash is compared instead.
MAY_CHANGE = {
    *("resume", "model", "dataset", "max_samples", "keep_code", "max_length", "adapter"),
    *("eval_samples", "micro_batch", "max_minutes"),
    *("tracker", "output", "run_dir", "dry_run"),
}


class SFTTrainer(sft_trainer.SFTTrainer):
    """TRL's SFTTrainer with a custom loss and custom resuming."""

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Return the mean negative log-likelihood of the labels, which equals TRL's loss."""
        assert not return_outputs  # only `Trainer.evaluate` asks for these; see `mean_loss`
        # Other attention kernels also compute the masked positions, which are most positions of a
        # packed sequence.
        packed = model.config._attn_implementation == ATTN_IMPLEMENTATION
        batch = pack_examples(inputs, model.device.type, packed)
        logprobs, _ = token_logprobs(model, batch, 1.0)
        count = (inputs["labels"][:, 1:] != IGNORE_INDEX).sum()
        return -logprobs.sum() / (count if num_items_in_batch is None else num_items_in_batch)

    def mean_loss(self, examples: Sequence[Mapping[str, Sequence[int]]]) -> float:
        """Return the mean loss of the examples, in nats per completion token.

        `Trainer.evaluate` would return the mean over batches, which depends on their size.
        """
        data = datasets.Dataset.from_list([dict(example) for example in examples])
        total, count = 0.0, 0
        model = cast("PeftModel", self.model).eval()
        for batch in self.get_eval_dataloader(cast("Any", data)):  # typed as torch's Dataset
            inputs = self._prepare_inputs(batch)
            with torch.no_grad(), self.compute_loss_context_manager():
                total += self.compute_loss(model, inputs, num_items_in_batch=1).item()
            count += int((inputs["labels"][:, 1:] != IGNORE_INDEX).sum())
        return total / count

    def train_from(self, step: int) -> None:
        """Train from this step on; `CheckpointCallback` restores the adapter and the optimizer."""
        if step == 0:
            self.train()
            return
        state = TrainerState(global_step=step, train_batch_size=self.args.train_batch_size)
        state.compute_steps(self.args, max_steps=self.args.max_steps)
        with tempfile.TemporaryDirectory() as folder:  # for the state that transformers reads
            state.save_to_json(str(Path(folder) / "trainer_state.json"))
            self.train(resume_from_checkpoint=folder)

    def _load_from_checkpoint(self, *arguments: object, **options: object) -> None:
        """Do nothing, because transformers would look for adapter files in the checkpoint."""


def examples_within_window(
    policy: PreTrainedModel | PeftModel, examples: Sequence[Example]
) -> list[Example]:
    """Return the examples that fit into the model's context window.

    `context_window` includes the local window, because packed training ignores local windows.
    """
    window = context_window(policy)
    return [e for e in examples if window is None or len(e["input_ids"]) <= window]


def check_window(
    policy: PreTrainedModel | PeftModel, examples: Sequence[Example], dataset: str | None
) -> None:
    """Warn if the prompts and completions of a later GRPO run would exceed the context window.

    A note about a shorter local attention window is printed, too.
    """
    announce_local_window(policy)
    window, default = context_window(policy), choose_max_new_tokens(dataset)
    longest = max(example["labels"].count(IGNORE_INDEX) for example in examples)  # prompt tokens
    if window and longest + default > window:
        terminal.line(
            f"warning: prompts of up to {longest} tokens and --max-new-tokens {default}, the "
            f"default of train_grpo.py, exceed the context window of {window} tokens: lower "
            "--max-new-tokens there, or the longest prompts are left out"
        )


def plan_sft(
    policy: PreTrainedModel | PeftModel, config: SFTConfig, examples: Sequence[Example]
) -> tuple[int, bool]:
    """Choose the micro-batch size of SFT; on a GPU, also print the planned memory.

    On a CPU, the size is always `config.micro_batch`, without gradient checkpointing.

    Returns:
        The number of examples in a micro-batch, which is at most `config.micro_batch`, and whether
        to use gradient checkpointing.
    """
    micro_batch = config.micro_batch
    if policy.device.type != "cuda":
        return micro_batch, False
    longest = max(len(example["input_ids"]) for example in examples)
    available = available_memory("cuda")
    trained = sum(t.numel() * 4 for t in policy.parameters() if t.requires_grad)
    room = int(HEADROOM * available - 3 * trained)  # gradients and two moments
    while True:
        _, checkpointing, learning = fit_micro_batch(policy, longest, room, micro_batch * longest)
        smaller = micro_batch // 2
        if learning <= room or smaller < 1 or config.batch_size % smaller:
            break
        micro_batch = smaller
    terminal.line(
        f"memory: about {(allocated('cuda') + 3 * trained + learning) / 2**30:.1f} GB at the "
        f"peak; {available / 2**30:.1f} GB are free; micro-batches of {micro_batch} examples"
        + (", with gradient checkpointing" if checkpointing else "")
    )
    return micro_batch, checkpointing


def make_trainer(
    config: SFTConfig,
    device: Device,
    policy: PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: list[Example],
) -> SFTTrainer:
    """Make the SFT trainer of a run."""
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
        logging_first_step=True,  # the first log line estimates the time of the run
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        train_sampling_strategy="group_by_length",  # reduces padding
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
        # On a CPU, autocast takes twice as long as a bf16 model.
        bf16=gpu and policy.dtype == torch.bfloat16,
        fp16=gpu and policy.dtype == torch.float16,
        use_cpu=not gpu,
        gradient_checkpointing=checkpointing,
        seed=config.seed,
    )
    if arguments.device.type == "cuda":  # TrainingArguments counts all GPUs, but SFT uses one
        arguments._n_gpu = 1
    trainer = SFTTrainer(
        model=policy,
        processing_class=tokenizer,
        train_dataset=datasets.Dataset.from_list(examples),
        args=arguments,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    # TRL casts the adapter of a quantized base model to bf16, which would round small updates to 0.
    for tensor in policy.parameters():
        if tensor.requires_grad:
            tensor.data = tensor.data.float()
    return trainer


class CheckpointCallback(TrainerCallback):
    """Logs metrics, saves checkpoints, and stops the run at a signal or at the time limit."""

    def __init__(
        self,
        config: SFTConfig,
        run: RunDirectory,
        policy: PeftModel,
        base_hash: str,
        examples: Sequence[Example],
    ) -> None:
        """Begin a new run, or load the newest checkpoint of a run that is resumed."""
        self.config, self.run, self.adapter = config, run, adapter_tensors(policy)
        self.steps, self.step = config.steps(len(examples)), 0  # total, already done
        self._seconds_before = 0.0
        self._loaded: dict[str, Tensor] = {}
        self._epoch_began = torch.get_rng_state()
        self._started = self._saved = time.monotonic()
        size = 3 * sum(t.nbytes for t in self.adapter.values())
        check_space("--run-dir", run.path, (KEEP + 1) * size + LOG_BYTES)
        rows = [[example["input_ids"], example["labels"]] for example in examples]
        start_weights = config.adapter / ADAPTER_FILES[1] if config.adapter else None
        data = {"training": data_id("examples", rows)}
        self.origin = run_origin(to_dict(config), base_hash, start_weights, **data)
        if config.resume:
            self._loaded, state = resume_run(
                run.path,
                run.checkpoints.load(),
                self.origin,
                self.adapter,
                may_change=MAY_CHANGE,
                expected_keys=["schedule"],
            )
            run.truncate(state["step"])
            self.step, self._schedule = state["step"], state["schedule"]
            self._seconds_before = state["seconds"]
        self._cuda_state = self._loaded.get("random/cuda") if torch.cuda.is_available() else None
        run.begin(to_dict(config), self.step)

    @property
    def seconds(self) -> float:
        """The seconds spent on the run, including the time before the run was resumed."""
        return self._seconds_before + time.monotonic() - self._started

    def mean_loss(self) -> float:
        """Return the mean loss of all steps.

        Each row of the log contains the mean loss of the steps since the previous row.
        """
        total, done = 0.0, 0
        for row in self.run.metrics():
            total += row["loss/sft"] * (row["step"] + 1 - done)
            done = row["step"] + 1
        return total / done

    def on_train_begin(self, *arguments: Any, **parts: Any) -> None:
        optimizer, scheduler = parts["optimizer"], parts["lr_scheduler"]
        self._optimizer, self._scheduler = optimizer, scheduler
        if self._loaded:
            restore_tensors(self._loaded, self.adapter, optimizer)
            scheduler.load_state_dict(self._schedule)
            for group, rate in zip(optimizer.param_groups, scheduler.get_last_lr(), strict=True):
                group["lr"] = rate

    def on_epoch_begin(self, args: Any, state: TrainerState, *control: Any, **parts: Any) -> None:
        # The order of the examples is drawn next. A resumed epoch draws the same order, skips the
        # steps that are already done, and continues with the random state that was saved after
        # these steps.
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
        control.should_log |= self._save_is_due()  # also between the regular log steps

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **parts: Any) -> None:
        logs, done = parts.get("logs") or {}, state.global_step
        if "loss" not in logs:
            return
        # The logged loss does not show divergence: transformers replaces a loss that is not finite
        # by the mean of the other losses.
        if not all(tensor.isfinite().all() for tensor in self.adapter.values()):
            raise UsageError(
                f"after step {done} the weights of the adapter are no longer finite: start again "
                "with a lower --learning-rate"
            )
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
        if torch.cuda.is_available():  # dropout uses the GPU's generator
            tensors["random/cuda"] = torch.cuda.get_rng_state()
        schedule = self._scheduler.state_dict()
        state = {"origin": self.origin, "seconds": self.seconds, "schedule": schedule}
        self.run.checkpoints.save(step, tensors, state, keep=KEEP)
        self._saved = time.monotonic()
