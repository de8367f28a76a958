"""Attention of the training pass in torch: it equals torch's, and is used where it is supported.

The compiled attention is tested in test_kernels.py and in training/test_logprobs.py.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from conftest import tiny_model

from rlm.cli.options import UsageError
from rlm.model.base import load_base
from rlm.model.hardware import Device
from rlm.ops import fused_layers
from rlm.training.logprobs import attention_mask

# Row 1 has a prompt of 3 tokens, and completions of 2 and 3. Row 2 ends with padding.
SEGMENTS = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2], [0, 0, 0, 0, 1, 1, -1, -1]])


def inputs(dtype, heads, shared, width=8):
    """Return q, k and v, (B, heads, S, D), as views of (B, S, heads, D) as in transformers."""
    torch.manual_seed(0)
    made = [torch.randn(2, 8, h, width).to(dtype).transpose(1, 2) for h in (heads, shared, shared)]
    return [part.requires_grad_() for part in made]


@pytest.mark.parametrize(("heads", "shared", "width"), [(6, 2, 64), (2, 2, 8), (3, 1, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 128])  # per block; with 3, the last block has two rows
def test_attention_and_its_gradients_equal_torchs(heads, shared, width, dtype, rows, monkeypatch):
    monkeypatch.setattr(fused_layers, "QUERY_BLOCK", rows)
    ours = inputs(dtype, heads, shared, width)
    exact = [part.detach().float().requires_grad_() for part in ours]
    mask, scale = attention_mask(SEGMENTS, dtype), 0.6 * width**-0.5
    out = fused_layers._BlockAttention.apply(*ours, mask, scale)
    # The results of padding are never read, so they are not compared.
    seen = (SEGMENTS >= 0)[:, None, :, None]
    wanted = F.scaled_dot_product_attention(
        *exact, attn_mask=attention_mask(SEGMENTS, torch.float32), scale=scale, enable_gqa=True
    )
    near = {"atol": 1e-6, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.03, "rtol": 0.03}
    torch.testing.assert_close((out * seen).float(), wanted * seen, **near)
    grad = torch.randn(out.shape) * seen
    found = torch.autograd.grad(out, ours, grad.to(dtype))
    for ours_by, exact_by in zip(found, torch.autograd.grad(wanted, exact, grad), strict=True):
        torch.testing.assert_close(ours_by.float(), exact_by, **near)


def test_only_keys_that_a_block_sees_are_computed(monkeypatch):
    monkeypatch.setattr(fused_layers, "QUERY_BLOCK", 3)
    mask = attention_mask(SEGMENTS, torch.bfloat16)
    first, padded = fused_layers._blocks(mask)
    blocks = [(block.rows.start, block.rows.stop, block.columns.tolist()) for block in first]
    # The blocks are the prompt; completion 1 and the beginning of completion 2; the rest of it.
    assert blocks == [(0, 3, [0, 1, 2]), (3, 6, [0, 1, 2, 3, 4, 5]), (6, 8, [0, 1, 2, 5, 6, 7])]
    assert torch.equal(first[2].mask, mask[0, 0, 6:][:, [0, 1, 2, 5, 6, 7]])
    # Padding attends to itself.
    assert padded[-1].columns.tolist() == [6, 7]


def test_each_mask_has_its_own_blocks():
    """The blocks are cached for the layers of a pass, and must not be used for the next mask."""
    q, k, v = inputs(torch.float32, 4, 2)
    one = attention_mask(SEGMENTS[:1], torch.float32)  # one mask for all sequences
    other = attention_mask(SEGMENTS.flip(0), torch.float32)
    masks = one, other, one, one.repeat(2, 1, 1, 1)
    outs = [fused_layers._BlockAttention.apply(q, k, v, mask, 0.5) for mask in masks]
    assert torch.equal(outs[0], outs[2])
    assert torch.equal(outs[0], outs[3])
    assert not torch.equal(outs[0], outs[1])


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_model_scores_the_same_with_it(family, tmp_path):
    tiny_model(family).save_pretrained(tmp_path)
    ids = torch.arange(24).reshape(2, 12) % 100
    padding = torch.ones_like(ids)
    padding[1, 9:] = 0
    logits = {}
    for attn in ("sdpa", fused_layers.ATTN_IMPLEMENTATION):
        model = load_base(str(tmp_path), Device("cpu", torch.float32, ""), attn=attn)
        logits[attn] = model(input_ids=ids, attention_mask=padding, use_cache=False).logits
    ours, theirs = (part[padding.bool()] for part in logits.values())
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_it_is_chosen_on_a_cpu(model_dir):
    device = Device("cpu", torch.float32, "")
    for named, used in (("auto", fused_layers.ATTN_IMPLEMENTATION), ("eager", "eager")):
        model = load_base(str(model_dir), device, attn=named)
        assert model.config._attn_implementation == used


@pytest.mark.parametrize("option", [{"softcap": 30.0}, {"s_aux": torch.zeros(2)}, {"dropout": 0.1}])
def test_what_it_does_not_do_is_one_line(option):
    q, k, v = inputs(torch.float32, 2, 2)
    mask = attention_mask(SEGMENTS, torch.float32)
    with pytest.raises(UsageError, match="not supported"):
        fused_layers.attention_forward(torch.nn.Module(), q, k, v, mask, **option)
