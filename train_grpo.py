"""Stage 2: trains a LoRA adapter with GRPO. The hand-written training loop is `GRPOTrainer.train`.

The loop does not use TRL's trainer. Each step samples a group of completions for each problem,
scores them (by default with 1 for a right answer in the right format, and 0 otherwise), computes
the advantages inside each group (`group_advantages`) and updates the adapter (`_learn`). There is
no value model: the baseline is the mean reward of the group. The loop differs from textbook GRPO in
these points:

1. The KL term is off (--kl-weight 0), because the reward checks the answer itself. If the KL term
   is on, the reference model is the model with the adapter that training started from.
2. Groups whose rewards are all equal have zero advantages, so without a KL term their loss is not
   computed. With --algorithm grpo these groups still count in the denominator of the loss; the
   default, topr, leaves them out.
3. With --algorithm grpo, a step makes one update, so the old log-probabilities equal the current
   ones. topr makes one update per mini-batch of two problems, and takes the old log-probabilities
   from the sampler. Neither needs a second forward pass.

    python train_grpo.py                                   # picks a model and data that fit here
    python train_grpo.py --plan                            # how much time and memory does it take?
    python train_grpo.py --doctor                          # why is my reward flat?
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlm.cli import check_command_line, run_main
from rlm.training import PRESETS, GRPOConfig, algorithms_help

if __name__ == "__main__":  # answers --help and reports mistakes before torch is loaded
    COMMAND_LINE = {"description": __doc__, "presets": PRESETS, "epilog": algorithms_help()}
    check_command_line(GRPOConfig, **COMMAND_LINE)

import torch
from torch import Tensor

from rlm.cli import required, terminal
from rlm.data import FORMATS, Problem, render_problem
from rlm.evaluation import Evaluation, evaluate
from rlm.model import (
    Device,
    base_model_hash,
    check_output,
    load_tokenizer,
    prepare_process,
    release_memory,
)
from rlm.ops import use_fused_layers
from rlm.rewards import RewardFunction, Scorer, as_reward, load_reward
from rlm.runs import RunDirectory
from rlm.sampling import SamplingParams
from rlm.tools import Tool
from rlm.training import (
    Distributed,
    Group,
    Rollout,
    StepScorer,
    TrainingData,
    TrainingRun,
    TrainingState,
    check_arguments,
    copies_above_mean,
    draw_problems,
    group_advantages,
    has_signal,
    learn_metrics,
    load_data,
    load_policy,
    make_engine,
    mean_metrics,
    mini_batches,
    old_logprobs_source,
    overlong_penalties,
    policy_loss,
    reference_logprobs,
    resolve_start,
    resume_if_restarted,
    reward_tensor,
    rollout_seeds,
    shard_rollouts,
    step_metrics,
    summary_card,
    timer,
)

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedTokenizerBase

    from rlm.training import Learned, OldLogprobs, ProblemScores


class GRPOTrainer:
    """Trains a LoRA adapter with GRPO."""

    # recipes/orchestrator overrides `load_model`, `render`, `validation_scores` and `log`, and sets
    # `scorer`.

    def __init__(
        self,
        model_name: str | Path,
        config: GRPOConfig | None = None,
        reward_fn: RewardFunction | Callable | Sequence | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        device: Device | None = None,
        tool: Tool | None = None,
    ) -> None:
        """Load the model and the initial adapter.

        Args:
            reward_fn: a RewardFunction, a function, or a list of rewards or (reward, weight) pairs
                (default: config.reward, else CorrectnessReward).
            tool: the tool that writes into completions (default: config.tool).

        Raises:
            TypeError, ValueError: an argument is invalid.
            UsageError: the model or the initial adapter cannot be loaded, or they do not match.
        """
        check_arguments(model_name, config)
        prepare_process()
        config = config or GRPOConfig()
        reward = as_reward(load_reward(config.reward) if reward_fn is None else reward_fn)
        self.distributed = Distributed.from_env()
        self.base_hash = base_model_hash(str(model_name), download=config.backend == "local")
        self.config, start, tool = resolve_start(
            config, str(model_name), self.base_hash, tool, self.distributed.size
        )
        config = self.config
        self._asked_steps = config.steps  # None: one pass over the problems
        self.answer_types = start.answer_types  # `prepare` replaces these with the data's types
        tags = required(config.reasoning_format, "--reasoning-format")
        self.format = FORMATS[tags].with_prompt(config.system_prompt)
        self.scorer: StepScorer = Scorer(reward, tags)
        self.tokenizer, self.policy = self.load_model(tokenizer, device)
        self.model = self.policy  # TRL's name
        use_fused_layers(self.policy)
        self.weights, self.sampler = make_engine(  # the learner and the sampler
            self.policy, self.tokenizer, config, self.distributed, tool
        )
        self.adapter = self.weights.master_weights  # name → trained fp32 tensor
        self.optimizer = self.weights.make_optimizer(config.learning_rate)
        self.state = TrainingState(self.weights, self.optimizer, self.base_hash, self.distributed)
        self.run: TrainingRun | None = None  # set by `train`

    def load_model(
        self, tokenizer: PreTrainedTokenizerBase | None, device: Device | None
    ) -> tuple[PreTrainedTokenizerBase, PeftModel]:
        """Load the tokenizer, and the base model with the trainable adapter, in eval mode."""
        model = required(self.config.model, "--model")
        return tokenizer or load_tokenizer(model), load_policy(self.config, model, device)

    def render(self, problem: Problem) -> list[int]:
        """Render the prompt of a problem as token ids."""
        return render_problem(self.tokenizer, problem, self.format)

    def train(self, dataset: Iterable, eval_dataset: Iterable | None = None) -> dict[str, Any]:
        """Train, export the last or the best adapter, and return a summary.

        Args:
            dataset: the training problems: Problems, dicts or a `datasets.Dataset`, with the
                fields in data/README.md.
            eval_dataset: the validation problems, which select the adapter to export.

        Raises:
            RuntimeError: this trainer has already trained.
            UsageError: --run-dir is in use, --output is not writable, or there is no run to resume.
            Interrupted: a signal was received; the current step is saved.
        """
        if self.run:
            raise RuntimeError(
                "this trainer has already trained; make a new GRPOTrainer, with "
                "GRPOConfig(sft_adapter=FOLDER) to continue from the adapter in FOLDER"
            )
        data = self.prepare(dataset, eval_dataset)
        self.config = config = resume_if_restarted(self.config, self.distributed)
        algorithm, is_main = config.resolved_algorithm, self.distributed.is_main
        if is_main:
            check_output(config.output)  # before RunDirectory, which moves an earlier run away
        directory = RunDirectory(config.run_dir, resume=config.resume, writes=is_main)
        with directory, closing(self.sampler):
            self.run = run = TrainingRun(self, data, directory)
            for step in range(run.first_step, run.steps):
                seconds: dict[str, float] = {}
                # 1. sample G completions of each of P problems, 2. score them
                groups, reward_metrics = self._sample_and_score(data.problems, step, seconds)

                # 3. compute the advantages inside each group
                rewards = reward_tensor([g.rewards for g in groups])  # (P, G), without penalties
                penalties = overlong_penalties(groups, config)  # (P, G)
                scored = rewards + penalties
                copies = copies_above_mean(groups, scored) if algorithm.distinct else None
                advantages = group_advantages(
                    scored, algorithm.advantage, algorithm.negative_weight, copies
                )
                signal = has_signal(rewards, algorithm.advantage)  # (P,)
                kept = signal | (not algorithm.dynamic_sampling)
                advantages[~kept] = 0.0  # log dropped groups with advantage 0

                # 4. train on rollouts whose loss is not exactly zero, one update per mini-batch
                batches = mini_batches(groups, advantages, kept, config, step)
                with timer(seconds, "learn"):
                    learn_metrics = self._learn(run, batches, step)
                self.state.restore_if_diverged(run.directory)

                metrics = {"step": step} | step_metrics(
                    groups, rewards, penalties, kept, seconds, algorithm.advantage
                )
                metrics |= reward_metrics | learn_metrics
                metrics |= run.start_metrics if step == 0 else {}
                metrics |= run.validate_if_due(step)
                self.log(run, metrics, groups, advantages)
                if run.save_or_stop(step):
                    break
            return run.export()

    def _sample_and_score(
        self, problems: Sequence[Problem], step: int, seconds: dict[str, float]
    ) -> tuple[list[Group], dict[str, float]]:
        """Sample and score a step; return the groups of all processes, and the reward's metrics."""
        config, distributed, size = self.config, self.distributed, self.config.group_size
        params = SamplingParams(config.max_new_tokens, config.temperature)
        groups: list[Group] = []
        reward_metrics: list[tuple[int, dict[str, float]]] = []
        for refill in range(config.sampling_rounds):  # one round without dynamic sampling
            drawn = draw_problems(problems, groups, step, config)
            if not drawn:
                break
            mine = distributed.shard(drawn)
            with timer(seconds, "sample"):
                prompts = [self.render(problem) for problem in mine]
                seeds = distributed.shard(rollout_seeds(drawn, config.seed, step, refill))
                with terminal.progress("sampling", len(mine) * size) as advance:
                    sampled = self.sampler.sample(prompts, size, params, seeds, advance)
            with timer(seconds, "score"):  # one call for all completions
                texts = [[c.text(self.tokenizer) for c in group] for group in sampled]
                truncated = [[c.truncated for c in group] for group in sampled]
                token_ids = [[c.token_ids for c in group] for group in sampled]
                scores = self.scorer(mine, texts, truncated, token_ids)
            reward_metrics.append((len(mine), scores.metrics))
            # From here on, every process has the groups of all processes.
            scored = zip(mine, prompts, sampled, texts, scores.rewards, scores.reasons, strict=True)
            groups += [Group(*fields) for fields in distributed.gather(list(scored))]
        self.sampler.release()  # frees memory for learning
        return groups, mean_metrics(distributed.gather(reward_metrics))

    def _learn(
        self, run: TrainingRun, batches: Sequence[Sequence[Rollout]], step: int
    ) -> dict[str, float]:
        """Make an update per mini-batch, `updates_per_batch` times, and return the metrics."""
        config = self.config
        mine = [shard_rollouts(rollouts, self.distributed) for rollouts in batches]
        source = old_logprobs_source(config, len(batches), self.sampler.matches_trainer)
        for rollouts in mine:
            run.repeat_if_out_of_memory(self._set_constant_logprobs, run, rollouts, source)

        learned: list[list[Learned]] = []
        norms: list[float] = []
        lr = config.learning_rate_at(step, self.state.updates)  # logged if there is no update
        for update in range(count := len(batches) * config.updates_per_batch):
            lr = config.learning_rate_at(step + update / count, self.state.updates)
            for group in self.optimizer.param_groups:
                group["lr"] = lr * self.state.lr_scale
            rollouts = mine[update % len(batches)]
            learned.append(
                run.repeat_if_out_of_memory(self._accumulate_gradient, run, rollouts, source)
            )
            if source == "first pass" and update == 0:
                for micro, logprobs, *_ in learned[0]:
                    micro.keep("old_logprobs", logprobs, rollouts)  # for further passes
            norms.append(self._optimizer_step(step))
            if len(batches) == 1 and self.state.consecutive_skips:
                break  # neither weights nor loss scale changed, so another pass would fail again
        metrics = learn_metrics(learned, norms, len(batches), self.distributed)
        self.sampler.invalidate_weights()
        release_memory()  # frees memory for sampling
        made = {"optim/lr": lr * self.state.lr_scale, "optim/skipped": self.state.skipped_total}
        return metrics | made

    @torch.no_grad()
    def _set_constant_logprobs(
        self, run: TrainingRun, rollouts: Sequence[Rollout], source: OldLogprobs
    ) -> None:
        """Compute the log-probabilities that stay constant during the updates of a step.

        The rollouts receive `ref_logprobs` if there is a KL term, and `old_logprobs` if `source` is
        "forward pass".
        """
        config = self.config
        if not config.kl_weight and source != "forward pass":
            return
        for micro in run.micro_batches(rollouts):
            if config.kl_weight:
                logprobs = reference_logprobs(self.policy, micro, config)
                micro.keep("ref_logprobs", logprobs, rollouts)
            if source == "forward pass":
                logprobs, _ = self.weights.token_logprobs(micro, config.temperature)
                micro.keep("old_logprobs", logprobs, rollouts)

    def _accumulate_gradient(
        self, run: TrainingRun, rollouts: Sequence[Rollout], source: OldLogprobs
    ) -> list[Learned]:
        """Accumulate the gradient of a mini-batch over the rollouts of this process."""
        config, learned = self.config, []
        algorithm, matches = config.resolved_algorithm, self.sampler.matches_trainer
        for micro in run.micro_batches(rollouts):
            if source == "sampler":
                micro.old_logprobs = micro.sampler_logprobs
            logprobs, entropy = self.weights.token_logprobs(micro, config.temperature)
            loss, sums = policy_loss(
                logprobs,
                micro,
                algorithm,
                correct_sampler=not (matches or source == "sampler"),
                kl_weight=config.kl_weight,
            )
            self.weights.backward(loss)
            learned.append((micro, logprobs.detach(), entropy, sums))
        return learned

    def _optimizer_step(self, step: int) -> float:
        """Clip the gradient, make an optimizer step, and return the gradient norm.

        The optimizer step is skipped if the gradient norm is not finite.
        """
        self.distributed.all_reduce(self.adapter.values())
        clipped = torch.nn.utils.clip_grad_norm_(self.adapter.values(), self.config.max_grad_norm)
        norm = clipped.item()
        if math.isfinite(norm):
            norm = self.optimizer.step() or norm  # a server's optimizer returns the norm
            self.weights.copy_to_model()
        if not math.isfinite(norm):
            terminal.line(f"gradient norm is {norm}: update skipped")
        self.optimizer.zero_grad(set_to_none=True)
        self.state.count_update(step, skipped=not math.isfinite(norm))
        return norm

    def prepare(self, dataset: Iterable, eval_dataset: Iterable | None) -> TrainingData:
        """Read the data, set the number of steps, and print an overview of the run."""
        data = TrainingData.read(self, dataset, eval_dataset)
        self.answer_types = data.answer_types
        asked = replace(self.config, steps=self._asked_steps)
        self.config = replace(asked, steps=asked.steps_for(len(data.problems)))
        self.state.validations.measure = data.measure
        data.announce(self)
        return data

    def evaluate(
        self, problems: Sequence[Problem], k: int, advance: Callable[[], None]
    ) -> Evaluation:
        """Sample k completions of each problem in the same way as training does, and grade them.

        `advance` is called after each completion.
        """
        return evaluate(
            self.sampler,
            self.tokenizer,
            problems,
            self.format,
            max_new_tokens=self.config.max_new_tokens,
            temperature=self.config.temperature,
            k=k,
            seed=self.config.seed,
            on_finish=advance,
        )

    def validation_scores(
        self, problems: Sequence[Problem], k: int, advance: Callable[[], None]
    ) -> Mapping[str, ProblemScores]:
        """Return the scores "accuracy" and "reward" of each problem, as means over k completions.

        "accuracy" is graded strictly; it is None for open problems, and left out if all problems
        are open. "reward" is included only if it selects the adapter to export. `advance` is called
        after each completion.
        """
        drawn = self.evaluate(problems, k, advance)
        scores: dict[str, ProblemScores] = {}
        if drawn.comparable:
            right = iter(drawn.per_problem(strict=True))  # without the open problems
            scores["accuracy"] = [
                None if p.answer_type == "open" else next(right) for p in problems
            ]
        if self.state.validations.measure == "reward":
            scored = replace(drawn, rewards=drawn.score(self.scorer))
            scores["reward"] = scored.reward_per_problem()
        return scores

    def log(
        self,
        run: TrainingRun,
        metrics: dict[str, float],
        groups: Sequence[Group],
        advantages: Tensor,  # (P, G)
    ) -> None:
        """Log a step to disk and to the terminal."""
        run.log_step(metrics, groups, advantages)

    def generate(self, question: str) -> str:
        """Answer a question with greedy decoding, and return the text with its reasoning and tags.

        Raises:
            TypeError: the question is not a str.
        """
        if not isinstance(question, str):
            raise TypeError(f"generate takes one question as a str, not {question!r:.60}")
        params = SamplingParams(self.config.max_new_tokens, temperature=0.0)
        prompt = self.render(Problem("", question, "", answer_type=self.answer_types[0]))
        [[completion]] = self.sampler.sample([prompt], 1, params, [self.config.seed])
        self.sampler.release()
        return completion.text(self.tokenizer)


def main(config: GRPOConfig) -> int:
    problems, validation = load_data(config)
    model = required(config.model, "--model")
    trainer = GRPOTrainer(model, config, load_reward(config.reward, problems))
    if config.doctor:
        from rlm.training import run_doctor

        return run_doctor(trainer, problems)
    if config.plan:
        from rlm.training import show_plan

        show_plan(trainer, trainer.prepare(problems, validation))
        return 0
    summary_card(config, trainer.train(problems, validation))
    return 0


if __name__ == "__main__":
    run_main(main, GRPOConfig, **COMMAND_LINE)
