"""Tests that need a real CUDA GPU; `make test-gpu` runs them.

They cover the kernels of each dtype, the dequantization of 4-bit weights, and the memory that the
allocator counts. `test_gpu.py` tests everything else on simulated GPUs.
"""

from pathlib import Path

import pytest
import torch
from conftest import byte_tokenizer, tiny_model

from rlm.model.base import load_base
from rlm.model.hardware import Device
from rlm.training.batches import Rollout, make_micro_batches
from rlm.training.logprobs import token_logprobs
from tests.test_train_grpo import PROBLEMS, a_config, a_trainer, force_checkpointing, rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU here"),
]
SHAPE = {"hidden_size": 512, "intermediate_size": 1536, "head_dim": 64, "vocab_size": 4096}
SHAPE |= {"num_attention_heads": 8, "num_hidden_layers": 8}
CPU = Device("cpu", torch.float32, "test")


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """Save a base model whose activations need more memory than the libraries."""
    path = tmp_path_factory.mktemp("base")
    tiny_model("qwen2", **SHAPE, initializer_range=0.02).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


def on_gpu(dtype: torch.dtype) -> Device:
    if dtype == torch.bfloat16 and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("this GPU has no bf16 units")
    return Device("cuda", dtype, "test")


def a_micro_batch(device: str, count: int = 4):
    generator = torch.Generator().manual_seed(0)
    draw = torch.randint(0, 256, (count, 96), generator=generator).tolist()
    rollouts = [Rollout(i, ids[:64], ids[64:], 1.0, 1.0, [0.0] * 32) for i, ids in enumerate(draw)]
    (micro,) = make_micro_batches(rollouts, count, 2**20, device)
    return micro


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("quantize", ["none", "4bit"])
def test_a_step_in_each_number_type(base, tmp_path, dtype, quantize):
    """Weights stay finite, and sampler and trainer agree up to the rounding of the dtype."""
    config = a_config(tmp_path, steps=2, max_new_tokens=32, quantize=quantize)

    def alternating(completions, **_):
        return [float(i % 2) for i in range(len(completions))]

    trainer = a_trainer(base, config, alternating, device=on_gpu(dtype))
    start = {name: tensor.detach().clone() for name, tensor in trainer.adapter.items()}
    trainer.train(PROBLEMS)
    assert {str(tensor.device) for tensor in trainer.policy.parameters()} == {"cuda:0"}
    assert any(not torch.equal(tensor, start[name]) for name, tensor in trainer.adapter.items())
    assert all(tensor.isfinite().all() for tensor in trainer.adapter.values())
    for row in rows(config):
        assert row["optim/skipped"] == 0
        assert row["sampler/logprob_gap_max"] < (1e-3 if dtype == torch.float32 else 0.25)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_log_probabilities_are_those_of_the_cpu(base, dtype):
    found = []
    for device in (CPU, on_gpu(dtype)):
        model = load_base(str(base), device)
        logprobs, _ = token_logprobs(model, a_micro_batch(device.type), 1.0)
        found.append(logprobs.float().cpu())
    assert torch.allclose(*found, atol=1e-3 if dtype == torch.float32 else 0.05)


def test_4_bit_weights_are_those_of_the_cpu(base):
    found = []
    for device in (CPU, on_gpu(torch.float32)):
        model = load_base(str(base), device, quantize="4bit")
        logprobs, _ = token_logprobs(model, a_micro_batch(device.type), 1.0)
        found.append(logprobs.cpu())
    assert torch.allclose(*found, atol=1e-2)


@pytest.mark.parametrize("quantize", ["none", "4bit"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_plan_counts_what_the_allocator_gives(
    base, tmp_path, quantize, checkpointing, monkeypatch
):
    monkeypatch.setattr("rlm.training.memory_plan.GPU_MICRO_BATCH", 96 * 64)
    if checkpointing:
        force_checkpointing(monkeypatch)
    config = a_config(tmp_path, steps=1, quantize=quantize)
    device = on_gpu(torch.float16)
    trainer = a_trainer(base, config, device=device)
    trainer.train(PROBLEMS)
    micro = a_micro_batch("cuda", 64)
    for _ in range(2):  # the first call also allocates memory that libraries keep
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        logprobs, _ = token_logprobs(trainer.policy, micro, 1.0)
        trainer.weights.backward(logprobs.sum())
        peak = torch.cuda.max_memory_allocated() - before
        del logprobs
    assert trainer.run.memory_plan.learning == pytest.approx(peak, rel=0.15)
