"""The compiled kernels equal torch, and sampling works without a compiler."""

import functools
import subprocess
import sys

import pytest
import torch
from conftest import kernels, tiny_model

from rlm.ops import TorchOps
from rlm.ops.kernels import load_ops
from rlm.sampling import Sampler, SamplingParams

# Relative errors: bf16 has 8 bits, and torch rounds more than once.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2}


@pytest.fixture(params=TOLERANCE)
def dtype(request):
    return request.param


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    error = (found.double() - wanted.double()).abs().max()
    assert error <= TOLERANCE[found.dtype] * wanted.double().abs().max()


# Each shape takes seconds to build. 80 is not a power of two, and the sums of (7, 128), the shape
# of Qwen2.5-7B, do not fit into the registers. No C code depends on the combination of shape and
# dtype, so one dtype of these two shapes is tested only by `make test-slow`.
RARE = [(1, 80, torch.bfloat16), (7, 128, torch.float32)]
SHAPES = [(queries, width, dtype) for queries, width in [(2, 8), (3, 64)] for dtype in TOLERANCE]
SHAPES += [(1, 80, torch.float32), (7, 128, torch.bfloat16)]
SHAPES += [pytest.param(*shape, marks=pytest.mark.slow) for shape in RARE]

# The cases include shared slots, empty segments, partial blocks, and caches that are not a multiple
# of a block.
SLOTS = [[0, 0, 0, 0, 0], [1, 0, 1, 2, 0], [0, 1, 2, 3, 4]]
LENGTHS = [[0, 5, 5, 5, 0], [33, 0, 33, 40, 1], [1, 2, 32, 33, 71]]
ROOM = [(1, 5), (3, 40), (5, 71)]  # slots, tokens


def stores(heads: int, width: int, dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return caches of two layers, with NaN where no row has a token."""
    made = []
    for (slots, tokens), where, lengths in zip(ROOM, SLOTS, LENGTHS, strict=True):
        keys = torch.randn(2, slots, heads, width, tokens).to(dtype)
        values = torch.randn(2, slots, heads, tokens, width).to(dtype)
        for slot in range(slots):
            used = max((n for s, n in zip(where, lengths, strict=True) if s == slot), default=0)
            keys[:, slot, ..., used:] = values[:, slot, :, used:] = torch.nan
        made.append((keys, values))
    return made


@pytest.mark.parametrize(("queries", "width", "dtype"), SHAPES)
def test_attention_is_the_softmax_over_what_a_row_has(queries, width, dtype, threads):
    torch.manual_seed(0)
    heads, layer, scale = 2, 1, 0.3
    kept = stores(heads, width, dtype)
    q, k, v = (torch.randn(5, n, 1, width).to(dtype) for n in (heads * queries, heads, heads))
    attend = kernels(dtype, queries, width).decode_attention(kept, SLOTS, LENGTHS)
    found = attend(layer, q, k, v, scale)
    assert found.shape == q.shape
    for row in range(5):
        own_keys, own_values = kept[-1]
        assert torch.equal(own_keys[layer, row, :, :, LENGTHS[-1][row] - 1], k[row, :, 0])
        assert torch.equal(own_values[layer, row, :, LENGTHS[-1][row] - 1], v[row, :, 0])
        parts = [
            (keys[layer, where[row], ..., : n[row]].mT, values[layer, where[row], :, : n[row]])
            for (keys, values), where, n in zip(kept, SLOTS, LENGTHS, strict=True)
        ]
        keys, values = (torch.cat(part, 1).double() for part in zip(*parts, strict=True))
        scores = torch.einsum("hqd,htd->hqt", q[row].double().view(heads, queries, -1), keys)
        wanted = (scores * scale).softmax(-1) @ values
        close(found[row, :, 0], wanted.reshape(heads * queries, width))


AT_THE_END_OF_A_PAGE = """
import ctypes, mmap, sys, torch
from rlm.ops.kernels import load_ops
dtype, page = getattr(torch, sys.argv[1]), mmap.PAGESIZE
alive = []

def at_the_end(*shape):
    size = torch.Size(shape).numel() * dtype.itemsize
    pages = -(-size // page) * page
    memory = mmap.mmap(-1, pages + page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + pages), page, 0) == 0  # PROT_NONE
    alive.append(memory)
    count = size // dtype.itemsize
    flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=pages - size)
    return flat.view(shape)

for tokens in map(int, sys.argv[2:]):
    kept = [(at_the_end(1, 1, 1, 64, n), at_the_end(1, 1, 1, n, 64)) for n in (1, 1, tokens)]
    for length in {1, tokens // 2 + 1, tokens}:
        attend = load_ops(dtype, 3, 64).decode_attention(kept, [[0]] * 3, [[0], [0], [length]])
        attend(0, torch.zeros(1, 3, 1, 64).to(dtype), *torch.zeros(2, 1, 1, 1, 64).to(dtype), 1.0)
"""


def test_attention_reads_nothing_behind_the_cache(dtype):
    """The keys and the values are followed by an unreadable page, so a wrong read would crash."""
    kernels(dtype)
    sizes = ["1", "2", "16", "30", "32", "33", "40", "64", "71"]
    command = [
        sys.executable,
        "-c",
        AT_THE_END_OF_A_PAGE,
        str(dtype).removeprefix("torch."),
        *sizes,
    ]
    subprocess.run(command, check=True)


def test_rows_may_lie_apart_in_memory():
    """One matmul computes queries, keys and values, so they are views of its result."""
    torch.manual_seed(0)
    kept = stores(2, 64, torch.float32)
    qkv = torch.randn(5, 10, 64)
    q, k, v = (part.unsqueeze(2) for part in qkv.split([6, 2, 2], 1))
    attend = kernels(torch.float32).decode_attention(kept, SLOTS, LENGTHS)
    together = [part.contiguous() for part in (q, k, v)]
    assert torch.equal(attend(0, q, k, v, 1.0), attend(0, *together, 1.0))


def test_attention_survives_scores_far_apart_and_passes_on_what_is_not_a_number():
    kept = [(torch.zeros(1, 1, 1, 8, 3), torch.zeros(1, 1, 1, 3, 8)) for _ in range(3)]
    keys, values = kept[1]
    keys[..., 0, :] = torch.tensor([-3e4, 3e4, 0])
    values[..., :, 0] = torch.tensor([1.0, 2.0, 3.0])
    attend = kernels(torch.float32, 1, 8).decode_attention(kept, [[0]] * 3, [[0], [3], [1]])
    q, nothing = torch.eye(1, 8)[None, None], torch.zeros(1, 1, 1, 8)
    assert attend(0, q, nothing, nothing, 1.0)[0, 0, 0].tolist() == [2, *[0] * 7]
    assert attend(0, q * torch.nan, nothing, nothing, 1.0).isnan().all()


@pytest.mark.parametrize("rows", [1, 3, 64])  # 64 rows use several threads
def test_the_passes_are_those_of_torch(rows, dtype, threads):
    torch.manual_seed(0)
    made = kernels(dtype)
    x = (3 * torch.randn(rows, 577)).to(dtype)
    close(made.rms_norm(x, None, 1e-5), TorchOps().rms_norm(x.double(), None, 1e-5))
    heads = torch.randn(rows, 9, 64).to(dtype)[:, 1:6]  # a view, as queries and keys are
    angles = torch.rand(rows, 32).repeat(1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    wanted = TorchOps().rotary_embedding(heads.double(), cos.double(), sin.double())
    close(made.rotary_embedding(heads, cos, sin), wanted)
    assert torch.equal(made.rotary_embedding(heads.clone(), cos, 0 * sin), heads * cos[:, None])


@pytest.mark.parametrize("vocabulary", [5, 256, 3001])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_scores_and_their_derivatives_are_those_of_the_softmax(
    vocabulary, temperature, dtype, threads
):
    torch.manual_seed(0)
    logits = (3 * torch.randn(50, vocabulary)).to(dtype)
    logits[0, 2] = 60  # a token with a probability of 1
    targets = torch.randint(vocabulary, (50,))
    targets[0] = 2
    before = logits.clone()
    logprobs, entropy = kernels(dtype).token_logprobs(logits, targets, temperature, gradients=False)
    assert torch.equal(logits, before)
    every = (logits.double() / temperature).log_softmax(-1)
    wanted = every.gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), wanted, atol=2e-6, rtol=2e-6)
    wanted_entropy = -(every.exp() * every).sum(-1)
    torch.testing.assert_close(entropy.double(), wanted_entropy, atol=1e-5, rtol=1e-5)
    again = kernels(dtype).token_logprobs(logits, targets, temperature, gradients=True)
    assert torch.equal(logprobs, again[0])
    assert torch.equal(entropy, again[1])
    grads = torch.nn.functional.one_hot(targets, vocabulary) - every.exp()
    eps = torch.finfo(dtype).eps
    assert ((logits.double() - grads).abs() <= 0.6 * eps * grads.abs() + 1e-6).all()


@pytest.mark.parametrize("rows", [1, 65])
def test_norm_and_gating_and_their_gradients_are_those_of_autograd(rows, dtype, threads):
    torch.manual_seed(0)
    made = kernels(dtype)
    x, weight, grad = (torch.randn(*shape, 577) for shape in ((rows,), (), (rows,)))
    x, weight, grad = (3 * x).to(dtype), weight.to(dtype), grad.to(dtype)
    exact = x.double().requires_grad_()
    wanted = weight.double() * exact * (exact.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    close(made.rms_norm(x, weight, 1e-5), wanted.detach())
    (grad_x,) = torch.autograd.grad(wanted, exact, grad.double())
    close(made.rms_norm_backward(x, weight, 1e-5, grad), grad_x)

    gate, up = (10 * torch.randn(rows, 577)).to(dtype), x
    exact = [part.double().requires_grad_() for part in (gate, up)]
    wanted = torch.nn.functional.silu(exact[0]) * exact[1]
    close(made.silu_and_mul(gate, up), wanted.detach())
    for found, by in zip(
        made.silu_and_mul_backward(gate, up, grad),
        torch.autograd.grad(wanted, exact, grad.double()),
        strict=True,
    ):
        close(found, by)


@pytest.mark.parametrize(("queries", "width", "dtype"), SHAPES)
@pytest.mark.parametrize(("tokens", "masks"), [(1, 1), (37, 1), (37, 2)])
def test_attention_of_many_tokens_and_its_gradients(queries, width, tokens, masks, dtype, threads):
    """The cases include hidden blocks, a partial last block, and queries that see no key."""
    torch.manual_seed(0)
    heads, scale = 2, 0.3
    q, k, v = (torch.randn(2, tokens, n, width) for n in (heads * queries, heads, heads))
    grad = torch.randn(q.shape)
    hidden = torch.rand(masks, 48 if tokens > 16 else 16, 48 if tokens > 16 else 16) < 0.5
    hidden[:, tokens:] = hidden[:, :, tokens:] = True  # (masks, keys, queries)
    hidden[:, 16:32, :16] = hidden[:, :, 5:7] = True
    visible = ~hidden[:, :tokens, :tokens].mT[:, None]
    reads = visible.any(-1).view(masks, tokens, 1, 1)
    given = [part.to(dtype) for part in (q, k, v)]
    exact = [part.double().requires_grad_() for part in given]
    wanted = torch.nn.functional.scaled_dot_product_attention(
        *(part.transpose(1, 2) for part in exact),
        attn_mask=torch.zeros(visible.shape).double().masked_fill_(~visible, -1e9),
        scale=scale,
        enable_gqa=True,
    ).transpose(1, 2)
    grad = (grad * reads).to(dtype)
    blocks = ~hidden.mT.unflatten(1, (-1, 16)).unflatten(3, (-1, 16)).all(4).all(2)
    shown, made = (hidden, blocks), kernels(dtype, queries, width)
    found = made.attention(*given, *shown, scale)
    assert found.isfinite().all()
    close(found * reads, (wanted * reads).detach())
    gradients = made.attention_backward(*given, *shown, scale, grad)
    for by, wanted_by in zip(
        gradients, torch.autograd.grad(wanted, exact, grad.double()), strict=True
    ):
        close(by, wanted_by)
    torch.set_num_threads(3)
    try:
        assert torch.equal(found, made.attention(*given, *shown, scale))
        again = made.attention_backward(*given, *shown, scale, grad)
    finally:
        torch.set_num_threads(1)
    assert all(map(torch.equal, gradients, again))


def test_what_is_not_a_number_stays_in_its_row():
    made, x, weight = kernels(torch.float32), torch.ones(3, 300), torch.ones(300)
    x[1, 2] = torch.nan
    logprobs, entropy = made.token_logprobs(x.clone(), torch.zeros(3).long(), 1.0, gradients=False)
    grads = x.clone()
    made.token_logprobs(grads, torch.zeros(3).long(), 1.0, gradients=True)
    for found in (
        logprobs[:, None],
        entropy[:, None],
        grads,
        made.rms_norm(x, weight, 1e-5),
        made.rms_norm_backward(x, weight, 1e-5, x),
        made.silu_and_mul(x, x),
    ):
        assert found.isnan().any(1).tolist() == [False, True, False]


def test_targets_are_tokens_of_the_vocabulary_or_none():
    made = kernels(torch.float32)
    for target in (-1, 300):
        with pytest.raises(IndexError, match="300 tokens"):
            made.token_logprobs(torch.zeros(1, 300), torch.tensor([target]), 1.0, True)
    nothing = made.token_logprobs(torch.zeros(0, 300), torch.zeros(0).long(), 1.0, True)
    assert [part.shape for part in nothing] == [(0,), (0,)]


def test_rounding_to_bf16_is_that_of_torch():
    """Rounding is to nearest, ties to even."""
    torch.manual_seed(0)
    x = torch.randn(2, 4096).to(torch.bfloat16)
    wide = x.double()
    wanted = (wide * wide.pow(2).mean(1, keepdim=True).rsqrt()).to(torch.bfloat16)
    found = kernels(torch.bfloat16).rms_norm(x, None, 0.0)
    assert (found == wanted).double().mean() > 0.999  # fp32 itself may be beyond a tie


@pytest.mark.parametrize(
    ("compiler", "said"),
    [
        ("no-such-compiler", "No such file"),
        ("false", "false failed"),
        ("true", "cannot open shared object"),  # creates no library
    ],
)
def test_without_a_compiler_torch_does_it(compiler, said, tokenizer, monkeypatch):
    model, prompts = tiny_model(), [[1, 2, 3], [4, 5]]
    params = SamplingParams(20, temperature=1.0)
    with_compiler = Sampler(model, tokenizer)
    monkeypatch.setenv("CC", compiler)
    # `load_ops` caches its result, so use a cache that ends with the test.
    forgetful = functools.cache(load_ops.__wrapped__)
    monkeypatch.setattr("rlm.ops.kernels.load_ops", forgetful)
    without = Sampler(model, tokenizer)
    assert "not compiled" in without.description
    assert said in without.description
    assert said in without.batch_note
    groups = [sampler.sample(prompts, 4, params, [0, 1]) for sampler in (with_compiler, without)]
    left, right = ([[c.token_ids for c in group] for group in groups] for groups in groups)
    assert left == right


def test_a_number_type_without_code_is_left_to_torch():
    made = load_ops(torch.float16, 3, 64)
    assert isinstance(made, TorchOps)
    assert "float16 is not supported" in made.description


def test_what_is_compiled_is_said_and_used(tokenizer, monkeypatch):
    kernels(torch.float32, 2, 8)
    model = tiny_model()
    sampler = Sampler(model, tokenizer)
    assert "kernels compiled" in sampler.description
    monkeypatch.setattr(TorchOps, "decode_attention", None)
    sampler.sample([[1, 2]], 2, SamplingParams(5), [0])
