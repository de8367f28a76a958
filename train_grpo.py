"""This is not TRL's trainer. Stage 2: GRPO by hand; the loop is `GRPOTrainer._loop`, its halves
`_roll_out` (sample, score) and `_learn` (update).

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
    python train_grpo.py --model Qwen/Qwen2.5-1.5B-Instruct --preset reasoning_small
    python train_grpo.py --doctor                          # why is my reward flat?
    python train_grpo.py --resume                          # go on where a run stopped
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from rlm.cli.main import check_command_line, run_main
from rlm.training.config import PRESETS, GRPOConfig, algorithms_help

if __name__ == "__main__":  # --help and mistakes are answered before torch is loaded
    COMMAND_LINE = {"description": __doc__, "presets": PRESETS, "epilog": algorithms_help()}
    check_command_line(GRPOConfig, **COMMAND_LINE)

import torch
from torch import Tensor

from rlm.cli import terminal
from rlm.data.problem import Problem
from rlm.data.prompts import FORMATS, render_problem
from rlm.evaluation.evaluator import evaluate
from rlm.model import base as models
from rlm.model import hardware as machine
from rlm.model.adapters import use_checkpointing, use_reference
from rlm.model.export import check_output, save_adapter
from rlm.rewards import CorrectnessReward, RewardFunction
from rlm.rewards.reward_function import load_reward
from rlm.rewards.scorer import Scorer
from rlm.runs.directory import RunDirectory
from rlm.runs.plots import learning_curves
from rlm.sampling import SamplingParams
from rlm.training import doctor
from rlm.training import metrics as report
from rlm.training import setup as start
from rlm.training.distributed import Distributed
from rlm.training.fused_layers import use_fused_layers
from rlm.training.grpo import (
    Group,
    Rollout,
    draw_problems,
    group_advantages,
    has_signal,
    importance_weights,
    make_rollouts,
    overlong_penalties,
    policy_loss,
    reward_tensor,
    rollout_seeds,
    shard_rollouts,
)
from rlm.training.logprobs import split, token_logprobs
from rlm.training.metrics import LearningTally, mean_metrics, step_metrics, timed
from rlm.training.setup import make_sampler
from rlm.training.state import TrainedAdapter, TrainingState

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedTokenizerBase


class GRPOTrainer:
    """Trains a LoRA adapter with GRPO: `train` opens the run, `_loop` is the loop.

    A recipe overrides `load_model`, `render`, `count_correct` and `log`, and sets `scorer`.
    """

    def __init__(
        self,
        model_name: str,
        config: GRPOConfig | None = None,
        reward_fn: RewardFunction | Callable | None = None,
        device: machine.Device | None = None,
    ) -> None:
        """Load the model and the adapter to start from.

        Args:
            reward_fn: a RewardFunction or a plain function (`rlm.rewards`); by default 1 for a
                completion in the strict format with the right number, else 0.
        """
        self.distributed = Distributed.from_env()
        self.model_name, self.base_hash = model_name, models.base_hash(model_name)
        config = start.fit(
            config or GRPOConfig(), model_name, self.base_hash, self.distributed.size
        )
        self.config, self.format = config, FORMATS[config.reasoning_format]
        reward = reward_fn or CorrectnessReward()
        self.scorer = Scorer(reward, config.reasoning_format, config.reward_timeout)
        self.tokenizer, self.policy = self.load_model(device)
        use_fused_layers(self.policy)
        use_checkpointing(self.policy, config.checkpointing)
        self.trained = TrainedAdapter(self.policy)
        self.adapter = self.trained.master_weights  # name → the fp32 tensor that is trained
        self.sampler = make_sampler(self.policy, self.tokenizer, config, self.distributed.rank)
        self.optimizer = torch.optim.AdamW(
            self.adapter.values(), lr=config.learning_rate, weight_decay=config.weight_decay
        )
        self.state = TrainingState(self.trained, self.optimizer, self.base_hash, config.kl_weight)

    def load_model(
        self, device: machine.Device | None
    ) -> tuple[PreTrainedTokenizerBase, PeftModel]:
        """Tokenizer, and the base with the adapter to train on it, in eval mode."""
        policy = start.load_policy(self.config, self.model_name, device)
        return models.load_tokenizer(self.model_name), policy

    def render(self, problem: Problem) -> list[int]:
        """The prompt of a problem, as token ids."""
        return render_problem(self.tokenizer, problem, self.format)

    def train(self, problems: Sequence[Problem], eval_problems: Sequence[Problem] = ()) -> dict:
        """Run the loop, export the best adapter, and return the run's summary.

        Raises:
            UsageError: another process trains there, no adapter can be written, or --resume finds
                nothing that it could resume as it was.
            Interrupted: a signal asked to stop; the step was ended and saved.
        """
        if self.distributed.is_main:
            check_output(self.config.output)  # first: a run directory puts an old run away
        self.run = RunDirectory(
            self.config.run_dir, resume=self.config.resume, writes=self.distributed.is_main
        )
        with self.run:  # from here on a signal waits for the end of a step
            return self._loop(problems, eval_problems)

    def _loop(self, problems: Sequence[Problem], eval_problems: Sequence[Problem]) -> dict:
        config, distributed, run, started = (
            self.config,
            self.distributed,
            self.run,
            time.monotonic(),
        )
        choices, overlong = config.choices, (config.overlong_buffer, config.overlong_penalty)
        time_limit = math.inf if config.max_minutes is None else config.max_minutes
        problems = start.within(problems, self.render, config.max_prompt_length)
        first_step = self.state.begin(run, config, problems, eval_problems, distributed)
        self.plan = distributed.broadcast(
            start.plan(self, [*problems, *eval_problems], len(eval_problems))
        )
        start_accuracy = self._evaluate(eval_problems, 0) if first_step == 0 else None
        run.raise_if_interrupted(distributed.any(run.interrupted))
        for step in range(first_step, config.steps):
            seconds: dict[str, float] = {}
            tried, figures = self._roll_out(problems, step, seconds)  # 1. sample, 2. score

            # 3. compare: inside each group
            completions = [group.completions for group in tried]
            rewards = reward_tensor(tried)  # (P, G), as the verifier gave them
            penalties = overlong_penalties(completions, config.max_new_tokens, *overlong)  # (P, G)
            advantages = group_advantages(rewards + penalties, scale_by_std=choices.scale_by_std)
            kept = has_signal(rewards) | (not choices.dynamic_sampling)  # (P,)
            advantages[~kept] = 0.0  # not learned from (`kept` below): the log is to say so

            # 4. learn: rows whose loss is exactly zero are not computed
            rollouts = make_rollouts(
                [group.prompt for group in tried],
                completions,
                advantages,
                kept=kept.tolist(),
                aggregation=choices.aggregation,
                constant=config.fixed_length_normalizer,
                keep_all=config.kl_weight > 0,
                mask_truncated=config.mask_truncated,
            )
            with timed(seconds, "learn"):
                rate = self.state.lr_scale * config.learning_rate_at(step)
                learned = self._learn(rollouts, rate)
            self.state.restore_if_diverged(run, step)

            metrics = {"step": step} | step_metrics(completions, rewards, penalties, kept, seconds)
            metrics |= figures | learned
            if step == 0 and start_accuracy is not None:
                metrics["eval/start_accuracy"] = start_accuracy
            done = step + 1
            out_of_time = distributed.broadcast(time.monotonic() - started >= 60 * time_limit)
            interrupted = distributed.any(run.interrupted)
            last = done == config.steps or out_of_time
            if last or (config.eval_every and done % config.eval_every == 0):
                accuracy = self._evaluate(eval_problems, done)
                if accuracy is not None:
                    metrics["eval/accuracy"] = accuracy
            self.log(metrics, tried, advantages)
            if last or interrupted or (config.save_every and done % config.save_every == 0):
                self.state.save(run, done, keep=config.keep_checkpoints)
            if last:
                break
            run.raise_if_interrupted(interrupted)
        return self._finish(len(eval_problems))

    def _roll_out(
        self, problems: Sequence[Problem], step: int, seconds: dict[str, float]
    ) -> tuple[list[Group], dict[str, float]]:
        """The groups of a step, of every process, and the reward's own figures of them."""
        config, distributed, size = self.config, self.distributed, self.config.group_size
        params = SamplingParams(config.max_new_tokens, config.temperature)
        decode = partial(self.tokenizer.decode, skip_special_tokens=True)
        tried: list[Group] = []
        figures: list[tuple[int, dict[str, float]]] = []
        for refill in range(config.sampling_rounds):  # one, but for dynamic sampling
            drawn = draw_problems(problems, tried, step, config.batch_size, config.seed)
            if not drawn:
                break
            chosen = distributed.shard(drawn)
            with timed(seconds, "sample"):  # 1. sample: G completions of each problem
                prompts = [self.render(problem) for problem in chosen]
                seeds = distributed.shard(rollout_seeds(drawn, config.seed, step, refill))
                with terminal.progress("sampling", len(chosen) * size) as advance:
                    groups = self.sampler.sample(prompts, size, params, seeds, advance)
            with timed(seconds, "score"):  # 2. score: one call for all of them
                texts = [[decode(c.token_ids) for c in group] for group in groups]
                truncated = [[c.truncated for c in group] for group in groups]
                scores = self.scorer(chosen, texts, truncated)
            figures.append((len(chosen), scores.metrics))
            # From here on every process knows the whole step; alone, nothing happens.
            scored = zip(chosen, prompts, groups, texts, scores.rewards, strict=True)
            tried += [Group(*parts) for parts in distributed.gather(list(scored))]
        self.sampler.release()  # its memory is the learning pass's, its weights soon stale
        return tried, mean_metrics(distributed.gather([figures]))

    def _learn(self, rollouts: Sequence[Rollout], rate: float) -> dict[str, float]:
        """`updates_per_batch` passes over the rollouts, one optimizer update each."""
        config, choices, tally = self.config, self.config.choices, LearningTally()
        old: dict[int, Tensor] = {}  # rollout → (T,), before the first update
        reference: dict[int, Tensor] = {}  # likewise, by the start adapter
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        mine = shard_rollouts(rollouts, self.distributed)
        for update in range(config.updates_per_batch if rollouts else 0):
            micro_batches = split(
                mine,
                max_rows=config.train_batch_size or len(rollouts),
                max_tokens=self.plan.train_batch_tokens,
                device=self.policy.device.type,
            )
            for micro in micro_batches:
                logprobs, entropy = token_logprobs(self.policy, micro, config.temperature)
                if update == 0:  # the current log-probabilities are the old ones
                    old |= dict(zip(micro.rows, logprobs.detach(), strict=True))
                    if config.kl_weight:
                        with torch.no_grad(), use_reference(self.policy, config.sft_adapter):
                            ref, _ = token_logprobs(self.policy, micro, config.temperature)
                        reference |= dict(zip(micro.rows, ref, strict=True))
                old_logprobs = torch.stack([old[row] for row in micro.rows])
                importance = None  # one, where sampler and trainer compute the same
                if not self.sampler.exact:
                    importance = importance_weights(old_logprobs, micro.sampler_logprobs)
                ref = torch.stack([reference[row] for row in micro.rows]) if reference else None
                loss, sums = policy_loss(
                    logprobs,
                    old_logprobs,
                    micro.advantages,
                    micro.weights,
                    micro.completion_mask,
                    **choices.of_loss,
                    importance=importance,
                    ref_logprobs=ref,
                    kl_weight=self.state.kl_weight,
                    kl_estimator=config.kl_estimator,
                )
                (loss * self.trained.loss_scale).backward()
                self.trained.accumulate()
                tally.add(update, micro, logprobs.detach(), entropy, sums)
            tally.grad_norm = self._update()
            if not math.isfinite(tally.grad_norm):
                break  # the weights are as before, another pass would give the same
        machine.give_back_memory()  # the sampler's turn
        learned = LearningTally.joined(self.distributed.gather([tally])).metrics()
        learned |= {"optim/lr": rate, "optim/skipped": self.state.skipped_total}
        if config.kl_weight:
            learned["loss/kl_weight"] = self.state.kl_weight
            self.state.adapt_kl_weight(learned.get("loss/kl"), config.kl_target)
        return learned

    def _update(self) -> float:
        """Clip and step. A gradient that is not finite changes nothing and is counted."""
        self.distributed.all_reduce(self.adapter.values())
        norm = torch.nn.utils.clip_grad_norm_(self.adapter.values(), self.config.max_grad_norm)
        if norm.isfinite():
            self.optimizer.step()
            self.trained.copy_to_model()
        else:
            terminal.line(f"gradient norm is {norm.item()}: update skipped")
        self.optimizer.zero_grad(set_to_none=True)
        self.state.count_update(skipped=not norm.isfinite())
        return norm.item()

    def _evaluate(self, problems: Sequence[Problem], step: int) -> float | None:
        """Greedy strict accuracy on the validation slice; the best adapter so far is kept."""
        if not problems:
            return None
        mine = self.distributed.shard(problems)
        with terminal.progress("evaluating", len(mine)) as advance:
            correct = self.count_correct(mine, advance) if mine else 0
        self.sampler.release()
        correct, total = sum(self.distributed.gather([correct])), len(problems)
        share = correct / total
        if step == 0:
            terminal.line(f"start: validation accuracy {share:.1%} ({correct} of {total})")
        else:
            self.state.keep_if_best(share, step)
        return share

    def count_correct(self, problems: Sequence[Problem], advance: Callable[[], None]) -> int:
        """How many of the problems are solved greedily; `advance` is called after each."""
        result = evaluate(
            self.sampler,
            self.tokenizer,
            problems,
            self.format,
            max_new_tokens=self.config.max_new_tokens,
            on_finish=advance,
        )
        return result.accuracy(strict=True)["correct"]

    def log(self, metrics: dict[str, float], groups: Sequence[Group], advantages: Tensor) -> None:
        """Write down and show a step; advantages are (P, G)."""
        report.log_step(self.run, self.config, metrics, groups, advantages)

    def _finish(self, validated_on: int) -> dict:
        """Export the best adapter with its history, draw the curves, return the summary."""
        self.state.use_best()
        rows, config = self.distributed.broadcast(self.run.metrics()), self.config
        summary = report.run_summary(config, self.model_name, self.state, rows, validated_on)
        if self.distributed.is_main:
            save_adapter(self.policy, self.tokenizer, config.output, summary)
            self.run.write_csv(rows)
            learning_curves(rows, self.run.path / "curves.png")
        return summary


def main(config: GRPOConfig) -> int:
    machine.prepare_process()
    reward, config = load_reward(config.reward), start.settle(config)
    problems, validation = start.load_data(config)
    trainer = GRPOTrainer(config.model, config, reward)
    if config.doctor:
        return doctor.examine(trainer, problems)
    report.announce(trainer, len(problems), len(validation))
    report.summary_card(config, trainer.train(problems, validation))
    return 0


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    run_main(main, GRPOConfig, **COMMAND_LINE)
