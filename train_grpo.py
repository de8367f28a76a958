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
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from rlm import machine, models, terminal
from rlm.config import UsageError, run_main
from rlm.data import Problem, load_problems
from rlm.evaluation import evaluate
from rlm.grpo import (
    ALGORITHMS,
    Rollout,
    group_advantages,
    importance_weights,
    make_rollouts,
    policy_loss,
    problems_for_step,
    share_rollouts,
    split,
    token_logprobs,
)
from rlm.grpo_config import GPU_DEFAULTS, GRPOConfig
from rlm.memory import plan_memory
from rlm.parallel import Team
from rlm.plots import learning_curves
from rlm.prompts import FORMATS, longest_prompts, render_prompt
from rlm.report import LearningTally, announce, log_step, run_summary, step_metrics, summary_card
from rlm.rewards import CorrectnessReward, RewardFunction, as_scorer
from rlm.runs import check_writable, open_run
from rlm.sampling import SamplingParams, prompt_seed
from rlm.sampling.remote import make_sampler
from rlm.state import TrainedAdapter, TrainingState


class GRPOTrainer:
    """Trains a LoRA adapter with GRPO; `train` is the loop."""

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
        self.config = config = config or GRPOConfig(sft_adapter=None)
        self.model_name = model_name
        self.format = FORMATS[config.reasoning_format]
        self.scorer = as_scorer(reward_fn or CorrectnessReward(self.format))
        self.tokenizer = models.load_tokenizer(model_name)
        self.base_hash = models.base_hash(model_name)
        if config.sft_adapter:
            models.check_adapter(config.sft_adapter, "run: python train_sft.py")
            models.check_base(config.sft_adapter, model_name, self.base_hash)
        self.team = Team.join()
        if config.batch_size < self.team.size:
            raise UsageError(
                f"--batch-size {config.batch_size}: fewer than {self.team.size} processes"
            )
        device = device or machine.pick_device()
        base = models.load_base(model_name, device, quantize=config.quantize, attn=config.attn)
        if config.sft_adapter:
            self.policy = models.load_adapter(base, config.sft_adapter, trainable=True)
        else:
            torch.manual_seed(config.seed)  # of the new adapter's matrices
            self.policy = models.new_adapter(base, r=config.lora_r, alpha=config.lora_alpha).eval()
        models.use_lean_lora(self.policy)
        models.use_checkpointing(self.policy, config.checkpointing)
        self.trained = TrainedAdapter(self.policy)
        self.adapter = self.trained.masters  # name → the fp32 tensor that is trained
        self.sampler = make_sampler(self.policy, self.tokenizer, config, self.team.rank)
        self.optimizer = torch.optim.AdamW(
            self.adapter.values(), lr=config.learning_rate, weight_decay=config.weight_decay
        )
        self.state = TrainingState(self.trained, self.optimizer, self.base_hash)

    def train(self, problems: Sequence[Problem], eval_problems: Sequence[Problem] = ()) -> dict:
        """Run the loop, export the best adapter, and return the run's summary.

        Raises:
            UsageError: the run directory holds another run, or --resume finds nothing to resume.
        """
        with open_run(self.config, self.team) as self.run:
            return self._loop(problems, eval_problems)

    def _loop(self, problems: Sequence[Problem], eval_problems: Sequence[Problem]) -> dict:
        """The loop. A signal that asks to stop is obeyed at the end of a step, when it is saved."""
        config, team, run, started = self.config, self.team, self.run, time.monotonic()
        first_step = self.state.begin(run, config, problems, eval_problems, team)
        algorithm = ALGORITHMS[config.algorithm]
        params = SamplingParams(config.max_new_tokens, config.temperature)
        time_limit = math.inf if config.max_minutes is None else config.max_minutes
        prompts = longest_prompts(self.tokenizer, [*problems, *eval_problems], self.format)
        masters, evaluated = list(self.adapter.values()), len(eval_problems)
        plan = plan_memory(self.policy, masters, self.sampler, config, prompts, evaluated)
        self.plan = team.agree(plan)
        terminal.line(f"memory: {self.plan}")
        start = self._evaluate(eval_problems, 0) if first_step == 0 else None
        run.leave_if(team.agree(run.interrupted))
        for step in range(first_step, config.steps):
            clock = [time.monotonic()]
            # 1. sample: P problems, G completions of each
            chosen = team.share(problems_for_step(problems, step, config.batch_size, config.seed))
            prompts = [render_prompt(self.tokenizer, p.question, self.format) for p in chosen]
            seeds = [prompt_seed(config.seed, step, problem.id) for problem in chosen]
            with terminal.progress("sampling", len(prompts) * config.group_size) as advance:
                groups = self.sampler.sample(prompts, config.group_size, params, seeds, advance)
            self.sampler.release()  # its memory is the learning pass's, its weights soon stale
            clock.append(time.monotonic())

            # 2. score: one call for the whole step
            decode = partial(self.tokenizer.decode, skip_special_tokens=True)
            texts = [[decode(c.token_ids) for c in group] for group in groups]
            scores = self.scorer(chosen, texts)
            rewards = [[math.nan if r is None else r for r in row] for row in scores.rewards]
            clock.append(time.monotonic())
            # From here on every process knows the whole step; alone, nothing happens.
            sampled = team.gather(list(zip(chosen, prompts, groups, texts, rewards, strict=True)))
            chosen, prompts, groups, texts, rewards = map(list, zip(*sampled, strict=True))
            rewards = torch.tensor(rewards)  # (P, G)

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
            learned = self._learn(rollouts, self.state.rate_scale * config.learning_rate_at(step))
            self.state.go_back_if_lost(run, step)
            clock.append(time.monotonic())

            metrics = {"step": step} | step_metrics(groups, rewards, clock)
            metrics |= team.mean(scores.metrics) | learned
            if step == 0 and start is not None:
                metrics["eval/start_accuracy"] = start
            done = step + 1
            out_of_time = time.monotonic() - started >= 60 * time_limit
            out_of_time, interrupted = team.agree((out_of_time, run.interrupted))
            last = done == config.steps or out_of_time
            if last or (config.eval_every and done % config.eval_every == 0):
                accuracy = self._evaluate(eval_problems, done)
                if accuracy is not None:
                    metrics["eval/accuracy"] = accuracy
            log_step(run, config, metrics, chosen, texts, rewards, advantages)
            if last or interrupted or (config.save_every and done % config.save_every == 0):
                self.state.save(run, done, keep=config.keep_checkpoints)
            if last:
                break
            run.leave_if(interrupted)
        return self._finish(len(eval_problems), time.monotonic() - started)

    def _learn(self, rollouts: Sequence[Rollout], rate: float) -> dict[str, float]:
        """`updates_per_batch` passes over the rollouts, one optimizer update each."""
        config, tally = self.config, LearningTally()
        old: dict[int, Tensor] = {}  # rollout → (T,), before the first update
        reference: dict[int, Tensor] = {}  # likewise, by the start adapter
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        mine = share_rollouts(rollouts, self.team)
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
                        with torch.no_grad(), models.use_reference(self.policy, config.sft_adapter):
                            ref, _ = token_logprobs(self.policy, micro, config.temperature)
                        reference |= dict(zip(micro.rows, ref, strict=True))
                before = torch.stack([old[row] for row in micro.rows])
                importance = None  # one, where sampler and trainer compute the same
                if not self.sampler.exact:
                    importance = importance_weights(before, micro.sampler_logprobs)
                ref = torch.stack([reference[row] for row in micro.rows]) if reference else None
                loss, sums = policy_loss(
                    logprobs,
                    before,
                    micro.advantages,
                    micro.weights,
                    micro.completion_mask,
                    clip_eps_low=config.clip_eps_low,
                    clip_eps_high=config.clip_eps_high,
                    importance=importance,
                    ref_logprobs=ref,
                    kl_weight=config.kl_weight,
                )
                loss.backward()
                self.trained.collect()
                tally.add(update, micro, logprobs.detach(), entropy, sums)
            tally.grad_norm = self._update()
        machine.give_back_memory()  # the sampler's turn
        learned = LearningTally.joined(self.team.gather([tally])).metrics()
        return {"optim/lr": rate, "optim/skipped": self.state.skipped_total, **learned}

    def _update(self) -> float:
        """Clip and step. A gradient that is not finite changes nothing and is counted."""
        self.team.add_gradients(self.adapter.values())
        norm = torch.nn.utils.clip_grad_norm_(self.adapter.values(), self.config.max_grad_norm)
        if norm.isfinite():
            self.optimizer.step()
            self.trained.publish()
        else:
            terminal.line(f"gradient norm is {norm.item()}: update skipped")
        self.optimizer.zero_grad(set_to_none=True)
        self.state.count_update(skipped=not norm.isfinite())
        return norm.item()

    def _evaluate(self, problems: Sequence[Problem], step: int) -> float | None:
        """Greedy strict accuracy on the validation slice; the best adapter so far is kept."""
        if not problems:
            return None
        mine = self.team.share(problems)
        with terminal.progress("evaluating", len(mine)) as advance:
            limit, tools = self.config.max_new_tokens, (self.sampler, self.tokenizer)
            result = evaluate(*tools, mine, self.format, max_new_tokens=limit, on_finish=advance)
        self.sampler.release()
        accuracy = self.team.gather([result.accuracy(strict=True)])
        correct, total = (sum(part[key] for part in accuracy) for key in ("correct", "total"))
        share = correct / total
        if step == 0:
            terminal.line(f"start: validation accuracy {share:.1%} ({correct} of {total})")
        else:
            self.state.keep_if_best(share, step)
        return share

    def _finish(self, validated_on: int, seconds: float) -> dict:
        """Export the best adapter with its history, draw the curves, return the summary."""
        self.state.use_best()
        rows, config = self.team.agree(self.run.metrics()), self.config
        summary = run_summary(config, self.model_name, self.state, len(rows), validated_on, seconds)
        if self.team.leads:
            models.save_adapter(
                self.policy, self.tokenizer, config.output, summary, keep_previous=True
            )
            self.run.write_csv()
            learning_curves(rows, self.run.path / "curves.png")
        return summary


def main(config: GRPOConfig) -> int:
    machine.prepare_process()
    if config.sft_adapter:
        models.check_adapter(config.sft_adapter, "run: python train_sft.py")
    start_run = models.read_run(config.sft_adapter) if config.sft_adapter else None
    config = machine.fill_in(config, GPU_DEFAULTS, start_run)
    problems = load_problems(
        config.dataset, "train", max_samples=config.max_samples, seed=config.seed
    )
    validation = load_problems(config.dataset, "validation", max_samples=config.eval_samples)
    check_writable("--output", config.output.parent)
    trainer = GRPOTrainer(config.model, config)
    announce(config, trainer.adapter, trainer.sampler, len(problems), len(validation))
    summary = trainer.train(problems, validation)
    summary_card(config, summary)
    return 0


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    run_main(main, GRPOConfig, description=__doc__)
