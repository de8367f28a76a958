"""Loads the base model once and every served adapter onto it, with a sampler for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlm.data import Format, render_prompt
from rlm.model import load_adapter, load_base, pick_device
from rlm.sampling import Sampler, common_prefix_length
from rlm.serving.engine import Replica
from rlm.serving.models import BASE, ServedModels


def load_replicas(
    models: ServedModels, tokenizer: PreTrainedTokenizerBase, max_num_seqs: int
) -> dict[str, Replica]:
    """Load the base, the adapters, and a sampler for each of them and for the base alone.

    Raises:
        UsageError: something does not load, or an adapter holds numbers that are not finite.
    """
    model = load_base(models.base_model, pick_device(), quantize=models.quantize)
    inner = {name: f"served_{i}" for i, name in enumerate(models.adapters)}  # PEFT bars dots
    for name, adapter in models.adapters.items():
        if adapter.path is not None:
            model = load_adapter(model, adapter.path, trainable=False, name=inner[name])
    set_adapter = _adapter_switch(model)
    replicas = {}
    for name, adapter in models.adapters.items():
        activate = partial(set_adapter, None if name == BASE else inner[name])
        activate()
        sampler = Sampler(model, tokenizer, max_num_seqs=max_num_seqs)
        replicas[name] = Replica(sampler, activate, prompt_prefix(tokenizer, adapter.format))
    return replicas


def _adapter_switch(model: PreTrainedModel) -> Callable[[str | None], None]:
    """A `set_adapter` that does nothing where the adapter (None: none) is active already."""
    active: str | None = ""

    def set_adapter(name: str | None) -> None:
        nonlocal active
        if name != active and isinstance(model, PeftModel):
            if name is None:
                model.base_model.disable_adapter_layers()
            else:
                model.base_model.enable_adapter_layers()
                model.set_adapter(name, inference_mode=True)
        active = name

    return set_adapter


def prompt_prefix(tokenizer: PreTrainedTokenizerBase, format: Format) -> Sequence[int]:
    """What every prompt begins with: the system prompt as the template writes it."""
    prompts = [render_prompt(tokenizer, question, format) for question in ("a", "7")]
    return prompts[0][: common_prefix_length(prompts)]
