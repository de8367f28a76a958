"""Log-probabilities of completion tokens: the forward pass of the trained policy.

The letters in the shapes are: n rollouts of a micro-batch, B packed sequences, S padded length of
the packed sequences, M completion tokens, T padded length of the completions, V vocabulary size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from rlm.model import decoder_and_head, using_reference
from rlm.ops import Ops, ops_for
from rlm.training.batches import MicroBatch
from rlm.training.config import GRPOConfig

if TYPE_CHECKING:  # rlm.model has to import bitsandbytes before peft is imported
    from peft import PeftModel

# Where the old log-probabilities come from: the sampler, a forward pass before the first update, or
# the first pass over the only mini-batch, in which they equal the current ones.
OldLogprobs = Literal["sampler", "forward pass", "first pass"]
# Number of tokens whose logits are computed at once.
LOGITS_CHUNK = 128


def attention_mask(segments: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the additive attention mask, (B, 1, S, S), of packed sequences.

    Each token attends to itself, and to the earlier tokens of the prompt and of its completion.
    """
    own = segments[:, :, None] == segments[:, None, :]
    prompt = (segments == 0)[:, None, :] & (segments >= 0)[:, :, None]
    size = segments.shape[1]
    causal = torch.ones(size, size, dtype=torch.bool, device=segments.device).tril()
    hidden = ~((own | prompt) & causal)
    mask = torch.zeros(hidden.shape, dtype=dtype, device=segments.device)
    return mask.masked_fill_(hidden, torch.finfo(dtype).min)[:, None]


def token_logprobs(
    model: PreTrainedModel | PeftModel, batch: MicroBatch, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return the log-probability and the entropy of each completion token, each (n, T).

    The distribution of a token is softmax(logits / temperature), as in sampling. The logits are
    computed for completion tokens only, one chunk at a time, so a (tokens × V) tensor of the whole
    batch is never allocated. The log-probabilities are computed in fp32. The entropy has no
    gradient. Both results are 0 for padding.
    """
    decoder, head = decoder_and_head(model)
    hidden = decoder(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        attention_mask=attention_mask(batch.segments, model.dtype),
        use_cache=False,
    ).last_hidden_state  # (B, S, hidden)
    hidden = hidden.flatten(0, 1)[batch.sources]  # (M, hidden), contiguous
    scored = score_tokens(hidden, head, batch.targets, temperature, ops_for(model))
    logprobs, entropy = (
        pad_sequence(list(flat.split(batch.lengths)), batch_first=True) for flat in scored
    )
    return logprobs, entropy


@torch.no_grad()
def reference_logprobs(policy: PeftModel, batch: MicroBatch, config: GRPOConfig) -> Tensor:
    """Return the log-probabilities (n, T) under the reference model.

    The reference model is the base model with the initial adapter, or the base model alone if
    training started from a new adapter.
    """
    with using_reference(policy, config.sft_adapter):
        logprobs, _ = token_logprobs(policy, batch, config.temperature)
    return logprobs


def old_logprobs_source(config: GRPOConfig, updates: int, matches_trainer: bool) -> OldLogprobs:
    """Return where the old log-probabilities of a step come from.

    Args:
        updates: the number of mini-batches of the step.
        matches_trainer: whether the sampler's probabilities equal the trainer's (see `Sampler`).
    """
    if config.resolved_algorithm.objective == "tapered":
        return "sampler"
    if updates == 1:
        return "first pass"
    return "sampler" if matches_trainer else "forward pass"


def score_tokens(
    hidden: Tensor,
    head: nn.Module,
    targets: Tensor,
    temperature: float,
    ops: Ops,
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each target token and the entropy, each (M,).

    Args:
        hidden: the hidden states from which the targets are predicted, (M, hidden), contiguous.
        head: the LM head, whose parameters are frozen.
        targets: the token ids of the targets, (M,).
        ops: the kernels for the model (see `Ops`).
    """
    chunks = zip(hidden.split(LOGITS_CHUNK), targets.split(LOGITS_CHUNK), strict=True)
    scored = [
        _ScoreTokens.apply(part, head.weight, head.bias, wanted, temperature, ops)
        for part, wanted in chunks
    ]
    logprobs, entropy = (torch.cat(parts) for parts in zip(*scored, strict=True))
    return logprobs, entropy


class _ScoreTokens(torch.autograd.Function):
    """Computes log-probabilities, their gradients and entropies from one set of logits.

    The derivative d logprob / d hidden = Σ_v (1[v = target] - p_v) W[v] / temperature does not
    depend on the loss. Therefore the forward pass computes this derivative from its logits, and the
    backward pass only scales the derivative. This takes two matmuls with the LM head and stores no
    logits; recomputing the logits in the backward pass would take three matmuls.

    The coefficients 1[v = target] - p_v are computed in fp32 and then rounded to the dtype of the
    weights. If p = 0.998 were rounded to bf16 before the subtraction, the coefficient of W[target]
    would be 0.004 instead of 0.002.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # (M, hidden)
        weight: Tensor,  # (V, hidden), frozen
        bias: Tensor | None,  # (V,), frozen
        targets: Tensor,  # (M,)
        temperature: float,
        ops: Ops,
    ) -> tuple[Tensor, Tensor]:
        logits = F.linear(hidden, weight, bias)  # (M, V)
        gradients = ctx.needs_input_grad[0]  # if True, the coefficients overwrite the logits
        logprobs, entropy = ops.token_logprobs(logits, targets, temperature, gradients)
        if gradients:
            ctx.save_for_backward(logits @ weight / temperature)  # (M, hidden)
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_logprob: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (derivative,) = ctx.saved_tensors
        return by_logprob[:, None].to(derivative.dtype) * derivative, *[None] * 5
