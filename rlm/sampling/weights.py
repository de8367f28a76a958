"""Runs the model for the sampler: the model itself, or a merged and fused copy of its weights.

`UnmergedWeights` runs the model itself with the adapter unmerged, for any architecture and without
extra memory. `MergedWeights`, the fast path of the Llama family, runs its own copy of base +
adapter, with fused projections in the layout of the CPU's matmuls. Neither changes the model.
Both call the function `attend`, which computes attention over the KV cache.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from rlm.cli import UsageError
from rlm.model import (
    active_lora_tensors,
    available_memory,
    decoder_and_head,
    merged_weight,
)
from rlm.ops import (
    FUSED_MODEL_TYPES,
    AttentionFunction,
    LinearFunction,
    Ops,
    fast_dtype,
    head_dim,
    learning_dtype,
    num_key_value_heads,
    ops_for,
    softmax_scale,
)

if TYPE_CHECKING:  # rlm.model imports bitsandbytes before peft
    from peft import PeftModel
    from transformers.models.llama.modeling_llama import (
        LlamaDecoderLayer,
        LlamaModel,
        LlamaRMSNorm,
    )

DECODED_ROWS = 64  # rows for which the dtypes are timed
_SWITCH = threading.Lock()  # held while a model's config names another attention
# `_through_cache` calls this function. Not all models pass an argument of forward on to attention.
_ATTEND: ContextVar[AttentionFunction] = ContextVar("attend")


class UnmergedWeights:
    """Runs the model as it is, adapter unmerged."""

    copied_bytes = 0  # while sampling, besides the model

    def __init__(self, model: PreTrainedModel | PeftModel) -> None:
        """
        Raises:
            UsageError: this architecture's attention cannot use our KV cache.
        """
        self._decoder, self.head = decoder_and_head(model)
        self.dtype = model.dtype
        if not self._decoder._supports_attention_backend:
            kind = self._decoder.config.model_type
            raise UsageError(
                f"{kind}: its attention cannot be replaced in transformers: unsupported"
            )
        self._check_attention()

    @torch.no_grad()
    def _check_attention(self) -> None:
        """Check the attention by running one token, which attends to itself, through all layers."""
        config = self._decoder.config
        expected = num_key_value_heads(config), head_dim(config)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            for name, part in (("keys", k), ("values", v)):
                found = part.shape[1], part.shape[-1]  # heads, width
                if found != expected:
                    raise UsageError(
                        f"{config.model_type}: its {name} have {found[0]} heads of {found[1]} "
                        f"numbers, and the cache holds {expected[0]} of {expected[1]}: unsupported"
                    )
            return v.repeat_interleave(q.shape[1] // v.shape[1], 1)

        token = torch.zeros(1, 1, dtype=torch.long, device=self.head.weight.device)
        self.forward(token, token, attend)

    def refresh(self) -> None:
        """Do nothing: training changes these very weights."""

    release = refresh

    def forward(self, ids: Tensor, positions: Tensor, attend: AttentionFunction) -> Tensor:
        """Compute the last hidden states (B, T, hidden) of tokens and positions (B, T)."""
        config, calls = self._decoder.config, []

        def attend_and_count(*inputs: Any) -> Tensor:
            calls.append(1)
            return attend(*inputs)

        with _SWITCH:  # another thread may sample with the same model, and so with this config
            usual, token = config._attn_implementation, _ATTEND.set(attend_and_count)
            config._attn_implementation = "rlm_cache"
            try:
                hidden = self._decoder(
                    input_ids=ids,
                    position_ids=positions,
                    # transformers passes a 4D mask on as it is. `_through_cache` ignores it:
                    # the cache knows which tokens each token sees.
                    attention_mask=torch.zeros(len(ids), 1, 1, 1, device=ids.device),
                    use_cache=False,
                ).last_hidden_state
            finally:
                _ATTEND.reset(token)
                config._attn_implementation = usual
        if len(calls) != config.num_hidden_layers:
            # Otherwise tokens would silently not see the tokens before them.
            raise UsageError(
                f"{config.model_type}: {len(calls)} of {config.num_hidden_layers} layers "
                "attend through keys and values that can be cached: unsupported"
            )
        return hidden


def _through_cache(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls; its result has heads and tokens swapped."""
    scale = softmax_scale(query, scaling, options)
    attend, layer = _ATTEND.get(), cast("int", module.layer_idx)
    return attend(layer, query, key, value, scale).transpose(1, 2), None


AttentionInterface.register("rlm_cache", _through_cache)


def check_architecture(model: PreTrainedModel | PeftModel) -> None:
    """Check that the sampler can run a model, before hours of SFT are spent on it.

    Raises:
        UsageError: it cannot.
    """
    UnmergedWeights(model)


def why_not_fused(model: PreTrainedModel | PeftModel) -> str | None:
    """Return why a model cannot use the fast path; None if it can."""
    config = decoder_and_head(model)[0].config
    if config.model_type not in FUSED_MODEL_TYPES:
        return f"{config.model_type} is not of the Llama family"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}"
    return None


def copy_bytes(model: PreTrainedModel | PeftModel, dtype: torch.dtype) -> int:
    """Estimate the bytes of a merged copy of the layers; the head is not copied again."""
    linear = [m for m in decoder_and_head(model)[0].modules() if isinstance(m, nn.Linear)]
    # Computed from the shapes, because 4-bit weights are stored packed.
    return sum(m.in_features * m.out_features for m in linear) * dtype.itemsize


class MergedWeights:
    """A fused copy of base + active adapters; it may have another dtype."""

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        ops: Ops,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._model, self.dtype = model, dtype or model.dtype
        self._ops = ops
        decoder, head = decoder_and_head(model)
        self._decoder = cast("LlamaModel", decoder)
        # Adapters do not change the head, so it is copied once.
        self.head = fused_linear(head, ops=ops, dtype=self.dtype)
        self.copied_bytes = copy_bytes(model, self.dtype)
        self.release()

    def refresh(self) -> None:
        """Update the copy if the adapter has changed.

        Comparing it with the copied adapter takes milliseconds, so callers need not report changes.
        """
        adapters = active_lora_tensors(self._model)
        same = self._layers and adapters.keys() == self._seen.keys()
        if same and all(torch.equal(tensor, self._seen[key]) for key, tensor in adapters.items()):
            return
        self.release()  # free the old copy first
        what = self._ops, self.dtype
        self._layers = [FusedLayer(layer, *what) for layer in decoder_layers(self._decoder)]
        self._seen = {name: tensor.detach().clone() for name, tensor in adapters.items()}

    def release(self) -> None:
        """Drop the copied layers until the next `refresh`."""
        self._layers: list[FusedLayer] = []
        self._seen: dict[str, Tensor] = {}

    def forward(self, ids: Tensor, positions: Tensor, attend: AttentionFunction) -> Tensor:
        """Compute the last hidden states (B, T, hidden) of tokens and positions (B, T)."""
        x = self._decoder.embed_tokens(ids).to(self.dtype)
        # (B·T, …), so that a batch of any shape takes one matmul.
        rotary = [part.flatten(0, 1) for part in self._decoder.rotary_emb(x, positions)]
        shape, x = ids.shape, x.flatten(0, 1)
        for layer in self._layers:
            x = layer(x, shape, rotary, attend)
        final = self._decoder.norm
        weight = final.weight.to(self.dtype)
        return self._ops.rms_norm(x, weight, final.variance_epsilon).unflatten(0, shape)


def choose_weights(
    model: PreTrainedModel | PeftModel,
    merged: bool | None,
    ops: Ops,
    dtype: torch.dtype,
    share: float = 1.0,
) -> tuple[UnmergedWeights | MergedWeights, str]:
    """Choose the weights to sample with; return them and a description with the reason.

    Args:
        merged: None merges if the architecture has a fast path and the copy fits in half of the
            free memory.
        dtype: of a merged copy.
        share: fraction of the free memory that this sampler may use.

    Raises:
        UsageError: a merged copy was requested, and there is no fast path.
    """
    reason = "as asked" if merged is False else why_not_fused(model)
    if merged and reason:
        raise UsageError(
            f"--sampler merged cannot run this model: {reason}; use --sampler unmerged"
        )
    size, free = copy_bytes(model, dtype), share * available_memory(model.device.type)
    gb = f"{size / 2**30:.1f} GB"
    if merged is None and reason is None and size > free / 2:
        reason = f"a merged copy would take {gb}, {free / 2**30:.1f} GB are free"
    if reason:
        return UnmergedWeights(model), f"the model itself, adapter unmerged ({reason})"
    how = ", matmuls compiled" if ops.has_linear else ""
    if dtype != model.dtype:
        how = f" in {str(dtype).removeprefix('torch.')}{how}"
    return MergedWeights(model, ops, dtype), f"a merged copy of the weights ({gb}){how}"


@torch.no_grad()
def fused_linear(
    *layers: nn.Linear,
    ops: Ops,
    norm: LlamaRMSNorm | None = None,
    gated: bool = False,
    dtype: torch.dtype | None = None,
) -> LinearFunction:
    """Fuse linear layers of one input, with merged adapters and the norm before them, into one.

    Args:
        gated: compute silu(first(x)) · second(x) of two layers.
        dtype: to compute in, the same as that of `ops` (None: the layers').
    """
    has_bias = any(getattr(layer, "bias", None) is not None for layer in layers)
    parts = [[layer] for layer in layers] if gated else [layers]
    weights = [_joined_weight(part, norm) for part in parts]
    weights = [weight.to(dtype or weight.dtype) for weight in weights]
    biases = [_joined_bias(part, weights[0]) for part in parts] if has_bias else None
    return ops.linear(weights, biases, None if norm is None else norm.variance_epsilon)


def _joined_weight(layers: Sequence[nn.Linear], norm: LlamaRMSNorm | None) -> Tensor:
    """Return the weight (outputs of all, inputs), with adapters merged, times the norm's weight."""
    weights = [merged_weight(layer) for layer in layers]
    weight = torch.cat(weights) if len(weights) > 1 else weights[0]
    return weight if norm is None else weight * norm.weight


def _joined_bias(layers: Sequence[nn.Linear], weight: Tensor) -> Tensor:
    """Return the bias (outputs of all) in the weight's dtype, with zeros if a layer has none."""
    biases = [(getattr(layer, "bias", None), layer.out_features) for layer in layers]
    return torch.cat([weight.new_zeros(size) if b is None else b for b, size in biases]).to(
        weight.dtype
    )


def decoder_layers(decoder: PreTrainedModel) -> list[LlamaDecoderLayer]:
    """Return the layers of a decoder with a fast path: all FUSED_MODEL_TYPES are built alike."""
    return cast("list[LlamaDecoderLayer]", list(cast("LlamaModel", decoder).layers))


class FusedLayer:
    """One decoder layer of the Llama family, in as few passes over the activations as possible.

    When few rows are decoded, starting the threads of a pass costs more than its work. So q, k and
    v are one matmul, norm weights are multiplied into the projections that follow, and norms,
    residual sums and gating are fused into matmuls.
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
        # Qwen3 normalises each head's queries and keys.
        self.q_norm, self.k_norm = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
        self.index = attention.layer_idx
        self.scale, self.width = attention.scaling, attention.head_dim
        config = attention.config
        self.heads = [config.num_attention_heads, *[config.num_key_value_heads] * 2]

    def __call__(
        self, x: Tensor, shape: torch.Size, rotary: Sequence[Tensor], attend: AttentionFunction
    ) -> Tensor:
        """Apply the layer to x (B·T, hidden); `rotary` is cos and sin, (B·T, D)."""
        heads, rows = self.heads, x.shape[0]
        qkv = self.qkv(x).view(rows, -1, self.width)  # (B·T, heads, D)
        qk, v = qkv[:, : -heads[2]], qkv[:, -heads[2] :]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = qk.split(heads[:2], 1)
            qk = torch.cat([self._head_norm(q, self.q_norm), self._head_norm(k, self.k_norm)], 1)
        qk = self.ops.rotary_embedding(qk, *rotary)
        # Attention takes and returns (B, heads, T, D).
        q, k, v = (
            part.view(*shape, -1, self.width).transpose(1, 2)
            for part in (qk[:, : heads[0]], qk[:, heads[0] :], v)
        )
        attended = attend(self.index, q, k, v, self.scale).transpose(1, 2).reshape(rows, -1)
        x = self.out(attended, x)
        return self.down(self.gated(x), x)

    def _head_norm(self, x: Tensor, norm: LlamaRMSNorm) -> Tensor:
        """Apply the norm of each head: (B·T, heads, D)."""
        rows = x.reshape(-1, self.width)
        return self.ops.rms_norm(rows, norm.weight.to(x.dtype), norm.variance_epsilon).view(x.shape)


def sampling_dtype(model: PreTrainedModel | PeftModel, dtype: str = "auto") -> torch.dtype:
    """Choose the dtype of a merged copy: "auto" times a fused layer of this model.

    It is the model's own dtype with any other --dtype, on a GPU, or without a fast path. It is also
    the model's own if that was not measured to be the fastest for training: a user has chosen it.
    """
    return choose_sampling_dtype(model, dtype)[0]


def choose_sampling_dtype(
    model: PreTrainedModel | PeftModel, dtype: str
) -> tuple[torch.dtype, str]:
    """Return what `sampling_dtype` returns, and a short reason."""
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
