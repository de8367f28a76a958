"""Draws the problems of a training step, and builds rollouts and packed micro-batches.

All random choices are pure functions of the arguments, so a resumed run replays no earlier steps.

The letters in the shapes are: P problems, G group size, n rollouts of a micro-batch, B packed
sequences, S padded length of the packed sequences, M completion tokens, T padded length of the
completions.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlm.data import Problem
from rlm.sampling import prompt_seed
from rlm.training.advantages import Group, has_signal, reward_tensor
from rlm.training.config import GRPOConfig
from rlm.training.distributed import Distributed

T = TypeVar("T")

# Maximum number of completions in a packed sequence on a GPU. Attention on a GPU also computes the
# masked positions, which are most positions of a long sequence. Splitting a group of eight
# completions into two sequences halves the number of masked positions.
GPU_PACKED_ROWS = 4


def draw_problems(
    problems: Sequence[Problem], groups: Sequence[Group], step: int, config: GRPOConfig
) -> list[Problem]:
    """Draw the problems for the next sampling round of a step.

    The first round draws `config.batch_size` problems. Later rounds, with dynamic sampling, draw
    `config.batch_size` minus the number of groups whose rewards differ. The list is empty if this
    number is 0, or if no unused problem is left.
    """
    count, seed = config.batch_size, config.seed
    if not groups:
        return problems_for_step(problems, step, count, seed)
    rewards = reward_tensor([group.rewards for group in groups])
    missing = count - int(has_signal(rewards, config.resolved_algorithm.advantage).sum())
    drawn = {group.problem.id for group in groups}
    fresh = [problem for problem in problems if problem.id not in drawn]
    return random.Random(f"{seed} {step} {len(groups)}").sample(fresh, min(missing, len(fresh)))


def problems_for_step(problems: Sequence[T], step: int, count: int, seed: int) -> list[T]:
    """Draw the problems of a training step. Each pass over the data shuffles the problems anew."""
    chosen: list[T] = []
    orders: dict[int, list[int]] = {}
    for position in range(step * count, (step + 1) * count):
        epoch, index = divmod(position, len(problems))
        if epoch not in orders:
            shuffle = random.Random(f"{seed} {epoch}")
            orders[epoch] = shuffle.sample(range(len(problems)), len(problems))
        chosen.append(problems[orders[epoch][index]])
    return chosen


def rollout_seeds(problems: Sequence[Problem], seed: int, step: int, refill: int) -> list[int]:
    """Return the sampling seed of each problem's group.

    A problem that is drawn twice in a step gets two different seeds.
    """
    seen: Counter[str] = Counter()
    seeds = []
    for problem in problems:
        again = [seen[problem.id]] if seen[problem.id] else []
        seeds.append(prompt_seed(seed, step, refill, problem.id, *again))
        seen[problem.id] += 1
    return seeds


@dataclass
class Rollout:
    """A completion with its advantage and the other values that the loss needs."""

    problem: int  # index of the problem; its rollouts are packed after one copy of the prompt
    prompt: Sequence[int]
    completion: Sequence[int]
    advantage: float
    weight: float  # weight of each token of the completion in the loss
    sampler_logprobs: Sequence[float] = ()
    tool_mask: Sequence[bool] = ()  # as in Completion: False for tokens written by a tool
    # The log-probabilities that stay constant during the updates of a step, each (length,).
    old_logprobs: Tensor | None = field(default=None, compare=False)
    ref_logprobs: Tensor | None = field(default=None, compare=False)


def row_weights(lengths: Sequence[int], aggregation: str, constant: int) -> list[float]:
    """Return, for each rollout, the weight of its tokens in the loss of an update.

    The denominator covers all N rollouts of the update, so the gradient does not depend on how they
    are split into micro-batches. `aggregation` selects the formula for rollout i:
        sequence  1 / (N · |o_i|)          GRPO: every completion counts the same
        constant  1 / (N · constant)       Dr. GRPO: every token counts the same in all updates
        token     1 / Σ |o_i|              DAPO: every token counts the same within the update
    `lengths` must include the rollouts with advantage 0. These rollouts are left out of the batch,
    but they still count in N. A length |o_i| counts the tokens sampled by the model, without the
    tokens written by a tool. A length is 0 if all tokens of the rollout are masked.

    >>> row_weights([2, 4], "sequence", 8), row_weights([2, 4], "constant", 8)
    ([0.25, 0.125], [0.0625, 0.0625])
    """
    samples = len(lengths)
    if aggregation == "sequence":
        return [1 / (samples * max(length, 1)) for length in lengths]
    if aggregation == "constant":
        return [1 / (samples * constant) for _ in lengths]
    return [1 / max(sum(lengths), 1)] * samples


def mini_batches(
    groups: Sequence[Group], advantages: Tensor, kept: Tensor, config: GRPOConfig, step: int
) -> list[list[Rollout]]:
    """Split the groups of a step at random into mini-batches, one for each optimizer update.

    The last mini-batch may be smaller. A mini-batch is left out if it has no rollout to learn from.

    Args:
        advantages: the advantage of each rollout, (P, G).
        kept: whether each group is used for training, (P,) of bool.
    """
    if config.resolved_algorithm.signal_only:
        kept = kept & (advantages != 0).any(1)
    places = kept.nonzero().flatten().tolist()
    size = config.mini_batch_size or max(len(places), 1)
    if size < len(places):
        random.Random(f"mini-batches {config.seed} {step}").shuffle(places)
    made = [
        make_rollouts(groups, advantages, sorted(places[start : start + size]), config)
        for start in range(0, len(places), size)
    ]
    return [rollouts for rollouts in made if rollouts]


def make_rollouts(
    groups: Sequence[Group], advantages: Tensor, places: Sequence[int], config: GRPOConfig
) -> list[Rollout]:
    """Make the rollouts of an update from its groups.

    A rollout with advantage 0 has exactly zero policy loss and gradient. Therefore such a rollout
    is left out unless there is a KL term, but it still counts in the denominator.
    `mask_truncated` removes the tokens of completions without an end token from every loss term and
    from the token denominators. These completions still count in N (see `row_weights`) and in the
    group's mean and std, as in TRL. Tokens written by a tool are removed in the same way.

    Args:
        advantages: the advantage of each rollout, (P, G).
        places: the indices of the update's groups.
    """
    rows = [
        (place, completion, advantage)
        for place in places
        for completion, advantage in zip(
            groups[place].completions, advantages[place].tolist(), strict=True
        )
    ]
    lengths = [
        0 if config.mask_truncated and drawn.truncated else drawn.own_tokens for _, drawn, _ in rows
    ]
    weights = row_weights(lengths, config.aggregation, config.max_new_tokens)
    rollouts = [
        Rollout(
            place,
            groups[place].prompt,
            drawn.token_ids,
            advantage,
            weight,
            drawn.logprobs,
            drawn.tool_mask,
        )
        for (place, drawn, advantage), weight, length in zip(rows, weights, lengths, strict=True)
        if (config.kl_weight > 0 or advantage != 0) and length
    ]
    return merge_copies(rollouts) if config.resolved_algorithm.distinct else rollouts


def merge_copies(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Merge the equal completions of a problem that have equal advantages, and add their weights.

    The loss stays the same, but fewer rollouts have to be computed.
    """
    merged: dict[tuple[int, float, tuple[int, ...]], Rollout] = {}
    for rollout in rollouts:
        key = (rollout.problem, rollout.advantage, tuple(rollout.completion))
        known = merged.get(key)
        total = rollout.weight + (known.weight if known else 0.0)
        merged[key] = replace(known or rollout, weight=total)
    return list(merged.values())


def shard_rollouts(rollouts: Sequence[Rollout], distributed: Distributed) -> list[Rollout]:
    """Return this process's share of the rollouts.

    All rollouts of a problem belong to the same process, because they share the prompt. If there
    are fewer problems than processes, the rollouts are shared out one by one.
    """
    problems = list(dict.fromkeys(rollout.problem for rollout in rollouts))
    if len(problems) < distributed.size:
        return distributed.shard(rollouts)
    mine = set(distributed.shard(problems))
    return [rollout for rollout in rollouts if rollout.problem in mine]


@dataclass
class MicroBatch:
    """Rollouts packed into sequences, each of which contains a shared prompt only once.

    A packed sequence is [prompt, completion 1, completion 2, …]. `segments` contains the number of
    the part that each token belongs to: 0 for the prompt, i for completion i, and -1 for padding. A
    completion attends only to the prompt and to itself, so the results equal those of a batch with
    one row per completion, but a packed batch has far fewer tokens.
    """

    input_ids: Tensor  # (B, S)
    position_ids: Tensor  # (B, S)
    segments: Tensor  # (B, S)
    sources: Tensor  # (M,) index into the B·S hidden states from which each target is predicted
    targets: Tensor  # (M,) the tokens to predict
    lengths: list[int]  # lengths of the n completions; M is the sum of the lengths
    advantages: Tensor  # (n,)
    weights: Tensor  # (n,)
    sampler_logprobs: Tensor  # (n, T), 0 for padding and for tokens written by a tool
    rows: list[int] = field(default_factory=list)  # index of each rollout in the mini-batch
    old_logprobs: Tensor | None = None  # (n, T), of the policy before the first update of the step
    ref_logprobs: Tensor | None = None  # (n, T), of the reference model
    tool_mask: Tensor | None = None  # (n, T) of bool, False for tokens written by a tool

    @property
    def completion_mask(self) -> Tensor:
        """The mask of the tokens in the loss, (n, T) of bool.

        The mask is True for the tokens that the model sampled, up to and including the end token.
        The mask is computed from the lengths and the tool mask, never from token ids. Every sum
        over tokens in `policy_loss` uses this mask. Tool tokens are attended to, but have no loss.
        """
        lengths = torch.tensor(self.lengths, device=self.input_ids.device)
        mask = torch.arange(max(self.lengths), device=lengths.device) < lengths[:, None]
        return mask if self.tool_mask is None else mask & self.tool_mask

    def keep(
        self,
        name: Literal["old_logprobs", "ref_logprobs"],
        logprobs: Tensor,
        rollouts: Sequence[Rollout],
    ) -> None:
        """Store log-probabilities (n, T) in the rollouts that this micro-batch was made from."""
        for row, length, values in zip(self.rows, self.lengths, logprobs, strict=True):
            setattr(rollouts[row], name, values[:length])

    def sequences(self) -> list[tuple[list[int], list[int]]]:
        """Return the token ids of the prompt and of the completion for each rollout."""
        width, found = self.input_ids.shape[1], []
        parts = zip(self.sources.split(self.lengths), self.targets.split(self.lengths), strict=True)
        for sources, targets in parts:
            row = int(sources[0]) // width
            prompt = self.input_ids[row][self.segments[row] == 0]
            found.append((prompt.tolist(), targets.tolist()))
        return found


def make_micro_batches(
    rollouts: Sequence[Rollout], max_rows: int, max_tokens: int, device: str
) -> list[MicroBatch]:
    """Split the rollouts of a mini-batch into micro-batches of sequences with similar lengths.

    A micro-batch has `old_logprobs` or `ref_logprobs` if all of its rollouts have them.

    Args:
        max_rows: the maximum number of completions in a micro-batch.
        max_tokens: the maximum number of tokens, including padding, in a micro-batch. A single
            completion with its prompt may exceed this number.
    """
    max_packed = min(max_rows, GPU_PACKED_ROWS) if device == "cuda" else max_rows
    # Each problem has one packed sequence, split if it exceeds `max_packed` or `max_tokens`.
    sequences: list[list[int]] = []
    open_sequence: dict[int, list[int]] = {}  # problem → its sequence that is not yet full
    for row, rollout in enumerate(rollouts):
        rows = open_sequence.get(rollout.problem)
        if rows and len(rows) < max_packed and _packed_length(rollouts, [*rows, row]) <= max_tokens:
            rows.append(row)
        else:
            open_sequence[rollout.problem] = [row]
            sequences.append(open_sequence[rollout.problem])
    sequences.sort(key=partial(_packed_length, rollouts), reverse=True)
    micro_batches = []
    while sequences:
        taken = [sequences.pop(0)]
        longest = _packed_length(rollouts, taken[0])
        while (
            sequences
            and sum(map(len, taken)) + len(sequences[0]) <= max_rows
            and longest * (len(taken) + 1) <= max_tokens
        ):
            taken.append(sequences.pop(0))
        micro_batches.append(pack_rollouts(rollouts, taken, device))
    return micro_batches


def _packed_length(rollouts: Sequence[Rollout], rows: Sequence[int]) -> int:
    # The last token of a completion predicts nothing, so it is a target but not an input.
    return len(rollouts[rows[0]].prompt) + sum(len(rollouts[i].completion) - 1 for i in rows)


def pack_rollouts(
    rollouts: Sequence[Rollout], sequences: Sequence[Sequence[int]], device: str
) -> MicroBatch:
    """Pack rollouts into the tensors of a micro-batch.

    Args:
        sequences: the packed sequences. Each is a list of indices into `rollouts`, all of which
            have the same prompt.
    """
    ids, positions, segments, sources, targets = [], [], [], [], []
    width = max(_packed_length(rollouts, rows) for rows in sequences)
    if device == "cuda":  # otherwise every attention layer would copy and pad the mask
        width += -width % 8
    for b, rows in enumerate(sequences):
        prompt = rollouts[rows[0]].prompt
        row_ids, row_positions = list(prompt), list(range(len(prompt)))
        row_segments = [0] * len(prompt)
        for number, row in enumerate(rows, start=1):
            completion = rollouts[row].completion
            first, count = b * width + len(row_ids), len(completion) - 1
            # The last token of the prompt predicts the first token of the completion.
            sources += [b * width + len(prompt) - 1, *range(first, first + count)]
            targets += completion
            row_ids += completion[:-1]
            row_positions += range(len(prompt), len(prompt) + count)
            row_segments += [number] * count
        padding = width - len(row_ids)
        ids.append(row_ids + [0] * padding)
        positions.append(row_positions + [0] * padding)
        segments.append(row_segments + [-1] * padding)
    order = [row for rows in sequences for row in rows]
    packed = [rollouts[row] for row in order]
    sampled = [torch.tensor(list(rollout.sampler_logprobs)) for rollout in packed]
    sampled = pad_sequence(sampled, batch_first=True)  # (n, T)
    tool_mask = None
    if any(rollout.tool_mask for rollout in packed):
        own = [rollout.tool_mask or [True] * len(rollout.completion) for rollout in packed]
        tool_mask = pad_sequence([torch.tensor(row) for row in own], batch_first=True)
        sampled = sampled.where(tool_mask, 0.0)  # NaN for tool tokens, and NaN times 0 is NaN
    tensor = partial(torch.tensor, device=device)
    return MicroBatch(
        input_ids=tensor(ids),
        position_ids=tensor(positions),
        segments=tensor(segments),
        sources=tensor(sources),
        targets=tensor(targets),
        lengths=[len(rollout.completion) for rollout in packed],
        advantages=tensor([rollout.advantage for rollout in packed]),
        weights=tensor([rollout.weight for rollout in packed]),
        sampler_logprobs=sampled.to(device),
        rows=order,
        old_logprobs=_padded([rollout.old_logprobs for rollout in packed]),
        ref_logprobs=_padded([rollout.ref_logprobs for rollout in packed]),
        tool_mask=None if tool_mask is None else tool_mask.to(device),
    )


def _padded(rows: Sequence[Tensor | None]) -> Tensor | None:
    known = [row for row in rows if row is not None]
    return pad_sequence(known, batch_first=True) if len(known) == len(rows) else None
