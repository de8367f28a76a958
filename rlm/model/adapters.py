"""LoRA adapters: make, load, compute with them, and know which base one belongs to.

Adapters stay unmerged on the model that is trained; only safetensors are read or written.
"""

from __future__ import annotations

from rlm.model.quantize import import_bitsandbytes

import_bitsandbytes()  # before peft does: it says there why

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rlm.cli import UsageError, command_of
from rlm.model.adapter_info import ADAPTER_FILES, HOW_TO_TRAIN_SFT, AdapterInfo, check_adapter
from rlm.model.base import base_model_hash, model_directory
from rlm.model.quantize import dequantized_weight


def new_adapter(model: PreTrainedModel, *, r: int, alpha: int, dropout: float = 0.0) -> PeftModel:
    """Add a fresh LoRA to every linear layer but the head; its output starts at exactly zero."""
    return get_peft_model(
        model,
        LoraConfig(
            r=r,
            lora_alpha=alpha,
            lora_dropout=dropout,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        ),
    )


def adapter_mismatch(adapter: Path, model: str, model_hash: str | None = None) -> str:
    """Say why an adapter can not be put on a base; "" if it can.

    Args:
        model_hash: of the base; computed if it is not at hand.
    """
    try:
        check_adapter(adapter, HOW_TO_TRAIN_SFT)
        check_base(adapter, model, model_hash or base_model_hash(model))
    except UsageError as error:
        return str(error)
    return ""


def adapter_hash(path: Path) -> str:
    """Identify an adapter, wherever it lies: a hash of its tensors and of its settings."""
    digest = hashlib.sha256()
    for name in ADAPTER_FILES:
        digest.update((path / name).read_bytes())
    return digest.hexdigest()[:16]


def check_base(adapter: Path, model: str, model_hash: str) -> None:
    """Refuse an adapter that was trained on other weights (known from its run.json) or on prompts
    of another chat template (kept beside it).

    Raises:
        UsageError: it was.
    """
    info = AdapterInfo.load(adapter)
    base = info.base_model or "a base that its run.json does not name"
    train = f"{command_of('train_sft')} --model {model}"
    todo = f"type --model {base}, or train one: {train}"
    if info.base_hash not in (None, model_hash):
        if info.base_model in (None, model):
            todo = f"train it again: {train}"
        raise UsageError(
            f"adapter {adapter} was trained on {base} with other weights than those of "
            f"--model {model}: {todo}"
        )
    templates = {_chat_template(adapter), _chat_template(Path(model_directory(model)))} - {None}
    if len(templates) > 1:
        raise UsageError(
            f"adapter {adapter} was trained on {base} with another chat template than that of "
            f"--model {model}: {todo}"
        )


def _chat_template(directory: Path) -> str | None:
    """Read the template beside a tokenizer; None if there is none, or no such directory is here
    (what the hub has is identified by its commit)."""
    file, config = directory / "chat_template.jinja", directory / "tokenizer_config.json"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    settings = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    template = settings.get("chat_template")
    return template if isinstance(template, str) else None  # older files may name several


def load_adapter(
    model: PreTrainedModel, path: Path, *, trainable: bool, name: str = "default"
) -> PeftModel:
    """Load an adapter onto a base, in eval mode; or beside those it has, whose layers go on as they
    were (those that are checkpointed count as training).

    Raises:
        UsageError: the files cannot be read, it is no plain LoRA of linear layers, the tensors
            belong to another base, or one of their values is not finite.
    """
    _check_kind(path)
    options = {"is_trainable": trainable, "use_safetensors": True}
    options["torch_device"] = str(model.device)  # PEFT would read onto the first card
    training: dict[torch.nn.Module, bool] = {}
    try:
        if isinstance(model, PeftModel):
            policy, training = model, {module: module.training for module in model.modules()}
            policy.load_adapter(path, name, **options)
        else:
            policy = PeftModel.from_pretrained(model, path, name, **options)
    except torch.OutOfMemoryError:
        raise
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise UsageError(f"adapter {path} does not fit this base: {first_line}") from error
    for key, tensor in policy.named_parameters():
        if "lora_embedding_A" in key:
            raise UsageError(f"adapter {path} also changes the token embeddings: unsupported")
        if name in key.split(".") and not tensor.isfinite().all():
            raise UsageError(f"adapter {path}: {key} holds values that are not finite")
    if any(layer.lora_variant or any(layer.lora_bias.values()) for layer in lora_layers(policy)):
        raise UsageError(f"adapter {path} is more than plain LoRA (DoRA, biases): unsupported")
    if not trainable and model.device.type == "cuda":  # PEFT made it fp32: slower, not as trained
        for key, tensor in policy.named_parameters():
            if name in key.split("."):
                tensor.data = tensor.data.to(model.dtype)
    policy.eval()
    for module, was in training.items():
        module.training = was
    return policy


def _check_kind(path: Path) -> None:
    """Refuse what the sampler's merged weights and the learning pass would leave out in silence."""
    try:
        config = dict(json.loads((path / ADAPTER_FILES[0]).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        message = f"adapter {path} does not fit this base: {ADAPTER_FILES[0]}: {error}"
        raise UsageError(message) from error
    kind = config.get("peft_type")
    if kind != "LORA":
        raise UsageError(f"adapter {path} is of the kind {kind}; only LoRA is supported")
    for name in ("modules_to_save", "target_parameters", "trainable_token_indices"):
        if config.get(name):
            raise UsageError(f"adapter {path} also replaces {config[name]} ({name}): unsupported")


def adapter_tensors(policy: PeftModel) -> dict[str, torch.nn.Parameter]:
    """The tensors that training changes, by name: the fp32 LoRA matrices of "default"."""
    return {name: tensor for name, tensor in policy.named_parameters() if tensor.requires_grad}


def exported_tensors(policy: PeftModel) -> dict[str, torch.Tensor]:
    """What PEFT writes of the adapter "default", by the names in its file."""
    tensors = get_peft_model_state_dict(policy, adapter_name="default", save_embedding_layers=False)
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def active_lora_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The LoRA matrices that take part in a forward pass now, by name; {} without an adapter."""
    return {
        f"{name}.{side}.{adapter}": getattr(module, side)[adapter].weight
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer) and not module.disable_adapters
        for adapter in module.active_adapters
        if adapter in module.lora_A
        for side in ("lora_A", "lora_B")
    }


def lora_layers(model: torch.nn.Module) -> list[LoraLayer]:
    """The layers that have an adapter."""
    return [module for module in model.modules() if isinstance(module, LoraLayer)]


@torch.no_grad()
def merged_weight(linear: torch.nn.Module) -> torch.Tensor:
    """Merge a linear layer's weight, (out, in), with its active adapters, in a new tensor.

    Packed weights are unpacked. The sum is made in fp32: rounded once, not once per adapter.
    """
    lora = isinstance(linear, LoraLayer)
    weight = dequantized_weight(linear.get_base_layer() if lora else linear)
    if not lora or linear.disable_adapters:
        return weight
    total = weight.float()
    for adapter in linear.active_adapters:
        if adapter in linear.lora_A:
            down, up = linear.lora_A[adapter].weight, linear.lora_B[adapter].weight
            total = total + linear.scaling[adapter] * (up.float() @ down.float())
    return total.to(weight.dtype)


def set_gradient_checkpointing(policy: PreTrainedModel, wanted: bool) -> None:
    """Keep each layer's input only, if wanted, and recompute the rest in the backward pass.

    transformers does so in training mode only. We train in eval mode (no dropout), so the layers
    themselves are told that they train, and what is inside them is not.
    """
    if wanted:
        policy.get_base_model().activation_checkpointing_enable({"use_reentrant": False})
    for module in policy.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = wanted


@contextmanager
def using_adapter(policy: PeftModel, adapter: str | None) -> Iterator[None]:
    """Let the policy compute with this adapter of its own, frozen; None is the bare base."""
    if adapter is None:
        with policy.disable_adapter():
            yield
        return
    policy.set_adapter(adapter, inference_mode=True)
    try:
        yield
    finally:
        policy.set_adapter("default")


@contextmanager
def using_reference(policy: PeftModel, start_adapter: Path | None) -> Iterator[None]:
    """Let the policy compute as when training started: as the reference of the KL term.

    After SFT that is the frozen SFT adapter, kept as a second adapter; the bare base only where
    training started from none.
    """
    if start_adapter is not None and "reference" not in policy.peft_config:
        load_adapter(policy, start_adapter, trainable=False, name="reference")
    with using_adapter(policy, None if start_adapter is None else "reference"):
        yield
