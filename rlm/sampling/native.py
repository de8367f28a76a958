"""What stands between the products of a decoding step, and the drawing that ends it, compiled for
this CPU (decode.c).

A process compiles it when it first wants it, which takes a C compiler and half a second. Without
one, torch does the same in many small passes (cache.py, weights.py, draw.py): equal up to rounding,
and slower.
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

SOURCE = Path(__file__).with_name("decode.c")
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


class Unavailable(Exception):
    """Why nothing can be compiled here."""


@functools.cache
def compiled(dtype: torch.dtype, queries: int, width: int) -> Native:
    """decode.c for this number type and shape of a head.

    Args:
        queries: query heads per key-value head.
        width: numbers in a head.

    Raises:
        Unavailable: there is no compiler, or it refuses.
    """
    if dtype not in (torch.float32, torch.bfloat16):
        raise Unavailable(f"no code for {str(dtype).removeprefix('torch.')}")
    shape = [f"-DQUERIES={queries}", f"-DWIDTH={width}"]
    shape += ["-DBF16"] if dtype == torch.bfloat16 else []
    compiler = shlex.split(os.environ.get("CC") or "cc")
    with tempfile.TemporaryDirectory() as scratch:
        library = Path(scratch) / "decode.so"
        command = [*compiler, *FLAGS, *shape, "-shared", "-fPIC", "-o", str(library), str(SOURCE)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
            # It stays loaded when the file is gone. OpenMP's threads are torch's: its library is
            # in the process already.
            return Native(ctypes.CDLL(str(library)))
        except subprocess.CalledProcessError as error:
            lines = error.stderr.splitlines() or ["no reason given"]
            first = next((line for line in lines if "error" in line), lines[0])
            raise Unavailable(f"{compiler[0]} failed: {first}") from error
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Unavailable(str(error)) from error


class Native:
    """The functions of decode.c, for tensors."""

    def __init__(self, library: ctypes.CDLL) -> None:
        for name, signature in _SIGNATURES.items():
            getattr(library, name).argtypes = signature
        self._library = library

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
        logits, uniform = logits.contiguous(), uniform.double().contiguous()
        tokens, logprobs = torch.empty(len(logits), dtype=torch.long), torch.empty(len(logits))
        addresses = [tensor.data_ptr() for tensor in (uniform, tokens, logprobs)]
        cold, threads = temperature == 0, torch.get_num_threads()
        failed = self._library.draw(
            logits.data_ptr(), *logits.shape, temperature or 1.0, cold, *addresses, threads
        )
        return None if failed else (tokens, logprobs)


def _heads_together(rows: Tensor) -> Tensor:
    """(N, heads, D) whose heads lie side by side."""
    return rows if rows.stride()[1:] == (rows.shape[2], 1) else rows.contiguous()
