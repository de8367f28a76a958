"""TRL's SFTTrainer, with a loss that on a CPU does no work for tokens that are not learned.

TRL's own loss leaves prompts out before the product with the vocabulary only where Triton runs;
elsewhere it scores every position and drops what is masked (1.16, `_use_triton`). Two thirds of a
word problem's tokens are prompt, and that product is a third of a small model's step.
"""

from __future__ import annotations

from typing import Any

import trl
from torch import Tensor

from rlm.logprobs import score_tokens
from rlm.models import decoder_and_head
from rlm.prompts import IGNORED
from rlm.sampling.native import compiled_for


class SFTTrainer(trl.SFTTrainer):
    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Mean negative log-likelihood of the labels: TRL's figure, and its gradient."""
        if return_outputs or model is not self.model or model.device.type != "cpu":
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        decoder, head = decoder_and_head(model)
        hidden = decoder(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            use_cache=False,
        ).last_hidden_state[:, :-1]  # (B, S - 1, hidden): before each label
        labels = inputs["labels"][:, 1:]
        learned = labels != IGNORED  # (B, S - 1)
        native = compiled_for(model)
        logprobs, _ = score_tokens(hidden[learned], head, labels[learned], 1.0, native)
        count = learned.sum() if num_items_in_batch is None else num_items_in_batch
        return -logprobs.sum() / count
