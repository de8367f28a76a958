"""Runs TRL's GRPOTrainer with the options of our `GRPOConfig`.

TRL gets the same problems in the same order, the same schedule and the same optimizer as our
trainer. Only the child process that runs TRL imports this module, because TRL takes seconds and
memory to load.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from datasets import Dataset
from peft import PeftModel
from transformers import PreTrainedTokenizerBase, TrainerCallback
from trl.trainer.grpo_config import GRPOConfig as TRLConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from benchmarks.trainers import ScriptedReward, in_scratch, problem_pool
from rlm.cli import required
from rlm.data import FORMATS, Problem, render_prompt, stop_token_ids
from rlm.model import (
    adapter_tensors,
    base_model_hash,
    load_adapter,
    load_base,
    load_tokenizer,
    new_adapter,
    pick_device,
    prepare_process,
    save_adapter,
)
from rlm.rewards import CorrectnessReward
from rlm.training import GRPOConfig, problems_for_step

# Default settings for TRL's speed and memory; grpo_step sets them with `--trl-…`.
SETTINGS = {"batch": 8, "autocast": False, "attn": "sdpa"}


def strict_reward(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """Return the CorrectnessReward of each completion. TRL accepts functions only."""
    correct = CorrectnessReward()
    return [correct(text, gold) for text, gold in zip(completions, answer, strict=True)]


class Clock(TrainerCallback):
    """Records the seconds of sampling, scoring and learning in each step."""

    def __init__(self) -> None:
        self.started, self.length_mean = 0.0, 0.0
        self.spent: dict[str, float] = {}
        self.steps: list[dict[str, float]] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.started, self.spent = time.monotonic(), {"sample": 0.0, "score": 0.0}

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not all(self.spent.values()):  # another version of TRL may rename the timed methods
            raise RuntimeError(f"a part of the step was not timed: {self.spent}")
        learn = time.monotonic() - self.started - sum(self.spent.values())
        self.steps.append({**self.spent, "learn": learn, "length_mean": self.length_mean})


class TimedTrainer(GRPOTrainer):
    """A trainer that reports the seconds of sampling and scoring to its clock."""

    def __init__(self, clock: Clock, **options: Any) -> None:
        super().__init__(callbacks=[clock], **options)
        self.clock = clock

    def _generate(self, *args: Any, **options: Any) -> Any:
        started = time.monotonic()
        result = super()._generate(*args, **options)
        self.clock.spent["sample"] += time.monotonic() - started
        lengths = [len(ids) for ids in result[1]]
        self.clock.length_mean = sum(lengths) / len(lengths)
        return result

    def _calculate_rewards(self, *args: Any, **options: Any) -> Any:
        started = time.monotonic()
        result = super()._calculate_rewards(*args, **options)
        self.clock.spent["score"] += time.monotonic() - started
        return result


def run_trl(config: Mapping[str, Any], signal: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Train with `config`, and return the seconds of each step; the first step is the warmup."""
    if settings["malloc"]:
        prepare_process()
    with in_scratch(config) as options:
        reward = ScriptedReward(signal, options.group_size)
        return reward.result(train(options, problem_pool(options), reward.score, settings))


def train(
    config: GRPOConfig,
    pool: Sequence[Problem],
    reward: Callable[..., list[float]],
    settings: Mapping[str, Any] = SETTINGS,
) -> list[dict[str, float]]:
    """Train, and return the seconds of each step.

    The files of an earlier run in `run_dir` are deleted. The final adapter is saved to `output`,
    and every `save_every` steps a checkpoint to run_dir/checkpoint-N/.
    """
    shutil.rmtree(config.run_dir, ignore_errors=True)
    clock, model = Clock(), required(config.model, "--model")
    rate = config.learning_rate or 1.0  # if it is 0, the schedule's factors are 0
    policy, tokenizer = load_policy(config, settings["attn"])
    optimizer = torch.optim.AdamW(adapter_tensors(policy).values(), lr=rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: config.learning_rate_at(step, step) / rate
    )
    trainer = TimedTrainer(
        clock,
        model=policy,
        reward_funcs=reward,
        args=trl_config(config, settings),
        train_dataset=dataset(in_order(config, pool), tokenizer),
        processing_class=tokenizer,
        optimizers=(optimizer, schedule),
    )
    trainer.train()
    run: dict[str, object] = {"base_model": model, "base_hash": base_model_hash(model)}
    save_adapter(policy, tokenizer, config.output, run)
    return clock.steps


def in_order(config: GRPOConfig, pool: Sequence[Problem]) -> list[Problem]:
    """Return the problems of all steps in the order in which our trainer uses them."""
    return [
        problem
        for step in range(required(config.steps, "--steps"))
        for problem in problems_for_step(pool, step, config.batch_size, config.seed)
    ]


def load_policy(config: GRPOConfig, attn: str) -> tuple[PeftModel, PreTrainedTokenizerBase]:
    """Load the model, with the adapter from which our trainer would start, and the tokenizer."""
    model = required(config.model, "--model")
    tokenizer, base = load_tokenizer(model), load_base(model, pick_device(), attn=attn)
    # TRL stops at the end tokens of the generation config, so set all at which our sampler stops.
    base.generation_config.eos_token_id = sorted(stop_token_ids(tokenizer, base.generation_config))
    if config.sft_adapter:
        return load_adapter(base, config.sft_adapter, trainable=True), tokenizer
    torch.manual_seed(config.seed)
    return new_adapter(base, r=config.lora_r, alpha=config.lora_alpha), tokenizer


def trl_config(config: GRPOConfig, settings: Mapping[str, Any]) -> TRLConfig:
    """Return TRL's config for textbook GRPO with one update per step, and without logs."""
    in_a_step = config.batch_size * config.group_size
    rows = math.gcd(settings["batch"], in_a_step)
    use_cpu = pick_device().type == "cpu"
    return TRLConfig(
        output_dir=str(config.run_dir),
        max_steps=required(config.steps, "--steps"),
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=in_a_step // rows,
        num_generations=config.group_size,
        max_completion_length=config.max_new_tokens,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        beta=0.0,
        epsilon=0.2,
        loss_type="grpo",
        scale_rewards="group",
        num_iterations=1,
        learning_rate=config.learning_rate,
        max_grad_norm=1.0,
        disable_dropout=True,
        gradient_checkpointing=False,
        bf16=settings["autocast"],
        use_cpu=use_cpu,
        dataloader_pin_memory=not use_cpu,
        shuffle_dataset=False,
        seed=config.seed,
        report_to="none",
        logging_strategy="no",
        save_strategy="steps" if config.save_every else "no",
        save_steps=config.save_every or 1,
        disable_tqdm=True,
    )


def dataset(problems: Sequence[Problem], tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Return the prompts as texts that TRL encodes to the same token ids as ours."""
    rows = []
    for problem in problems:
        ids = render_prompt(tokenizer, problem.question, FORMATS["deepseek"])
        prompt = tokenizer.decode(ids)
        if tokenizer(text=prompt)["input_ids"] != ids:
            raise ValueError(f"TRL encodes the prompt of {problem.id} to other token ids than ours")
        rows.append({"prompt": prompt, "answer": problem.answer})
    return Dataset.from_list(rows)
