"""The forward pass of the sampler, with the model itself or with a merged copy of its weights.

`UnmergedWeights` runs the model itself with the adapter unmerged. It supports any architecture that
computes the same logits with our KV cache as without it, and it needs no extra memory.
`MergedWeights` is the fast path of the Llama family. It runs a copy of the base model in which the
adapter is merged and projections are fused. On a CPU, the copy has the memory layout of the
matmuls. Neither class changes the model. Both call the function `attend`, which computes attention
over the KV cache.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from rlm.cli import UsageError
from rlm.model import (
    active_lora_tensors,
    available_memory,
    base_of,
    decoder_and_head,
    merged_weight,
)
from rlm.ops import (
    FUSED_MODEL_TYPES,
    AttentionFunction,
    DecodeAttention,
    DecodeLayers,
    LinearFunction,
    Ops,
    fast_dtype,
    learning_dtype,
    ops_for,
    softmax_scale,
)
from rlm.sampling.kv_cache import CacheConfig, KVCache

if TYPE_CHECKING:  # at run time, rlm.model must import bitsandbytes before peft
    from peft import PeftModel
    from transformers.models.llama.modeling_llama import (
        LlamaDecoderLayer,
        LlamaModel,
        LlamaRMSNorm,
    )

# The check of an architecture runs CHECKED tokens. It prefills the first PREFILLED and decodes the
# others.
PREFILLED, CHECKED = 3, 5
# Maximum relative difference of the logits in this check, for models wholly in fp32 and for others.
# Rounding alone causes a relative difference of 1e-6 to 1e-4 in fp32, and of 0.01 to 0.05 in bf16.
TOLERANCE_FP32, TOLERANCE = 1e-3, 0.2
DECODED_ROWS = 64  # number of rows with which the dtypes are timed
_SWITCH = threading.Lock()  # held while a model's config selects the attention function "rlm_cache"
# The attention function that `_through_cache` calls. It is a context variable, because some models
# do not pass extra arguments of `forward` on to their attention layers.
_ATTEND: ContextVar[AttentionFunction] = ContextVar("attend")


class UnmergedWeights:
    """Runs the model itself, with the adapter unmerged."""

    copied_bytes = 0  # extra memory while sampling

    def __init__(self, model: PreTrainedModel | PeftModel) -> None:
        """
        Raises:
            UsageError: the architecture does not compute the same logits with our KV cache, or
                transformers cannot replace its attention.
        """
        self._decoder, self.head = decoder_and_head(model)
        self.dtype = model.dtype
        if not self._decoder._supports_attention_backend:
            kind = self._decoder.config.model_type
            raise UsageError(
                f"{kind} models are not supported: transformers cannot replace their attention"
            )
        self._check_attention(model)

    @torch.no_grad()
    def _check_attention(self, model: PreTrainedModel | PeftModel) -> None:
        """Compare the logits of a few tokens with those of the model's usual forward pass."""
        config, device = self._decoder.config, self.head.weight.device
        step = config.vocab_size // (CHECKED + 2)  # avoids special tokens at both ends
        ids = torch.arange(1, CHECKED + 1, device=device)[None] * step
        positions = torch.arange(CHECKED, device=device)[None]
        try:
            room = CacheConfig(1, 1, PREFILLED, CHECKED - PREFILLED)
            cache = KVCache(config, room, self.dtype, device, ops_for(model))
            parts = [(slice(PREFILLED), cache.prefill_prompts([0], PREFILLED, 0))]
            for own in range(CHECKED - PREFILLED):
                place = slice(PREFILLED + own, PREFILLED + own + 1)
                parts.append((place, cache.decode([0], [0], [PREFILLED], [own])))
            hidden = [self.forward(ids[:, at], positions[:, at], attend) for at, attend in parts]
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, IndexError) as error:  # raised by operations on the cache
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise UsageError(
                f"{config.model_type} models are not supported: their keys, values or queries do "
                f"not fit the KV cache ({reason})"
            ) from error
        base = base_of(model)
        is_fp32 = all(tensor.dtype == torch.float32 for tensor in base.parameters())
        tolerance = TOLERANCE_FP32 if is_fp32 else TOLERANCE
        with _SWITCH:
            usual = base(input_ids=ids, use_cache=False).logits
            difference = _difference(self.head(torch.cat(hidden, 1)), usual)
            if difference <= tolerance:
                return
            # In bf16, rounding alone may cause this, for example if it selects other experts.
            with base.get_input_embeddings().register_forward_hook(_rounded_otherwise):
                noise = _difference(base(input_ids=ids, use_cache=False).logits, usual)
        if difference > tolerance + 2 * noise:
            raise UsageError(
                f"{config.model_type} models are not supported: with the sampler's KV cache, the "
                f"logits of {CHECKED} tokens differ by {difference:.1%} from those of transformers"
            )

    def refresh(self) -> None:
        """Do nothing, because training updates the same weights in place."""

    release = refresh

    def forward(self, ids: Tensor, positions: Tensor, attend: AttentionFunction) -> Tensor:
        """Compute the last hidden states (B, T, hidden) for token ids and positions (B, T)."""
        config = self._decoder.config
        with _SWITCH:  # another thread may use the same model, and thus the same config
            usual, token = config._attn_implementation, _ATTEND.set(attend)
            config._attn_implementation = "rlm_cache"
            try:
                return self._decoder(
                    input_ids=ids,
                    position_ids=positions,
                    # transformers passes a 4D mask on unchanged, and `_through_cache` ignores it,
                    # because the cache determines which tokens each token attends to.
                    attention_mask=torch.zeros(len(ids), 1, 1, 1, device=ids.device),
                    use_cache=False,
                ).last_hidden_state
            finally:
                _ATTEND.reset(token)
                config._attn_implementation = usual


def _difference(found: Tensor, wanted: Tensor) -> float:
    """Return the relative difference of logits minus their means, which the softmax ignores."""
    found, wanted = (part.float() - part.float().mean(-1, keepdim=True) for part in (found, wanted))
    return float((found - wanted).norm() / wanted.norm())


def _rounded_otherwise(module: nn.Module, inputs: object, embeddings: Tensor) -> Tensor:
    """Change embeddings (…, hidden) by at most the relative precision of their dtype."""
    ripple = torch.linspace(-1, 1, embeddings.shape[-1], device=embeddings.device)
    factors = 1 + torch.finfo(embeddings.dtype).eps * ripple
    return (embeddings.float() * factors).to(embeddings.dtype)


def _through_cache(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """Call the current `attend` function, with the interface that transformers expects.

    The result is transposed, because transformers expects the shape (B, T, heads, D).
    """
    scale = softmax_scale(query, scaling, options)
    attend, layer = _ATTEND.get(), cast("int", module.layer_idx)
    return attend(layer, query, key, value, scale).transpose(1, 2), None


AttentionInterface.register("rlm_cache", _through_cache)


def check_architecture(model: PreTrainedModel | PeftModel) -> None:
    """Check that the sampler supports a model, before hours of SFT are spent on the model."""
    UnmergedWeights(model)


def why_not_fused(model: PreTrainedModel | PeftModel) -> str | None:
    """Return the reason why a model cannot use the fast path; None if the model can use it."""
    config = decoder_and_head(model)[0].config
    if config.model_type not in FUSED_MODEL_TYPES:
        return f"{config.model_type} is not of the Llama family"
    if config.hidden_act != "silu":
        return f"the activation function is {config.hidden_act}"
    return None


def copy_bytes(model: PreTrainedModel | PeftModel, dtype: torch.dtype) -> int:
    """Estimate the size of a merged copy of the layers in bytes, without the LM head."""
    linear = [m for m in decoder_and_head(model)[0].modules() if isinstance(m, nn.Linear)]
    # Computed from the shapes, because 4-bit weights are stored packed.
    return sum(m.in_features * m.out_features for m in linear) * dtype.itemsize


class MergedWeights:
    """A copy of the base model with the active adapters merged and projections fused.

    The dtype of the copy may differ from the dtype of the model.
    """

    def __init__(self, model: PreTrainedModel | PeftModel, ops: Ops, dtype: torch.dtype) -> None:
        self._model, self._ops, self.dtype = model, ops, dtype
        decoder, head = decoder_and_head(model)
        self._decoder = cast("LlamaModel", decoder)
        # Adapters do not change the LM head, so it is copied only once.
        self.head = fused_linear(head, ops=ops, dtype=self.dtype)
        self.copied_bytes = copy_bytes(model, self.dtype)
        self.release()

    def refresh(self) -> None:
        """Update the copy if the adapter has changed.

        Changes are detected by comparing the adapter with the adapter that was merged. This takes
        only milliseconds, so callers do not need to report changes.
        """
        adapters = active_lora_tensors(self._model)
        same = self._layers and adapters.keys() == self._seen.keys()
        if same and all(torch.equal(tensor, self._seen[key]) for key, tensor in adapters.items()):
            return
        self.release()  # free the old copy before the new copy is made
        what = self._ops, self.dtype
        self._layers = [FusedLayer(layer, *what) for layer in decoder_layers(self._decoder)]
        self._decode_layers = self._ops.decode_layers(self._layers)
        self._seen = {name: tensor.detach().clone() for name, tensor in adapters.items()}

    def release(self) -> None:
        """Drop the copied layers until the next `refresh`."""
        self._layers: list[FusedLayer] = []
        self._decode_layers: DecodeLayers | None = None
        self._seen: dict[str, Tensor] = {}

    def forward(self, ids: Tensor, positions: Tensor, attend: AttentionFunction) -> Tensor:
        """Compute the last hidden states (B, T, hidden) for token ids and positions (B, T)."""
        x = self._decoder.embed_tokens(ids).to(self.dtype)
        # Flatten to (B·T, …), so that a batch of any shape needs only one matmul per projection.
        cos, sin = (part.flatten(0, 1) for part in self._decoder.rotary_emb(x, positions))
        shape, x = ids.shape, x.flatten(0, 1)
        if self._decode_layers and isinstance(attend, DecodeAttention):
            x = self._decode_layers(x, cos, sin, attend)
        else:
            for layer in self._layers:
                x = layer(x, shape, (cos, sin), attend)
        final = self._decoder.norm
        weight = final.weight.to(self.dtype)
        return self._ops.rms_norm(x, weight, final.variance_epsilon).unflatten(0, shape)


def choose_weights(
    model: PreTrainedModel | PeftModel,
    merged: bool | None,
    ops: Ops,
    dtype: torch.dtype,
    share: float,
) -> tuple[UnmergedWeights | MergedWeights, str]:
    """Choose the weights to sample with; return the weights, and a description with the reason.

    Args:
        merged: whether to make a merged copy. With None, a copy is made if the architecture has a
            fast path and the copy fits in half of the free memory.
        dtype: the dtype of the merged copy.
        share: the fraction of the free memory that this sampler may use.

    Raises:
        UsageError: a merged copy was requested, but the architecture has no fast path.
    """
    reason = "as requested" if merged is False else why_not_fused(model)
    if merged and reason:
        raise UsageError(
            f"--sampler merged cannot run this model: {reason}; use --sampler unmerged"
        )
    size, free = copy_bytes(model, dtype), share * available_memory(model.device.type)
    gb = f"{size / 2**30:.1f} GB"
    if merged is None and reason is None and size > free / 2:
        reason = (
            f"a merged copy of the layers would take {gb}, more than half of the "
            f"{free / 2**30:.1f} GB that are free"
        )
    if reason:
        return UnmergedWeights(model), f"the model itself, adapter unmerged ({reason})"
    how = ", matmuls compiled" if ops.has_linear else ""
    if dtype != model.dtype:
        how = f" in {str(dtype).removeprefix('torch.')}{how}"
    return MergedWeights(model, ops, dtype), f"a merged copy of the layers ({gb}){how}"


@torch.no_grad()
def fused_linear(
    *layers: nn.Linear,
    ops: Ops,
    norm: LlamaRMSNorm | None = None,
    gated: bool = False,
    dtype: torch.dtype | None = None,
) -> LinearFunction:
    """Fuse linear layers that have the same input into one function, with their adapters merged.

    Args:
        norm: the RMSNorm before the layers, which is fused as well.
        gated: compute silu(first(x)) · second(x) from two layers.
        dtype: the dtype to compute in, which must be the dtype of `ops` (None: the layers' dtype).
    """
    has_bias = any(getattr(layer, "bias", None) is not None for layer in layers)
    parts = [[layer] for layer in layers] if gated else [layers]
    dtype = dtype or layers[0].weight.dtype
    weights = [_joined_weight(part, norm).to(dtype) for part in parts]
    biases = [_joined_bias(part, weights[0]) for part in parts] if has_bias else None
    return ops.linear(weights, biases, None if norm is None else norm.variance_epsilon)


def _joined_weight(layers: Sequence[nn.Linear], norm: LlamaRMSNorm | None) -> Tensor:
    """Return the concatenated weights (total outputs, inputs) with adapters and norm merged.

    The adapters and the norm are merged in fp32, so that the result is rounded only once.
    """
    weights = [merged_weight(layer, torch.float32) for layer in layers]
    weight = torch.cat(weights) if len(weights) > 1 else weights[0]
    return weight if norm is None else weight.float() * norm.weight.float()


def _joined_bias(layers: Sequence[nn.Linear], weight: Tensor) -> Tensor:
    """Return the concatenated biases (total outputs), with zeros for a layer without a bias."""
    biases = [(getattr(layer, "bias", None), layer.out_features) for layer in layers]
    return torch.cat([weight.new_zeros(size) if b is None else b for b, size in biases]).to(
        weight.dtype
    )


def decoder_layers(decoder: PreTrainedModel) -> list[LlamaDecoderLayer]:
    """Return the layers of a decoder of FUSED_MODEL_TYPES, which all have the same structure."""
    return cast("list[LlamaDecoderLayer]", list(cast("LlamaModel", decoder).layers))


class FusedLayer:
    """One decoder layer of the Llama family, computed in few passes over the activations.

    When few rows are decoded, starting the threads of a pass costs more time than the pass itself.
    Therefore q, k and v are computed by one matmul, the norm weights are multiplied into the
    projections that follow, and norms, residual additions and gating are fused into the matmuls.
    """

    def __init__(self, layer: LlamaDecoderLayer, ops: Ops, dtype: torch.dtype) -> None:
        self.ops, linear = ops, partial(fused_linear, ops=ops, dtype=dtype)
        attention, mlp = layer.self_attn, layer.mlp
        projections = attention.q_proj, attention.k_proj, attention.v_proj
        self.qkv = linear(*projections, norm=layer.input_layernorm)
        self.out = linear(attention.o_proj)
        norm, gate_up = layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)
        self.gated = linear(*gate_up, norm=norm, gated=True)
        self.down = linear(mlp.down_proj)
        # Qwen3 normalizes each head's queries and keys.
        names = [name for name in ("q_norm", "k_norm") if hasattr(attention, name)]
        norms: list[LlamaRMSNorm] = [getattr(attention, name) for name in names]
        self.head_norms = [(norm.weight.to(dtype), norm.variance_epsilon) for norm in norms]
        self.index = attention.layer_idx
        self.scale, self.width = attention.scaling, attention.head_dim
        config = attention.config
        self.heads = [config.num_attention_heads, *[config.num_key_value_heads] * 2]

    def __call__(
        self, x: Tensor, shape: torch.Size, rotary: Sequence[Tensor], attend: AttentionFunction
    ) -> Tensor:
        """Apply the layer.

        Args:
            x: the activations, (B·T, hidden).
            shape: (B, T).
            rotary: cosine and sine of the rotary embedding, (B·T, D) each.
        """
        heads, rows = self.heads, x.shape[0]
        qkv = self.qkv(x).view(rows, -1, self.width)  # (B·T, heads, D)
        qk, v = qkv[:, : -heads[2]], qkv[:, -heads[2] :]
        if self.head_norms:
            parts = zip(qk.split(heads[:2], 1), self.head_norms, strict=True)
            qk = torch.cat([self._head_norm(part, *norm) for part, norm in parts], 1)
        qk = self.ops.rotary_embedding(qk, *rotary)
        # Attention takes and returns (B, heads, T, D).
        q, k, v = (
            part.view(*shape, -1, self.width).transpose(1, 2)
            for part in (qk[:, : heads[0]], qk[:, heads[0] :], v)
        )
        attended = attend(self.index, q, k, v, self.scale).transpose(1, 2).reshape(rows, -1)
        x = self.out(attended, x)
        return self.down(self.gated(x), x)

    def _head_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Apply a norm to each head of x, (B·T, heads, D)."""
        return self.ops.rms_norm(x.reshape(-1, self.width), weight, epsilon).view(x.shape)


def sampling_dtype(
    model: PreTrainedModel | PeftModel, dtype: str = "auto"
) -> tuple[torch.dtype, str]:
    """Return the dtype for the sampler's merged copy of the weights, and a short reason.

    With "auto" on a CPU, a fused layer of this model is timed in each dtype, and the faster dtype
    is returned. The model's own dtype is returned without timing if --dtype names a dtype, if the
    model is on a GPU or has no fast path, or if the caller has loaded the model in another dtype
    than "auto" selects for training.
    """
    if dtype != "auto":
        return model.dtype, f"--dtype {dtype}"
    if model.device.type != "cpu" or why_not_fused(model) or model.dtype != learning_dtype()[0]:
        return model.dtype, "as in learning"
    layer = decoder_layers(decoder_and_head(model)[0])[0]
    config = model.config.get_text_config()

    def one_layer(dtype: torch.dtype) -> Callable[[], object]:
        fused = FusedLayer(layer, ops_for(model, dtype), dtype)
        x = torch.ones(DECODED_ROWS, config.hidden_size, dtype=dtype)
        attended = torch.ones(DECODED_ROWS, layer.self_attn.o_proj.in_features, dtype=dtype)

        def products() -> Tensor:
            fused.qkv(x)
            y = fused.out(attended, x)
            return fused.down(fused.gated(y), y)

        return products

    sizes = f"{config.hidden_size} x {config.intermediate_size}"
    return fast_dtype(f"sampling {sizes}", one_layer)
