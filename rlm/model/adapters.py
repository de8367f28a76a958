"""Creates, loads and applies LoRA adapters, and checks which base model an adapter belongs to.

During training, adapters are not merged into the model. Only safetensors files are read or written.
"""

from __future__ import annotations

from rlm.model.quantize import import_bitsandbytes

import_bitsandbytes()  # must run before peft is imported; its docstring explains why

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from peft import (
    LoraConfig,
    PeftConfig,
    PeftModel,
    PeftModelForCausalLM,
    get_peft_model,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from rlm.cli import UsageError, command_of, print_once, print_stderr
from rlm.model.adapter_info import ADAPTER_FILES, HOW_TO_TRAIN_SFT, AdapterInfo, check_adapter
from rlm.model.base import (
    base_model_hash,
    base_of,
    is_lfs_pointer,
    load_empty_base,
    model_directory,
)
from rlm.model.quantize import dequantized_weight

if TYPE_CHECKING:
    from peft.tuners.lora import LoraModel

LORA_MATRIX = re.compile(r"\.(lora_[AB])(\.default)?\.weight$")  # the end of a LoRA matrix's name
# Exceptions of PEFT for an adapter_config.json whose values it cannot use.
ADAPTER_ERRORS = (
    *(OSError, ValueError, TypeError, RuntimeError, AttributeError, KeyError),
    *(SafetensorError, re.error),
)
# Options of PEFT's LoraConfig that an adapter may set, with their allowed values (None: any value).
# An adapter with only these options consists of two matrices for each adapted linear layer, and the
# base model stays unchanged.
ANYTHING = """r lora_alpha use_rslora rank_pattern alpha_pattern lora_dropout fan_in_fan_out
    target_modules exclude_modules layers_to_transform layers_pattern eva_config ensure_weight_tying
    base_model_name_or_path revision inference_mode auto_mapping peft_type peft_version"""
PLAIN_LORA: dict[str, list[object] | None] = dict.fromkeys(ANYTHING.split()) | {
    "task_type": ["CAUSAL_LM"],
    "init_lora_weights": [True, "gaussian", "orthogonal", "eva"],
}


def new_adapter(model: PreTrainedModel, *, r: int, alpha: float, dropout: float = 0.0) -> PeftModel:
    """Add a newly initialized LoRA adapter to every linear layer except the LM head.

    The output of the new adapter is exactly zero. Unlike with PEFT's "all-linear", the routers and
    experts of a mixture-of-experts model get no adapter: they are not linear layers, or they belong
    to subclasses that return more than a matmul.

    Raises:
        UsageError: PEFT does not support this architecture.
    """
    head, kind = model.get_output_embeddings(), model.config.model_type
    names = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
        and module is not head
        # Excludes routers that are an architecture's own subclass (phimoe), not quantized layers.
        and not type(module).__module__.startswith("transformers.models.")
    }
    options = {"r": r, "lora_alpha": alpha, "lora_dropout": dropout, "task_type": "CAUSAL_LM"}
    try:
        policy = get_peft_model(model, LoraConfig(target_modules=[*names], **options))
        made = cast("LoraConfig", policy.peft_config["default"])
        # PEFT also adapts experts that were linear layers with one of these names in transformers
        # 4, and moves the names to `target_parameters`. Make the adapter again without them.
        if made.target_parameters:
            names = {*(made.target_modules or ())}
            bare = take_adapters_off(policy)
            policy = get_peft_model(bare, LoraConfig(target_modules=[*names], **options))
    except ValueError as error:
        why = str(error).partition(". ")[0]
        raise UsageError(f"{kind} models cannot be trained here (PEFT: {why})") from error
    if any(p.ndim > 2 for p in base_of(policy).parameters()):
        on = ", ".join(sorted(names))
        print_stderr(f"{kind}: LoRA is on {on}; experts, routers and convolutions are not adapted")
    return policy


def take_adapters_off(model: PreTrainedModel | PeftModel) -> PreTrainedModel:
    """Remove all adapters from a model, and return the original base model."""
    if isinstance(model, PeftModel):
        cast("LoraModel", model.base_model).unload()
    return base_of(model)


def adapter_without_base(name: str, *, r: int, alpha: float) -> PeftModel:
    """Create an adapter of zeros for a base model whose weights are on a server.

    The caller fills its tensors with trained values, and exports it.
    """
    policy = new_adapter(load_empty_base(name), r=r, alpha=alpha).eval()
    for layer in lora_layers(policy):
        layer.lora_A.to_empty(device="cpu")
        layer.lora_B.to_empty(device="cpu")
    for tensor in adapter_tensors(policy).values():
        nn.init.zeros_(tensor)
    return policy


def adapter_mismatch(adapter: Path, model: str, model_hash: str | None = None) -> str:
    """Return why an adapter does not belong to a base model, or "" if it does belong to it.

    Args:
        model_hash: hash of the base model; if None, the hash is computed.
    """
    try:
        check_adapter(adapter, HOW_TO_TRAIN_SFT)
        check_base(adapter, model, model_hash or base_model_hash(model))
    except UsageError as error:
        return str(error)
    return ""


def adapter_hash(path: Path) -> str:
    """Return a hash of an adapter's tensors and settings; it does not depend on the path."""
    digest = hashlib.sha256()
    for name in ADAPTER_FILES:
        digest.update((path / name).read_bytes())
    return digest.hexdigest()[:16]


def same_weights(a: Path, b: Path) -> bool:
    """Return whether two adapters have the same tensors, compared in the narrower dtype.

    GRPO may export weights in bfloat16 that SFT wrote in float32.
    """
    first, second = (load_file(path / ADAPTER_FILES[1]) for path in (a, b))

    def is_same(name: str) -> bool:
        narrower = min(first[name].dtype, second[name].dtype, key=lambda dtype: dtype.itemsize)
        return torch.equal(first[name].to(narrower), second[name].to(narrower))

    return first.keys() == second.keys() and all(map(is_same, first))


def check_base(adapter: Path, model: str, model_hash: str) -> None:
    """Check that an adapter was trained on these base weights and with this model's chat template.

    The hash of the base weights is read from the adapter's run.json. The chat template of training
    is stored beside the adapter.

    Raises:
        UsageError: the adapter was trained on other weights or with another chat template.
    """
    info = AdapterInfo.load(adapter)
    base = info.base_model or "a base model that its run.json does not name"
    train = f"{command_of('train_sft')} --model {model}"
    todo = f"pass --model {base}, or train a new adapter: {train}"
    if info.base_hash not in (None, model_hash):
        if info.base_model in (None, model):
            todo = f"train the adapter again: {train}"
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
    """Return the chat template beside a tokenizer, or None if there is no template.

    The result is also None if the directory does not exist, as for a model on the hub.

    Raises:
        UsageError: tokenizer_config.json is not valid JSON.
    """
    file, config = directory / "chat_template.jinja", directory / "tokenizer_config.json"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    try:
        settings = dict(json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {})
    except (ValueError, TypeError) as error:
        raise UsageError(f"{config} is not valid JSON, so copy it again ({error})") from error
    template = settings.get("chat_template")
    if not isinstance(template, str):  # older files may list several templates
        return None
    return template.replace("\r\n", "\n")  # as `read_text` and jinja do


def load_adapter(
    model: PreTrainedModel | PeftModel, path: Path, *, trainable: bool, name: str = "default"
) -> PeftModel:
    """Load an adapter onto a base model, or onto a model that already has adapters.

    A base model is put into eval mode. The modules of a model with adapters keep their mode,
    because checkpointed layers are in training mode. Every tensor of the file is loaded, and every
    LoRA matrix of the new adapter comes from the file.

    Raises:
        UsageError: the files cannot be read, the adapter is not plain LoRA of linear layers, its
            tensors do not match the base model, or one of their values is not finite.
    """
    try:
        config = _plain_config(path)
        tensors = _lora_matrices(path, str(model.device))
        config.inference_mode = not trainable
        training: dict[nn.Module, bool] = {}
        if isinstance(model, PeftModel):
            policy, training = model, {module: module.training for module in model.modules()}
            policy.add_adapter(name, config)
            policy.set_requires_grad(name, requires_grad=trainable)
        else:
            policy = PeftModelForCausalLM(model, config, adapter_name=name)
        _check_places(path, config, tensors, exported_tensors(policy, name))
        set_peft_model_state_dict(policy, tensors, adapter_name=name)
    except torch.OutOfMemoryError:
        raise
    except ADAPTER_ERRORS as error:
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UsageError(f"adapter {path} does not fit this base model: {first_line}") from error
    if isinstance(base_of(policy).get_output_embeddings(), LoraLayer):
        raise UsageError(f"adapter {path} changes the LM head, which is not supported")
    # PEFT has converted the adapter to fp32, which is slower than the dtype of the model.
    if not trainable and model.device.type == "cuda":
        for key, tensor in policy.named_parameters():
            if name in key.split("."):
                tensor.data = tensor.data.to(model.dtype)
    policy.eval()
    for module, was in training.items():
        module.training = was
    return policy


def fill_adapter(policy: PeftModel, path: Path) -> None:
    """Copy an adapter file's tensors to the adapter "default"; names and shapes must be equal."""
    tensors = _lora_matrices(path, "cpu")
    _check_places(path, policy.peft_config["default"], tensors, exported_tensors(policy))
    set_peft_model_state_dict(policy, tensors)


def _plain_config(path: Path) -> LoraConfig:
    """Read adapter_config.json, and check that it describes plain LoRA of linear layers.

    Other features of PEFT are ignored by the sampler, or they change the base model, which the
    other adapters and the reference model share. Therefore only the options in `PLAIN_LORA` may be
    set; every other option of the installed PEFT version must be off.

    Raises:
        UsageError: the file cannot be read, or it describes more than plain LoRA.
    """
    file = path / ADAPTER_FILES[0]
    try:
        settings = dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        message = f"adapter {path} does not fit this base model: {file.name}: {error}"
        raise UsageError(message) from error
    if str(kind := settings.get("peft_type")).upper() != "LORA":
        raise UsageError(f"adapter {path} has peft_type {kind}, but only LoRA is supported")
    for name in ("r", "lora_alpha"):
        if not isinstance(value := settings.get(name, 8), int | float):  # 8: PEFT's default
            what = f"{name} of {file.name} is {value!r}"
            raise UsageError(f"adapter {path}: {what}, which is not a number")
    plain, known = LoraConfig().to_dict(), {}
    for name, value in settings.items():
        says_no = value in (None, False, "none", "", [], {})
        if name not in plain:
            if not says_no:
                left_out = f"PEFT {version('peft')} ignores {name} in {file.name}: unknown option"
                print_once(f"adapter {path}: {left_out}")
            continue
        known[name] = value
        allowed = PLAIN_LORA.get(name, [plain[name]])
        if not says_no and allowed is not None and value not in allowed:
            way_out = "; merge it with PEFT (merge_and_unload), and pass the result with --model"
            if name == "task_type":
                way_out = ""
            if name == "init_lora_weights":
                way_out = (
                    "; convert it to plain LoRA with PEFT: "
                    "save_pretrained(…, path_initial_model_for_weight_conversion=…)"
                )
            raise UsageError(
                f"adapter {path} is more than plain LoRA of linear layers ({file.name}: {name} is "
                f"{value!r:.60}): unsupported{way_out}"
            )
    return LoraConfig(**known)


def _lora_matrices(path: Path, device: str) -> dict[str, torch.Tensor]:
    """Read the tensors of an adapter, and return them under the names that PEFT expects.

    Some tools write the adapter's name into the tensor names; this function removes it.

    Raises:
        UsageError: a tensor is not a LoRA matrix of a linear layer (PEFT would write the tensor
            into the base model), or has a value that is not finite.
    """
    file = path / ADAPTER_FILES[1]
    if is_lfs_pointer(file):
        raise UsageError(
            f"adapter {path}: {file.name} is a Git LFS pointer, not the weights: run git lfs "
            "pull in the repository that the file came from"
        )
    try:
        tensors = load_file(file, device=device)
    except SafetensorError as error:
        message = f"adapter {path}: {file.name} is broken or cut off, so copy it again ({error})"
        raise UsageError(message) from error
    others = [n for n, t in tensors.items() if t.ndim != 2 or not LORA_MATRIX.search(n)]
    if others:
        raise UsageError(
            f"adapter {path} is more than plain LoRA of linear layers: {len(others)} of its "
            f"{len(tensors)} tensors are not LoRA matrices "
            f"({others[0]}{' …' * (len(others) > 1)}): unsupported"
        )
    for name, tensor in tensors.items():
        if not tensor.float().isfinite().all():
            raise UsageError(f"adapter {path}: {name} contains values that are not finite")
    return {LORA_MATRIX.sub(r".\1.weight", name): tensor for name, tensor in tensors.items()}


def _check_places(
    path: Path,
    config: PeftConfig,
    tensors: Mapping[str, torch.Tensor],
    places: Mapping[str, torch.Tensor],
) -> None:
    """Check that the tensors of an adapter file are exactly the LoRA matrices of the base model.

    Raises:
        UsageError: the tensors differ; the message gives the number of differences.
    """
    surplus, missing = [*(tensors.keys() - places)], [*(places.keys() - tensors)]
    shapes = [
        f"{name}: {tuple(tensors[name].shape)}, here {tuple(place.shape)}"
        for name, place in places.items()
        if name in tensors and tensors[name].shape != place.shape
    ]
    said = [
        f"{len(names)} of {total} {what} ({min(names)}{' …' * (len(names) > 1)})"
        for names, total, what in (
            (surplus, len(tensors), "tensors of the file do not exist in the base model"),
            (missing, len(places), "LoRA matrices of the base model are not in the file"),
            (shapes, len(tensors), "tensors have another shape"),
        )
        if names
    ]
    if said:
        base = config.base_model_name_or_path
        made_for = f"; according to {ADAPTER_FILES[0]}, it was made for {base}" if base else ""
        raise UsageError(
            f"adapter {path} does not fit this base model: {', '.join(said)}{made_for}"
        )


def adapter_tensors(policy: PeftModel) -> dict[str, nn.Parameter]:
    """Return the trainable tensors by name: the fp32 LoRA matrices of the adapter "default"."""
    return {name: tensor for name, tensor in policy.named_parameters() if tensor.requires_grad}


def exported_tensors(policy: PeftModel, name: str = "default") -> dict[str, torch.Tensor]:
    """Return the tensors that PEFT writes for an adapter, by their names in the adapter file."""
    tensors = get_peft_model_state_dict(policy, adapter_name=name, save_embedding_layers=False)
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def active_lora_tensors(model: PreTrainedModel | PeftModel) -> dict[str, torch.Tensor]:
    """Return the LoRA matrices that a forward pass would use, by name; {} without an adapter."""
    return {
        f"{name}.{side}.{adapter}": getattr(module, side)[adapter].weight
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer) and not module.disable_adapters
        for adapter in module.active_adapters
        if adapter in module.lora_A
        for side in ("lora_A", "lora_B")
    }


def lora_layers(model: nn.Module) -> list[LoraLayer]:
    """Return the layers that have an adapter."""
    return [module for module in model.modules() if isinstance(module, LoraLayer)]


@torch.no_grad()
def merged_weight(linear: nn.Module, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a layer's weight, in the layout of the layer, merged with the active adapters.

    Without an active adapter, the result may be the layer's own tensor, in its own dtype. Quantized
    weights are dequantized. The sum is computed in fp32, so that it is rounded only once and not
    after each adapter.

    Args:
        dtype: the dtype of a merged weight (None: that of the layer).
    """
    lora = isinstance(linear, LoraLayer)
    weight = dequantized_weight(linear.get_base_layer() if lora else linear)
    if not lora or linear.disable_adapters:
        return weight
    total = weight.float()
    for adapter in linear.active_adapters:
        if adapter in linear.lora_A:
            sides = linear.lora_A[adapter], linear.lora_B[adapter]
            down, up = (cast("nn.Linear", side).weight for side in sides)
            update = (up.float() @ down.float()).mul_(linear.scaling[adapter])  # (out, in)
            total = total + (update.T if linear.fan_in_fan_out else update)  # (in, out) in Conv1D
    return total.to(dtype or weight.dtype)


def set_gradient_checkpointing(policy: PreTrainedModel | PeftModel, wanted: bool) -> None:
    """Turn gradient checkpointing on or off.

    With checkpointing, only the input of each layer is saved, and the backward pass recomputes the
    rest. transformers checkpoints a layer only in training mode. We train in eval mode (without
    dropout), so only the layers are put into training mode, not the modules inside the layers.
    """
    if wanted:
        base_of(policy).activation_checkpointing_enable({"use_reentrant": False})
    for module in policy.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = wanted


@contextmanager
def using_adapter(policy: PeftModel, adapter: str | None) -> Iterator[None]:
    """Run the policy with one of its adapters, frozen; None selects the base model."""
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
    """Run the policy as the reference model of the KL term: the policy before training.

    After SFT, the reference model uses the SFT adapter, loaded as a second and frozen adapter. If
    training started without an adapter, the reference model is the base model alone.
    """
    if start_adapter is not None and "reference" not in policy.peft_config:
        load_adapter(policy, start_adapter, trainable=False, name="reference")
    with using_adapter(policy, None if start_adapter is None else "reference"):
        yield
