"""Stage 2: trains a LoRA adapter with GRPO. The loop is `GRPOTrainer.train`, by hand: sample and
score (`_sample_and_score`), compare (`group_advantages`), learn (`_learn`).

This is not TRL's trainer. Each step samples a group of completions for each problem, checks each
final answer (0 or 1), compares inside the group and updates the adapter. Four things of textbook
GRPO are left out:

1. The KL term is off (--kl-weight 0): the reward checks the answer itself. If it is on, the
   reference model is the adapter that training started from.
2. Groups whose rewards are all equal have no gradient, so they are not computed. They still count
   in the average: the update is the same.
3. With one update per batch the old log-probabilities are the current ones: no second pass.
4. There is no value model: the group's mean reward is the baseline.

    python train_grpo.py                                   # picks a model and data that fit here
    python train_grpo.py --plan                            # how much time and memory does it take?
    python train_grpo.py --doctor                          # why is my reward flat?
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rlm.cli import check_command_line, run_main
from rlm.training import PRESETS, GRPOConfig, algorithms_help

if __name__ == "__main__":  # --help and mistakes are answered before torch is loaded
    COMMAND_LINE = {"description": __doc__, "presets": PRESETS, "epilog": algorithms_help()}
    check_command_line(GRPOConfig, **COMMAND_LINE)

import torch
from torch import Tensor

from rlm.cli import terminal
from rlm.data import FORMATS, Problem, render_problem
from rlm.model import (
    AdapterInfo,
    Device,
    base_model_hash,
    load_tokenizer,
    prepare_process,
    release_memory,
)
from rlm.rewards import RewardFunction, Scorer, as_reward, load_reward
from rlm.sampling import SamplingParams
from rlm.tools import Tool
from rlm.training import (
    Distributed,
    Group,
    LearnMetrics,
    MixedPrecisionAdapter,
    Rollout,
    TrainingState,
    begin_run,
    check_arguments,
    draw_problems,
    export_run,
    generate_text,
    group_advantages,
    has_signal,
    load_data,
    load_policy,
    log_step,
    make_sampler,
    mean_metrics,
    mini_batches,
    open_run,
    overlong_penalties,
    policy_loss,
    prepare_run,
    repeat_if_out_of_memory,
    resolve_start,
    reward_tensor,
    rollout_seeds,
    run_doctor,
    run_plan,
    set_constant_logprobs,
    shard_rollouts,
    split_rollouts,
    step_metrics,
    summary_card,
    timer,
    token_logprobs,
    use_fused_layers,
    validate,
    validation_scores,
    without_copies,
)

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedTokenizerBase


class GRPOTrainer:
    """Trains a LoRA adapter with GRPO.

    A recipe overrides `load_model`, `render`, `validation_scores` and `log`, and sets `scorer`.
    """

    def __init__(
        self,
        model_name: str | Path,
        config: GRPOConfig | None = None,
        reward_fn: RewardFunction | Callable | Sequence | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        device: Device | None = None,
        tool: Tool | None = None,
        **others: object,
    ) -> None:
        """Load the model and the adapter to start from.

        Args:
            reward_fn: a RewardFunction, a function or a list of these; None: CorrectnessReward.
            tool: writes into completions (docs/how-to/tools.md). None: what config.tool names.

        Raises:
            TypeError, ValueError: an argument is not what it should be; nothing was loaded.
        """
        check_arguments(model_name, config, others)
        prepare_process()
        reward, self.tokenizer = as_reward(reward_fn), tokenizer
        self.distributed, self.model_name = Distributed.from_env(), str(model_name)
        self.base_hash = base_model_hash(self.model_name)
        start = tool, self.model_name, self.base_hash, self.distributed.size
        self.config, tool = resolve_start(config or GRPOConfig(), *start)
        config = self.config
        self.format = FORMATS[config.reasoning_format].with_prompt(config.system_prompt)
        start = AdapterInfo.load(config.sft_adapter) if config.sft_adapter else AdapterInfo(Path())
        self.answer_types = start.answer_types  # until the data says it
        self.scorer = Scorer(reward, config.reasoning_format, config.reward_timeout)
        self.tokenizer, self.policy = self.load_model(device)
        self.model = self.policy  # its name elsewhere
        use_fused_layers(self.policy)
        self.weights = MixedPrecisionAdapter(self.policy)
        self.adapter = self.weights.master_weights  # name → the fp32 tensor that is trained
        self.sampler = make_sampler(self.policy, self.tokenizer, config, self.distributed, tool)
        self.optimizer = torch.optim.AdamW(
            self.adapter.values(), lr=config.learning_rate, weight_decay=config.weight_decay
        )
        saved = (self.weights, self.optimizer, self.base_hash, config.kl_weight)
        self.state = TrainingState(*saved, self.distributed)

    def load_model(self, device: Device | None) -> tuple[PreTrainedTokenizerBase, PeftModel]:
        """Load the tokenizer, and the base with the adapter to train on it, in eval mode."""
        policy = load_policy(self.config, self.model_name, device)
        return self.tokenizer or load_tokenizer(self.model_name), policy

    def render(self, problem: Problem) -> list[int]:
        """Render the prompt of a problem as token ids."""
        return render_problem(self.tokenizer, problem, self.format)

    def train(self, dataset: Iterable, eval_dataset: Iterable | None = None) -> dict:
        """Run the loop, export the last adapter or the best, and return the run's summary.

        Makes one pass over the problems if the config names neither `steps` nor `num_epochs`.

        Args:
            dataset, eval_dataset: Problems, or dicts or a `datasets.Dataset` with the fields of
                data/README.md; the second chooses the adapter.

        Raises:
            UsageError: --run-dir is in use, --output not writable, or nothing can be resumed.
            Interrupted: a signal asked to stop; the step was ended and saved.
        """
        problems, eval_problems = prepare_run(self, dataset, eval_dataset)
        config, algorithm = self.config, self.config.resolved_algorithm
        self.run = run = open_run(self)
        with run, closing(self.sampler):  # from here on a signal waits for the end of a step
            first_step, start_metrics = begin_run(self, problems, eval_problems)
            fall = ""
            for step in range(first_step, config.steps):
                seconds: dict[str, float] = {}
                # 1. sample G completions of each of P problems, 2. score them
                groups, reward_metrics = self._sample_and_score(problems, step, seconds)

                # 3. compare, inside each group
                rewards = reward_tensor(groups)  # (P, G), as the verifier gave them
                penalties = overlong_penalties(groups, config)  # (P, G)
                scored = rewards + penalties
                if algorithm.distinct:
                    scored = without_copies(groups, scored)
                advantages = group_advantages(scored, *algorithm.scaling)
                kept = has_signal(rewards) | (not algorithm.dynamic_sampling)  # (P,)
                advantages[~kept] = 0.0  # replaced groups: the log is to say so

                # 4. learn from the rollouts whose loss is not exactly zero: an update a mini-batch
                batches = mini_batches(groups, advantages, kept, config, step)
                with timer(seconds, "learn"):
                    learn_metrics = repeat_if_out_of_memory(self, self._learn, batches, step)
                self.state.restore_if_diverged(run, step)

                metrics = {"step": step} | step_metrics(groups, rewards, penalties, kept, seconds)
                metrics |= reward_metrics | learn_metrics | (start_metrics if step == 0 else {})
                control = self.state.control_after(step, config, run.interrupted)
                if control.should_evaluate:
                    metrics |= validate(self, eval_problems, step + 1)
                self.log(metrics, groups, advantages)
                fall = self.state.brake(step + 1) if control.should_evaluate else ""
                if control.should_save or fall:
                    self.state.save(run, step + 1, keep=config.keep_checkpoints)
                if control.should_stop or fall:
                    break
                run.raise_if_interrupted(control.interrupted)
            return export_run(self, len(eval_problems), fall)

    def _sample_and_score(
        self, problems: Sequence[Problem], step: int, seconds: dict[str, float]
    ) -> tuple[list[Group], dict[str, float]]:
        """Return the groups of a step, of every process, and the reward's own metrics of them."""
        config, distributed, size = self.config, self.distributed, self.config.group_size
        params = SamplingParams(config.max_new_tokens, config.temperature)
        decode = partial(self.tokenizer.decode, skip_special_tokens=True)
        groups: list[Group] = []
        reward_metrics: list[tuple[int, dict[str, float]]] = []
        for refill in range(config.sampling_rounds):  # one, but for dynamic sampling
            drawn = draw_problems(problems, groups, step, config.batch_size, config.seed)
            if not drawn:
                break
            mine = distributed.shard(drawn)
            with timer(seconds, "sample"):  # 1. sample: G completions of each problem
                prompts = [self.render(problem) for problem in mine]
                seeds = distributed.shard(rollout_seeds(drawn, config.seed, step, refill))
                with terminal.progress("sampling", len(mine) * size) as advance:
                    sampled = self.sampler.sample(prompts, size, params, seeds, advance)
            with timer(seconds, "score"):  # 2. score: one call for all of them
                texts = [[decode(c.token_ids) for c in group] for group in sampled]
                truncated = [[c.truncated for c in group] for group in sampled]
                token_ids = [[c.token_ids for c in group] for group in sampled]
                scores = self.scorer(mine, texts, truncated, token_ids)
            reward_metrics.append((len(mine), scores.metrics))
            # From here on every process knows the whole step; alone, nothing happens.
            scored = zip(mine, prompts, sampled, texts, scores.rewards, scores.reasons, strict=True)
            groups += [Group(*parts) for parts in distributed.gather(list(scored))]
        self.sampler.release()  # its memory is for learning now
        return groups, mean_metrics(distributed.gather([reward_metrics]))

    def _learn(self, batches: Sequence[Sequence[Rollout]], step: int) -> dict[str, float]:
        """Make `updates_per_batch` passes over the mini-batches, an optimizer update for each."""
        config, algorithm = self.config, self.config.resolved_algorithm
        kl = {"kl_weight": self.state.kl_weight, "kl_estimator": config.kl_estimator}
        updates = [split_rollouts(self, shard_rollouts(b, self.distributed)) for b in batches]
        metrics, count = LearnMetrics(len(updates)), len(updates) * config.updates_per_batch
        differs = set_constant_logprobs(self, updates)

        lr = self._set_learning_rate(step)
        for update, micro_batches in enumerate(updates * config.updates_per_batch):
            lr = self._set_learning_rate(step + update / count)
            for micro in micro_batches:
                logprobs, entropy = token_logprobs(self.policy, micro, config.temperature)
                if micro.old_logprobs is None:  # first update: the current ones are the old ones
                    micro.old_logprobs = logprobs.detach()
                loss, sums = policy_loss(logprobs, micro, algorithm, correct_sampler=differs, **kl)
                (loss * self.weights.loss_scale).backward()
                self.weights.accumulate()
                metrics.add(update, micro, logprobs.detach(), entropy, sums)
            metrics.grad_norms.append(self._optimizer_step())
            if len(updates) == 1 and not math.isfinite(metrics.grad_norms[-1]):
                break  # the weights are as before, another pass would give the same
        self.sampler.invalidate_weights()
        release_memory()  # the sampler's turn
        learned = metrics.as_dict(self.distributed)
        return learned | {"optim/lr": lr} | self.state.end_learning(learned.get("loss/kl"), config)

    def _set_learning_rate(self, step: float) -> float:
        lr = self.state.lr_scale * self.config.learning_rate_at(step, self.state.updates)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return lr

    def _optimizer_step(self) -> float:
        """Clip and step. A gradient that is not finite changes nothing and is counted."""
        self.distributed.all_reduce(self.adapter.values())
        norm = torch.nn.utils.clip_grad_norm_(self.adapter.values(), self.config.max_grad_norm)
        if norm.isfinite():
            self.optimizer.step()
            self.weights.copy_to_model()
        else:
            terminal.line(f"gradient norm is {norm.item()}: update skipped")
        self.optimizer.zero_grad(set_to_none=True)
        self.state.count_update(skipped=not norm.isfinite())
        return norm.item()

    def generate(self, question: str) -> str:
        """Answer a question greedily; the text shows the reasoning, in its tags."""
        return generate_text(self, question)

    def validation_scores(
        self, problems: Sequence[Problem], k: int, advance: Callable[[], None]
    ) -> dict[str, Sequence[float | None]]:
        """Return each problem's mean over k completions, by "accuracy" or "reward"; `advance` is
        called after each completion."""
        return validation_scores(self, problems, k, advance)

    def log(self, metrics: dict[str, float], groups: Sequence[Group], advantages: Tensor) -> None:
        """Write down and show a step; advantages are (P, G)."""
        log_step(self, metrics, groups, advantages)


def main(config: GRPOConfig) -> int:
    problems, validation = load_data(config)
    trainer = GRPOTrainer(config.model, config, load_reward(config.reward, problems))
    if config.plan:
        return run_plan(trainer, problems, validation)
    if config.doctor:
        return run_doctor(trainer, problems)
    summary_card(config, trainer.train(problems, validation))
    return 0


if __name__ == "__main__":
    run_main(main, GRPOConfig, **COMMAND_LINE)
