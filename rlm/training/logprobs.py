"""The learning pass: rollouts packed into micro-batches, log-probabilities of their tokens.

Letters as in `grpo`: n rollouts of a micro-batch, B packed sequences, S padded length of those,
M completion tokens, T padded completion length, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from rlm.kernels import Kernels
from rlm.model.base import decoder_and_head, kernels_for
from rlm.training.grpo import Rollout

# Logits of this many tokens are made in one product and held at once.
LOGITS_CHUNK = 128
# On a CPU torch makes fp32 of so many at once: 16 × 49,152 × 4 bytes = 3 MB stay in the cache, and
# the allocator finds such a block again. 25 MB it often maps anew, page fault by page fault.
WIDE_ROWS = 16


@dataclass
class MicroBatch:
    """Rollouts as tensors. The prompt of a group stands once in front of its completions.

    A packed sequence is [prompt, completion 1, completion 2, …]; `segments` numbers its parts (0
    the prompt, -1 padding), and a completion attends to the prompt and to itself alone, so what
    is computed equals one row per completion, for a fraction of the tokens.
    """

    input_ids: Tensor  # (B, S)
    position_ids: Tensor  # (B, S)
    segments: Tensor  # (B, S)
    sources: Tensor  # (M,) where in the flattened (B·S) the hidden state that predicts stands
    targets: Tensor  # (M,) the token it must predict
    lengths: list[int]  # n; M = sum
    advantages: Tensor  # (n,)
    weights: Tensor  # (n,)
    sampler_logprobs: Tensor  # (n, T), 0 beyond the end
    rows: list[int] = field(default_factory=list)  # which rollouts of the step these are

    @property
    def completion_mask(self) -> Tensor:
        """(n, T) of bool, true up to and with the end token. From lengths, never from ids."""
        lengths = torch.tensor(self.lengths, device=self.input_ids.device)
        return torch.arange(max(self.lengths), device=lengths.device) < lengths[:, None]


def split(
    rollouts: Sequence[Rollout], *, max_rows: int, max_tokens: int, device: str
) -> Iterator[MicroBatch]:
    """Cut the rollouts of a step into micro-batches of similar length.

    Args:
        max_rows: completions in a micro-batch.
        max_tokens: padded tokens in a micro-batch (a single completion may exceed it).
    """

    def length(rows: list[int]) -> int:
        # An end token predicts nothing: it is a target and never an input.
        return len(rollouts[rows[0]].prompt) + sum(len(rollouts[i].completion) - 1 for i in rows)

    # One packed sequence per problem, cut where it would hold too many rows or tokens.
    sequences: list[list[int]] = []
    open_sequence: dict[int, list[int]] = {}  # of a problem
    for row, rollout in enumerate(rollouts):
        rows = open_sequence.get(rollout.problem)
        if rows and len(rows) < max_rows and length([*rows, row]) <= max_tokens:
            rows.append(row)
        else:
            open_sequence[rollout.problem] = [row]
            sequences.append(open_sequence[rollout.problem])
    sequences.sort(key=length, reverse=True)
    while sequences:
        taken = [sequences.pop(0)]
        longest = length(taken[0])
        while (
            sequences
            and sum(map(len, taken)) + len(sequences[0]) <= max_rows
            and longest * (len(taken) + 1) <= max_tokens
        ):
            taken.append(sequences.pop(0))
        yield _pack([[(i, rollouts[i]) for i in rows] for rows in taken], device)


def _pack(sequences: list[list[tuple[int, Rollout]]], device: str) -> MicroBatch:
    ids, positions, segments = [], [], []
    sources, targets = [], []
    flat = [pair for sequence in sequences for pair in sequence]
    width = max(len(s[0][1].prompt) + sum(len(r.completion) - 1 for _, r in s) for s in sequences)
    for b, sequence in enumerate(sequences):
        prompt = sequence[0][1].prompt
        row_ids, row_positions = list(prompt), list(range(len(prompt)))
        row_segments = [0] * len(prompt)
        for number, (_, rollout) in enumerate(sequence, start=1):
            inputs = list(rollout.completion[:-1])
            first = len(row_ids)
            # The prompt's last token predicts the first one, each token the one after it.
            sources += [b * width + len(prompt) - 1]
            sources += range(b * width + first, b * width + first + len(inputs))
            targets += rollout.completion
            row_ids += inputs
            row_positions += range(len(prompt), len(prompt) + len(inputs))
            row_segments += [number] * len(inputs)
        padding = width - len(row_ids)
        ids.append(row_ids + [0] * padding)
        positions.append(row_positions + [0] * padding)
        segments.append(row_segments + [-1] * padding)
    return MicroBatch(
        input_ids=torch.tensor(ids, device=device),
        position_ids=torch.tensor(positions, device=device),
        segments=torch.tensor(segments, device=device),
        sources=torch.tensor(sources, device=device),
        targets=torch.tensor(targets, device=device),
        lengths=[len(rollout.completion) for _, rollout in flat],
        advantages=torch.tensor([rollout.advantage for _, rollout in flat], device=device),
        weights=torch.tensor([rollout.weight for _, rollout in flat], device=device),
        sampler_logprobs=_pad(
            [torch.tensor(list(rollout.sampler_logprobs)) for _, rollout in flat]
        ).to(device),
        rows=[row for row, _ in flat],
    )


def _pad(rows: Sequence[Tensor]) -> Tensor:
    return pad_sequence(list(rows), batch_first=True)


def attention_mask(segments: Tensor, dtype: torch.dtype) -> Tensor:
    """Additive mask (B, 1, S, S): causal, to the prompt and within the own completion alone."""
    own = segments[:, :, None] == segments[:, None, :]
    prompt = (segments == 0)[:, None, :] & (segments >= 0)[:, :, None]
    size = segments.shape[1]
    causal = torch.ones(size, size, dtype=torch.bool, device=segments.device).tril()
    hidden = ~((own | prompt) & causal)
    mask = torch.zeros(hidden.shape, dtype=dtype, device=segments.device)
    return mask.masked_fill_(hidden, torch.finfo(dtype).min)[:, None]


def token_logprobs(
    model: PreTrainedModel, batch: MicroBatch, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probability of each completion token, and the entropy it was drawn with: two (n, T).

    Under softmax(logits / temperature), the distribution that was sampled. Logits are made for
    completion tokens only, a chunk at a time, and scored in fp32; no (tokens × V) tensor of the
    batch exists. Entropy carries no gradient. Beyond a row's end both are 0.
    """
    decoder, head = decoder_and_head(model)
    hidden = decoder(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        attention_mask=attention_mask(batch.segments, model.dtype),
        use_cache=False,
    ).last_hidden_state  # (B, S, hidden)
    hidden = hidden.flatten(0, 1)[batch.sources]  # (M, hidden), contiguous
    kernels, _ = kernels_for(model)
    logprobs, entropy = score_tokens(hidden, head, batch.targets, temperature, kernels)
    return _pad(logprobs.split(batch.lengths)), _pad(entropy.split(batch.lengths))


def score_tokens(
    hidden: Tensor,
    head: nn.Module,
    targets: Tensor,
    temperature: float,
    kernels: Kernels | None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target after its hidden state, and the entropy: two (M,).

    Args:
        hidden: (M, hidden), contiguous.
        head: the output embeddings, frozen.
        targets: (M,) of token ids.
        kernels: what is compiled for the model, if anything is.
    """
    chunks = zip(hidden.split(LOGITS_CHUNK), targets.split(LOGITS_CHUNK), strict=True)
    scored = [
        _ScoreTokens.apply(part, head.weight, head.bias, wanted, temperature, kernels)
        for part, wanted in chunks
    ]
    logprobs, entropy = (torch.cat(parts) for parts in zip(*scored, strict=True))
    return logprobs, entropy


class _ScoreTokens(torch.autograd.Function):
    """Log-probabilities and entropies of tokens, and the gradient, from one set of logits.

    d logprob / d hidden = Σ_v (1[v = target] - p_v) W[v] / temperature does not depend on the loss:
    it is made while the logits are at hand, and the backward pass only scales it. That is two
    products with the head instead of the three of making the logits again, and no logits kept.
    The coefficients are made in fp32 before they are rounded to the weights' type: of a token with
    p = 0.998, W[target] - (p in bf16) · W would keep 0.004 where 0.002 is meant.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        hidden: Tensor,  # (M, hidden)
        weight: Tensor,  # (V, hidden), frozen
        bias: Tensor | None,  # (V,), frozen
        targets: Tensor,  # (M,)
        temperature: float,
        kernels: Kernels | None,
    ) -> tuple[Tensor, Tensor]:
        logits = F.linear(hidden, weight, bias)  # (M, V)
        slopes = ctx.needs_input_grad[0]  # they then take the place of the logits
        if kernels:
            logprobs, entropy = kernels.token_logprobs(logits, targets, temperature, slopes)
        else:
            logprobs, entropy = _score(logits, targets, temperature, slopes)
        if slopes:
            ctx.save_for_backward(logits @ weight / temperature)  # (M, hidden)
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, by_logprob: Tensor, _: Tensor
    ) -> tuple[Tensor | None, ...]:
        (slope,) = ctx.saved_tensors
        return by_logprob[:, None].to(slope.dtype) * slope, *[None] * 5


def _score(
    logits: Tensor, targets: Tensor, temperature: float, slopes: bool
) -> tuple[Tensor, Tensor]:
    """`Kernels.score` in torch."""
    rows = WIDE_ROWS if logits.device.type == "cpu" else LOGITS_CHUNK
    logprobs, entropies = [], []
    for part, wanted in zip(logits.split(rows), targets.split(rows), strict=True):
        wide = part.float()
        if temperature != 1:
            wide = wide / temperature
        wide = wide.log_softmax(-1)  # log-probabilities of all tokens
        logprobs.append(wide.gather(-1, wanted[:, None]).squeeze(-1))
        probabilities = wide.exp()
        # As a product of a row and a column: no further (rows, V).
        entropies.append(-torch.bmm(probabilities[:, None], wide[..., None]).flatten())
        if slopes:
            coefficients = probabilities.neg_()
            coefficients[torch.arange(len(wanted), device=wanted.device), wanted] += 1
            part.copy_(coefficients)
    return torch.cat(logprobs), torch.cat(entropies)
