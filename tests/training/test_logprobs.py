"""Log-probabilities of packed micro-batches, and the fused layers.

Values and gradients equal those of unpacked rows, full logits, and the layers of transformers and
PEFT.
"""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from conftest import kernels, let_it_speak, tiny_model

from rlm.model.adapters import adapter_tensors, new_adapter
from rlm.ops import ATTN_IMPLEMENTATION, TorchOps, ops_for, use_fused_layers
from rlm.ops.kernels import Kernels
from rlm.training.batches import make_micro_batches
from rlm.training.config import GRPOConfig
from rlm.training.logprobs import old_logprobs_source, score_tokens, token_logprobs
from rlm.training.state import MixedPrecisionAdapter
from tests.training.test_batches import some_rollouts


def fill(tensors):
    """Replace the values of tensors by random numbers in fp32."""
    generator = torch.Generator().manual_seed(0)
    for tensor in tensors:
        tensor.data = torch.randn(tensor.shape, generator=generator) * 0.2


@pytest.mark.parametrize(
    ("algorithm", "updates", "matches_trainer", "old"),
    [
        ("grpo", 1, True, "first pass"),
        ("grpo", 1, False, "first pass"),
        ("grpo", 2, True, "sampler"),
        ("grpo", 2, False, "forward pass"),
        ("topr", 1, False, "sampler"),
    ],
)
def test_where_the_old_logprobs_come_from(algorithm, updates, matches_trainer, old):
    """A forward pass computes them only if neither the sampler nor the first pass provides them."""
    assert old_logprobs_source(GRPOConfig(algorithm=algorithm), updates, matches_trainer) == old


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_fused_layers_equal_those_of_transformers_and_peft(family, monkeypatch):
    """Values and gradients are compared with the first, with the second, and without an adapter."""
    calls, call = Counter(), Kernels._call
    monkeypatch.setattr(Kernels, "_call", lambda *args: (calls.update([args[1]]), call(*args))[1])
    model = tiny_model(family)
    model.set_attn_implementation(ATTN_IMPLEMENTATION)
    policy = new_adapter(model, r=4, alpha=8).eval()
    policy.add_adapter("reference", policy.peft_config["default"])
    fill(tensor for name, tensor in policy.named_parameters() if "lora_" in name)
    (micro,) = make_micro_batches(some_rollouts(), 99, 9999, "cpu")

    def outcome():
        found = []
        for adapter in ("default", "reference", None):
            policy.set_adapter(adapter or "default")
            if adapter is None:
                with policy.disable_adapter():
                    found.append(token_logprobs(policy, micro, 0.8)[0].detach())
                continue
            logprobs, _ = token_logprobs(policy, micro, 0.8)
            logprobs.square().sum().backward()
            found.append(logprobs.detach())
            found += [p.grad.clone() for p in policy.parameters() if p.grad is not None]
            policy.zero_grad()
        return found

    expected = outcome()
    assert calls.keys() <= {"token_logprobs"}
    use_fused_layers(policy)
    got = outcome()
    if isinstance(ops_for(policy), Kernels):
        # There are 2 layers, 3 forward passes and 2 backward passes.
        norms = 2 * (4 if family == "qwen3" else 2) + 1
        first = 2  # the first norm has no backward pass: nothing before it is trained
        assert (calls["rms_norm"], calls["rms_norm_backward"]) == (3 * norms, 2 * norms - first)
        assert (calls["silu_and_mul"], calls["silu_and_mul_backward"]) == (3 * 2, 2 * 2)
        assert (calls["attention_forward"], calls["attention_backward"]) == (3 * 2, 2 * 2)
    assert len(expected) == len(got) == 2 * (1 + 2 * 7 * 2) + 1
    for left, right in zip(expected, got, strict=True):
        assert (left - right).abs().max() < 1e-5 * max(1, left.abs().max())


def test_an_fp32_adapter_of_a_bf16_base_is_fused(monkeypatch):
    """SFT relies on it: the matmuls are in bf16, which is much faster, and the gradient is fp32."""
    (micro,) = make_micro_batches(some_rollouts(), 99, 9999, "cpu")

    def gradient(dtype):
        policy = new_adapter(tiny_model(), r=4, alpha=8).eval().to(dtype)
        fill(adapter_tensors(policy).values())
        use_fused_layers(policy)
        logprobs, _ = token_logprobs(policy, micro, 1.0)
        logprobs.sum().backward()
        return torch.cat([tensor.grad.flatten() for tensor in adapter_tensors(policy).values()])

    expected = gradient(torch.float32)
    monkeypatch.delattr("rlm.ops.fused_layers._add_adapters")  # the fallback
    got = gradient(torch.bfloat16)
    assert got.dtype == torch.float32
    assert (got - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize("with_kernels", [False, True])
def test_a_confident_token_keeps_its_gradient_in_bf16(with_kernels):
    """1 - p must be computed before rounding: rounding p = 0.998 to bf16 would double it."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 32, generator=generator).bfloat16()
    targets = torch.tensor([5])
    direction = weight[5].float() / weight[5].float().square().sum()
    hidden = (direction * 13).bfloat16()[None]

    def slope(hidden, weight):
        head = torch.nn.Linear(32, 64, bias=False)
        head.weight = torch.nn.Parameter(weight, requires_grad=False)
        hidden = hidden.clone().requires_grad_()
        made = kernels(weight.dtype) if with_kernels else TorchOps()
        logprobs, _ = score_tokens(hidden, head, targets, 1.0, made)
        logprobs.sum().backward()
        return logprobs.exp().item(), hidden.grad.float()

    p, expected = slope(hidden.float(), weight.float())
    assert 0.99 < p < 0.9995
    _, got = slope(hidden, weight)
    assert (got - expected).norm() < 0.05 * expected.norm()


def test_gradients_too_small_for_fp16_are_not_lost():
    """Without loss scaling, the gradient of one of ten thousand tokens would underflow to 0."""
    rollouts = [replace(r, weight=r.weight * 1e-5) for r in some_rollouts()]
    (micro,) = make_micro_batches(rollouts, 99, 9999, "cpu")

    def gradient(dtype):
        policy = new_adapter(tiny_model(), r=4, alpha=8).eval()
        fill(adapter_tensors(policy).values())
        trained = MixedPrecisionAdapter(policy.to(dtype))
        logprobs, _ = token_logprobs(policy, micro, 1.0)
        loss = (logprobs * micro.weights[:, None] * micro.completion_mask).sum()
        trained.backward(loss)
        return torch.cat([master.grad.flatten() for master in trained.master_weights.values()])

    expected, got = gradient(torch.float32), gradient(torch.float16)
    assert got.dtype == torch.float32
    assert (got - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize(
    ("family", "temperature", "max_rows", "max_tokens", "chunk"),
    [
        ("llama", 1.0, 1, 1, 128),
        ("qwen2", 0.7, 4, 1, 128),
        ("llama", 0.7, 3, 9999, 128),
        ("qwen2", 1.0, 3, 9999, 3),
        ("llama", 1.0, 99, 9999, 128),
    ],
)
@pytest.mark.parametrize("with_kernels", [False, True])
def test_log_probabilities_and_gradients_equal_those_of_plain_rows(
    family, temperature, max_rows, max_tokens, chunk, with_kernels, monkeypatch
):
    """The expected values come from one unpadded row per completion, with full logits."""
    monkeypatch.setattr("rlm.training.logprobs.LOGITS_CHUNK", chunk)
    policy = let_it_speak(new_adapter(tiny_model(family), r=4, alpha=8), 0.1).eval()
    if with_kernels:
        kernels(policy.dtype)
        assert isinstance(ops_for(policy), Kernels)
    else:
        monkeypatch.setattr("rlm.training.logprobs.ops_for", lambda model: TorchOps())
    rollouts = some_rollouts()
    factors = torch.randn(64, generator=torch.Generator().manual_seed(1))
    expected = []
    for rollout in rollouts:
        text = torch.tensor([[*rollout.prompt, *rollout.completion]])
        logits = policy(text).logits[0, len(rollout.prompt) - 1 : -1].float() / temperature
        every = logits.log_softmax(-1)
        drawn = every.gather(-1, text[0, len(rollout.prompt) :, None]).squeeze(-1)
        (drawn * factors[: len(drawn)]).sum().backward()
        expected.append((drawn.detach(), -(every.exp() * every).sum(-1).detach()))
    gradient = torch.cat([t.grad.flatten() for t in adapter_tensors(policy).values()])
    policy.zero_grad()
    seen = []
    for micro in make_micro_batches(rollouts, max_rows, max_tokens, "cpu"):
        assert len(micro.rows) <= max_rows
        seen += micro.rows
        logprobs, entropy = token_logprobs(policy, micro, temperature)
        for row, values, spread in zip(micro.rows, logprobs, entropy, strict=True):
            length = len(rollouts[row].completion)
            assert torch.allclose(values[:length], expected[row][0], atol=1e-5)
            assert torch.allclose(spread[:length], expected[row][1], atol=1e-5)
            assert not values[length:].any()
        (logprobs * factors[: logprobs.shape[1]]).sum().backward()
    assert sorted(seen) == list(range(len(rollouts)))
    got = torch.cat([t.grad.flatten() for t in adapter_tensors(policy).values()])
    assert gradient.abs().max() > 0.1
    assert torch.allclose(got, gradient, atol=1e-5, rtol=1e-4)
