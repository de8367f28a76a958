"""Simulates NVIDIA GPUs, so that tests can run the code for GPUs on a machine without one.

Everything is computed on the CPU. `torch.cuda` answers as if there were such GPUs. A tensor that is
moved to "cuda" reports this device, and so do all tensors computed from it. As on a real GPU, an
error is raised for mixed devices, for `.numpy()` of a GPU tensor, for a GPU that does not exist and
for more bytes than a GPU has. Speed, kernels and their rounding, streams, Triton, fragmentation and
NCCL (replaced by gloo) are not simulated.

The GPU of a tensor is an attribute of its storage, which all views share and which exists as long
as the memory. A function mode removes "cuda" from calls in Python. A dispatch mode passes the
attribute on to results, even in the backward pass.
"""

from __future__ import annotations

import contextlib
import threading
import types
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CONTEXT = 2**29  # bytes of GPU memory that CUDA's context and the libraries use
REAL_DEVICE, aten = Tensor.device, torch.ops.aten
KERNEL = threading.local()  # `runs` is set during kernels in Python, which must see CPU tensors
# Operations that may mix devices: copies, and operations whose indices may be on the CPU.
MAY_MIX = {aten.copy_, aten._to_copy, aten.set_, aten.lift_fresh, aten.index, aten.index_put_}
MAY_MIX |= {aten.index_put, aten._index_put_impl_, aten._unsafe_index}
MOVES = {"to", "cuda", "cpu"}  # methods whose first argument may name a device
NO_OPERATIONS = (
    "_lazy_init empty_cache synchronize manual_seed manual_seed_all ipc_collect "
    "reset_peak_memory_stats set_rng_state_all"
)


class Cards:
    """The simulated GPUs and the memory that is allocated on them."""

    def __init__(self, gigabytes: float, capability: tuple[int, int], count: int) -> None:
        self.total, self.capability, self.count = int(gigabytes * 2**30), capability, count
        self.name = "pretended sm_{}{}".format(*capability)
        self.current = 0
        self.allocated, self.peak = [0] * count, [0] * count  # bytes on each GPU
        self.random_state = torch.Generator().get_state()  # of the GPUs' generator

    def parse(self, device: Any) -> torch.device | None:
        """Return the GPU that an argument names, or None if it names no GPU."""
        if isinstance(device, str) and device.split(":")[0] == "cuda":
            device = torch.device(device)
        if not isinstance(device, torch.device) or device.type != "cuda":
            return None
        index = self.current if device.index is None else device.index
        if index >= self.count:
            raise RuntimeError(f"CUDA error: invalid device ordinal ({index})")
        return torch.device("cuda", index)

    def index(self, device: Any = None) -> int:
        """Return the number of the GPU that an argument of a function in torch.cuda names."""
        device = torch.device("cuda", device) if isinstance(device, int) else device
        return self.parse(device or "cuda").index

    def put(self, tensor: Tensor, device: torch.device | None) -> None:
        """Mark a tensor's memory as that of a GPU (None: of the CPU)."""
        storage = tensor.untyped_storage()
        if old := storage.__dict__.pop("pretended", None):
            old[1]()  # frees the bytes on the old GPU
        if device is None:
            return
        index, size = device.index, storage.nbytes()
        self._add(index, size)
        self.peak[index] = max(self.peak[index], self.allocated[index])
        storage.pretended = device, weakref.finalize(storage, self._add, index, -size)
        if self.allocated[index] > self.total - CONTEXT:
            message = f"CUDA out of memory. Tried to allocate {size} bytes. GPU {index}"
            raise torch.OutOfMemoryError(message)

    def _add(self, index: int, size: int) -> None:
        self.allocated[index] += size

    def free(self, device: Any = None) -> int:
        return max(0, self.total - CONTEXT - self.allocated[self.index(device)])


def card_of(tensor: Tensor) -> torch.device | None:
    """Return the GPU that a tensor is on, or None if it is on the CPU."""
    return tensor.untyped_storage().__dict__.get("pretended", (None,))[0]


class _Arguments(TorchFunctionMode):
    """Removes CUDA devices from calls in Python, and marks the results."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        args, kwargs, cards = list(args), dict(kwargs or {}), self.cards
        name = getattr(func, "__name__", "")
        if name == "_parse_to":  # called by Module.to, which then moves each tensor
            return func(*(torch.device("cuda", a) if type(a) is int else a for a in args), **kwargs)
        if func is torch.device and type(args[0]) is int:  # the number of a GPU
            return torch.device("cuda", args[0])
        if name in ("numpy", "__array__") and card_of(args[0]):
            raise TypeError(f"can't convert {card_of(args[0])} device type tensor to numpy")
        kwargs.pop("pin_memory", None)
        if name == "pin_memory":  # needs a driver if torch is built with CUDA
            return args[0]
        if name == "cuda":
            func, args = Tensor.to, [args[0], torch.device("cuda", cards.index(*args[1:2]))]
        target, said = None, name == "cpu"  # `said` is whether the call names any device
        if name == "to" and len(args) > 1 and isinstance(args[1], Tensor):
            target, said = card_of(args[1]), True  # the device of another tensor
        for key, value in [*enumerate(args), *kwargs.items()]:
            first = name in MOVES and key == 1
            if (key == "device" or (first and name == "to")) and type(value) is int:
                value = torch.device("cuda", value)
            if key == "device" or first or type(value) is torch.device:
                found = cards.parse(value)
                said |= bool(found) or value == "cpu" or isinstance(value, torch.device)
                if found:
                    target = found
                    (args if isinstance(key, int) else kwargs)[key] = torch.device("cpu")
        result = func(*args, **kwargs)
        if not said:
            self._mark_made_in_c(args, kwargs, result)
        elif isinstance(result, Tensor) and not result.is_meta and card_of(result) != target:
            if args and isinstance(args[0], Tensor) and result.data_ptr() == args[0].data_ptr():
                result = result.clone()  # from one device to another is always a copy
            cards.put(result, target)
        return result

    def _mark_made_in_c(self, args: list, kwargs: dict[str, Any], result: Any) -> None:
        """Mark a result that C++ code created without a device, as in pad_sequence."""
        places = {
            card_of(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.dim()
        }
        if len(places) == 1 and None not in places:
            for t in tree_leaves(result):
                if isinstance(t, Tensor) and card_of(t) is None and not t.is_meta:
                    self.cards.put(t, *places)


class _Operations(TorchDispatchMode):
    """Passes the mark on to results, and rejects operations on two devices."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if named := self.cards.parse(kwargs.get("device")):  # the other mode is off in backward()
            result = func(*args, **(kwargs | {"device": torch.device("cpu")}))
            self.cards.put(result, named)
            return result
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        places = {card_of(t) for t in inputs if t.dim() and t.numel()}
        mixes = func.overloadpacket in MAY_MIX
        if len(places) > 1 and not mixes:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, not {places} ({func})"
            )
        with mock.patch.object(KERNEL, "runs", True, create=True):
            result = _compute(func, args, kwargs)
        marks = [card_of(inputs[0])] if mixes and inputs else [*places, *map(card_of, inputs)]
        place = next(filter(None, marks), None)
        known = {t.untyped_storage()._cdata for t in inputs}
        for t in tree_leaves(result) if place else ():
            if isinstance(t, Tensor) and t.untyped_storage()._cdata not in known:
                self.cards.put(t, place)
        return result


@contextlib.contextmanager
def _modes(cards: Cards) -> Iterator[None]:
    with _Arguments() as first, _Operations() as second:
        first.cards = second.cards = cards
        yield


def _compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation. 16-bit matmuls with a wider result, which only CUDA has, are emulated."""
    if func._overloadname not in ("dtype", "dtype_out") or "mm" not in func.__name__:
        return func(*args, **kwargs)
    *operands, dtype = (part.float() if isinstance(part, Tensor) else part for part in args)
    out = kwargs.pop("out", None)
    result = getattr(torch, func.overloadpacket.__name__)(*operands, **kwargs).to(dtype)
    return result if out is None else out.copy_(result)


def _answers(cards: Cards) -> dict[str, Any]:
    """Return the replacements of functions in torch.cuda."""
    major, minor = cards.capability
    facts = {"name": cards.name, "total_memory": cards.total, "major": major, "minor": minor}
    facts |= {"multi_processor_count": 40, "warp_size": 32, "is_integrated": False}
    fixed = {"is_available": True, "is_initialized": True, "device_count": cards.count}
    fixed |= {"get_device_capability": cards.capability, "get_device_name": cards.name}
    fixed["get_device_properties"] = types.SimpleNamespace(**facts)
    fixed |= dict.fromkeys(NO_OPERATIONS.split())
    answers = {name: lambda *_, value=value, **__: value for name, value in fixed.items()}
    answers |= {
        "current_device": lambda: cards.current,
        "set_device": lambda device: setattr(cards, "current", cards.index(device)),
        "device": lambda device: mock.patch.object(cards, "current", cards.index(device)),
        "is_bf16_supported": lambda including_emulation=True: major >= 8 or including_emulation,
        "mem_get_info": lambda device=None: (cards.free(device), cards.total),
        "get_rng_state": lambda device=None: cards.random_state.clone(),
        "set_rng_state": lambda state, device=None: setattr(cards, "random_state", state.clone()),
        "get_rng_state_all": lambda: [cards.random_state.clone()] * cards.count,
        "current_stream": lambda device=None: mock.MagicMock(),
    }
    for name in ("memory_allocated", "memory_reserved"):
        answers[name] = lambda device=None: cards.allocated[cards.index(device)]
        answers[f"max_{name}"] = lambda device=None: cards.peak[cards.index(device)]
    return answers


def _patches(cards: Cards) -> Iterator[Any]:
    """Yield the patches of torch."""
    for name, answer in _answers(cards).items():
        yield mock.patch.object(torch.cuda, name, answer)

    def device(tensor: Tensor) -> torch.device:
        return (not hasattr(KERNEL, "runs") and card_of(tensor)) or REAL_DEVICE.__get__(tensor)

    is_cuda = property(lambda tensor: tensor.device.type == "cuda")
    for name, value in {"device": property(device), "is_cuda": is_cuda}.items():
        yield mock.patch.object(Tensor, name, value, create=True)
    autocast, run = torch.amp.autocast_mode.autocast, threading.Thread.run
    join, begin = torch.distributed.init_process_group, autocast.__init__

    def on_cpu(self: Any, device_type: str, *arguments: Any, **options: Any) -> None:
        kind = "cpu" if device_type == "cuda" else device_type  # uses the CPU's autocast
        begin(self, kind, *arguments, **options)

    def by_gloo(*_: Any, **__: Any) -> None:
        join("gloo")

    def run_in_modes(self: threading.Thread) -> None:  # modes apply to one thread
        with _modes(cards):
            run(self)

    # If torch is built with CUDA, Adam reads the stream, which needs a driver.
    stream = types.SimpleNamespace(is_capturing=lambda: False)
    yield mock.patch.object(torch.accelerator, "current_stream", return_value=stream)
    yield mock.patch.object(autocast, "__init__", on_cpu)
    yield mock.patch.object(torch.distributed, "init_process_group", by_gloo)
    yield mock.patch.object(threading.Thread, "run", run_in_modes)


@contextlib.contextmanager
def pretended_cards(
    gigabytes: float = 16, capability: tuple[int, int] = (7, 5), count: int = 1
) -> Iterator[Cards]:
    """Simulate `count` GPUs of the given size during a `with` block."""
    from rlm.model.quantize import import_bitsandbytes

    import_bitsandbytes()  # while there is no simulated GPU
    cards = Cards(gigabytes, capability, count)
    with contextlib.ExitStack() as stack:
        # The tensors that bitsandbytes caches would be on another simulated GPU.
        stack.enter_context(mock.patch.dict("bitsandbytes.functional.name2qmap", clear=True))
        for patch in _patches(cards):
            stack.enter_context(patch)
        with _modes(cards):
            yield cards
