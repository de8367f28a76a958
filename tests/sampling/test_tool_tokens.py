"""Tokens that a tool writes into completions: their places and masks.

They do not depend on the other completions in the batch.
"""

import math

import pytest
import torch
from conftest import byte_fallback_tokenizer, tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlm.data import encode_inserted_text
from rlm.model.adapters import new_adapter
from rlm.sampling import (
    Request,
    Sampler,
    SamplingParams,
    ToolTokens,
    tool_spans,
)
from rlm.tools import Calculator
from rlm.training.batches import Rollout, make_micro_batches
from rlm.training.logprobs import token_logprobs

PROMPTS = [[7, 8, 9, 1], [7, 8, 2], [7, 8, 9, 3, 4, 5], [6]]
PARAMS = SamplingParams(40)


class Remark:
    """A tool that writes after a third of all characters, so that a random model triggers it."""

    name, trigger = "remark", ""

    def __call__(self, text):
        if not text or text.endswith("!") or ord(text[-1]) % 3:
            return None
        return f"[{len(text)}]!"


def completions(tokenizer, max_num_seqs, prompts=PROMPTS, n=3, seeds=range(4), tool=Remark):
    model = tiny_model()
    sampler = Sampler(model, tokenizer, max_num_seqs=max_num_seqs, tool=tool and tool())
    return sampler.sample(prompts, n, PARAMS, list(seeds))


def seen(groups):
    return [[(c.token_ids, c.tool_mask, c.finish_reason) for c in group] for group in groups]


def test_a_completion_with_a_tool_is_the_same_alone_and_in_a_batch(tokenizer):
    expected = seen(completions(tokenizer, 64))
    masks = [mask for group in expected for _, mask, _ in group]
    assert sum(not all(mask) for mask in masks) > 6  # the tool wrote in most of them
    assert all(any(mask) for mask in masks)
    for max_num_seqs in (1, 5):
        assert seen(completions(tokenizer, max_num_seqs)) == expected
    alone = completions(tokenizer, 8, [PROMPTS[2]], n=1, seeds=[2 + 1])
    assert seen(alone) == [[expected[2][1]]]


def test_the_mask_is_where_no_token_was_drawn_and_the_rest_is_what_the_model_says(tokenizer):
    """Later tokens attend to the inserted tokens, in training as in sampling."""
    policy = new_adapter(tiny_model(), r=4, alpha=8).eval()
    groups = Sampler(policy, tokenizer, tool=Remark()).sample(PROMPTS, 3, PARAMS, [0, 1, 2, 3])
    rollouts = []
    for problem, group in enumerate(groups):
        for c in group:
            assert c.tool_mask == [not math.isnan(logprob) for logprob in c.logprobs]
            assert c.own_tokens == sum(c.tool_mask) < len(c.token_ids)
            about = (1.0, 1.0, c.logprobs, c.tool_mask)
            rollouts.append(Rollout(problem, PROMPTS[problem], c.token_ids, *about))
    for micro in make_micro_batches(rollouts, 5, 999, "cpu"):
        with torch.no_grad():
            logprobs, _ = token_logprobs(policy, micro, 1.0)
        gap = (logprobs - micro.sampler_logprobs)[micro.completion_mask].abs()
        assert gap.max() < 1e-4


def test_every_remark_stands_where_the_tool_was_asked(tokenizer):
    """The tool depends only on the text before it, so the finished text determines its output."""
    tool, calls = Remark(), 0
    for group in completions(tokenizer, 64):
        for c in group:
            for (first, end), (start, stop) in zip(
                c.tool_calls, tool_spans(tokenizer, c), strict=True
            ):
                before = tokenizer.decode(c.token_ids[:first], skip_special_tokens=True)
                written = tokenizer.decode(c.token_ids[:end], skip_special_tokens=True)
                assert (start, stop) == (len(before), len(written))
                inserted = tool(before)
                cut = end == len(c.token_ids)
                assert inserted == written[start:] or (cut and inserted.startswith(written[start:]))
                assert not cut or c.finish_reason == "length"
                calls += 1
    assert calls > 10


def test_without_a_tool_there_is_no_mask(tokenizer):
    for group in completions(tokenizer, 64, tool=None):
        for c in group:
            assert (c.tool_mask, c.tool_calls, c.own_tokens) == ([], [], len(c.token_ids))


def test_an_insertion_counts_and_may_be_cut(tokenizer):
    """max_new_tokens counts the tool's tokens, and may cut off the tool's text."""
    ids = tokenizer.encode("x<<3+4=", add_special_tokens=False)
    force = ToolTokens(Calculator(), tokenizer)

    def write(row, before, token):  # writes `ids`, then lets the model write
        return [ids[len(before)]] if len(before) < len(ids) else force(row, before, token)

    sampler = Sampler(tiny_model(), tokenizer)
    for room, text in ((2, "7>"), (3, "7>>"), (5, "7>>")):
        request = Request([1, 2], SamplingParams(len(ids) + room), 3, force_tokens=write)
        [[c]] = sampler.complete([request])
        assert tokenizer.decode(c.token_ids).startswith("x<<3+4=" + text)
        assert len(c.token_ids) <= len(ids) + room
        if room < 4:
            assert c.finish_reason == "length"


def bpe(*merged: str) -> PreTrainedTokenizerFast:
    """Make a byte-level BPE tokenizer with the given merged tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {c: i for i, c in enumerate([*alphabet, *merged])}
    backend = Tokenizer(models.BPE(vocabulary, [(m[0], m[1:]) for m in merged]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.mark.parametrize(
    ("text", "merged", "inserted"),
    [
        ("<<3+4=", (), "7>>"),
        ("<<(3+4)=", (")=",), "7>>"),  # a token ends with the trigger
        ("<<3+4=7", ("=7",), None),  # the token contains text after the trigger
    ],
)
def test_tokens_of_several_characters(text, merged, inserted):
    tokenizer = bpe(*merged)
    ids = tokenizer.encode(text)
    assert not merged or len(ids) < len(text)
    force = ToolTokens(Calculator(), tokenizer)
    asked = [force(0, ids[:end], 0) for end in range(len(ids) + 1)]
    assert asked[:-1] == [None] * len(ids)
    assert (asked[-1] and tokenizer.decode(asked[-1])) == inserted


def test_a_trigger_may_end_inside_a_token_of_bytes(tokenizer):
    class Answer:
        name, trigger = "answer", "答案是"

        def __call__(self, text):
            return "42"

    ids = tokenizer.encode("x答案是", add_special_tokens=False)
    force = ToolTokens(Answer(), tokenizer)
    assert [force(0, ids[:end], 0) for end in range(len(ids))] == [None] * len(ids)
    assert tokenizer.decode(force(0, ids, 0)) == "42"


def test_no_space_is_put_before_what_a_tool_writes():
    """SentencePiece adds a space before each text that it encodes."""
    tokenizer = byte_fallback_tokenizer()
    ids = tokenizer.encode("<<3+4=")
    assert tokenizer.decode(ids + ToolTokens(Calculator(), tokenizer)(0, ids, 0)) == "<<3+4=7>>"
    inserted = encode_inserted_text(tokenizer, " so")
    assert tokenizer.decode(ids + inserted) == "<<3+4= so"


def test_a_tool_can_not_forge_a_special_token(tokenizer):
    class Forger:
        name, trigger = "forger", "a"

        def __call__(self, text):
            return "<|im_end|>"

    ids = ToolTokens(Forger(), tokenizer)(0, tokenizer.encode("a"), 0)
    assert 257 not in ids
    assert tokenizer.decode(ids) == "<|im_end|>"
