"""How good is a model: sample, grade, and say how sure one can be.

The statistics come first and need neither torch nor a model; `evaluate` samples and grades;
`Evaluation` sums up. Intervals are 95 %. A problem is the unit of every resampling: completions of
one problem are not independent, problems are.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rlm.data.prompts import Format, render_problem
from rlm.grading.answers import Verdict, grade

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlm.data.problem import Problem
    from rlm.sampling import Completion, Sampler

# --- one number and its interval ------------------------------------------------------------------


def wilson_interval(correct: int, total: int, z: float = 1.96) -> tuple[float, float]:
    """Interval of a proportion p = correct / total, fit for small samples and for 0 and 1.

    (p + z²/2n ± z √(p(1-p)/n + z²/4n²)) / (1 + z²/n)   (Wilson 1927)
    """
    if not 0 <= correct <= total or total == 0:
        raise ValueError(f"no proportion: {correct} correct of {total}")
    p = correct / total
    scale = 1 + z**2 / total
    centre = (p + z**2 / (2 * total)) / scale
    half = z * math.sqrt(p * (1 - p) / total + z**2 / (4 * total**2)) / scale
    # At 0 and 1 a bound is exactly that; rounding may push it past.
    low = 0.0 if correct == 0 else centre - half
    high = 1.0 if correct == total else centre + half
    return low, high


def bootstrap_interval(
    values: Sequence[float], resamples: int = 10_000, seed: int = 0
) -> tuple[float, float]:
    """Interval of a mean: percentiles of the means of resamples (Efron and Tibshirani 1993).

    A mean does not depend on the order, so a resample is drawn as how often it holds each
    distinct value, which is multinomial: the same distribution as drawing indices, less memory.
    Equal values give an interval of no width, which says nothing about a small sample.
    """
    if not len(values):
        raise ValueError("no values to resample")
    distinct, counts = np.unique(np.asarray(values, dtype=float), return_counts=True)
    drawn = np.random.default_rng(seed).multinomial(
        len(values), counts / len(values), size=resamples
    )  # (resamples, distinct)
    low, high = np.percentile(drawn @ distinct / len(values), [2.5, 97.5])
    return float(low), float(high)


# --- several completions of one problem -----------------------------------------------------------


def mean_at_k(correct: Sequence[bool]) -> float:
    """Share of k completions that are right; its expectation is that of one completion."""
    return sum(correct) / len(correct)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that k of n completions, c of them right, hold a right one: 1 - C(n-c, k) / C(n, k).

    Unbiased for k ≤ n, unlike 1 - (1 - c/n)^k (Chen et al. 2021, arXiv:2107.03374).
    """
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {n} completions, {c} right: needs 0 ≤ c ≤ n and 1 ≤ k ≤ n")
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def majority(answers: Sequence[Hashable | None]) -> list[Hashable]:
    """The answers given most often: several on a tie, none if nobody votes (None is no vote).

    maj@k (Wang et al. 2023, arXiv:2203.11171) is then the share of these that is right, the
    expected value of breaking ties at random: the order of sampling must not matter.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    most = max(votes.values(), default=0)
    return [answer for answer, count in votes.items() if count == most]


# --- two models on the same problems --------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """b - a in percentage points, with its interval."""

    points: float
    low: float
    high: float


def paired_bootstrap(
    a: Sequence[float], b: Sequence[float], resamples: int = 10_000, seed: int = 0
) -> Difference:
    """How much better b is than a, from scores in 0…1 of the same problems in the same order.

    What both find hard or easy cancels, so the interval is narrower than two separate ones.
    """
    if len(a) != len(b):
        raise ValueError(f"not paired: {len(a)} and {len(b)} scores")
    points = 100 * (np.asarray(b, dtype=float) - np.asarray(a, dtype=float))
    return Difference(float(points.mean()), *bootstrap_interval(points, resamples, seed))


def mcnemar(a: Sequence[bool], b: Sequence[bool]) -> float:
    """Two-sided exact p of "a and b are equally good", from what only one of them gets right.

    p = min(1, 2 · P(X ≤ m)), X ~ Binomial(n, 1/2); n problems with one right, m the fewer ones
    (McNemar 1947; exact form: Fagerland et al. 2013). Without such problems p is 1.
    """
    only_a = sum(x and not y for x, y in zip(a, b, strict=True))
    only_b = sum(y and not x for x, y in zip(a, b, strict=True))
    n = only_a + only_b
    tail = sum(math.comb(n, i) for i in range(min(only_a, only_b) + 1))
    return min(1.0, 2 * tail / 2**n)


# --- a model on problems --------------------------------------------------------------------------


@dataclass(frozen=True)
class Graded:
    """A completion and what both gradings say of it."""

    text: str
    strict: Verdict
    lenient: Verdict
    tokens: int  # the end token included
    truncated: bool

    def verdict(self, strict: bool) -> Verdict:
        return self.strict if strict else self.lenient

    @property
    def kept_format(self) -> bool:
        """Strict grading found one number where it belongs, right or wrong."""
        return self.strict.is_answer


@dataclass(frozen=True)
class Evaluation:
    """Problems and their groups of k graded completions. Every rate is over completions."""

    problems: Sequence[Problem]
    groups: Sequence[Sequence[Graded]]

    @property
    def k(self) -> int:
        return len(self.groups[0])

    @property
    def completions(self) -> list[Graded]:
        return [graded for group in self.groups for graded in group]

    def per_problem(self, strict: bool) -> list[float]:
        """mean@k of each problem; 0 or 1 for k = 1."""
        return [mean_at_k([g.verdict(strict).correct for g in group]) for group in self.groups]

    def accuracy(self, strict: bool) -> dict[str, float]:
        """mean, low, high (Wilson), correct, total; for k = 1, independent trials."""
        if self.k != 1:
            raise ValueError("accuracy is of one completion a problem; mean_accuracy is of several")
        return _proportion(self.per_problem(strict))

    def mean_accuracy(self, strict: bool) -> dict[str, float]:
        """mean, low, high (bootstrap over problems) of mean@k, for any k."""
        return _mean(self.per_problem(strict))

    def pass_at(self, k: int, strict: bool) -> dict[str, float]:
        """mean, low, high (bootstrap over problems) of pass@k."""
        right = [sum(g.verdict(strict).correct for g in group) for group in self.groups]
        return _mean([pass_at_k(self.k, c, k) for c in right])

    def majority_accuracy(self, strict: bool) -> dict[str, float]:
        """mean, low, high (bootstrap over problems) of maj@k. Equal numbers are one answer."""
        return _mean([majority_score([g.verdict(strict) for g in group]) for group in self.groups])

    def by_column(self, column: str, strict: bool) -> dict[str, dict[str, float]]:
        """Accuracy on the problems with each value of a column; {} if no problem has it."""
        scores: dict[str, list[float]] = {}
        for problem, score in zip(self.problems, self.per_problem(strict), strict=True):
            if column in problem.columns:
                scores.setdefault(str(problem.columns[column]), []).append(score)
        return {v: (_proportion if self.k == 1 else _mean)(scores[v]) for v in sorted(scores)}

    def reasons(self, strict: bool) -> dict[str, int]:
        """How many completions got each reason, most frequent first."""
        return dict(Counter(g.verdict(strict).reason for g in self.completions).most_common())

    @property
    def format_rate(self) -> float:
        return mean_at_k([g.kept_format for g in self.completions])

    @property
    def truncated_rate(self) -> float:
        return mean_at_k([g.truncated for g in self.completions])

    @property
    def length_mean(self) -> float:
        return sum(g.tokens for g in self.completions) / len(self.completions)


def _proportion(scores: Sequence[float]) -> dict[str, float]:
    correct, total = round(sum(scores)), len(scores)
    low, high = wilson_interval(correct, total)
    return {"mean": correct / total, "low": low, "high": high, "correct": correct, "total": total}


def _mean(scores: Sequence[float]) -> dict[str, float]:
    low, high = bootstrap_interval(scores)
    return {"mean": sum(scores) / len(scores), "low": low, "high": high}


def majority_score(verdicts: Sequence[Verdict]) -> float:
    """Chance that the most frequent answer of some completions is right; equal values are one."""
    votes = [v.value if v.is_answer else None for v in verdicts]
    right = {vote for vote, v in zip(votes, verdicts, strict=True) if v.correct}
    winners = majority(votes)
    return mean_at_k([winner in right for winner in winners]) if winners else 0.0


def evaluate(
    sampler: Sampler,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    format: Format,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    k: int = 1,
    seed: int = 0,
    examples: Sequence[tuple[str, str]] = (),
    system_prompt: str | None = None,
    on_finish: Callable[[], None] = lambda: None,
) -> Evaluation:
    """Draw k completions of each problem and grade them strictly and leniently.

    What is drawn for a problem depends on the seed and the problem's id, not on its neighbours.

    Args:
        temperature: 0 is greedy, with k = 1.
        examples: (question, completion) pairs shown first (few-shot).
        system_prompt: replaces the format's own; "" leaves it out.
        on_finish: called after each completion (progress bars).

    Raises:
        ValueError: no problems, greedy with k > 1, or a problem among its own examples.
    """
    from rlm.sampling import SamplingParams, prompt_seed  # loads torch

    if not problems:
        raise ValueError("no problems to evaluate on")
    if temperature == 0 and k > 1:
        raise ValueError(f"greedy decoding gives {k} equal completions; set a temperature")
    if {question for question, _ in examples} & {problem.question for problem in problems}:
        raise ValueError("an example is one of the problems: the prompt would hold its answer")
    prompts = [
        render_problem(tokenizer, p, format, examples=examples, system_prompt=system_prompt)
        for p in problems
    ]
    groups = sampler.sample(
        prompts,
        k,
        SamplingParams(max_new_tokens, temperature),
        [prompt_seed(seed, problem.id) for problem in problems],
        on_finish,
    )

    def graded(problem: Problem, drawn: Completion) -> Graded:
        text = tokenizer.decode(drawn.token_ids, skip_special_tokens=True)
        tokens, truncated = len(drawn.token_ids), drawn.truncated
        return grade_completion(text, tokens, truncated, problem=problem, format=format)

    return Evaluation(
        problems,
        [
            [graded(problem, drawn) for drawn in group]
            for problem, group in zip(problems, groups, strict=True)
        ],
    )


def grade_completion(
    text: str, tokens: int, truncated: bool, *, problem: Problem, format: Format
) -> Graded:
    strict, lenient = (
        grade(text, problem.answer, strict=strict, kind=problem.answer_type, **format.tags)
        for strict in (True, False)
    )
    return Graded(text, strict, lenient, tokens, truncated)
