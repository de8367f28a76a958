"""This is not TRL's trainer. Stage 2: GRPO by hand; the whole loop is in `GRPOTrainer.train`.

Sample a group of completions for each problem, verify each final answer 0/1, compare inside the
group, update the LoRA adapter. What textbook GRPO has and this leaves out, and why:

1. The KL term is off (--kl-weight 0): a verified reward cannot be flattered, and the reference
   then costs nothing. Switched on, the reference is the frozen adapter that training started from.
2. Rollouts of a group without a difference have exactly zero gradient: they are not computed,
   but they stay in the denominator, so the update is the textbook's.
3. With one update per batch the old log-probabilities are the current ones, detached: there is
   no second pass for them.
4. No value model: the group's mean is the baseline.

    python train_grpo.py                                   # picks model and data by what is here
    python train_grpo.py --dataset gsm8k --sft-adapter weights/sft_lora --use-4bit
    python train_grpo.py --resume                          # go on where a run stopped
"""

from __future__ import annotations

import logging
import math
import random
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from rlm import terminal
from rlm.config import UsageError, explicit, run_main, to_dict
from rlm.data import Problem, load_problems
from rlm.evaluation import evaluate
from rlm.grpo import (
    ALGORITHMS,
    LossSums,
    group_advantages,
    make_rollouts,
    policy_loss,
    split,
    token_logprobs,
)
from rlm.grpo_config import GRPOConfig
from rlm.machine import Device, default_setup, keep_freed_memory, peak_memory_gb, pick_device
from rlm.models import (
    adapter_tensors,
    base_hash,
    check_adapter,
    check_base,
    load_adapter,
    load_base,
    load_tokenizer,
    new_adapter,
    read_run,
    save_adapter,
    use_reference,
)
from rlm.plots import learning_curves
from rlm.prompts import FORMATS, render_prompt
from rlm.report import step_line, step_metrics
from rlm.rewards import CorrectnessReward, RewardFunction, as_scorer
from rlm.runs import RunDirectory, optimizer_tensors, restore_optimizer
from rlm.sampling import Sampler, SamplingParams, prompt_seed

GIVE_UP_AFTER = 3  # updates in a row without a finite gradient


def problems_for_step(
    problems: Sequence[Problem], step: int, count: int, seed: int
) -> list[Problem]:
    """The problems of a step: a pure function of its arguments, so a resume replays nothing.

    Passes over the data are shuffled, each in its own way.
    """
    chosen = []
    for position in range(step * count, (step + 1) * count):
        epoch, index = divmod(position, len(problems))
        order = random.Random(prompt_seed(seed, "epoch", epoch)).sample(
            range(len(problems)), len(problems)
        )
        chosen.append(problems[order[index]])
    return chosen


def learning_rate(step: int, config: GRPOConfig) -> float:
    """Linear warm-up, then constant, linear or cosine down to min_lr_ratio of the peak."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    falls = {
        "constant": 1.0,
        "linear": 1 - done,
        "cosine": (1 + math.cos(math.pi * done)) / 2,
    }[config.lr_schedule]
    return config.learning_rate * (config.min_lr_ratio + (1 - config.min_lr_ratio) * falls)


class GRPOTrainer:
    """Trains a LoRA adapter with GRPO; `train` is the loop."""

    def __init__(
        self,
        model_name: str,
        config: GRPOConfig | None = None,
        reward_fn: RewardFunction | Callable | None = None,
        device: Device | None = None,
    ) -> None:
        """Load the model and the adapter to start from.

        Args:
            reward_fn: a RewardFunction or a plain function (`rlm.rewards`); by default 1 for a
                completion in the strict format with the right number, else 0.
        """
        self.config = config = config or GRPOConfig(sft_adapter=None)
        self.model_name = model_name
        self.format = FORMATS[config.reasoning_format]
        self.scorer = as_scorer(reward_fn or CorrectnessReward(self.format))
        self.tokenizer = load_tokenizer(model_name)
        self.base_hash = base_hash(model_name)
        if config.sft_adapter:
            check_adapter(config.sft_adapter, "run: python train_sft.py")
            check_base(config.sft_adapter, model_name, self.base_hash)
        base = load_base(model_name, device or pick_device(), use_4bit=config.use_4bit)
        if config.sft_adapter:
            self.policy = load_adapter(base, config.sft_adapter, trainable=True)
        else:
            self.policy = new_adapter(base, r=config.lora_r, alpha=config.lora_alpha).eval()
        self.sampler = Sampler(self.policy, self.tokenizer, seats=config.seats)
        self.adapter = adapter_tensors(self.policy)  # name → the tensor that is trained
        self.optimizer = torch.optim.AdamW(
            self.adapter.values(), lr=config.learning_rate, weight_decay=config.weight_decay
        )
        self.best: dict = {"accuracy": -1.0, "step": None, "tensors": {}}
        self.skipped = 0  # updates without a finite gradient, in a row

    def train(self, problems: Sequence[Problem], eval_problems: Sequence[Problem] = ()) -> dict:
        """Run the loop, export the best adapter, and return the run's summary.

        Raises:
            UsageError: the run directory holds another run, or --resume finds nothing to resume.
        """
        config, started = self.config, time.monotonic()
        run = self.run = RunDirectory(config.run_dir, resume=config.resume)
        first_step = self._resume() if config.resume else 0
        run.write_config(to_dict(config))
        algorithm = ALGORITHMS[config.algorithm]
        params = SamplingParams(config.max_new_tokens, config.temperature)
        accuracy = self._evaluate(eval_problems, first_step) if first_step == 0 else None
        step = first_step
        for step in range(first_step, config.steps):
            clock = [time.monotonic()]
            # 1. sample: P problems, G completions of each
            chosen = problems_for_step(problems, step, config.batch_size, config.seed)
            prompts = [render_prompt(self.tokenizer, p.question, self.format) for p in chosen]
            seeds = [prompt_seed(config.seed, step, problem.id) for problem in chosen]
            with terminal.progress("sampling", len(prompts) * config.group_size) as advance:
                groups = self.sampler.sample(prompts, config.group_size, params, seeds, advance)
            clock.append(time.monotonic())

            # 2. score: one call for the whole step
            texts = [[self._decode(c.token_ids) for c in group] for group in groups]
            scores = self.scorer(chosen, texts)
            rewards = torch.tensor(
                [[math.nan if r is None else r for r in row] for row in scores.rewards]
            )  # (P, G)
            clock.append(time.monotonic())

            # 3. compare: inside each group
            advantages = group_advantages(rewards, scale_by_std=algorithm.scale_by_std)  # (P, G)

            # 4. learn: rows whose loss is exactly zero are not computed
            rollouts = make_rollouts(
                prompts,
                groups,
                advantages,
                aggregation=algorithm.aggregation,
                max_new_tokens=config.max_new_tokens,
                keep_all=config.kl_weight > 0,
            )
            learned = self._learn(rollouts, learning_rate(step, config))
            clock.append(time.monotonic())

            metrics = {
                "step": step,
                **step_metrics(groups, rewards, clock),
                **scores.metrics,
                **learned,
            }
            done = step + 1
            last = done == config.steps or self._out_of_time(started)
            if last or (config.eval_every and done % config.eval_every == 0):
                accuracy = self._evaluate(eval_problems, done)
                if accuracy is not None:
                    metrics["eval/accuracy"] = accuracy
            self._log(metrics, chosen, texts, rewards, advantages)
            if last or (config.save_every and done % config.save_every == 0):
                self._checkpoint(done)
            if last:
                break
        return self._finish(len(eval_problems), time.monotonic() - started)

    def _learn(self, rollouts: list, rate: float) -> dict[str, float]:
        """`updates_per_batch` passes over the rollouts, one optimizer update each."""
        config, metrics = self.config, {"optim/lr": rate}
        old: dict[int, torch.Tensor] = {}  # rollout → its log-probabilities before the update
        reference: dict[int, torch.Tensor] = {}
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        for update in range(config.updates_per_batch if rollouts else 0):
            sums: list[LossSums] = []
            entropy_sum = gap_sum = gap_max = 0.0
            micros = split(
                rollouts,
                max_rows=config.train_batch_size or len(rollouts),
                max_tokens=config.train_batch_tokens,
                device=self.policy.device.type,
            )
            with terminal.progress("learning", len(rollouts)) as advance:
                for micro in micros:
                    mask = micro.completion_mask
                    logprobs, entropy = token_logprobs(self.policy, micro, config.temperature)
                    if update == 0:
                        old |= dict(zip(micro.rows, logprobs.detach(), strict=True))
                        gap = ((logprobs.detach() - micro.sampler_logprobs) * mask).abs()
                        gap_sum, gap_max = (
                            gap_sum + gap.sum().item(),
                            max(gap_max, gap.max().item()),
                        )
                    if config.kl_weight and update == 0:
                        with torch.no_grad(), use_reference(self.policy, config.sft_adapter):
                            ref, _ = token_logprobs(self.policy, micro, config.temperature)
                        reference |= dict(zip(micro.rows, ref, strict=True))
                    loss, part = policy_loss(
                        logprobs,
                        torch.stack([old[row] for row in micro.rows]),
                        micro.advantages,
                        micro.weights,
                        mask,
                        clip_eps_low=config.clip_eps_low,
                        clip_eps_high=config.clip_eps_high,
                        ref_logprobs=torch.stack([reference[row] for row in micro.rows])
                        if config.kl_weight
                        else None,
                        kl_weight=config.kl_weight,
                    )
                    loss.backward()
                    sums.append(part)
                    entropy_sum += entropy.sum().item()
                    for _ in micro.rows:
                        advance()
            tokens = sum(part.tokens for part in sums)
            metrics["optim/grad_norm"] = self._update()
            if update == 0:
                metrics["policy/entropy"] = entropy_sum / tokens
                metrics["sampler/logprob_gap_mean"] = gap_sum / tokens
                metrics["sampler/logprob_gap_max"] = gap_max
        if rollouts:
            metrics["loss/policy"] = sum(part.policy for part in sums)
            metrics["loss/kl"] = sum(part.k3 for part in sums) / tokens
            clipped = sum(part.clipped_low + part.clipped_high for part in sums)
            metrics["policy/clip_fraction"] = clipped / tokens
            metrics["optim/skipped_in_a_row"] = self.skipped
        return metrics

    def _update(self) -> float:
        """Clip and step. A gradient that is not finite changes nothing and is counted."""
        norm = torch.nn.utils.clip_grad_norm_(self.adapter.values(), self.config.max_grad_norm)
        if norm.isfinite():
            self.optimizer.step()
            self.skipped = 0
        else:
            self.skipped += 1
            terminal.line(f"gradient norm is {norm.item()}: update skipped")
        self.optimizer.zero_grad(set_to_none=True)
        if self.skipped >= GIVE_UP_AFTER:
            raise UsageError(
                f"{self.skipped} updates in a row had no finite gradient; lower --learning-rate "
                f"and go on from the last checkpoint with --resume"
            )
        return norm.item()

    def _evaluate(self, problems: Sequence[Problem], step: int) -> float | None:
        """Greedy strict accuracy on the validation slice; the best adapter so far is kept."""
        if not problems:
            return None
        with terminal.progress("evaluating", len(problems)) as advance:
            result = evaluate(
                self.sampler,
                self.tokenizer,
                problems,
                self.format,
                max_new_tokens=self.config.max_new_tokens,
                on_finish=advance,
            )
        accuracy = result.accuracy(strict=True)
        share = accuracy["correct"] / accuracy["total"]
        if step == 0:
            terminal.line(
                f"start: validation accuracy {share:.1%} "
                f"({accuracy['correct']} of {accuracy['total']})"
            )
        elif share >= self.best["accuracy"]:  # of equals the longer trained
            tensors = {name: tensor.detach().clone() for name, tensor in self.adapter.items()}
            self.best = {"accuracy": share, "step": step, "tensors": tensors}
        return share

    def _log(
        self,
        metrics: dict,
        problems: list[Problem],
        texts: list[list[str]],
        rewards: torch.Tensor,
        advantages: torch.Tensor,
    ) -> None:
        self.run.log(metrics)
        terminal.line(step_line(metrics, self.config.steps))
        self.run.log_samples(
            [
                {
                    "step": metrics["step"],
                    "problem": problem.id,
                    "question": problem.question,
                    "answer": problem.answer,
                    "completions": group,
                    "rewards": [None if math.isnan(r) else r for r in row],
                    "advantages": signal,
                }
                for problem, group, row, signal in zip(
                    problems, texts, rewards.tolist(), advantages.tolist(), strict=True
                )
            ]
        )
        if self.config.sample_every and metrics["step"] % self.config.sample_every == 0:
            reward = f"reward {rewards[0, 0].item():g}, gold {problems[0].answer}"
            terminal.sample(problems[0].question, texts[0][0], reward)

    def _checkpoint(self, next_step: int) -> None:
        names = list(self.adapter)
        tensors = {f"adapter/{name}": tensor.detach() for name, tensor in self.adapter.items()}
        tensors |= {f"best/{name}": tensor for name, tensor in self.best["tensors"].items()}
        tensors |= optimizer_tensors(self.optimizer, names)
        state = {
            "best": {"accuracy": self.best["accuracy"], "step": self.best["step"]},
            "skipped": self.skipped,
            "base_hash": self.base_hash,
        }
        self.run.save_checkpoint(next_step, tensors, state, keep=self.config.keep_checkpoints)

    @torch.no_grad()
    def _resume(self) -> int:
        """Restore the newest checkpoint; the step to go on with. Nothing random is to restore:
        what a step draws is a function of the seed and its number."""
        loaded = self.run.load_checkpoint()
        if loaded is None:
            raise UsageError(f"--resume: no checkpoint in {self.config.run_dir}")
        tensors, state = loaded
        if state["base_hash"] != self.base_hash:
            raise UsageError(f"--resume: {self.config.run_dir} was trained on another base model")
        for name, tensor in self.adapter.items():
            tensor.copy_(tensors[f"adapter/{name}"])
        restore_optimizer(self.optimizer, list(self.adapter), tensors)
        best = {k.removeprefix("best/"): t for k, t in tensors.items() if k.startswith("best/")}
        self.best = {**state["best"], "tensors": best}
        self.skipped = state["skipped"]
        self.run.truncate(state["step"])
        terminal.line(f"resumed {self.config.run_dir} before step {state['step'] + 1}")
        return state["step"]

    @torch.no_grad()
    def _finish(self, validated_on: int, seconds: float) -> dict:
        """Export the best adapter with its history, draw the curves, return the summary."""
        rows = self.run.metrics()
        for name, tensor in self.best["tensors"].items():
            self.adapter[name].copy_(tensor)
        summary = {
            "stage": "grpo",
            "base_model": self.model_name,
            "base_hash": self.base_hash,
            "start_adapter": str(self.config.sft_adapter),
            "dataset": self.config.dataset,
            "steps": len(rows),
            "step": self.best["step"] if self.best["tensors"] else len(rows),
            "accuracy": self.best["accuracy"] if self.best["tensors"] else None,
            "validated_on": validated_on,
            "commit": git_commit(),
            "seconds": seconds,
            "peak_memory_gb": peak_memory_gb(),
            "config": to_dict(self.config),
        }
        save_adapter(self.policy, self.tokenizer, self.config.output, summary, keep_previous=True)
        self.run.write_csv()
        learning_curves(rows, self.run.path / "curves.png")
        return summary

    def _out_of_time(self, started: float) -> bool:
        minutes = self.config.max_minutes
        return minutes is not None and time.monotonic() - started >= 60 * minutes

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)


def git_commit() -> str | None:
    """The commit of the code that runs; None outside a git checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip() if result.returncode == 0 else None


# What changes when a GPU picks the 7B model on GSM8K.
GPU_DEFAULTS = {"max_new_tokens": 512, "steps": 200, "learning_rate": 2e-5, "seats": 128}


def main(config: GRPOConfig) -> int:
    keep_freed_memory()
    if config.model is None or config.dataset is None:
        config = _choose_defaults(config)
    problems = load_problems(
        config.dataset, "train", max_samples=config.max_samples, seed=config.seed
    )
    validation = load_problems(config.dataset, "validation", max_samples=config.eval_samples)
    trainer = GRPOTrainer(config.model, config)
    terminal.facts(
        "Stage 2: GRPO",
        {
            "model": f"{config.model} + {config.sft_adapter or 'a new adapter'}",
            "device": pick_device(),
            "data": f"{config.dataset}: {len(problems)} problems, {len(validation)} to validate on",
            "trainable": f"{sum(t.numel() for t in trainer.adapter.values()):,} parameters",
            "algorithm": f"{config.algorithm}: {ALGORITHMS[config.algorithm].formula}",
            "steps": f"{config.steps} of {config.batch_size} problems × {config.group_size} completions",
            "run": config.run_dir,
        },
    )
    summary = trainer.train(problems, validation)
    terminal.facts(
        "Stage 2 done",
        {
            "validation accuracy": f"{summary['accuracy']:.1%} at step {summary['step']}",
            "time": terminal.duration(summary["seconds"]),
            "peak memory": f"{summary['peak_memory_gb']:.1f} GB",
            "curves": config.run_dir / "curves.png",
            "adapter": config.output,
            "next": 'python inference.py "your question"',
        },
    )
    return 0


def _choose_defaults(config: GRPOConfig) -> GRPOConfig:
    """The machine's model and data where no flag names them; the SFT adapter's own base first."""
    given, chosen = explicit(config), {}
    run = read_run(config.sft_adapter) if config.sft_adapter else {}
    if run:
        terminal.line(f"no --model or --dataset given: those of {config.sft_adapter}")
        chosen = {
            "model": run["base_model"],
            "dataset": run["dataset"],
            "use_4bit": run["use_4bit"],
        }
    else:
        setup = default_setup()
        terminal.line(f"no --model or --dataset given; {setup.reason}")
        chosen = {"model": setup.model, "dataset": setup.dataset, "use_4bit": setup.use_4bit}
    if chosen["use_4bit"]:
        chosen |= GPU_DEFAULTS
    return replace(config, **{k: v for k, v in chosen.items() if k not in given})


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    run_main(main, GRPOConfig, description=__doc__)
