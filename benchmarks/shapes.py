"""Models that only have a shape: random weights, for speed and memory where no download is at hand.

`--model random:qwen2.5-0.5b` builds one in a temporary directory, with the embedded model's
tokenizer. What such a model says means nothing; what it costs is what the real one costs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config

from rlm.cli.options import UsageError
from rlm.model import base as models
from rlm.model import hardware as machine

PREFIX = "random:"

# From the published config.json of each model.
SHAPES: dict[str, tuple[type[PretrainedConfig], dict[str, object]]] = {
    "smollm2-135m": (
        LlamaConfig,
        {
            "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
            "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
            "tie_word_embeddings": True,
        },
    ),
    "smollm2-360m": (
        LlamaConfig,
        {
            "hidden_size": 960, "intermediate_size": 2560, "num_hidden_layers": 32,
            "num_attention_heads": 15, "num_key_value_heads": 5, "vocab_size": 49152,
            "tie_word_embeddings": True,
        },
    ),
    "qwen2.5-0.5b": (
        Qwen2Config,
        {
            "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
            "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936,
            "tie_word_embeddings": True,
        },
    ),
    "qwen2.5-7b": (
        Qwen2Config,
        {
            "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
            "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
            "tie_word_embeddings": False,
        },
    ),
}  # fmt: skip


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
    config_class, values = SHAPES[shape]
    device = machine.pick_device()
    tokenizer = models.load_tokenizer(machine.EMBEDDED_MODEL)
    config = config_class(
        **values,
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
