"""llama.cpp reads the GGUF files: equal token ids, and equal greedy completions.

The tests are skipped if llama.cpp is not installed: pip install -e '.[llama-cpp]'.
"""

from __future__ import annotations

import json

import pytest
import torch
from conftest import byte_tokenizer, tiny_model
from tokenizers import Regex, Tokenizer, pre_tokenizers

from benchmarks import export
from benchmarks.plain_generate import greedy
from rlm.model.gguf_export import QWEN2_SPLIT, write_gguf

pytest.importorskip("xllamacpp", reason="an extra: pip install -e '.[llama-cpp]'")

MERGES = ["a t", "1 2", "Ġ w", "! !"]  # Ġ: a space; of these, how a text is split forbids some
TEXTS = ["What is 12 + 7?", "at 1212 watts!!", "  don't\n\nWAIT 3.12 "]


def merging_tokenizer(*steps):
    """Make the byte tokenizer with a few merges, which llama.cpp requires, and another split."""
    tokenizer = byte_tokenizer()
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    first = len(tokenizer)
    words = {merge.replace(" ", ""): first + i for i, merge in enumerate(MERGES)}
    backend["model"]["vocab"] |= words
    backend["model"]["merges"] = [merge.split() for merge in MERGES]
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(backend))
    if steps:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps])
    return tokenizer


def rounded_model(family, vocab_size):
    """Make a tiny model whose weights are exact in f16, and whose biases are not zero."""
    model = tiny_model(family, vocab_size=vocab_size)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith("bias"):
                tensor.normal_(std=0.5)
            tensor.copy_(tensor.half().float())
    return model


@pytest.mark.parametrize(("kind", "tokens", "least"), [("f16", 12, 7), ("q8_0", 1, 6)])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_llama_cpp_continues_as_the_model_does(family, kind, tokens, least, tmp_path):
    """Rounding may change near ties: the cache is in f16, and q8_0 also rounds activations."""
    tokenizer = merging_tokenizer()
    model = rounded_model(family, len(tokenizer))
    write_gguf(model, tokenizer, tmp_path / "m.gguf", kind)
    limits = {"max_new_tokens": tokens, "min_new_tokens": tokens}  # no end token
    same = 0
    with export.llama_cpp(tmp_path / "m.gguf") as post:
        for i in range(8):
            messages = [{"role": "user", "content": f"What is {i} + 12?"}]
            ids = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False
            )
            text = post("/apply-template", {"messages": messages})["prompt"]
            body = {"content": text, "parse_special": True, "add_special": True}
            assert post("/tokenize", body)["tokens"] == ids
            body = {"prompt": ids, "n_predict": tokens, "temperature": 0, "ignore_eos": True}
            found = post("/completion", body | {"return_tokens": True, "cache_prompt": False})
            same += found["tokens"] == greedy(model, ids, **limits)
    assert same >= least


@pytest.mark.parametrize(
    "steps",
    [
        (),
        (
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ),
        (
            pre_tokenizers.Split(Regex(QWEN2_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ),
    ],
    ids=["gpt-2", "smollm", "qwen2"],
)
def test_llama_cpp_splits_texts_as_the_tokenizer_does(steps, tmp_path):
    tokenizer = merging_tokenizer(*steps)
    model = tiny_model(vocab_size=len(tokenizer))
    write_gguf(model, tokenizer, tmp_path / "m.gguf", "f16")
    with export.llama_cpp(tmp_path / "m.gguf") as post:
        for text in TEXTS:
            body = {"content": text, "parse_special": False, "add_special": False}
            assert post("/tokenize", body)["tokens"] == tokenizer.encode(text), text
