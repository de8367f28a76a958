"""Merged models and GGUF files, which other programs read as the same model."""

from __future__ import annotations

import json
import shutil
from copy import deepcopy
from functools import partial

import gguf
import pytest
import torch
from conftest import CHATML, byte_tokenizer, exit_code, let_it_speak, tiny_model
from tokenizers import Regex, normalizers, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedTokenizerBase,
)

import inference
from rlm.cli.options import UsageError
from rlm.data.prompts import FORMATS, render_prompt
from rlm.model.adapters import load_adapter, new_adapter
from rlm.model.base import base_model_hash, save_model
from rlm.model.export import merge_adapter, save_adapter, save_merged
from rlm.model.gguf_export import QWEN2_SPLIT, check_convertible, write_gguf

LONG = {"max_new_tokens": 12, "do_sample": False}


exported = partial(exit_code, inference, inference.InferenceConfig)


@pytest.fixture(scope="module")
def adapter(model_dir, tokenizer, tmp_path_factory):
    """Save an adapter that changes the output of the model."""
    path = tmp_path_factory.mktemp("adapters") / "lora"
    policy = new_adapter(AutoModelForCausalLM.from_pretrained(model_dir), r=4, alpha=8)
    torch.manual_seed(1)
    let_it_speak(policy, 0.3)
    run = {"base_model": str(model_dir), "base_hash": base_model_hash(str(model_dir))}
    save_adapter(policy, tokenizer, path, run | {"quantize": "4bit"})
    return path


def test_the_merged_model_says_what_base_and_adapter_say(adapter, model_dir, tmp_path):
    """transformers alone loads the result, in fp32 although training used 4 bits."""
    assert exported("--adapter", adapter, "--merge", tmp_path / "merged") == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    base = AutoModelForCausalLM.from_pretrained(model_dir)
    ours = load_adapter(base, adapter, trainable=False)
    changed = 0
    for i in range(5):
        prompt = render_prompt(tokenizer, f"What is {i} + 7?", FORMATS["deepseek"])
        ids = torch.tensor([prompt])
        found = merged.generate(ids, **LONG)
        assert torch.equal(found, ours.generate(ids, **LONG))
        torch.testing.assert_close(merged(ids).logits, ours(ids).logits, rtol=1e-4, atol=1e-4)
        with ours.disable_adapter():
            changed += not torch.equal(found, ours.generate(ids, **LONG))
    assert changed > 2
    assert {p.dtype for p in merged.parameters()} == {torch.float32}
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(model_dir).chat_template
    assert merged.generation_config.eos_token_id == [257]
    assert FORMATS["deepseek"].system_prompt in (tmp_path / "merged/README.md").read_text()
    assert not list((tmp_path / "merged").glob("adapter*"))
    assert [file.name for file in tmp_path.iterdir()] == ["merged"]


def test_a_merged_model_in_bf16_is_rounded_once(adapter, tmp_path):
    """The base weights are rounded when they are loaded, and each sum is rounded once more."""
    options = ["--merge", tmp_path / "half", "--merge-dtype", "bfloat16"]
    assert exported("--adapter", adapter, *options) == 0
    half = AutoModelForCausalLM.from_pretrained(tmp_path / "half").state_dict()
    assert {tensor.dtype for tensor in half.values()} == {torch.bfloat16}
    base = AutoModelForCausalLM.from_pretrained(
        json.loads((adapter / "run.json").read_text())["base_model"]
    )
    policy = load_adapter(base.bfloat16(), adapter, trainable=False)
    name = "model.layers.0.self_attn.q_proj"
    layer = policy.base_model.model.get_submodule(name)
    update = layer.lora_B.default.weight.float() @ layer.lora_A.default.weight.float()
    whole = layer.get_base_layer().weight.float() + 2 * update  # alpha 8 over rank 4
    assert torch.equal(half[f"{name}.weight"], whole.bfloat16())
    assert exported("--adapter", adapter, "--gguf", "x.gguf", "--merge-dtype", "bfloat16") == 2


SCALED = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALED |= {"original_max_position_embeddings": 64}


@pytest.mark.parametrize("scaling", [{}, SCALED])
def test_programs_with_transformers_4_find_the_names_that_they_know(scaling, tokenizer, tmp_path):
    """Without `rope_theta`, they would use 10000 and give wrong answers without an error."""
    rope = {"rope_type": "default", "rope_theta": 100000.0} | scaling
    save_model(tiny_model(rope_parameters=rope), tokenizer, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["rope_theta"], config.get("rope_scaling", {})) == (100000.0, scaling)
    words = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert words["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert not isinstance(words.get("extra_special_tokens"), list)
    found = AutoConfig.from_pretrained(tmp_path).rope_parameters
    assert {name: found[name] for name in rope} == rope
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again.get_vocab() == tokenizer.get_vocab()
    assert {*again.all_special_tokens} == {*tokenizer.all_special_tokens}


FACTORS = {"type": "longrope", "short_factor": [1.0] * 3, "long_factor": [2.0] * 3}
LINEAR = {"rope_type": "linear", "factor": 8.0}


PHI4 = {"partial_rotary_factor": 0.75, "original_max_position_embeddings": 64}
GEMMA3 = {"rope_theta": 2e6, "rope_local_base_freq": 2e4, "rope_scaling": LINEAR}


@pytest.mark.parametrize(
    ("family", "old"),
    [
        ("phi3", PHI4 | {"rope_scaling": FACTORS}),
        ("stablelm", {"partial_rotary_factor": 0.5}),
        ("gemma3_text", GEMMA3),
    ],
)
def test_programs_with_transformers_4_find_every_rope_setting(family, old, tokenizer, tmp_path):
    model = tiny_model(family, **deepcopy(old))  # transformers changes the dict `rope_scaling`
    save_model(model, tokenizer, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert {name: config.get(name) for name in old} == old
    assert AutoConfig.from_pretrained(tmp_path).rope_parameters == model.config.rope_parameters


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")  # PEFT sets it itself
@torch.no_grad()
def test_layers_that_store_their_weights_transposed_are_merged(tokenizer, tmp_path):
    """The Conv1D of GPT-2 stores its weight as (inputs, outputs)."""
    base = tiny_model("gpt2", n_embd=32, n_layer=1, n_head=4, n_positions=64)
    base.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    policy = let_it_speak(new_adapter(base, r=2, alpha=4), 0.3).eval()
    save_adapter(policy, tokenizer, tmp_path / "lora", {"base_model": str(tmp_path / "base")})
    # Vicuna has such a file, which transformers refuses to write.
    (tmp_path / "base/generation_config.json").write_text('{"temperature": 0.9, "top_p": 0.6}')
    merged, _ = merge_adapter(tmp_path / "lora")
    save_merged(merged, tokenizer, "", tmp_path / "merged")
    settings = json.loads((tmp_path / "merged/generation_config.json").read_text())
    assert (settings["do_sample"], settings["temperature"], settings["top_p"]) == (True, 0.9, 0.6)
    ids = torch.tensor([[1, 2, 3]])
    torch.testing.assert_close(merged(ids).logits, policy(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "tied"), [("llama", False), ("llama", True), ("qwen2", True), ("qwen2", False)]
)
@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_a_gguf_file_holds_the_same_model(family, tied, kind, tokenizer, tmp_path):
    """transformers reads the file, and undoes llama.cpp's order of rows."""
    model = tiny_model(family, tie_word_embeddings=tied)
    write_gguf(model, tokenizer, tmp_path / "m.gguf", kind)
    options = {"gguf_file": "m.gguf", "quantization_config": GgufConfig(dequantize=True)}
    found = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, **options)
    tensors = found.state_dict()
    assert tensors.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        if tensor.ndim == 1:
            assert torch.equal(tensors[name], tensor)
        elif kind == "f16":
            assert torch.equal(tensors[name], tensor.half().float()), name
        else:
            step = tensor.abs().max() / 127
            assert (tensors[name] - tensor).abs().max() <= step, name
    names = ["num_attention_heads", "num_key_value_heads", "rms_norm_eps"]
    for name in names + ["head_dim"] * (family == "llama"):
        assert getattr(found.config, name) == pytest.approx(getattr(model.config, name))
    assert found.config.rope_parameters["rope_theta"] == model.config.rope_parameters["rope_theta"]


def test_the_tokenizer_goes_into_the_file(tokenizer, tmp_path):
    write_gguf(tiny_model(vocab_size=264), tokenizer, tmp_path / "m.gguf", "f16")
    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields
    found = {name: field.contents() for name, field in fields.items()}
    assert found["tokenizer.chat_template"] == tokenizer.chat_template
    assert found["tokenizer.ggml.pre"] == "gpt-2"
    assert found["tokenizer.ggml.eos_token_id"] == 257
    assert found["tokenizer.ggml.add_bos_token"] is False
    assert found["tokenizer.ggml.tokens"][257:] == ["<|im_end|>", "<|pad|>"] + [
        f"[PAD{i}]" for i in range(259, 264)
    ]
    assert found["tokenizer.ggml.token_type"][255:] == [1, 3, 3, 3, 5, 5, 5, 5, 5]


def splitting(*steps, normalizer=None):
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps])
    if normalizer:
        tokenizer.backend_tokenizer.normalizer = normalizer
    return tokenizer


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False)


def by_regex(pattern):
    return pre_tokenizers.Split(Regex(pattern), "isolated")


@pytest.mark.parametrize(
    ("tokenizer", "name"),
    [
        (splitting(pre_tokenizers.Digits(individual_digits=True), WORDS), "smollm"),
        (splitting(by_regex(QWEN2_SPLIT), BYTES, normalizer=normalizers.NFC()), "qwen2"),
        (splitting(by_regex(QWEN2_SPLIT.replace(r"\p{N}|", r"\p{N}{1,3}|")), BYTES), "llama-bpe"),
    ],
)
def test_how_llama_cpp_calls_the_way_that_texts_are_split(tokenizer, name, tmp_path):
    write_gguf(tiny_model(), tokenizer, tmp_path / "m.gguf", "f16")
    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields
    assert fields["tokenizer.ggml.pre"].contents() == name


@pytest.mark.parametrize(
    ("model", "tokenizer", "said"),
    [
        ({"family": "mistral"}, byte_tokenizer(), "the architecture mistral"),
        ({}, splitting(by_regex(r"\d"), BYTES), "this tokenizer"),
        ({}, splitting(WORDS, normalizer=normalizers.Lowercase()), "this tokenizer"),
        ({}, splitting(pre_tokenizers.Digits(), WORDS), "this tokenizer"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            byte_tokenizer(),
            "RoPE scaling of the type linear",
        ),
    ],
)
def test_what_would_be_converted_wrongly_is_refused(model, tokenizer, said):
    with pytest.raises(UsageError, match=f"does not support {said}.*convert_hf_to_gguf"):
        check_convertible(tiny_model(**model), tokenizer)


def test_a_tokenizer_of_another_library_is_refused():
    with pytest.raises(UsageError, match="not a tokenizer of the tokenizers library"):
        check_convertible(tiny_model(), PreTrainedTokenizerBase())


def test_a_tensor_that_llama_cpp_does_not_know_is_refused(tokenizer, tmp_path):
    model = tiny_model()
    model.model.register_buffer("extra", torch.zeros(4))
    with pytest.raises(UsageError, match=r"does not support the tensor model\.extra of this model"):
        write_gguf(model, tokenizer, tmp_path / "m.gguf", "f16")
    assert not (tmp_path / "m.gguf").exists()


def test_q8_0_packs_rows_of_32(tokenizer, tmp_path):
    write_gguf(tiny_model(intermediate_size=48), tokenizer, tmp_path / "m.gguf", "q8_0")
    types = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert types["blk.0.ffn_down.weight"] == "F16"  # rows of 48 weights
    assert types["blk.0.ffn_up.weight"] == "Q8_0"
    assert types["output_norm.weight"] == "F32"


def test_mistakes_are_said_in_one_line_and_nothing_is_replaced(adapter, tmp_path, capsys):
    thesis = tmp_path / "thesis"
    thesis.write_text("years of work")
    for option in ("--merge", "--gguf"):
        assert exported("--adapter", adapter, option, thesis) == 2
        assert f"error: {option} {thesis} exists: pass a new path\n" in capsys.readouterr().err
        assert exported("--adapter", tmp_path / "nowhere", option, tmp_path / "new") == 2
        assert exported("What?", "--adapter", adapter, option, tmp_path / "new") == 2
        assert "leave out the question and --base" in capsys.readouterr().err
    folder = tmp_path / "empty"
    folder.mkdir()
    for both in ([], ["--merge", folder]):  # such a run would fail after the merge
        assert exported("--adapter", adapter, "--gguf", folder, *both) == 2
        assert f"--gguf {folder} is a folder: name a file" in capsys.readouterr().err
        shutil.rmtree(folder, ignore_errors=True)
    assert [file.name for file in tmp_path.iterdir()] == ["thesis"]
    assert thesis.read_text() == "years of work"


def test_half_a_file_is_not_left(adapter, tmp_path, monkeypatch, capsys):
    def full(*_, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("transformers.PreTrainedTokenizerBase.save_pretrained", full)
    monkeypatch.setattr("gguf.GGUFWriter.write_tensors_to_file", full)
    for option in ("--merge", "--gguf"):
        assert exported("--adapter", adapter, option, tmp_path / "new") == 2
        assert "No space left on device" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_template_that_opens_the_reasoning_is_named_for_other_programs(tmp_path, capsys):
    opens = CHATML.replace("assistant\n{%", "assistant\n<think>\n{%")  # as in DeepSeek-R1
    for template, said in ((CHATML, False), (opens, True)):
        tokenizer = byte_tokenizer(template=template)
        base, adapter = tmp_path / f"base {said}", tmp_path / f"adapter {said}"
        tiny_model().save_pretrained(base)
        tokenizer.save_pretrained(base)
        save_adapter(new_adapter(tiny_model(), r=4, alpha=8), tokenizer, adapter, {})
        merge_adapter(adapter, str(base))
        assert ("begins the reply with <think>" in "".join(capsys.readouterr())) == said
