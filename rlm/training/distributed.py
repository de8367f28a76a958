"""Distributed training: several processes work on one run.

The processes are started by `torchrun` or, on GPUs, by `accelerate launch`. Each process samples
and scores its share of a step's problems. Then all groups are gathered, so the advantages and the
denominators of the loss equal those of a single process. Each process trains on its share of the
rollouts, and the gradients are summed once per update.
"""

from __future__ import annotations

import atexit
import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rlm.cli import UsageError, terminal

T = TypeVar("T")

# Timeout for a process that does not answer. The timeout is long because a slow start or a long
# completion is not a failure. A process that has exited is detected at once; only a lost connection
# has to be detected by the timeout.
TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class Distributed:
    """The processes of a run. In a single process, the methods return their arguments unchanged."""

    rank: int = 0
    size: int = 1

    @classmethod
    def from_env(cls) -> Distributed:
        """Join the process group that is described by the launcher's environment variables."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls()
        if torch.cuda.is_available():
            rank, cards = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
            if rank >= cards:
                message = f"at least {rank + 1} processes run on this machine with {cards} GPUs"
                raise UsageError(f"{message}: start one process per GPU (--nproc-per-node {cards})")
            torch.cuda.set_device(rank)
        if not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            with _explain_lost_process():
                dist.init_process_group(backend, timeout=TIMEOUT)
        atexit.register(_leave)  # without this, NCCL warns at exit and may hang
        distributed = cls(dist.get_rank(), size)
        terminal.console.quiet = not distributed.is_main
        host = socket.gethostname()
        where = f"; the run directory is on {host}" if distributed.on_several_machines else ""
        # If the launcher started only one process by mistake, the user can notice it because this
        # line is missing.
        terminal.line(f"{size} processes share this run{where}")
        return distributed

    @property
    def on_several_machines(self) -> bool:
        """Whether the processes run on several machines, which may not share a disk."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", self.size)) < self.size

    @property
    def is_main(self) -> bool:
        """Whether this is the main process, which writes the files and prints."""
        return self.rank == 0

    def shard(self, items: Sequence[T]) -> list[T]:
        """Return this process's share of the items, which is every size-th item."""
        return list(items[self.rank :: self.size])

    def gather(self, shares: Sequence[T]) -> list[T]:
        """Gather the items of all processes, in the order that the items had before `shard`.

        The processes may have different numbers of items.
        """
        if self.size == 1:
            return list(shares)
        parts: list[list[T]] = [[] for _ in range(self.size)]
        with _explain_lost_process():
            dist.all_gather_object(parts, list(shares))
        longest = max(map(len, parts))
        return [part[i] for i in range(longest) for part in parts if i < len(part)]

    def broadcast(self, value: T) -> T:
        """Return the main process's value, for values that may differ between the processes."""
        if self.size == 1:
            return value
        box = [value]
        with _explain_lost_process():
            dist.broadcast_object_list(box)
        return box[0]

    def any(self, value: bool) -> bool:
        """Return whether the value is true in any process."""
        return True in self.gather([value])

    def all_reduce(self, parameters: Iterable[Tensor]) -> None:
        """Sum the gradient of each parameter over the processes; a missing gradient counts as 0."""
        if self.size == 1:
            return
        parameters = list(parameters)
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        with _explain_lost_process():
            dist.all_reduce(flat)
        parts = flat.split([parameter.numel() for parameter in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def _explain_lost_process() -> Iterator[None]:
    """Convert the RuntimeError that a lost process causes into a UsageError."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        raise UsageError(
            "another process of this run has ended or does not answer; see its output for the "
            "cause, and start all processes again with --resume"
        ) from error
