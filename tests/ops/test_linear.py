"""The sampler's linear layers, compared with double precision."""

from collections.abc import Sequence

import conftest
import pytest
import torch
from conftest import USUAL_HEADS, tiny_model
from torch import Tensor, nn

from rlm.ops import TorchOps
from rlm.ops.kernels import Kernels
from rlm.sampling.weights import MergedWeights, UnmergedWeights, fused_linear

BF16 = torch.bfloat16
KINDS = ("fp32", "bf16", "tiles")  # of matmuls


def kernels(kind: str) -> Kernels:
    """Return kernels with compiled matmuls; skip the test on a CPU without them."""
    if kind == "tiles":
        return conftest.tile_kernels()
    made = conftest.kernels(BF16 if kind == "bf16" else torch.float32)
    if not made.has_linear:
        pytest.skip(made.batch_note)
    return made


def dtype_of(kind: str) -> torch.dtype:
    return torch.float32 if kind == "fp32" else BF16


def layers(inputs: int, outputs: Sequence[int], bias: bool, dtype: torch.dtype) -> list[nn.Linear]:
    made = [nn.Linear(inputs, n, bias=bias) for n in outputs]
    for layer in made:
        nn.init.normal_(layer.weight, std=inputs**-0.5)
    return [layer.to(dtype).requires_grad_(False) for layer in made]


class Norm(nn.Module):
    """The RMS norm of a Llama layer, in double precision."""

    variance_epsilon = 1e-5

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        x = x.double()
        root = (x.square().mean(-1, keepdim=True) + self.variance_epsilon).sqrt()
        return x / root * self.weight.double()


def ones(width: int, dtype: torch.dtype) -> Norm:
    """Return a norm with weights of 1, which merge into a layer's weights without rounding."""
    return Norm(torch.ones(width, dtype=dtype))


def double(layer: nn.Linear, x: Tensor) -> Tensor:
    bias = None if layer.bias is None else layer.bias.double()
    return nn.functional.linear(x.double(), layer.weight.double(), bias)


def rounded_once(found: Tensor, wanted: Tensor) -> None:
    """Check that the error is at most that of fp32 sums which are rounded once."""
    eps = torch.finfo(found.dtype).eps
    error = (found.double() - wanted).abs()
    summed = 1e-5 if found.dtype == BF16 else 2e-6
    assert (error <= 0.51 * eps * wanted.abs() + summed * wanted.abs().max()).all()


def near(found: Tensor, wanted: Tensor) -> None:
    """Check that the error is at most four units in the last place, for several roundings."""
    error = (found.double() - wanted).abs().max()
    assert error <= 4 * torch.finfo(found.dtype).eps * wanted.abs().max()


@pytest.mark.parametrize("rows", [1, 9, 200])
@pytest.mark.parametrize(
    ("inputs", "outputs", "bias"),
    [
        *((2, [1], False), (64, [48, 16, 16], False), (64, [48, 16, 16], True)),
        *((130, [96], False), (66, [7], False)),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_product_is_rounded_once(inputs, outputs, bias, rows, kind, threads):
    torch.manual_seed(0)
    dtype, how = dtype_of(kind), kernels(kind)
    made = layers(inputs, outputs, bias, dtype)
    x, residual = torch.randn(rows, inputs).to(dtype), torch.randn(rows, sum(outputs)).to(dtype)
    wanted = torch.cat([double(layer, x) for layer in made], 1)
    rounded_once(fused_linear(*made, ops=how)(x), wanted)
    rounded_once(fused_linear(*made, ops=how)(x, residual), wanted + residual.double())
    norm = ones(inputs, dtype)
    wanted = torch.cat([double(layer, norm(x)) for layer in made], 1)
    rounded_once(fused_linear(*made, norm=norm, ops=how)(x), wanted)


@pytest.mark.parametrize("rows", [1, 9, 200])
@pytest.mark.parametrize(
    ("inputs", "outputs", "bias"),
    [(2, 1, False), (64, 96, False), (64, 96, True), (130, 50, False)],
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_gate_is_rounded_once(inputs, outputs, bias, rows, kind, threads):
    torch.manual_seed(0)
    dtype = dtype_of(kind)
    gate, up = layers(inputs, [outputs, outputs], bias, dtype)
    norm, x = ones(inputs, dtype), (9 * torch.randn(rows, inputs)).to(dtype)
    wanted = nn.functional.silu(double(gate, norm(x))) * double(up, norm(x))
    rounded_once(fused_linear(gate, up, norm=norm, gated=True, ops=kernels(kind))(x), wanted)


@pytest.mark.parametrize("compiled_too", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inputs", [33, 64])  # torch multiplies odd numbers of bf16
@pytest.mark.parametrize("biases", [(), (0,), (0, 1)])
def test_every_path_computes_the_same(inputs, biases, kind, compiled_too):
    torch.manual_seed(0)
    dtype, how = dtype_of(kind), kernels(kind) if compiled_too else TorchOps()
    first, second = layers(inputs, [40, 40], True, dtype)
    for i, layer in enumerate((first, second)):
        if i not in biases:
            layer.bias = None
    norm, x = Norm(torch.rand(inputs).to(dtype) + 0.5), torch.randn(9, inputs).to(dtype)
    residual = torch.randn(9, 40).to(dtype)
    near(fused_linear(first, ops=how)(x, residual), double(first, x) + residual.double())
    wanted = torch.cat([double(layer, norm(x)) for layer in (first, second)], 1)
    near(fused_linear(first, second, norm=norm, ops=how)(x), wanted)
    wanted = nn.functional.silu(double(first, norm(x))) * double(second, norm(x))
    near(fused_linear(first, second, norm=norm, gated=True, ops=how)(x), wanted)


# 200 outputs end in an incomplete block. The other shapes are those of SmolLM2-135M: qkv, down, and
# the LM head.
@pytest.mark.parametrize(("inputs", "outputs"), [(576, 200), (576, 960), (1536, 576), (576, 49152)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_the_same_in_any_company_and_on_any_number_of_threads(
    inputs, outputs, kind, threads
):
    torch.manual_seed(0)
    dtype, how = dtype_of(kind), kernels(kind)
    gate, up = layers(inputs, [outputs, outputs], True, dtype)
    linear = fused_linear(gate, ops=how)
    gated = fused_linear(gate, up, norm=ones(inputs, dtype), gated=True, ops=how)
    x, residual = torch.randn(77, inputs).to(dtype), torch.randn(77, outputs).to(dtype)
    sums, gates = linear(x, residual), gated(x)
    torch.set_num_threads(1)
    for start, end in [(0, 1), (1, 3), (3, 10), (5, 69), (10, 27), (70, 77)]:
        assert torch.equal(linear(x[start:end], residual[start:end]), sums[start:end])
        assert torch.equal(gated(x[start:end]), gates[start:end])


@pytest.mark.parametrize("kind", KINDS[1:])
def test_what_is_not_a_number_stays_in_its_row(kind):
    torch.manual_seed(0)
    (layer,) = layers(64, [50], False, BF16)
    x = torch.randn(20, 64).to(BF16)
    usual = fused_linear(layer, norm=ones(64, BF16), ops=kernels(kind))(x)
    x[3, 7], x[11, 0] = torch.nan, torch.inf
    found = fused_linear(layer, norm=ones(64, BF16), ops=kernels(kind))(x)
    assert found[3].isnan().all()
    assert not found[11].isfinite().all()
    rest = [i for i in range(20) if i not in (3, 11)]
    assert torch.equal(found[rest], usual[rest])


@pytest.mark.parametrize("kind", KINDS[1:])
def test_rows_may_lie_apart_and_nothing_is_written_but_the_answer(kind):
    torch.manual_seed(0)
    (layer,) = layers(64, [50], False, BF16)
    made = fused_linear(layer, ops=kernels(kind))
    wide, other = torch.randn(9, 100).to(BF16), torch.randn(9, 80).to(BF16)
    before = wide.clone(), other.clone(), layer.weight.clone()
    found = made(wide[:, 20:84], other[:, 10:60])
    assert torch.equal(found, made(wide[:, 20:84].contiguous(), other[:, 10:60].contiguous()))
    after = wide, other, layer.weight
    assert all(map(torch.equal, before, after))


def attention_of_one(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Compute the attention of one token, which attends only to itself."""
    return v.repeat_interleave(q.shape[1] // v.shape[1], 1)


@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_in_bf16_the_merged_weights_are_as_near_to_fp32_as_the_model(family, kind):
    model = tiny_model(family, **USUAL_HEADS)
    ids, positions = torch.arange(20)[:, None], torch.arange(20)[:, None] % 7
    wanted = UnmergedWeights(model).forward(ids, positions, attention_of_one)
    model.to(BF16)
    itself = UnmergedWeights(model).forward(ids, positions, attention_of_one)
    weights = MergedWeights(model, kernels(kind), BF16)
    weights.refresh()
    merged = weights.forward(ids, positions, attention_of_one)
    error, usual = ((part.float() - wanted).square().mean().sqrt() for part in (merged, itself))
    assert error < 1.5 * usual
