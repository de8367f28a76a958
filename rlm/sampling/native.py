"""What is compiled for this CPU: what stands between the products of a decoding step (decode.c)
and of the learning pass (learn.c), the drawing and scoring of tokens (logits.c), and the decoding
step's products where the CPU multiplies pairs of bf16 numbers (products.c).

A process compiles them when it first wants them, which takes a C compiler and a second. Without
one, torch does the same in many small passes (cache.py, draw.py, rlm/logprobs.py, rlm/attention.py)
and oneDNN the products (products.py): equal up to rounding, and slower.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlm.models import head_width, key_value_heads
from rlm.sampling.draw import BLOCK

NAMES = ("decode.c", "learn.c", "logits.c", "products.c")
SOURCES = [Path(__file__).with_name(name) for name in NAMES]
# Nobody looks at errno or floating-point traps, so loops over conversions may become vectors.
FLAGS = ("-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math")

_POINTER, _INTEGER, _FLOAT, _THREADS = (
    ctypes.c_void_p,
    ctypes.c_int64,
    ctypes.c_float,
    ctypes.c_int,
)
_SIGNATURES = {
    "attend": (
        *(_POINTER, _INTEGER, _FLOAT),
        *(_POINTER, _INTEGER) * 3,  # queries, keys, values, and how far apart their rows are
        *(_POINTER, _THREADS),
    ),
    "unit": (_POINTER, _POINTER, _INTEGER, _INTEGER, _FLOAT, _THREADS),
    "rotate": (_POINTER, _POINTER, _POINTER, _INTEGER, _INTEGER, _INTEGER, _THREADS),
    "silu": (_POINTER, _INTEGER, _THREADS),
    "draw": (
        *(_POINTER, _INTEGER, _INTEGER, _FLOAT, _THREADS),
        *(_POINTER, _POINTER, _POINTER, _THREADS),
    ),
    "score_targets": (
        *(_POINTER, _INTEGER, _INTEGER, _POINTER, _FLOAT, _THREADS),
        *(_POINTER, _POINTER, _THREADS),
    ),
    "norm": (_POINTER, _POINTER, _POINTER, _INTEGER, _INTEGER, _FLOAT, _THREADS),
    "norm_back": (*[_POINTER] * 4, _INTEGER, _INTEGER, _FLOAT, _THREADS),
    "gating": (_POINTER, _POINTER, _POINTER, _INTEGER, _THREADS),
    "gating_back": (*[_POINTER] * 5, _INTEGER, _THREADS),
    "soften": (_POINTER, _POINTER, _INTEGER, _INTEGER, _INTEGER, _THREADS),
    "multiply": (_POINTER, _THREADS),
}


class _Segment(ctypes.Structure):
    _fields_ = (
        ("keys", _POINTER),
        ("values", _POINTER),
        ("slots", _INTEGER),
        ("tokens", _INTEGER),
        ("slot", _POINTER),
        ("length", _POINTER),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        ("rows", _INTEGER),
        ("heads", _INTEGER),
        ("parts", _Segment * 3),
    )


class _Product(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("x", "weights", "bias", "residual", "out")),
        *((name, _INTEGER) for name in ("rows", "inputs", "outputs", "gated", "normed")),
        ("epsilon", _FLOAT),
    )


class Unavailable(Exception):
    """Why nothing can be compiled here."""


def compiled_for(model: PreTrainedModel) -> Native | None:
    """What is compiled for a model; None where torch does it all."""
    try:
        return compile_for(model)
    except Unavailable:
        return None


def compile_for(model: PreTrainedModel) -> Native:
    """
    Raises:
        Unavailable: the model is not on a CPU, or as in `compiled`.
    """
    if model.device.type != "cpu":
        raise Unavailable(f"no code for {model.device.type}")
    config = model.config.get_text_config()
    queries = config.num_attention_heads // key_value_heads(config)
    return compiled(model.dtype, queries, head_width(config))


def compiled(dtype: torch.dtype, queries: int, width: int) -> Native:
    """All of it for this number type and shape of a head.

    Args:
        queries: query heads per key-value head.
        width: numbers in a head.

    Raises:
        Unavailable: there is no compiler, or it refuses.
    """
    built = _build(dtype, queries, width)
    if isinstance(built, str):
        raise Unavailable(built)
    return built


@functools.cache
def _build(dtype: torch.dtype, queries: int, width: int) -> Native | str:
    """The code, or why there is none: tried once in a process."""
    if dtype not in (torch.float32, torch.bfloat16):
        return f"no code for {str(dtype).removeprefix('torch.')}"
    shape = [f"-DQUERIES={queries}", f"-DWIDTH={width}", f"-DDRAWN={BLOCK}"]
    shape += ["-DBF16"] if dtype == torch.bfloat16 else []
    compiler = shlex.split(os.environ.get("CC") or "cc")
    with tempfile.TemporaryDirectory() as scratch:
        library = Path(scratch) / "native.so"
        command = [*compiler, *FLAGS, *shape, "-shared", "-fPIC", "-o", str(library)]
        command += [*map(str, SOURCES), "-lm"]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
            # It stays loaded when the file is gone. OpenMP's threads are torch's: its library is
            # in the process already.
            return Native(ctypes.CDLL(str(library)), dtype)
        except subprocess.CalledProcessError as error:
            lines = error.stderr.splitlines() or ["no reason given"]
            first = next((line for line in lines if "error" in line), lines[0])
            return f"{compiler[0]} failed: {first}"
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)


class Native:
    """The functions of the C files, for tensors."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._columns = library.block_columns()
        for name, signature in _SIGNATURES.items():
            if name != "multiply" or self.multiplies:
                getattr(library, name).argtypes = signature
        self._library = library

    @property
    def multiplies(self) -> bool:
        """Whether products are compiled for this CPU and number type."""
        return self._columns > 0

    def product(
        self,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        epsilon: float | None = None,
    ) -> Callable[..., Tensor]:
        """A linear layer: x (rows, inputs) and, if it is to be added, a residual (rows, outputs) →
        (rows, outputs).

        Args:
            weights: (outputs, inputs), copied; of a gate and of what its SiLU gates, if two.
            biases: (outputs,) of each, or None.
            epsilon: if given, rows are divided by their root mean square first.
        """
        kept, shifts = self._in_blocks(weights), None
        if any(bias is not None for bias in biases):
            zero = weights[0].new_zeros(len(weights[0]))
            shifts = self._in_columns([zero if bias is None else bias for bias in biases]).float()
        outputs, inputs = weights[0].shape
        what = _Product(inputs=inputs, outputs=outputs, gated=len(weights) == 2)
        what.weights, what.bias = kept.data_ptr(), shifts.data_ptr() if shifts is not None else None
        what.normed, what.epsilon = epsilon is not None, epsilon or 0.0
        what.alive = kept, shifts  # it holds their addresses

        def multiply(x: Tensor, residual: Tensor | None = None) -> Tensor:
            assert x.dtype == self.dtype
            rows = x.shape[0]
            x, out = x.contiguous(), torch.empty(rows, outputs, dtype=x.dtype)
            added = None if residual is None else residual.contiguous()
            what.x, what.out, what.rows = x.data_ptr(), out.data_ptr(), rows
            what.residual = None if added is None else added.data_ptr()
            self._library.multiply(ctypes.byref(what), torch.get_num_threads())
            return out

        return multiply

    def _in_blocks(self, matrices: Sequence[Tensor]) -> Tensor:
        """Matrices (outputs, inputs) as (blocks, matrices, inputs / 2, columns, 2)."""
        # Two inputs are moved as one number of 32 bits.
        pairs = [matrix.contiguous().view(torch.int32) for matrix in matrices]
        blocks = self._in_columns(pairs).transpose(-1, -2).contiguous()
        return blocks.view(matrices[0].dtype)

    def _in_columns(self, parts: Sequence[Tensor]) -> Tensor:
        """(outputs, …) each, as (blocks, parts, columns, …); zeros fill up the last block."""
        missing = -len(parts[0]) % self._columns
        whole = [torch.cat([part, part.new_zeros(missing, *part.shape[1:])]) for part in parts]
        return torch.stack([part.unflatten(0, (-1, self._columns)) for part in whole], 1)

    def decode(
        self,
        stores: Sequence[tuple[Tensor, Tensor]],
        slots: Sequence[Sequence[int]],
        lengths: Sequence[Sequence[int]],
    ) -> Callable[[int, Tensor, Tensor, Tensor, float], Tensor]:
        """The attention of `Cache.decode`.

        Args:
            stores: keys (L, slots, H, D, T) and values (L, slots, H, T, D) of each segment; the
                new token's are written to the last, at its length less one.
            slots: in each segment, where each row reads.
            lengths: in each segment, how many tokens each row reads.
        """
        numbers = [[torch.tensor(part) for part in parts] for parts in (slots, lengths)]
        step = _Step(rows=len(slots[0]), heads=stores[0][0].shape[2])
        step.alive = stores, numbers  # it holds their addresses
        for part, (keys, values), slot, length in zip(step.parts, stores, *numbers, strict=True):
            part.keys, part.values = keys.data_ptr(), values.data_ptr()
            part.slots, part.tokens = keys.shape[1], keys.shape[-1]
            part.slot, part.length = slot.data_ptr(), length.data_ptr()

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            out = torch.empty(q.shape, dtype=q.dtype)
            # One token a row: what is left is (N, heads, D), of which rows may lie apart.
            parts = [_heads_together(part[:, :, 0]) for part in (q, k, v)]
            tensors = [number for part in parts for number in (part.data_ptr(), part.stride(0))]
            threads = torch.get_num_threads()
            if self._library.attend(
                ctypes.byref(step), layer, scale, *tensors, out.data_ptr(), threads
            ):
                raise MemoryError("no memory for the scores of attention")
            return out

        return attend

    def unit(self, x: Tensor, epsilon: float) -> Tensor:
        """x / rms(x) of each row of (rows, width)."""
        x, out = x.contiguous(), torch.empty(x.shape, dtype=x.dtype)
        threads = torch.get_num_threads()
        self._library.unit(x.data_ptr(), out.data_ptr(), *x.shape, epsilon, threads)
        return out

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotary position embedding of (rows, heads, D), in place; cos and sin (rows, D)."""
        x, cos, sin = _heads_together(x), cos.contiguous(), sin.contiguous()
        addresses = [tensor.data_ptr() for tensor in (x, cos, sin)]
        self._library.rotate(*addresses, *x.shape[:2], x.stride(0), torch.get_num_threads())
        return x

    def silu(self, x: Tensor) -> Tensor:
        """x times its logistic function, in place."""
        assert x.is_contiguous()
        self._library.silu(x.data_ptr(), x.numel(), torch.get_num_threads())
        return x

    def draw(
        self, logits: Tensor, uniform: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor] | None:
        """`rlm.sampling.draw.draw` without top-p and top-k; None if a logit is not finite.

        Args:
            logits: (N, V), of the number type that this was compiled for.
            uniform: (N,), in [0, 1).
        """
        assert logits.dtype == self.dtype
        logits, uniform = logits.contiguous(), uniform.double().contiguous()
        tokens, logprobs = torch.empty(len(logits), dtype=torch.long), torch.empty(len(logits))
        addresses = [tensor.data_ptr() for tensor in (uniform, tokens, logprobs)]
        cold, threads = temperature == 0, torch.get_num_threads()
        failed = self._library.draw(
            logits.data_ptr(), *logits.shape, temperature or 1.0, cold, *addresses, threads
        )
        return None if failed else (tokens, logprobs)

    def score(
        self, logits: Tensor, targets: Tensor, temperature: float, slopes: bool
    ) -> tuple[Tensor, Tensor]:
        """Of each row, the target's log-probability and the entropy: two (M,) in fp32.

        Args:
            logits: (M, V), of the number type that this was compiled for.
            slopes: overwrite the logits by the derivatives of the log-probability by them, times
                the temperature.

        Raises:
            IndexError: a target is no token of the vocabulary.
        """
        if len(targets) and not 0 <= targets.min() <= targets.max() < logits.shape[1]:
            raise IndexError(f"a target is not among {logits.shape[1]} tokens")
        assert logits.is_contiguous()
        assert logits.dtype == self.dtype
        targets = targets.contiguous()
        logprobs, entropy = torch.empty(2, len(logits))
        self._library.score_targets(
            *(logits.data_ptr(), *logits.shape, targets.data_ptr(), temperature, slopes),
            *(logprobs.data_ptr(), entropy.data_ptr(), torch.get_num_threads()),
        )
        return logprobs, entropy

    def norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """weight · x / rms(x) of each row of (rows, width)."""
        out = torch.empty_like(x)
        self._call("norm", x, weight, out, *x.shape, epsilon)
        return out

    def norm_back(self, x: Tensor, weight: Tensor, epsilon: float, by_out: Tensor) -> Tensor:
        """The gradient of `norm` by x, from the one by what it gave."""
        by_x = torch.empty_like(x)
        self._call("norm_back", x, weight, by_out, by_x, *x.shape, epsilon)
        return by_x

    def gating(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) · up, elementwise."""
        out = torch.empty_like(gate)
        self._call("gating", gate, up, out, gate.numel())
        return out

    def gating_back(self, gate: Tensor, up: Tensor, by_out: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of `gating` by gate and up, from the one by what it gave."""
        by_gate, by_up = torch.empty_like(gate), torch.empty_like(up)
        self._call("gating_back", gate, up, by_out, by_gate, by_up, gate.numel())
        return by_gate, by_up

    def soften(self, scores: Tensor, mask: Tensor) -> Tensor:
        """softmax(scores + mask) of rows of (…, rows, columns), in place; mask (rows, columns)."""
        rows, columns = mask.shape
        if self._call("soften", scores, mask, scores.numel() // mask.numel(), rows, columns):
            raise MemoryError("no memory for a row of attention")
        return scores

    def _call(self, name: str, *values: Tensor | float) -> int | None:
        """A function of learn.c: contiguous tensors of this number type, then numbers."""
        tensors = [value for value in values if isinstance(value, Tensor)]
        assert all(tensor.is_contiguous() and tensor.dtype == self.dtype for tensor in tensors)
        numbers = values[len(tensors) :]
        addresses = [tensor.data_ptr() for tensor in tensors]
        return getattr(self._library, name)(*addresses, *numbers, torch.get_num_threads())


def _heads_together(rows: Tensor) -> Tensor:
    """(N, heads, D) whose heads lie side by side."""
    return rows if rows.stride()[1:] == (rows.shape[2], 1) else rows.contiguous()
