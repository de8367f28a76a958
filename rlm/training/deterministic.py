"""`--deterministic`: the same adapter, bit for bit, with any threads, processes and batches.

The sampler's compiled code sums each row by itself. What learning needs stands here: torch computes
on one thread, threads of Python compute the gradients of different groups, and these are added in
the order of the step's problems. docs/explanation/determinism.md says what is guaranteed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from transformers import PreTrainedModel

from rlm.cli import UsageError, terminal
from rlm.model import kernels_for
from rlm.training.batches import MicroBatch
from rlm.training.distributed import Distributed

# forward(micro_batch) → the micro-batch, its loss, and more that the caller wants to have
Forward = Callable[[MicroBatch], tuple[Any, ...]]


class OrderedGradients:
    """Computes the gradients of micro-batches in threads, and adds them in one order."""

    def __init__(self, parameters: Iterable[Tensor], distributed: Distributed) -> None:
        """Limit torch to one thread in this process: with more it adds in another order."""
        self._parameters, self._distributed = list(parameters), distributed
        self.threads = torch.get_num_threads()  # as many micro-batches are computed at a time
        torch.set_num_threads(1)

    def losses(
        self, forward: Forward, micro_batches: Sequence[MicroBatch]
    ) -> Iterator[tuple[Any, ...]]:
        """Yield what `forward` returns for each micro-batch; a loss's gradient is computed already.

        The caller calls `backward` on each loss, which adds that gradient. The gradients of other
        processes' micro-batches are added in between, where their turn is.

        Args:
            micro_batches: this process's, one for each problem that `Distributed.shard` gave it.
        """
        distributed, waiting, running = self._distributed, iter(micro_batches), deque()
        count = sum(distributed.gather([len(micro_batches)]))
        initial = {"initializer": torch.set_num_threads, "initargs": (1,)}
        with ThreadPoolExecutor(self.threads, **initial) as pool:
            for turn in range(count):
                for micro in islice(waiting, 2 * self.threads - len(running)):
                    running.append(pool.submit(self._differentiate, forward, micro))
                gradients = None
                if distributed.owns(turn):
                    gradients, micro, loss, *more = running.popleft().result()
                    yield micro, _Differentiated.apply(loss, gradients, *self._parameters), *more
                distributed.share_gradients(turn, self._parameters, gradients)

    def _differentiate(self, forward: Forward, micro: MicroBatch) -> tuple[Any, ...]:
        micro, loss, *more = forward(micro)
        gradients = torch.autograd.grad(loss, self._parameters)
        return gradients, micro, loss.detach(), *more


class _Differentiated(torch.autograd.Function):
    """A loss whose gradients are known: several threads' `backward` would add in any order."""

    @staticmethod
    def forward(ctx: FunctionCtx, loss: Tensor, gradients: Sequence[Tensor], *_: Tensor) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: FunctionCtx, by_loss: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(by_loss * gradient for gradient in ctx.gradients)


def ordered_gradients(trainer: Any) -> OrderedGradients | None:
    """Make the `OrderedGradients` of a `train_grpo.GRPOTrainer`; None without --deterministic."""
    if not trainer.config.deterministic:
        return None
    made = OrderedGradients(trainer.adapter.values(), trainer.distributed)
    terminal.line(
        f"deterministic: fp32; a micro-batch is the group of one problem, whatever "
        f"--train-batch-size and --train-batch-tokens say; {made.threads} of them at a time"
    )
    return made


def check_deterministic(policy: PreTrainedModel) -> None:
    """Check that sums can be in one order with this policy, on this machine.

    Raises:
        UsageError: one line that says why not.
    """
    kernels, why_not = kernels_for(policy)
    dtype = str(policy.dtype).removeprefix("torch.")
    reasons = {
        "a GPU adds in an order of its own; CUDA_VISIBLE_DEVICES= hides it": (
            policy.device.type != "cpu"
        ),
        f"the model computes in {dtype}; only fp32 is tested": policy.dtype != torch.float32,
        f"the sampler needs compiled products ({why_not})": kernels is None,
        "this CPU has no fused multiply-add, so products are not compiled": (
            kernels is not None and not kernels.has_linear
        ),
    }
    for reason, is_so in reasons.items():
        if is_so:
            raise UsageError(f"--deterministic: {reason}")
