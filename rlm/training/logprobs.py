"""Log-probabilities of completion tokens: the forward pass of the trained policy.

Letters: n rollouts of a micro-batch, B packed sequences, S padded length of those, M completion
tokens, T padded completion length, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from rlm.model import decoder_and_head, using_reference
from rlm.ops import Ops, ops_for
from rlm.training.batches import MicroBatch
from rlm.training.config import GRPOConfig

if TYPE_CHECKING:  # rlm.model has to import bitsandbytes before peft is imported
    from peft import PeftModel

# Log-probability and entropy of each completion token, at a temperature.
Score = Callable[[MicroBatch, float], tuple[Tensor, Tensor]]
# The number of tokens whose logits are computed at once.
LOGITS_CHUNK = 128


def attention_mask(segments: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the additive mask (B, 1, S, S): causal, within the prompt and the own completion."""
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
    """Return each completion token's log-probability and its distribution's entropy, each (n, T).

    The distribution is softmax(logits / temperature), as in sampling. Logits are computed for
    completion tokens only, one chunk at a time, and scored in fp32, so no (tokens × V) tensor of
    the batch exists. Entropy carries no gradient. Both are 0 beyond a row's end.
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
    """Return log-probabilities (n, T) under the start adapter, or the base if there is none."""
    with using_reference(policy, config.sft_adapter):
        logprobs, _ = token_logprobs(policy, batch, config.temperature)
    return logprobs


def set_constant_logprobs(
    policy: PeftModel,
    score: Score,
    config: GRPOConfig,
    updates: Sequence[Sequence[MicroBatch]],
    matches_trainer: bool,
) -> bool:
    """Set the log-probabilities that stay constant during the updates of a step.

    `ref_logprobs` are set if there is a KL term. `old_logprobs` are the sampler's if the
    algorithm's ratio is to the sampling policy ("tapered"). Otherwise, with several mini-batches,
    they are the sampler's if it matches the trainer, or else come from a forward pass over the
    step. With a single mini-batch the first training pass sets them.

    Args:
        score: computes log-probabilities by the current policy, here or on a server.
        matches_trainer: whether the sampler's probabilities are the trainer's (`Sampler`).

    Returns:
        Whether the loss must correct for a sampler that computes differently.
    """
    off_policy = config.resolved_algorithm.objective == "tapered"
    for micro in (micro for micro_batches in updates for micro in micro_batches):
        if config.kl_weight:
            micro.ref_logprobs = reference_logprobs(policy, micro, config)
        if off_policy or (matches_trainer and len(updates) > 1):
            micro.old_logprobs = micro.sampler_logprobs
        elif len(updates) > 1:
            with torch.no_grad():
                micro.old_logprobs, _ = score(micro, config.temperature)
    return not (matches_trainer or off_policy)


def score_tokens(
    hidden: Tensor,
    head: nn.Module,
    targets: Tensor,
    temperature: float,
    ops: Ops,
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each target given its hidden state, and the entropy, each (M,).

    Args:
        hidden: (M, hidden), contiguous.
        head: the output embeddings, frozen.
        targets: (M,) of token ids.
        ops: the `Ops` for the model.
    """
    chunks = zip(hidden.split(LOGITS_CHUNK), targets.split(LOGITS_CHUNK), strict=True)
    scored = [
        _ScoreTokens.apply(part, head.weight, head.bias, wanted, temperature, ops)
        for part, wanted in chunks
    ]
    logprobs, entropy = (torch.cat(parts) for parts in zip(*scored, strict=True))
    return logprobs, entropy


class _ScoreTokens(torch.autograd.Function):
    """Log-probabilities and entropies of tokens, and the gradient, from one set of logits.

    d logprob / d hidden = Σ_v (1[v = target] - p_v) W[v] / temperature does not depend on the loss,
    so the forward pass computes it from its logits, and the backward pass only scales it. This
    takes two matmuls with the head, where recomputing the logits would take three, and keeps no
    logits. The coefficients are computed in fp32 and then rounded to the weights' dtype. With
    p = 0.998 rounded to bf16 first, W[target] would get the coefficient 0.004 instead of 0.002.
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
        slopes = ctx.needs_input_grad[0]  # then the coefficients overwrite the logits
        logprobs, entropy = ops.token_logprobs(logits, targets, temperature, slopes)
        if slopes:
            ctx.save_for_backward(logits @ weight / temperature)  # (M, hidden)
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, by_logprob: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (slope,) = ctx.saved_tensors
        return by_logprob[:, None].to(slope.dtype) * slope, *[None] * 5
