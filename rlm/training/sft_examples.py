"""SFT examples: problems as token ids, with the loss on the completions alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlm.cli import UsageError, terminal
from rlm.data import IGNORED, Format, Problem, render_completion, render_problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Example = dict[str, list[int]]  # input_ids and labels


def to_examples(
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    format: Format,
    dataset: str,
    max_length: int,
) -> list[Example]:
    """Problems as examples to learn from, without those that are too long.

    Raises:
        UsageError: a problem has no solution.
    """
    unsolved = sum(not problem.solution for problem in problems)
    if unsolved:
        raise UsageError(
            f"--dataset {dataset}: {unsolved} of {len(problems)} problems have no solution "
            "to learn from; SFT needs a `solution` field"
        )
    examples = [to_example(tokenizer, problem, format) for problem in problems]
    return [e for e in examples if len(e["input_ids"]) <= max_length]


def to_example(tokenizer: PreTrainedTokenizerBase, problem: Problem, format: Format) -> Example:
    """`input_ids` and `labels` of one problem; labels are ids on the completion, IGNORED before."""
    prompt = render_problem(tokenizer, problem, format)
    completion = render_completion(tokenizer, problem.solution, problem.answer, format)
    return {"input_ids": prompt + completion, "labels": [IGNORED] * len(prompt) + completion}


def show_example(tokenizer: PreTrainedTokenizerBase, example: Example) -> None:
    """Print the rendered text: the part without a loss, and the part that is learned."""
    prompt = example["labels"].count(IGNORED)
    parts = {"prompt, no loss": slice(prompt), "completion, learned": slice(prompt, None)}
    for what, part in parts.items():
        ids = example["input_ids"][part]
        terminal.line(f"--- {what} ({len(ids)} tokens)\n{tokenizer.decode(ids)}")
    terminal.line("")


def show_counts(problems: int, examples: int, max_length: int, what: str = "problems") -> None:
    """Print how many of the problems that were read are used."""
    left_out = f"{problems - examples} left out (over --max-length {max_length} tokens)"
    terminal.line(f"{what}: {problems} read, {examples} used, {left_out}")
