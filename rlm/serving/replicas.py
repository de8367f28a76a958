"""The model behind a server: one base, each offered adapter a replica on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlm.data.prompts import Format, render_prompt
from rlm.model.adapters import load_adapter
from rlm.model.base import load_base
from rlm.model.hardware import pick_device
from rlm.sampling import Sampler, common_prefix_length
from rlm.serving.catalog import BASE, Catalog
from rlm.serving.engine import Replica


def load_replicas(
    catalog: Catalog, tokenizer: PreTrainedTokenizerBase, max_num_seqs: int
) -> dict[str, Replica]:
    """Load the base once, every adapter onto it, and a sampler for each.

    Raises:
        UsageError: something does not load, or an adapter holds numbers that are not finite.
    """
    model = load_base(catalog.model, pick_device(), quantize=catalog.quantize)
    inner = {name: f"served_{i}" for i, name in enumerate(catalog.offered)}  # PEFT bars dots
    for name, offered in catalog.offered.items():
        if offered.path is not None:
            model = load_adapter(model, offered.path, trainable=False, name=inner[name])
    wear = _wardrobe(model)
    replicas = {}
    for name, offered in catalog.offered.items():
        activate = partial(wear, None if name == BASE else inner[name])
        activate()
        sampler = Sampler(model, tokenizer, max_num_seqs=max_num_seqs)
        replicas[name] = Replica(sampler, activate, _shared_prefix(tokenizer, offered.format))
    return replicas


def _wardrobe(model: PreTrainedModel) -> Callable[[str | None], None]:
    """The function that lets the model wear an adapter by name, or none."""
    worn: str | None = ""

    def wear(name: str | None) -> None:
        nonlocal worn
        if name != worn and isinstance(model, PeftModel):
            if name is None:
                model.base_model.disable_adapter_layers()
            else:
                model.base_model.enable_adapter_layers()
                model.set_adapter(name, inference_mode=True)
        worn = name

    return wear


def _shared_prefix(tokenizer: PreTrainedTokenizerBase, format: Format) -> Sequence[int]:
    """What every prompt begins with: the system prompt as the template writes it."""
    prompts = [render_prompt(tokenizer, question, format) for question in ("a", "7")]
    return prompts[0][: common_prefix_length(prompts)]
