"""Writes a model as a GGUF file for llama.cpp and ollama, in f16 or q8_0.

Llama (including SmolLM2), Qwen2 and Qwen3 models with a byte-level BPE tokenizer are supported.
Other models are rejected; they require llama.cpp's own converter.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import torch

from rlm.cli import UsageError
from rlm.data import backend_tokenizer, end_of_turn_id
from rlm.ops import head_dim, num_key_value_heads
from rlm.runs import check_space, sync, writing_beside

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Maps the steps of a pre-tokenizer to llama.cpp's name for it (`tokenizer.ggml.pre`).
PRE_TOKENIZERS = {
    ("GPT-2",): "gpt-2",
    ("Digits", "GPT-2"): "smollm",
    (QWEN2_SPLIT, "ByteLevel"): "qwen2",
    (QWEN2_SPLIT.replace(r"\p{N}|", r"\p{N}{1,3}|"), "ByteLevel"): "llama-bpe",
}


def check_convertible(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that llama.cpp computes the same results from the GGUF file as the model.

    Raises:
        UsageError: the architecture, RoPE scaling or tokenizer is not supported.
    """
    config, reason = model.config, None
    rope = getattr(config, "rope_parameters", None) or {}
    if config.model_type not in ARCHITECTURES:
        reason = f"the architecture {config.model_type}"
    elif rope.get("rope_type", "default") != "default":
        reason = f"RoPE scaling of the type {rope['rope_type']}"
    elif getattr(config, "use_sliding_window", False):
        reason = "a sliding window"
    elif _pre_tokenizer(tokenizer) is None:
        reason = "this tokenizer"
    if reason:
        raise UsageError(
            f"--gguf does not support {reason}: save the model with --merge DIR and run "
            "llama.cpp's convert_hf_to_gguf.py DIR"
        )


def write_gguf(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, path: Path, kind: str
) -> None:
    """Write the model, its tokenizer and its chat template to a file, completely or not at all.

    Args:
        kind: type of the matrices, "f16" or "q8_0"; vectors are written in fp32.
    """
    check_convertible(model, tokenizer)
    path = path.resolve()
    check_space("--gguf", path.parent, sum(2 * p.numel() for p in model.parameters()))
    architecture = ARCHITECTURES[model.config.model_type]
    writer = gguf.GGUFWriter(None, gguf.MODEL_ARCH_NAMES[architecture])
    _add_hyperparameters(writer, model)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind.upper()}"])
    _add_tokenizer(writer, tokenizer, model.config.vocab_size)
    _add_tensors(writer, model, kind)
    with writing_beside(path) as scratch:
        writer.write_header_to_file(scratch / path.name)
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        sync(scratch / path.name)
        (scratch / path.name).rename(path)


def _add_hyperparameters(writer: gguf.GGUFWriter, model: PreTrainedModel) -> None:
    config, width = model.config, head_dim(model.config)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(num_key_value_heads(config))
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(width)
    writer.add_vocab_size(config.vocab_size)


def _add_tokenizer(
    writer: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerBase, vocab_size: int
) -> None:
    names = {number: token for token, number in tokenizer.get_vocab().items()}
    added, types = tokenizer.added_tokens_decoder, []
    for number in range(vocab_size):
        kind = gguf.TokenType.NORMAL if number in names else gguf.TokenType.UNUSED
        if number in added:
            special = added[number].special
            kind = gguf.TokenType.CONTROL if special else gguf.TokenType.USER_DEFINED
        types.append(kind)
    merges = _backend(tokenizer)["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(str(_pre_tokenizer(tokenizer)))  # never None: see `check_convertible`
    writer.add_token_list([names.get(number, f"[PAD{number}]") for number in range(vocab_size)])
    writer.add_token_types(types)
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    writer.add_eos_token_id(end_of_turn_id(tokenizer))
    if isinstance(tokenizer.bos_token_id, int):
        writer.add_bos_token_id(tokenizer.bos_token_id)
    if isinstance(tokenizer.pad_token_id, int):
        writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_add_bos_token(False)  # the chat template adds the token if the model needs it
    writer.add_chat_template(tokenizer.get_chat_template())


def _add_tensors(writer: gguf.GGUFWriter, model: PreTrainedModel, kind: str) -> None:
    config = model.config
    names = gguf.get_tensor_name_map(ARCHITECTURES[config.model_type], config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": num_key_value_heads(config)}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        layer = name.split(".")[-2]
        if config.model_type == "llama" and layer in heads:
            tensor = _interleave_rotary_halves(tensor, heads[layer])
        data, dtype = tensor.float().numpy(), gguf.GGMLQuantizationType.F32
        if data.ndim > 1:  # q8_0 quantizes blocks of 32 numbers
            dtype = gguf.GGMLQuantizationType[kind.upper() if data.shape[-1] % 32 == 0 else "F16"]
        packed = gguf.quantize(data, dtype)
        known = names.get_name(name, (".weight", ".bias"))
        if known is None:
            raise UsageError(f"--gguf does not support the tensor {name} of this model")
        writer.add_tensor(known, packed, raw_dtype=dtype)


def _interleave_rotary_halves(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder the rows of a projection for llama.cpp's rotary embedding.

    llama.cpp rotates the pairs of dimensions (2i, 2i+1), and transformers the pairs (i, i + d/2).
    """
    halves = tensor.reshape(heads, 2, -1, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape).contiguous()


def _backend(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    return json.loads(backend_tokenizer(tokenizer).to_str())


def _pre_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return llama.cpp's name for the pre-tokenizer of a byte-level BPE tokenizer.

    The result is None if llama.cpp has no name for it, or if the tokenizer has a normalizer other
    than NFC, which would change texts that llama.cpp leaves unchanged.
    """
    backend = _backend(tokenizer)
    if backend["model"]["type"] != "BPE" or not backend["pre_tokenizer"]:
        return None
    steps = backend["pre_tokenizer"].get("pretokenizers") or [backend["pre_tokenizer"]]
    kinds = []
    for step in steps:
        if step["type"] == "ByteLevel" and not step["add_prefix_space"]:
            kinds.append("GPT-2" if step["use_regex"] else "ByteLevel")
        elif step["type"] == "Digits" and step["individual_digits"]:
            kinds.append("Digits")
        elif step["type"] == "Split" and step["behavior"] == "Isolated" and not step["invert"]:
            kinds.append(step["pattern"].get("Regex"))
        else:
            return None
    normalizer = (backend["normalizer"] or {}).get("type")
    return PRE_TOKENIZERS.get(tuple(kinds)) if normalizer in (None, "NFC") else None
