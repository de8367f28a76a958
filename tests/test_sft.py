"""The loss of stage 1 beside TRL's own, which scores every position."""

import datasets
import pytest
import torch
import trl
from conftest import byte_tokenizer, tiny_model

import rlm.sft
from rlm.adapters import new_adapter
from rlm.prompts import IGNORED

ROWS = [([5, 6, 7, 8, 9, 10], 4), ([11, 12, 13], 1), ([14, 15, 16, 17], 3)]  # ids, of them prompt


def example(ids, prompt):
    return {"input_ids": ids, "labels": [IGNORED] * prompt + ids[prompt:]}


def trainer_of(cls, folder, **options):
    torch.manual_seed(0)
    policy = new_adapter(tiny_model(), r=4, alpha=8, dropout=0.0)
    for name, tensor in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(tensor)  # else half of the gradients are zero
    arguments = trl.SFTConfig(
        output_dir=str(folder), use_cpu=True, bf16=False, fp16=False, report_to="none",
        max_length=None, dataset_kwargs={"skip_prepare_dataset": True}, **options,
    )  # fmt: skip
    return cls(
        model=policy,
        processing_class=byte_tokenizer(),
        train_dataset=datasets.Dataset.from_list([example(*row) for row in ROWS]),
        args=arguments,
    )


@pytest.mark.parametrize("count", [None, 11])
def test_loss_and_gradient_are_trls(tmp_path, count):
    """Also where several micro-batches share one denominator."""
    found = []
    for cls in (trl.SFTTrainer, rlm.sft.SFTTrainer):
        trainer = trainer_of(cls, tmp_path)
        batch = trainer.data_collator([example(*row) for row in ROWS])
        loss = trainer.compute_loss(trainer.model, dict(batch), num_items_in_batch=count)
        loss.backward()
        gradients = {n: p.grad for n, p in trainer.model.named_parameters() if p.requires_grad}
        found.append((loss.detach(), gradients))
    (theirs, their_gradients), (ours, our_gradients) = found
    assert torch.allclose(ours, theirs, rtol=1e-5)
    assert their_gradients.keys() == our_gradients.keys()
    for name, gradient in their_gradients.items():
        assert gradient.abs().max() > 0, name
        assert torch.allclose(our_gradients[name], gradient, rtol=1e-4, atol=1e-6), name


def test_only_learned_positions_meet_the_vocabulary(tmp_path, monkeypatch):
    scored = []

    def watched(hidden, head, targets, temperature=1.0):
        scored.append((hidden.shape[0], targets.tolist()))
        return original(hidden, head, targets, temperature)

    original = rlm.sft.score_tokens
    monkeypatch.setattr(rlm.sft, "score_tokens", watched)
    trainer = trainer_of(rlm.sft.SFTTrainer, tmp_path)
    batch = trainer.data_collator([example(*row) for row in ROWS])
    trainer.compute_loss(trainer.model, dict(batch))
    assert scored == [(5, [9, 10, 12, 13, 17])]  # of 13 tokens, padding to 18


def test_training_ends_where_trls_does(tmp_path):
    """Three updates of two micro-batches each, by the whole of TRL's loop."""
    ends = []
    for cls in (trl.SFTTrainer, rlm.sft.SFTTrainer):
        trainer = trainer_of(
            cls, tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=2,
            max_steps=3, learning_rate=1e-2, save_strategy="no",
        )  # fmt: skip
        losses = trainer.train().training_loss
        ends.append((losses, trainer.evaluate(trainer.train_dataset)["eval_loss"]))
    assert ends[1] == pytest.approx(ends[0], rel=1e-4)
