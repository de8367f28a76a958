"""Evaluate a model on problems: sample completions, grade them, and summarize the verdicts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from rlm.data import Format, render_problem
from rlm.evaluation.statistics import pass_at_k, summarize_scores
from rlm.grading import Verdict, has_wrong_equation, majority_score
from rlm.sampling import SamplingParams, prompt_seed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlm.data import Problem
    from rlm.rewards import Scores
    from rlm.sampling import Completion, RolloutSampler


@dataclass(frozen=True)
class Graded:
    """A completion with its strict and its lenient verdict."""

    text: str
    strict: Verdict
    lenient: Verdict
    token_ids: Sequence[int]
    truncated: bool

    def verdict(self, strict: bool) -> Verdict:
        return self.strict if strict else self.lenient


@dataclass(frozen=True)
class Evaluation:
    """Problems with k graded completions each.

    `format_rate` and `truncated_rate` are shares of all completions. Results with an interval are
    dicts of mean, low and high (`summarize_scores`). The accuracy covers only the problems that
    have a reference answer.
    """

    problems: Sequence[Problem]
    groups: Sequence[Sequence[Graded]]  # the k completions of each problem
    # The value of --reward for each completion; None for a completion without a reward.
    rewards: Sequence[Sequence[float | None]] | None = None

    def score(self, scorer: Callable[..., Scores]) -> list[list[float | None]]:
        """Return the reward that `scorer` gives each completion, or None for no reward."""
        texts = [[graded.text for graded in group] for group in self.groups]
        truncated = [[graded.truncated for graded in group] for group in self.groups]
        ids = [[[*graded.token_ids] for graded in group] for group in self.groups]
        return scorer(self.problems, texts, truncated, ids).rewards

    @property
    def k(self) -> int:
        return len(self.groups[0])

    @property
    def completions(self) -> list[Graded]:
        return [graded for group in self.groups for graded in group]

    @property
    def comparable(self) -> list[tuple[Problem, Sequence[Graded]]]:
        """The problems that have a reference answer, with their groups."""
        pairs = zip(self.problems, self.groups, strict=True)
        return [(problem, group) for problem, group in pairs if problem.answer_type != "open"]

    def per_problem(self, strict: bool) -> list[float]:
        """Return the mean@k, 0 or 1 for k = 1, of each problem with a reference answer."""
        return [fmean(g.verdict(strict).correct for g in group) for _, group in self.comparable]

    def reward_per_problem(self) -> list[float | None]:
        """Return the mean reward of each problem; None for a problem without rewards."""
        given = [[r for r in group if r is not None] for group in self.rewards or ()]
        return [fmean(rewards) if rewards else None for rewards in given]

    def mean_reward(self) -> dict[str, float]:
        rewards = [r for r in self.reward_per_problem() if r is not None]
        return summarize_scores(rewards, bounded=False)

    def accuracy(self, strict: bool) -> dict[str, float]:
        """Return the mean@k over the problems; for k = 1 also `correct` and `total`."""
        return self._summary(self.per_problem(strict))

    def pass_at(self, k: int, strict: bool) -> dict[str, float]:
        right = [sum(g.verdict(strict).correct for g in group) for _, group in self.comparable]
        return summarize_scores([pass_at_k(self.k, c, k) for c in right])

    def majority_accuracy(self, strict: bool) -> dict[str, float]:
        """Return maj@k, the accuracy of the majority answer. Equal numbers count as one answer."""
        votes = [[g.verdict(strict) for g in group] for _, group in self.comparable]
        return summarize_scores(list(map(majority_score, votes)))

    def by_column(self, column: str, strict: bool) -> dict[str, dict[str, float]]:
        """Return the accuracy for each value of a column; {} if no problem has the column."""
        scores: dict[str, list[float]] = {}
        for (problem, _), score in zip(self.comparable, self.per_problem(strict), strict=True):
            if (value := problem.columns.get(column)) is not None:
                scores.setdefault(str(value), []).append(score)
        return {value: self._summary(scores[value]) for value in sorted(scores)}

    def _summary(self, scores: Sequence[float]) -> dict[str, float]:
        return summarize_scores(scores, trials=self.k == 1)

    def reasons(self, strict: bool) -> dict[str, int]:
        """Count completions by reason, the most frequent first."""
        return dict(Counter(g.verdict(strict).reason for g in self.completions).most_common())

    def right_with_wrong_equation(self, strict: bool) -> dict[str, float]:
        """Return the number and share of right completions that have a wrong equation."""
        right = [g.text for g in self.completions if g.verdict(strict).correct]
        count = sum(map(has_wrong_equation, right))
        return {"count": count, "rate": count / len(right) if right else 0.0}

    @property
    def format_rate(self) -> float:
        """The share of completions in the strict format, whether right or wrong."""
        return fmean(g.strict.is_answer for g in self.completions)

    @property
    def truncated_rate(self) -> float:
        return fmean(g.truncated for g in self.completions)

    @property
    def length_mean(self) -> float:
        return fmean(len(g.token_ids) for g in self.completions)


def evaluate(
    sampler: RolloutSampler,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    format: Format,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    k: int = 1,
    seed: int = 0,
    examples: Sequence[tuple[str, str]] = (),
    on_finish: Callable[[], None] = lambda: None,
) -> Evaluation:
    """Sample k completions of each problem and grade them strictly and leniently.

    The random numbers for a problem depend only on the seed and the problem's id.

    Args:
        temperature: 0 means greedy decoding and requires k = 1.
        examples: few-shot examples as (question, completion) pairs, shown before the problem.
        on_finish: a function called after each completion, for progress bars.

    Raises:
        ValueError: there are no problems, decoding is greedy with k > 1, or an example is one of
            the problems.
    """
    if not problems:
        raise ValueError("no problems to evaluate on")
    if temperature == 0 and k > 1:
        raise ValueError(f"greedy decoding gives {k} equal completions: set a temperature above 0")
    if {question for question, _ in examples} & {problem.question for problem in problems}:
        raise ValueError("an example is one of the problems: the prompt would contain its answer")
    prompts = [render_problem(tokenizer, p, format, examples=examples) for p in problems]
    params = SamplingParams(max_new_tokens, temperature)
    seeds = [prompt_seed(seed, problem.id) for problem in problems]
    groups = sampler.sample(prompts, k, params, seeds, on_finish)

    def graded(problem: Problem, drawn: Completion) -> Graded:
        return grade_completion(
            drawn.text(tokenizer), drawn.token_ids, drawn.truncated, problem, format
        )

    pairs = zip(problems, groups, strict=True)
    return Evaluation(problems, [[graded(problem, drawn) for drawn in g] for problem, g in pairs])


def grade_completion(
    text: str, token_ids: Sequence[int], truncated: bool, problem: Problem, format: Format
) -> Graded:
    """Grade a completion of a problem strictly and leniently."""
    format = format.with_answer_type(problem.answer_type)
    strict, lenient = (format.grade(text, problem.answer, strict=flag) for flag in (True, False))
    return Graded(text, strict, lenient, token_ids, truncated)
