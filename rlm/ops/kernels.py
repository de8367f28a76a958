"""Calls the compiled C functions on tensors; `_SIGNATURES` lists their arguments.

products.c has the matmuls, logits.c sampling and scoring. decode.c has the other operations of a
decoding step, learn.c and attention.c those of a training pass.
Without a compiler, `TorchOps` computes the same in many small passes, with oneDNN's matmuls: equal
up to rounding, and slower.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlm.ops.build import BuildError, load_library
from rlm.ops.torch_ops import (
    VOCAB_BLOCK,
    AttentionFunction,
    LinearFunction,
    Store,
    TorchOps,
    packed_linear,
)

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PretrainedConfig, PreTrainedModel

ATTENTION_BLOCK = 16  # tokens; the same as TOKENS in attention.c

_P, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
# The argument types of each C function, except the last one: the number of threads.
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
}


class _Segment(ctypes.Structure):
    _fields_ = (
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("slots", ctypes.c_int64),
        ("tokens", ctypes.c_int64),
        ("slot", ctypes.c_void_p),
        ("length", ctypes.c_void_p),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        ("rows", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("parts", _Segment * 3),
    )


class _Attention(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("queries", "keys", "values", "hidden", "seen")),
        *((name, ctypes.c_int64) for name in ("batch", "tokens", "heads", "masks")),
        ("scale", ctypes.c_float),
    )


class _Product(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weights", "bias", "residual", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "inputs", "outputs", "gated", "normed")),
        ("epsilon", ctypes.c_float),
    )


def head_dim(config: PretrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def num_key_value_heads(config: PretrainedConfig) -> int:
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def ops_for(model: PreTrainedModel | PeftModel, dtype: torch.dtype | None = None) -> Ops:
    """Return the ops for a model of these shapes: compiled kernels on a CPU, else torch.

    Args:
        dtype: to compute in (None: the model's).
    """
    if model.device.type != "cpu":
        return TorchOps(f"no code for {model.device.type}", "matmuls on a GPU depend on it")
    config = model.config.get_text_config()
    queries = config.num_attention_heads // num_key_value_heads(config)
    return load_ops(dtype or model.dtype, queries, head_dim(config))


@functools.cache
def load_ops(dtype: torch.dtype, queries: int, head_dim: int) -> Ops:
    """Compile and load the kernels for a dtype and a head shape; return `TorchOps` if that fails.

    Args:
        queries: query heads per key-value head.
    """
    if dtype not in (torch.float32, torch.bfloat16):
        return TorchOps(f"no code for {str(dtype).removeprefix('torch.')}")
    macros = [f"QUERIES={queries}", f"WIDTH={head_dim}", f"DRAWN={VOCAB_BLOCK}"]
    if dtype == torch.bfloat16:
        macros.append("BF16")
    try:
        library = load_library(macros)
    except BuildError as error:
        return TorchOps(str(error))
    return Kernels(library, dtype, (queries, head_dim))


class Kernels:
    """The functions of the C files, for tensors on the CPU."""

    description = "kernels compiled"

    def __init__(
        self, library: ctypes.CDLL, dtype: torch.dtype, head_shape: tuple[int, int]
    ) -> None:
        self.dtype = dtype
        self._head_shape = head_shape  # query heads per key-value head, and the head width
        self._columns = library.block_columns()
        # Whether matmuls are compiled for this CPU and dtype.
        self.has_linear = self._columns > 0
        self.has_tiles = bool(library.uses_tiles())  # whether matmuls use AMX
        self._inputs_together = library.inputs_together()  # inputs whose weights are adjacent
        self.logit_bytes = dtype.itemsize  # per logit while sampling: no copy is made
        self._library = library
        for name, arguments in _SIGNATURES.items():
            if name != "linear" or self.has_linear:
                getattr(library, name).argtypes = (*arguments, ctypes.c_int)

    @property
    def batch_note(self) -> str | None:
        """Why a row's results may depend on other rows; None if they do not, bit for bit."""
        if self.has_linear:
            return None
        return (
            "matmuls are not compiled: this CPU has no fused multiply-add, or its system allows "
            "no AMX tiles"
        )

    def linear(
        self,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor] | None,
        epsilon: float | None = None,
    ) -> LinearFunction:
        """Make a linear layer's function: x (rows, inputs)[, residual] → (rows, outputs).

        It adds the residual (rows, outputs), if there is one.

        Args:
            weights: one or two (outputs, inputs), copied. Two give silu(first(x)) · second(x).
            biases: (outputs,) for each weight.
            epsilon: if given, each row of x is first divided by its root mean square.
        """
        if not self.has_linear or weights[0].shape[1] % self._inputs_together:
            return packed_linear(weights, biases, epsilon, self.rms_norm)
        kept = self._in_blocks(weights)
        shifts = None if biases is None else self._in_columns(biases).float()
        outputs, inputs = weights[0].shape
        what = _Product(inputs=inputs, outputs=outputs, gated=len(weights) == 2)
        what.weights, what.bias = kept.data_ptr(), None if shifts is None else shifts.data_ptr()
        what.normed, what.epsilon = epsilon is not None, epsilon or 0.0
        what.alive = kept, shifts  # `what` has only their addresses
        call = self._library.linear

        def multiply(x: Tensor, residual: Tensor | None = None) -> Tensor:
            assert x.dtype == self.dtype
            rows = x.shape[0]
            x, out = x.contiguous(), torch.empty(rows, outputs, dtype=x.dtype)
            added = None if residual is None else residual.contiguous()
            what.x, what.out, what.rows = x.data_ptr(), out.data_ptr(), rows
            what.residual = None if added is None else added.data_ptr()
            call(ctypes.byref(what), torch.get_num_threads())
            return out

        return multiply

    def _in_blocks(self, matrices: Sequence[Tensor]) -> Tensor:
        """Reshape matrices (outputs, inputs) to (blocks, matrices, inputs / n, columns, n), where n
        inputs are multiplied at once."""
        # These n numbers are moved as one integer.
        size = 8 * self._inputs_together * self.dtype.itemsize
        together = {16: torch.int16, 32: torch.int32}[size]
        groups = [matrix.contiguous().view(together) for matrix in matrices]
        blocks = self._in_columns(groups).transpose(-1, -2).contiguous()
        return blocks.view(self.dtype)

    def _in_columns(self, parts: Sequence[Tensor]) -> Tensor:
        """Reshape (outputs, …) to (blocks, parts, columns, …); the last block is zero-padded."""
        missing = -len(parts[0]) % self._columns
        whole = [torch.cat([part, part.new_zeros(missing, *part.shape[1:])]) for part in parts]
        return torch.stack([part.unflatten(0, (-1, self._columns)) for part in whole], 1)

    def new_store(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate a key or value cache, uninitialized: only what rows have written is read."""
        return torch.empty(*shape, dtype=dtype, device=device)

    def prefill_attention(
        self, stores: Sequence[Store], slots: Sequence[int], tokens: int, prefix: int
    ) -> AttentionFunction:
        """Make the attention that prefills prompts; see `TorchOps.prefill_attention`.

        It runs the decoding kernel, with each token of a prompt as a row. So a token's attention is
        summed in one order, wherever its shared prefix ends and whatever is prefilled with it.
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
    ) -> Callable[[int, Tensor, Tensor | None, Tensor | None, float], Tensor]:
        """Make the attention for rows with one new token; see `TorchOps.decode_attention`.

        There are three segments. If k and v are None, those of the new tokens are stored already.
        """
        numbers = [[torch.tensor(part) for part in parts] for parts in (slots, lengths)]
        step = _Step(rows=len(slots[0]), heads=stores[0][0].shape[2])
        step.alive = stores, numbers  # `step` has only their addresses
        for part, (keys, values), slot, length in zip(step.parts, stores, *numbers, strict=True):
            part.keys, part.values = keys.data_ptr(), values.data_ptr()
            part.slots, part.tokens = keys.shape[1], keys.shape[-1]
            part.slot, part.length = slot.data_ptr(), length.data_ptr()
        call = self._library.decode_attention

        def attend(
            layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, scale: float
        ) -> Tensor:
            out = torch.empty(q.shape, dtype=q.dtype)
            # One token per row: (N, heads, D), whose rows need not be contiguous.
            parts = [None if x is None else _heads_together(x[:, :, 0]) for x in (q, k, v)]
            rows = [
                value
                for x in parts
                for value in ((None, 0) if x is None else (x.data_ptr(), x.stride(0)))
            ]
            threads = torch.get_num_threads()
            if call(ctypes.byref(step), layer, float(scale), *rows, out.data_ptr(), threads):
                raise MemoryError("not enough memory for the attention scores")
            return out

        return attend

    def rotary_embedding(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Apply rotary position embedding to (rows, heads, D), in place; cos and sin (rows, D)."""
        x, cos, sin = _heads_together(x), cos.contiguous(), sin.contiguous()
        self._call("rotary_embedding", x, cos, sin, *x.shape[:2], x.stride(0))
        return x

    def sample(
        self, logits: Tensor, uniform: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor] | None:
        """Sample a token per row: ids (N,) and log-probabilities; None if a logit is not finite.

        Args:
            logits: (N, V), of the dtype that this was compiled for.
            uniform: (N,), in [0, 1).
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
        """Score each row: the target's log-probability and the entropy, two (M,) in fp32.

        Args:
            logits: (M, V), of the dtype that this was compiled for.
            gradients: overwrite the logits with the gradient of the log-probability, times the
                temperature.

        Raises:
            IndexError: a target is outside the vocabulary.
        """
        if len(targets) and not 0 <= targets.min() <= targets.max() < logits.shape[1]:
            raise IndexError(f"a target is not among {logits.shape[1]} tokens")
        assert logits.is_contiguous()
        assert logits.dtype == self.dtype
        targets = targets.contiguous()
        logprobs, entropy = torch.empty(2, len(logits))
        what = logits, *logits.shape, targets, float(temperature), gradients
        self._call("token_logprobs", *what, logprobs, entropy)
        return logprobs, entropy

    def rms_norm(self, x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
        """Compute weight · x / rms(x) for each row of (rows, width); None is a weight of 1."""
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
            k: (B, S, H, D), and v, contiguous.
            hidden: (B or 1, S of keys, S of queries) of bool, both S padded to whole blocks.
            seen: (B or 1, blocks of queries, blocks of keys) of bool: whether any key is visible.
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
        """Run `_call` after checking that all tensors are contiguous and of this dtype."""
        tensors = [value for value in values if isinstance(value, Tensor)]
        assert all(tensor.is_contiguous() and tensor.dtype == self.dtype for tensor in tensors)
        return self._call(name, *values)

    def _call(self, name: str, *values: object) -> int:
        """Call a C function with tensor addresses, numbers, and last the number of threads."""
        passed = [value.data_ptr() if isinstance(value, Tensor) else value for value in values]
        return getattr(self._library, name)(*passed, torch.get_num_threads())


def _heads_together(rows: Tensor) -> Tensor:
    """Return (N, heads, D) with the heads of a row contiguous in memory."""
    return rows if rows.stride()[1:] == (rows.shape[2], 1) else rows.contiguous()


Ops = TorchOps | Kernels
