"""Calls the compiled C functions on tensors; `_SIGNATURES` lists their arguments.

products.c contains the matmuls, and logits.c contains sampling and scoring. decode.c runs all
layers of a decoding step, and contains the operations between its matmuls. attention.c and learn.c
contain the operations between the matmuls of a training pass.

Without a compiler, `TorchOps` is used instead. Its results are equal up to rounding, but it is
slower because it makes many small passes and uses oneDNN's matmuls.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlm.ops.cpu import BuildError, load_library
from rlm.ops.torch_ops import (
    VOCAB_BLOCK,
    AttentionFunction,
    DecoderLayer,
    LinearFunction,
    Store,
    TorchOps,
    packed_linear,
)

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PretrainedConfig, PreTrainedModel

ATTENTION_BLOCK = 16  # tokens per block; equals TOKENS in attention.c

_P, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
# The argument types of each C function. The last argument, the number of threads, is left out.
_SIGNATURES = {
    "decode_attention": (_P, _I, _F, _P, _I, _P, _I, _P, _I, _P),
    "rotary_embedding": (_P, _P, _P, _I, _I, _I),
    "rms_norm": (_P, _P, _P, _I, _I, _F),
    "rms_norm_backward": (_P, _P, _P, _P, _I, _I, _F),
    "silu_and_mul": (_P, _P, _P, _I),
    "silu_and_mul_backward": (_P, _P, _P, _P, _P, _I),
    "attention_forward": (_P, _P),
    "attention_backward": (_P, _P, _P, _P, _P),
    "sample": (_P, _I, _I, _F, _I, _P, _P, _P),
    "token_logprobs": (_P, _I, _I, _P, _F, _I, _P, _P),
    "linear": (_P,),
    "decode_layers": (_P, _I, _P, _P, _P, _P),
}
_MATMULS = ("linear", "decode_layers")  # compiled only if products.c has matmuls for this CPU


class _Segment(ctypes.Structure):
    _fields_ = (
        *(("keys", _P), ("values", _P), ("slots", _I), ("tokens", _I)),
        *(("slot", _P), ("length", _P)),
    )


class _Step(ctypes.Structure):
    _fields_ = (("rows", _I), ("heads", _I), ("parts", _Segment * 3))


class _Attention(ctypes.Structure):
    _fields_ = (
        *((name, _P) for name in ("queries", "keys", "values", "hidden", "seen")),
        *((name, _I) for name in ("batch", "tokens", "heads", "masks")),
        ("scale", _F),
    )


class _Product(ctypes.Structure):
    _fields_ = (
        *((name, _P) for name in ("x", "weights", "bias", "residual", "out")),
        *((name, _I) for name in ("rows", "inputs", "outputs", "gated", "normed")),
        ("epsilon", _F),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _Product) for name in ("qkv", "out", "gated", "down")),
        *(("query_norm", _P), ("key_norm", _P), ("epsilon", _F), ("scale", _F)),
    )


def head_dim(config: PretrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def num_key_value_heads(config: PretrainedConfig) -> int:
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def ops_for(model: PreTrainedModel | PeftModel, dtype: torch.dtype | None = None) -> Ops:
    """Return the operations for a model: compiled kernels on a CPU, or else torch.

    Args:
        dtype: dtype of the computation; None selects the dtype of the model.
    """
    if model.device.type != "cpu":
        return TorchOps(
            "they run only on CPUs", "GPU matmuls may round differently for another batch size"
        )
    config = model.config.get_text_config()
    queries = config.num_attention_heads // num_key_value_heads(config)
    return load_ops(dtype or model.dtype, queries, head_dim(config))


@functools.cache
def load_ops(dtype: torch.dtype, queries: int, head_dim: int) -> Ops:
    """Compile and load the kernels for a dtype and a head shape; return `TorchOps` if that fails.

    Args:
        queries: number of query heads per key-value head.
    """
    if dtype not in (torch.float32, torch.bfloat16):
        return TorchOps(f"{str(dtype).removeprefix('torch.')} is not supported")
    macros = [f"QUERIES={queries}", f"WIDTH={head_dim}", f"DRAWN={VOCAB_BLOCK}"]
    if dtype == torch.bfloat16:
        macros.append("BF16")
    try:
        library = load_library(macros)
    except BuildError as error:
        return TorchOps(str(error))
    return Kernels(library, dtype, (queries, head_dim))


class Kernels:
    """Calls the functions of the C files on CPU tensors."""

    description = "kernels compiled"
    new_store = staticmethod(torch.empty)  # allocates a cache; unwritten entries are never used

    def __init__(
        self, library: ctypes.CDLL, dtype: torch.dtype, head_shape: tuple[int, int]
    ) -> None:
        self.dtype = dtype
        self._head_shape = head_shape  # query heads per key-value head, and the head width
        self._columns = library.block_columns()  # columns of a block of weights; 0 without matmuls
        # Whether matmuls are compiled for this CPU and dtype.
        self.has_linear = self._columns > 0
        self._inputs_together = library.inputs_together()  # inputs whose weights are adjacent
        self.logit_bytes = dtype.itemsize  # bytes per logit in sampling, which makes no copy
        self._library = library
        for name, arguments in _SIGNATURES.items():
            if name not in _MATMULS or self.has_linear:
                getattr(library, name).argtypes = (*arguments, ctypes.c_int)

    @property
    def batch_note(self) -> str | None:
        """The reason why a row's results may depend on other rows; None if they never do."""
        if self.has_linear:
            return None
        return (
            "matmuls are not compiled: this CPU has no fused multiply-add, or its system does "
            "not allow AMX tiles"
        )

    def linear(
        self,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor] | None,
        epsilon: float | None = None,
    ) -> LinearFunction:
        """Build the function of a linear layer, which maps x (rows, inputs) to (rows, outputs).

        If the function receives a residual (rows, outputs) as its second argument, it adds the
        residual to the result.

        Args:
            weights: one or two matrices (outputs, inputs), which are copied. With two matrices, the
                function computes silu(first(x)) · second(x).
            biases: a vector (outputs,) for each matrix.
            epsilon: if given, each row of x is first divided by its root mean square.
        """
        if not self.has_linear or weights[0].shape[1] % self._inputs_together:
            return packed_linear(weights, biases, epsilon, self.rms_norm)
        kept = self._in_blocks(weights)
        shifts = None
        if biases is not None:
            shifts = torch.stack([self._in_columns(bias) for bias in biases], 1).float()
        outputs, inputs = weights[0].shape
        what = _Product(inputs=inputs, outputs=outputs, gated=len(weights) == 2)
        what.weights, what.bias = kept.data_ptr(), None if shifts is None else shifts.data_ptr()
        what.normed, what.epsilon = epsilon is not None, epsilon or 0.0
        what.alive = kept, shifts  # `what` stores only the addresses of these tensors
        return _Linear(what, self._library.linear, self.dtype)

    def _in_blocks(self, matrices: Sequence[Tensor]) -> Tensor:
        """Rearrange matrices (outputs, inputs) into the blocks that the compiled matmul reads.

        The result is (blocks, matrices, inputs / n, columns, n), where n is `_inputs_together`.
        """
        # The n numbers of a group are moved as one integer.
        size = 8 * self._inputs_together * self.dtype.itemsize
        together = {16: torch.int16, 32: torch.int32}[size]
        groups = [self._in_columns(matrix.contiguous().view(together)) for matrix in matrices]
        return torch.stack([group.mT for group in groups], 1).view(self.dtype)

    def _in_columns(self, part: Tensor) -> Tensor:
        """Rearrange (outputs, …) to (blocks, columns, …), padded with zeros at the end."""
        if missing := -len(part) % self._columns:
            part = torch.cat([part, part.new_zeros(missing, *part.shape[1:])])
        return part.unflatten(0, (-1, self._columns))

    def prefill_attention(
        self, stores: Sequence[Store], slots: Sequence[int], tokens: int, prefix: int
    ) -> AttentionFunction:
        """Build the attention function that prefills prompts; see `TorchOps.prefill_attention`.

        The function runs the decoding kernel, with each token of a prompt as a row. Therefore the
        attention of a token is always summed in the same order, independent of the length of the
        shared prefix and of the other prompts that are prefilled.
        """
        before, (keys, values) = stores
        where, rows = torch.tensor(slots), len(slots) * tokens
        read = self.decode_attention(
            (before, before, (keys, values)),
            ([0] * rows, [0] * rows, [slot for slot in slots for _ in range(tokens)]),
            ([prefix] * rows, [0] * rows, [*range(1, tokens + 1)] * len(slots)),
        )

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            keys[layer][where, :, :, :tokens] = k.mT
            values[layer][where, :, :tokens] = v
            queries = q.transpose(1, 2).flatten(0, 1)[:, :, None]  # (B·T, heads, 1, D)
            out = read(layer, queries, None, None, scale)
            return out.view(len(slots), tokens, *out.shape[1:2], -1).transpose(1, 2)

        return attend

    def decode_attention(
        self,
        stores: Sequence[Store],
        slots: Sequence[Sequence[int]],
        lengths: Sequence[Sequence[int]],
    ) -> DecodeAttention:
        """Build the attention function for decoding; see `TorchOps.decode_attention`.

        There must be three segments. The attention function may be called with None for k and v if
        the keys and values of the new tokens are already in the cache.
        """
        numbers = [[torch.tensor(part) for part in parts] for parts in (slots, lengths)]
        step = _Step(rows=len(slots[0]), heads=stores[0][0].shape[2])
        step.alive = stores, numbers  # `step` stores only the addresses of these tensors
        for part, (keys, values), slot, length in zip(step.parts, stores, *numbers, strict=True):
            part.keys, part.values = keys.data_ptr(), values.data_ptr()
            part.slots, part.tokens = keys.shape[1], keys.shape[-1]
            part.slot, part.length = slot.data_ptr(), length.data_ptr()
        return DecodeAttention(step, self._head_shape, self._library.decode_attention, self.dtype)

    def decode_layers(self, layers: Sequence[DecoderLayer]) -> DecodeLayers | None:
        """Build the function that runs all layers of a decoding step; see `DecodeLayers`.

        The result is None if the matmuls of a layer are not compiled.
        """
        table = (_Layer * len(layers))()
        for row, layer in zip(table, layers, strict=True):
            for name in ("qkv", "out", "gated", "down"):
                linear = getattr(layer, name)
                if not isinstance(linear, _Linear):
                    return None
                setattr(row, name, linear.product)
            row.scale = layer.scale
            if layer.head_norms:
                (query, row.epsilon), (key, _) = layer.head_norms
                row.query_norm, row.key_norm = query.data_ptr(), key.data_ptr()
        return DecodeLayers(table, layers, self._library.decode_layers, self.dtype)

    def rotary_embedding(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Apply rotary position embedding, in place if the heads of each row are contiguous.

        Args:
            x: (rows, heads, D).
            cos, sin: (rows, D).
        """
        x, cos, sin = _heads_together(x), cos.contiguous(), sin.contiguous()
        self._call("rotary_embedding", x, cos, sin, *x.shape[:2], x.stride(0))
        return x

    def sample(
        self, logits: Tensor, uniform: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor] | None:
        """Sample one token per row.

        Args:
            logits: (N, V), in the dtype for which the kernels were compiled.
            uniform: random numbers (N,) in [0, 1).

        Returns:
            The token ids (N,) and their log-probabilities (N,), or None if a row has a logit of NaN
            or +inf, or only logits of -inf. A token with the logit -inf is never sampled.
        """
        assert logits.dtype == self.dtype
        logits, uniform = logits.contiguous(), uniform.double().contiguous()
        tokens, logprobs = torch.empty(len(logits), dtype=torch.long), torch.empty(len(logits))
        how = float(temperature or 1), temperature == 0
        failed = self._call("sample", logits, *logits.shape, *how, uniform, tokens, logprobs)
        return None if failed else (tokens, logprobs)

    def token_logprobs(
        self, logits: Tensor, targets: Tensor, temperature: float, gradients: bool
    ) -> tuple[Tensor, Tensor]:
        """Compute the log-probability of each row's target, and the entropy of each row.

        Args:
            logits: (M, V), in the dtype for which the kernels were compiled.
            gradients: whether to overwrite the logits with the gradient of the log-probability,
                multiplied by the temperature.

        Returns:
            The log-probabilities (M,) and the entropies (M,), in fp32.

        Raises:
            IndexError: a target is outside the vocabulary.
        """
        if len(targets) and not 0 <= targets.min() <= targets.max() < logits.shape[1]:
            raise IndexError(f"a target is outside the vocabulary of {logits.shape[1]} tokens")
        assert logits.is_contiguous()
        assert logits.dtype == self.dtype
        targets = targets.contiguous()
        logprobs, entropy = torch.empty(2, len(logits))
        what = logits, *logits.shape, targets, float(temperature), gradients
        self._call("token_logprobs", *what, logprobs, entropy)
        return logprobs, entropy

    def rms_norm(self, x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
        """Compute weight · x / rms(x) for each row of (rows, width); a weight of None means 1."""
        x = x.contiguous()
        out = torch.empty_like(x)
        self._pass("rms_norm", x, weight, out, *x.shape, float(epsilon))
        return out

    def rms_norm_backward(
        self, x: Tensor, weight: Tensor, epsilon: float, grad_out: Tensor
    ) -> Tensor:
        """Compute the gradient of x through `rms_norm` from the gradient of its output."""
        grad_x = torch.empty_like(x)
        self._pass("rms_norm_backward", x, weight, grad_out, grad_x, *x.shape, float(epsilon))
        return grad_x

    def silu_and_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """Compute silu(gate) · up, elementwise."""
        out = torch.empty_like(gate)
        self._pass("silu_and_mul", gate, up, out, gate.numel())
        return out

    def silu_and_mul_backward(
        self, gate: Tensor, up: Tensor, grad_out: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute the gradients of gate and up from the gradient of `silu_and_mul`'s output."""
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        self._pass("silu_and_mul_backward", gate, up, grad_out, grad_gate, grad_up, gate.numel())
        return grad_gate, grad_up

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, seen: Tensor, scale: float
    ) -> Tensor:
        """Compute softmax(scale · q kᵀ) v over the keys that are not hidden, in the shape of q.

        Args:
            q: (B, S, H·Q, D), contiguous.
            k, v: (B, S, H, D), contiguous.
            hidden: whether a key is hidden from a query, (B or 1, keys, queries) of bool, with
                keys and queries padded to whole blocks.
            seen: whether any key of a block is visible to any query of a block, (B or 1, query
                blocks, key blocks) of bool.
        """
        out = torch.empty_like(q)
        self._attend_all("attention_forward", (q, k, v), hidden, seen, scale, out)
        return out

    def attention_backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        hidden: Tensor,
        seen: Tensor,
        scale: float,
        grad_out: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the gradients of q, k and v from the gradient of `attention`'s output."""
        grad_q, grad_k, grad_v = (torch.empty_like(part) for part in (q, k, v))
        tensors = grad_out, grad_q, grad_k, grad_v
        self._attend_all("attention_backward", (q, k, v), hidden, seen, scale, *tensors)
        return grad_q, grad_k, grad_v

    def _attend_all(
        self,
        name: str,
        qkv: Sequence[Tensor],
        hidden: Tensor,
        seen: Tensor,
        scale: float,
        *others: Tensor,
    ) -> None:
        parts = (*qkv, hidden, seen)
        assert all(part.is_contiguous() for part in (*parts, *others))
        assert all(part.dtype == self.dtype for part in (*qkv, *others))
        assert hidden.shape[-1] == seen.shape[-1] * ATTENTION_BLOCK >= qkv[0].shape[1]
        (*_, heads, width), (*_, shared, _) = qkv[0].shape, qkv[1].shape
        assert self._head_shape == (heads // shared, width)
        addresses, sizes = (part.data_ptr() for part in parts), qkv[1].shape[:3]
        what = _Attention(*addresses, *sizes, len(hidden), scale)
        if self._call(name, ctypes.byref(what), *others):
            raise MemoryError("not enough memory for the attention scores")

    def _pass(self, name: str, *values: Tensor | float | None) -> int:
        """Check that all tensors are contiguous and have the right dtype, then run `_call`."""
        tensors = [value for value in values if isinstance(value, Tensor)]
        assert all(tensor.is_contiguous() and tensor.dtype == self.dtype for tensor in tensors)
        return self._call(name, *values)

    def _call(self, name: str, *values: object) -> int:
        """Call a C function with tensor addresses, numbers and, at the end, the thread count."""
        passed = [value.data_ptr() if isinstance(value, Tensor) else value for value in values]
        return getattr(self._library, name)(*passed, torch.get_num_threads())


class _Linear:
    """The function of a linear layer; see `Kernels.linear`."""

    def __init__(self, product: _Product, call: Callable[..., int], dtype: torch.dtype) -> None:
        self.product, self._call, self._dtype = product, call, dtype

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        assert x.dtype == self._dtype
        what, rows = self.product, x.shape[0]
        x, out = x.contiguous(), torch.empty(rows, what.outputs, dtype=x.dtype)
        added = None if residual is None else residual.contiguous()
        what.x, what.out, what.rows = x.data_ptr(), out.data_ptr(), rows
        what.residual = None if added is None else added.data_ptr()
        self._call(ctypes.byref(what), torch.get_num_threads())
        return out


class DecodeAttention:
    """The attention function of a decoding step; see `Kernels.decode_attention`."""

    def __init__(
        self,
        step: _Step,
        head_shape: tuple[int, int],
        call: Callable[..., int],
        dtype: torch.dtype,
    ) -> None:
        self.step, self._call, self._dtype = step, call, dtype
        queries, width = head_shape
        counts = step.heads * queries, step.heads, step.heads
        self._expected = [(heads, 1, width) for heads in counts]

    def __call__(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, scale: float
    ) -> Tensor:
        for x, shape in zip((q, k, v), self._expected, strict=True):
            if x is not None and (x.shape[1:] != shape or x.dtype != self._dtype):
                raise ValueError(
                    f"a layer's attention has heads of shape {(*x.shape[1:],)} in {x.dtype}, "
                    f"but the kernels are compiled for {shape} in {self._dtype}"
                )
        out = torch.empty(q.shape, dtype=q.dtype)
        # There is one token per row: (N, heads, D). The rows need not be contiguous.
        parts = [None if x is None else _heads_together(x[:, :, 0]) for x in (q, k, v)]
        rows = [
            value
            for x in parts
            for value in ((None, 0) if x is None else (x.data_ptr(), x.stride(0)))
        ]
        threads = torch.get_num_threads()
        step = ctypes.byref(self.step)
        if self._call(step, layer, float(scale), *rows, out.data_ptr(), threads):
            raise MemoryError("not enough memory for the attention scores")
        return out


class DecodeLayers:
    """Runs all layers of a decoding step in one call of C code."""

    def __init__(
        self,
        table: ctypes.Array[_Layer],
        layers: Sequence[DecoderLayer],
        call: Callable[..., int],
        dtype: torch.dtype,
    ) -> None:
        self._table, self._call, self._dtype = table, call, dtype
        self._layers = layers  # the table stores only the addresses of their tensors

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, attention: DecodeAttention) -> Tensor:
        """Return the output of the last layer.

        Args:
            x: the embeddings of the new tokens, (rows, hidden), which are overwritten.
            cos, sin: the rotary embedding of each row, (rows, D).
        """
        x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
        assert x.dtype == cos.dtype == sin.dtype == self._dtype
        assert len(x) == len(cos) == len(sin) == attention.step.rows
        addresses = (tensor.data_ptr() for tensor in (x, cos, sin))
        threads, step = torch.get_num_threads(), ctypes.byref(attention.step)
        if self._call(self._table, len(self._table), step, *addresses, threads):
            raise MemoryError("not enough memory for a decoding step")
        return x


def _heads_together(rows: Tensor) -> Tensor:
    """Return rows (N, heads, D) in which the heads of each row are contiguous in memory."""
    return rows if rows.stride()[1:] == (rows.shape[2], 1) else rows.contiguous()


Ops = TorchOps | Kernels
