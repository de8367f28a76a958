"""SFT examples: problems as token ids, in which only the completions have a loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from rlm.cli import UsageError, terminal
from rlm.data import (
    IGNORE_INDEX,
    Format,
    Problem,
    render_completion,
    render_problem,
)
from rlm.sampling import common_prefix_length
from rlm.training.batches import MicroBatch, Rollout, pack_rollouts

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

Example = dict[str, list[int]]  # keys: input_ids, labels


def drop_unsolved(problems: Sequence[Problem], dataset: str | None) -> list[Problem]:
    """Return the problems that have a solution, and print the number of those without a solution.

    Raises:
        UsageError: no problem has a solution.
    """
    solved = [problem for problem in problems if problem.has_steps]
    missing = len(problems) - len(solved)
    if problems and not solved:
        raise UsageError(
            f"--dataset {dataset}: none of {len(problems)} problems has a solution to learn from; "
            "write a `solution` (the reasoning in words, not only the answer) for a dozen rows"
        )
    if missing:
        terminal.line(
            f"{missing} of {len(problems)} problems have no solution with steps: SFT learns from "
            f"the other {len(solved)}"
        )
    return solved


def to_examples(
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    format: Format,
    max_length: int,
) -> list[Example]:
    """Convert problems with solutions to training examples of at most `max_length` tokens.

    Longer examples are left out.
    """
    examples = [to_example(tokenizer, problem, format) for problem in problems]
    return [e for e in examples if len(e["input_ids"]) <= max_length]


def to_example(tokenizer: PreTrainedTokenizerBase, problem: Problem, format: Format) -> Example:
    """Convert a problem with a solution to a training example."""
    prompt = render_problem(tokenizer, problem, format)
    completion = render_completion(tokenizer, problem.solution, problem.answer, format)
    return mask_prompt(prompt, completion)


def mask_prompt(prompt: list[int], completion: list[int]) -> Example:
    """Make an example from token ids; the labels of the prompt are IGNORE_INDEX."""
    return {"input_ids": prompt + completion, "labels": [IGNORE_INDEX] * len(prompt) + completion}


def pack_examples(inputs: Mapping[str, Tensor], device: str, packed: bool) -> MicroBatch:
    """Convert a padded batch of examples to a micro-batch.

    Args:
        inputs: `input_ids`, `attention_mask` and `labels`, each (B, S), padded on the right.
        packed: whether to pack all examples into one sequence, in which their common prefix (the
            system prompt) is computed only once. Otherwise each example is a sequence of its own.

    Returns:
        A micro-batch of B completions, whose targets are the tokens that have a loss.
    """
    lengths = inputs["attention_mask"].sum(1).tolist()
    ids, labels = (
        [row[:length] for row, length in zip(inputs[name].tolist(), lengths, strict=True)]
        for name in ("input_ids", "labels")
    )
    learned = [[label != IGNORE_INDEX for label in row] for row in labels]
    prompts = [max(1, row.index(True)) for row in learned]
    shared = min(common_prefix_length(ids), *prompts) if packed else 0
    cuts = [shared] * len(ids) if shared else prompts
    rollouts = [
        Rollout(0, row[:cut], row[cut:], 0.0, 1.0) for row, cut in zip(ids, cuts, strict=True)
    ]
    rows = range(len(ids))
    batch = pack_rollouts(rollouts, [rows] if shared else [[row] for row in rows], device)
    kept = [row[cut:] for row, cut in zip(learned, cuts, strict=True)]
    mask = torch.tensor([label for row in kept for label in row], device=batch.targets.device)
    return replace(
        batch, sources=batch.sources[mask], targets=batch.targets[mask], lengths=[*map(sum, kept)]
    )


def show_example(tokenizer: PreTrainedTokenizerBase, example: Example) -> None:
    """Print the prompt of an example, which has no loss, and the completion."""
    prompt = example["labels"].count(IGNORE_INDEX)
    parts = {"prompt, no loss": slice(prompt), "completion, with loss": slice(prompt, None)}
    for what, part in parts.items():
        ids = example["input_ids"][part]
        terminal.line(f"--- {what} ({len(ids)} tokens)\n{tokenizer.decode(ids)}")
    terminal.line("")


def show_counts(problems: int, examples: int, max_length: int, what: str = "problems") -> None:
    """Print how many problems were read, how many are used, and how many were left out."""
    left_out = f"{problems - examples} left out (over --max-length {max_length} tokens)"
    terminal.line(f"{what}: {problems} read, {examples} used, {left_out}")
