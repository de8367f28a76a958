"""Models that only have a shape: random weights, for speed and memory where no download is at hand.

`--model random:qwen2.5-0.5b` builds one in a temporary directory, with the embedded model's
tokenizer. What such a model says means nothing; what it costs is what the real one costs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from rlm.cli import UsageError
from rlm.model import EMBEDDED_MODEL, load_tokenizer, pick_device

PREFIX = "random:"

# From the published config.json of each model.
COLUMNS = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "vocab_size", "tie_word_embeddings",
)  # fmt: skip
SHAPES = {
    "smollm2-135m": ("llama", 576, 1536, 30, 9, 3, 49152, True),
    "smollm2-360m": ("llama", 960, 2560, 32, 15, 5, 49152, True),
    "qwen2.5-0.5b": ("qwen2", 896, 4864, 24, 14, 2, 151936, True),
    "qwen2.5-7b": ("qwen2", 3584, 18944, 28, 28, 4, 152064, False),
}


def config_of(shape: str, **more: object) -> PretrainedConfig:
    """The transformers config of a shape."""
    return AutoConfig.for_model(**dict(zip(COLUMNS, SHAPES[shape], strict=True)), **more)


@contextmanager
def model_at(name: str) -> Iterator[str]:
    """What `rlm.model` loads: the name itself, or a directory with the random model it asks for.

    Raises:
        UsageError: no such shape.
    """
    if not name.startswith(PREFIX):
        yield name
        return
    shape = name.removeprefix(PREFIX)
    if shape not in SHAPES:
        raise UsageError(f"--model {name}: the shapes are {', '.join(PREFIX + s for s in SHAPES)}")
    with tempfile.TemporaryDirectory(prefix=f"{shape}-") as folder:
        save_random_model(shape, folder)
        yield folder


def save_random_model(shape: str, folder: str) -> None:
    """Weights of the machine's number type and the embedded tokenizer, as from_pretrained reads."""
    device = pick_device()
    tokenizer = load_tokenizer(EMBEDDED_MODEL)
    config = config_of(
        shape,
        max_position_embeddings=8192,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    with torch.device(device.type):
        model = AutoModelForCausalLM.from_config(config, dtype=device.dtype)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
