"""Mixed precision: fp32 master weights for a LoRA adapter that computes in bf16 or fp16."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from rlm.model import adapter_tensors
from rlm.training.batches import MicroBatch
from rlm.training.logprobs import token_logprobs

if TYPE_CHECKING:
    from peft import PeftModel

    from rlm.sampling import TinkerEngine

Learner: TypeAlias = "MixedPrecisionAdapter | TinkerEngine"  # trains here or on a server

GOOD_UPDATES = 200  # number of finite updates after which the loss scale is doubled
MAX_LOSS_SCALE = 2.0**16


class MixedPrecisionAdapter:
    """The trained LoRA matrices: the model's weights and their fp32 master weights.

    A bf16 model is fast only if its adapter is in bf16 too. The updates are too small for bf16, so
    they are added to fp32 master weights. In an fp32 model, the model's weights and the master
    weights are the same tensors, and `accumulate` and `copy_to_model` do nothing.

    The smallest positive fp16 number is 6e-8, and most gradients of a single token in a batch of
    ten thousand are smaller than this number. Therefore the loss is multiplied by `loss_scale`
    before the backward pass, and `accumulate` divides the gradients by `loss_scale` in fp32. If a
    gradient overflows, the update is skipped and `loss_scale` is halved. After GOOD_UPDATES finite
    updates in a row, `loss_scale` is doubled.
    """

    def __init__(self, policy: PeftModel) -> None:
        self.policy = policy
        self.model_weights = adapter_tensors(policy)
        self.master_weights = self.model_weights
        self.loss_scale = 2.0**14 if policy.dtype == torch.float16 else 1.0
        self._scales, self.good_updates = policy.dtype == torch.float16, 0  # in a row
        if policy.dtype != torch.float32:
            self.master_weights = {
                name: torch.nn.Parameter(tensor.detach().float())
                for name, tensor in self.model_weights.items()
            }
            for tensor in self.model_weights.values():
                tensor.data = tensor.data.to(policy.dtype)

    def token_logprobs(self, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """Compute the log-probability and the entropy of each completion token, each (n, T)."""
        return token_logprobs(self.policy, batch, temperature)

    def make_optimizer(self, learning_rate: float) -> torch.optim.Optimizer:
        """Make the optimizer that updates the master weights."""
        return torch.optim.Adam(self.master_weights.values(), lr=learning_rate)

    def fetch(self) -> None:
        """Do nothing, because the master weights are already on this machine."""

    def save_state(self) -> None:
        """Return None, because the checkpoints contain the whole state."""

    def load_state(self, path: str | None) -> None:
        """Do nothing, because the checkpoints contain the whole state."""

    def accumulate(self) -> None:
        """Add the gradients of a micro-batch to the gradients of the master weights, in fp32."""
        if self.master_weights is self.model_weights:
            return
        for name, tensor in self.model_weights.items():
            if tensor.grad is not None:
                master = self.master_weights[name]
                new = tensor.grad.float()
                if self.loss_scale != 1:
                    new /= self.loss_scale
                master.grad = new if master.grad is None else master.grad + new
                tensor.grad = None

    def adapt_loss_scale(self, *, skipped: bool) -> bool:
        """Adapt the loss scale after an update.

        Args:
            skipped: whether the update was skipped because its gradient was not finite.

        Returns:
            Whether the loss scale may have caused the overflow of the gradient.
        """
        at_fault = skipped and self.loss_scale > 1
        if at_fault:
            self.loss_scale /= 2
        self.good_updates = 0 if skipped else self.good_updates + 1
        if self._scales and self.good_updates >= GOOD_UPDATES:
            self.loss_scale, self.good_updates = min(2 * self.loss_scale, MAX_LOSS_SCALE), 0
        return at_fault

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """Copy the master weights to the model."""
        if self.master_weights is not self.model_weights:
            for name, master in self.master_weights.items():
                self.model_weights[name].copy_(master)
