"""Training on a base model in 4 or 8 bits on a CPU, which stays unchanged; no update is lost."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from bitsandbytes.nn import Linear4bit, Linear8bitLt
from conftest import let_it_speak, tiny_model
from safetensors.torch import load_file

import eval as evaluate
import inference
import train_grpo
import train_sft
from rlm.cli.options import UsageError
from rlm.model import base
from rlm.model import quantize as quantization
from rlm.model.adapters import merged_weight, new_adapter
from rlm.model.base import load_base
from rlm.model.export import merge_adapter, save_adapter
from rlm.model.quantize import dequantized_weight, multiplies_int8_exactly
from rlm.ops import use_fused_layers
from rlm.sampling import Sampler, SamplingParams
from tests.test_scripts import run
from tests.test_train_grpo import CPU, PROBLEMS, a_config, likes_letters
from train_grpo import GRPOTrainer

needs_int8 = pytest.mark.skipif(
    not multiplies_int8_exactly(), reason="8-bit products are wrong on this CPU"
)
PACKED = ("4bit", pytest.param("8bit", marks=needs_int8))
SLOW_8BIT = pytest.mark.slow, needs_int8
FIRST = ("4bit", pytest.param("8bit", marks=SLOW_8BIT))  # for tests that take seconds
# Maximum log-probability gap, in nats per token, between the merged copy and the quantized layers.
# 8-bit matmuls also round their input.
GAP = {"4bit": 2e-3, "8bit": 0.1}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory, tokenizer):
    """Save a model whose rows are as wide as the blocks of bitsandbytes."""
    path = tmp_path_factory.mktemp("base")
    tiny_model(hidden_size=64, head_dim=16, initializer_range=0.1).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def packed_layers(model):
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, Linear4bit | Linear8bitLt)
    }


def base_bytes(model):
    """Return the bytes of all base weights, including the scales of the quantized weights."""
    found = {n: p for n, p in model.named_parameters() if "lora_" not in n}
    for name, module in packed_layers(model).items():
        weight, state = module.weight, getattr(module.weight, "quant_state", None)
        scales = state.as_dict(packed=True) if state else {"scales": weight.SCB}
        if state is None and module.state.SCB is not None:  # a forward pass moves the scales
            scales = {"scales": module.state.SCB}
        found |= {f"{name}.{key}": tensor for key, tensor in scales.items()}
    return {n: t.detach().clone().view(torch.uint8).numpy().tobytes() for n, t in found.items()}


def with_adapter(model_dir, quantize, scale=0.3):
    """Load a quantized base model, and add an adapter that changes its output."""
    torch.manual_seed(0)
    policy = new_adapter(load_base(str(model_dir), CPU, quantize=quantize), r=4, alpha=8).eval()
    return let_it_speak(policy, scale)


@pytest.mark.parametrize("quantize", FIRST)
def test_grpo_changes_the_adapter_and_not_one_byte_of_the_base(model_dir, tmp_path, quantize):
    config = a_config(tmp_path, steps=3, quantize=quantize, eval_every=1)
    trainer = GRPOTrainer(str(model_dir), config, reward_fn=likes_letters, device=CPU)
    layers = packed_layers(trainer.policy).values()
    assert len(layers) == 14  # seven projections in two layers
    # On CPUs with AVX512-BF16, bitsandbytes would rearrange the weights in place.
    assert not any(getattr(layer, "support_avx512bf16_for_cpu", False) for layer in layers)
    before = base_bytes(trainer.policy)
    adapter = {name: tensor.detach().clone() for name, tensor in trainer.adapter.items()}
    trainer.train(PROBLEMS, PROBLEMS[:2])
    assert base_bytes(trainer.policy) == before
    assert all(not torch.equal(t, adapter[name]) for name, t in trainer.adapter.items())
    rows = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").open()]
    assert all(row["optim/grad_norm"] > 0 for row in rows if "optim/grad_norm" in row)
    gaps = [row["sampler/logprob_gap_max"] for row in rows if "loss/policy" in row]
    assert gaps
    assert max(gaps) < GAP[quantize]


@pytest.mark.parametrize("quantize", PACKED)
def test_weights_unpack_to_what_the_layer_multiplies_with(model_dir, quantize):
    model = load_base(str(model_dir), CPU, quantize=quantize)
    full = load_base(str(model_dir), CPU)
    for name, layer in packed_layers(model).items():
        weight = dequantized_weight(layer)
        assert weight.dtype == model.dtype == torch.float32
        product = layer(torch.eye(layer.in_features)).detach()
        assert torch.allclose(product.t(), weight, atol=1e-3), name
        assert torch.equal(dequantized_weight(layer), weight)  # the forward pass has moved scales
        exact = full.get_submodule(name).weight
        error = (weight - exact).norm() / exact.norm()
        assert 0 < error < {"4bit": 0.15, "8bit": 0.02}[quantize]


def test_wrong_8_bit_products_are_refused(model_dir, monkeypatch):
    """Without VNNI instructions, 8-bit matmuls silently overflow in 16 bits."""
    monkeypatch.setattr(quantization, "multiplies_int8_exactly", lambda: False)
    with pytest.raises(UsageError, match="8-bit integers wrongly on this CPU"):
        load_base(str(model_dir), CPU, quantize="8bit")
    load_base(str(model_dir), CPU, quantize="4bit")


def test_rows_that_bitsandbytes_unpacks_wrongly_are_refused(tmp_path):
    tiny_model().save_pretrained(tmp_path)  # two rows of 32 weights share a block
    with pytest.raises(UsageError, match="rows of 32 weights wrongly on a CPU"):
        load_base(str(tmp_path), CPU, quantize="4bit")


def test_a_base_that_is_stored_quantized_is_loaded_as_such_and_merged_unpacked(
    model_dir, tokenizer, tmp_path
):
    load_base(str(model_dir), CPU, quantize="4bit").save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    policy = with_adapter(tmp_path / "base", "none")
    layer = next(iter(packed_layers(policy).values()))
    assert not layer.support_avx512bf16_for_cpu
    save_adapter(policy, tokenizer, tmp_path / "adapter", {"base_model": str(tmp_path / "base")})
    merged, _ = merge_adapter(tmp_path / "adapter")
    name = next(name for name, _ in merged.named_modules() if name.endswith("q_proj"))
    wanted = merged_weight(policy.base_model.model.get_submodule(name))
    assert torch.allclose(merged.get_submodule(name).weight, wanted, atol=1e-5)
    assert {p.dtype for p in merged.parameters()} == {torch.float32}


def test_a_base_that_is_stored_in_fp8_is_refused(model_dir, monkeypatch):
    model = tiny_model()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.to(torch.float8_e4m3fn))
    loaded = model, {"missing_keys": set(), "mismatched_keys": set()}
    monkeypatch.setattr(base.AutoModelForCausalLM, "from_pretrained", lambda *_, **__: loaded)
    with pytest.raises(UsageError, match="stored in fp8"):
        load_base(str(model_dir), CPU)


@pytest.mark.parametrize("quantize", PACKED)
def test_a_merged_copy_keeps_the_whole_update(model_dir, quantize):
    """Quantized again after merging, the weights would lose the update; the copy is unquantized."""
    policy = with_adapter(model_dir, quantize, scale=1e-3)
    for name, module in policy.named_modules():
        if name.endswith("q_proj"):
            up, down = (getattr(module, side)["default"].weight for side in ("lora_B", "lora_A"))
            update = (merged_weight(module) - dequantized_weight(module.get_base_layer())).detach()
            expected = module.scaling["default"] * up @ down
            similarity = torch.cosine_similarity(update.flatten(), expected.flatten(), dim=0)
            assert similarity > 0.999


@pytest.mark.parametrize("quantize", PACKED)
def test_both_samplers_draw_what_the_model_computes(model_dir, tokenizer, quantize):
    policy = with_adapter(model_dir, quantize)
    drawn = [
        Sampler(policy, tokenizer, merged=merged).sample(
            [[1, 2, 3, 4], [5, 6]], 3, SamplingParams(12, 1.0), [7, 8]
        )
        for merged in (True, False)
    ]
    merged, unmerged = ([c for group in groups for c in group] for groups in drawn)
    for left, right in zip(merged, unmerged, strict=True):
        # With 8 bits, rounding may change a token, and then the rest of the completion differs.
        pairs = enumerate(zip(left.token_ids, right.token_ids, strict=True))
        same = next((i for i, (a, b) in pairs if a != b), len(left.token_ids))
        assert same >= {"4bit": len(left.token_ids), "8bit": 1}[quantize]
        gap = GAP[quantize]
        assert left.logprobs[:same] == pytest.approx(right.logprobs[:same], abs=gap)


@pytest.mark.parametrize("quantize", ["none", *PACKED])
def test_the_lean_adapter_has_pefts_gradient(model_dir, quantize):
    ids = torch.arange(12)[None]
    gradients = []
    for fused in (False, True):
        policy = with_adapter(model_dir, quantize)
        if fused:
            use_fused_layers(policy)
        policy(input_ids=ids, labels=ids).loss.backward()
        gradients.append({n: p.grad for n, p in policy.named_parameters() if p.requires_grad})
    for name, gradient in gradients[0].items():
        error = (gradient - gradients[1][name]).norm() / gradient.norm()
        # 8-bit matmuls round their input to 127 steps, so a tiny difference may become a step.
        assert error < {"none": 1e-5, "4bit": 1e-5, "8bit": 0.03}[quantize], name


@pytest.mark.parametrize(
    ("quantize", "model"),
    [
        ("4bit", None),
        pytest.param("8bit", None, marks=SLOW_8BIT),
        pytest.param("4bit", "smollm2-135m", marks=pytest.mark.slow),
    ],
)
def test_the_scripts_take_a_packed_base_and_pass_it_on(
    model_dir, tmp_path, capsys, quantize, model, request
):
    if model:
        request.getfixturevalue("smollm2")
    common = ["--model", model or model_dir, "--dataset", "word-problems:1"]
    sft, grpo = tmp_path / "sft", tmp_path / "grpo"
    assert run(
        train_sft, *common, "--quantize", quantize, "--max-samples", 8, "--batch-size", 4,
        "--micro-batch", 4, "--eval-samples", 2, "--output", sft, "--run-dir", tmp_path / "a",
    ) == 0  # fmt: skip
    history = json.loads((sft / "run.json").read_text())
    assert history["quantize"] == quantize
    learned = load_file(sft / "adapter_model.safetensors").values()
    assert {tensor.dtype for tensor in learned} == {torch.float32}  # TRL would make it bf16
    assert history["base_hash"].startswith("sha256:")  # of the unquantized files
    assert run(
        train_grpo, "--sft-adapter", sft, "--output", grpo, "--run-dir", tmp_path / "b",
        "--steps", 1, "--batch-size", 2, "--group-size", 2, "--max-new-tokens", 4,
        "--max-samples", 40, "--eval-samples", 2,
    ) == 0  # fmt: skip
    assert json.loads((grpo / "run.json").read_text())["quantize"] == quantize  # from the adapter
    packed, full = (inference.load_rlm_model(grpo, quantize=q)[0] for q in ("auto", "none"))
    assert len(packed_layers(packed)) == 7 * packed.config.num_hidden_layers
    assert not packed_layers(full)
    assert run(
        evaluate, "--sft-adapter", sft, "--adapter", grpo, "--max-samples", 2,
        "--max-new-tokens", 4, "--few-shot", 0, "--output", tmp_path / "c",
    ) == 0  # fmt: skip
    evaluated = json.loads((tmp_path / "c" / "evaluation.json").read_text())
    assert evaluated["config"]["quantize"] == quantize
    text = capsys.readouterr()
    said = re.sub(r"kernels (not )?compiled", "", text.out + text.err)  # our own message
    assert "kernels" not in said  # bitsandbytes would advise to install this package


AVX512_MACHINE = """
import importlib.abc, importlib.machinery, sys, types
sys.path.insert(0, {root!r})

class Patch(importlib.abc.MetaPathFinder):
    # Makes bitsandbytes believe that the CPU has AVX512-BF16.
    def find_spec(self, name, path, target=None):
        if name != "bitsandbytes.functional":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module
        def patched(module):
            execute(module)
            module.has_avx512bf16 = lambda: True
        spec.loader.exec_module = patched
        return spec

sys.meta_path.insert(0, Patch())
if {installed!r}:
    kernels = types.ModuleType("kernels")
    kernels.__spec__ = importlib.machinery.ModuleSpec("kernels", None)
    def get_kernel(*arguments, **options):
        raise SystemExit("it downloads")
    kernels.get_kernel = get_kernel
    sys.modules["kernels"] = kernels
if {guarded!r}:
    import {guarded}
else:
    import bitsandbytes
from bitsandbytes.backends.cpu import ops
assert ops.has_avx512bf16()
assert ("kernels" in sys.modules) == {installed!r}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "guarded",
    ["", "rlm.model.base", "rlm.model.adapters", "rlm.sampling.engine", "train_grpo"],
)
@pytest.mark.parametrize("installed", [False, True])
def test_nothing_is_downloaded_and_nothing_said_about_it(installed, guarded):
    """The CPU is one on which the import of bitsandbytes would download code from the hub."""
    root = str(Path(__file__).parents[2])
    code = AVX512_MACHINE.format(root=root, installed=installed, guarded=guarded)
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    silent = (done.returncode, done.stdout + done.stderr) == (0, "")
    assert silent == bool(guarded)  # without the guard, bitsandbytes downloads or prints
