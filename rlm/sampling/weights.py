"""The two ways in which the sampler multiplies with the model's weights.

`ModelWeights` runs the model itself, adapter unmerged: any architecture, no extra memory.
`MergedWeights` runs a copy of base + adapter of its own, its projections fused and laid out for
the CPU's matrix products: the fast path of the Llama family. The model is never written.
Both leave attention to the cache, through the function `attend`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from rlm.config import UsageError
from rlm.models import active_adapters, decoder_and_head, merged_weight
from rlm.sampling.cache import Attend

FUSED_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


class ModelWeights:
    """The model as it is."""

    copied_bytes = 0  # while sampling, beside the model

    def __init__(self, model: PreTrainedModel) -> None:
        self._decoder, self.head = decoder_and_head(model)

    def refresh(self) -> None:
        """Nothing to do: these are the weights that training changes."""

    def release(self) -> None:
        """Nothing to do: these are needed for training."""

    def hidden(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Last hidden states (B, T, hidden) of tokens (B, T) at these positions (B, T)."""
        config = self._decoder.config
        usual = config._attn_implementation
        # The model is told to attend through `_through_cache`, and hands it this function.
        config._attn_implementation = "rlm_cache"
        _through_cache.attend = attend
        try:
            return self._decoder(
                input_ids=ids,
                position_ids=positions,
                # Four dimensions: taken as it is, no mask is built. The cache knows who sees whom.
                attention_mask=torch.zeros(len(ids), 1, 1, 1, device=ids.device),
                use_cache=False,
            ).last_hidden_state
        finally:
            config._attn_implementation = usual


def _through_cache(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """What transformers calls for attention; heads and tokens are swapped in its answer."""
    unsupported = [name for name in ("softcap", "s_aux") if options.get(name) is not None]
    if unsupported:
        raise UsageError(f"this model's attention needs {unsupported[0]}: unsupported")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = _through_cache.attend(module.layer_idx, query, key, value, scale)
    return out.transpose(1, 2), None


AttentionInterface.register("rlm_cache", _through_cache)


def why_not_fused(model: PreTrainedModel) -> str | None:
    """What keeps a model from the fast path; None if nothing does."""
    config = decoder_and_head(model)[0].config
    if config.model_type not in FUSED_FAMILIES:
        return f"{config.model_type} is not of the Llama family"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}"
    return None


def copy_bytes(model: PreTrainedModel) -> int:
    """What a merged copy of the layers takes; the head's, kept all the time, is not in it."""
    linear = [m for m in decoder_and_head(model)[0].modules() if isinstance(m, nn.Linear)]
    # From the shapes: 4-bit weights are stored packed.
    return sum(m.in_features * m.out_features for m in linear) * model.dtype.itemsize


class MergedWeights:
    """A fused copy of base + active adapters, in the model's number type."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._decoder, self._head = decoder_and_head(model)
        self.head = _linear(self._head)  # adapters do not reach it: copied once
        self.copied_bytes = copy_bytes(model)
        self.release()

    def refresh(self) -> None:
        """Bring the copy up to date, if the adapter has changed since.

        Compared with what was copied, which costs milliseconds, so that nobody can forget it.
        """
        adapters = active_adapters(self._model)
        if self._seen is not None and _same(adapters, self._seen):
            return
        self.release()  # the old copy goes first
        self._layers = [_Layer(layer) for layer in self._decoder.layers]
        self._seen = {name: tensor.detach().clone() for name, tensor in adapters.items()}

    def release(self) -> None:
        """Drop the copied layers until the next `refresh`."""
        self._layers: list[_Layer] = []
        self._seen: dict[str, Tensor] | None = None

    def hidden(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Last hidden states (B, T, hidden) of tokens (B, T) at these positions (B, T)."""
        x = self._decoder.embed_tokens(ids)
        cos, sin = self._decoder.rotary_emb(x, positions)  # (B, T, D)
        shape = ids.shape
        x = x.flatten(0, 1)  # (B·T, hidden): one matrix product whatever the batch looks like
        for i, layer in enumerate(self._layers):
            x = layer(i, x, shape, cos[:, :, None], sin[:, :, None], attend)
        return _norm(self._decoder.norm)(x).unflatten(0, shape)


class _Layer:
    """One decoder layer of the Llama family: q, k, v as one product, gate and up as one."""

    def __init__(self, layer: nn.Module) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.qkv = _linear(attention.q_proj, attention.k_proj, attention.v_proj)
        self.out = _linear(attention.o_proj)
        self.gate_up = _linear(mlp.gate_proj, mlp.up_proj)
        self.down = _linear(mlp.down_proj)
        self.before_attention = _norm(layer.input_layernorm)
        self.before_mlp = _norm(layer.post_attention_layernorm)
        # Qwen3 normalises each head's queries and keys.
        self.q_norm = _norm(attention.q_norm) if hasattr(attention, "q_norm") else None
        self.k_norm = _norm(attention.k_norm) if hasattr(attention, "k_norm") else None
        self.scale, self.width = attention.scaling, attention.head_dim
        config = attention.config
        self.heads = [config.num_attention_heads, *[config.num_key_value_heads] * 2]

    def __call__(
        self, i: int, x: Tensor, shape: torch.Size, cos: Tensor, sin: Tensor, attend: Attend
    ) -> Tensor:
        qkv = self.qkv(self.before_attention(x)).view(*shape, sum(self.heads), self.width)
        q, k, v = qkv.split(self.heads, 2)  # (B, T, heads, D)
        if self.q_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        attended = attend(i, q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), self.scale)
        x = x + self.out(attended.transpose(1, 2).reshape(len(x), -1))
        gate, up = self.gate_up(self.before_mlp(x)).chunk(2, -1)
        return x + self.down(F.silu(gate).mul_(up))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (Su et al., arXiv 2104.09864), halves paired as in Llama."""
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin


def _norm(module: nn.Module) -> Callable[[Tensor], Tensor]:
    weight, eps = module.weight, module.variance_epsilon
    return lambda x: F.rms_norm(x, weight.shape, weight, eps)


def _linear(*modules: nn.Module) -> Callable[[Tensor], Tensor]:
    """The product with one or several linear layers side by side, (B, in) → (B, out)."""
    weights = [merged_weight(module) for module in modules]
    weight = torch.cat(weights) if len(weights) > 1 else weights[0]
    biases = [getattr(module, "bias", None) for module in modules]
    bias = None
    if any(b is not None for b in biases):
        bias = torch.cat(
            [
                torch.zeros(m.out_features, dtype=weight.dtype, device=weight.device)
                if b is None
                else b
                for m, b in zip(modules, biases, strict=True)
            ]
        )
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return lambda x: F.linear(x, weight, bias)
    # oneDNN's own blocked layout. A row-major matrix is rearranged in every single product.
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous().detach(), PACKED_FOR_ROWS)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


PACKED_FOR_ROWS = 64  # a hint for the layout; any number of rows may be multiplied


def _same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(tensor, right[name]) for name, tensor in left.items()
    )
