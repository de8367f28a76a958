"""Writes a model with a published architecture and random weights, without a download.

Its completions are meaningless, but its speed and memory use are those of the real model.

    python -m benchmarks.shapes qwen2.5-0.5b runs/qwen2.5-0.5b
    python -m benchmarks.grpo_step --model runs/qwen2.5-0.5b
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlm.cli import check_values, flag, run_main, terminal
from rlm.model import EMBEDDED_MODEL, load_tokenizer, pick_device

# Values from the published config.json of each model.
COLUMNS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "vocab_size", "tie_word_embeddings",
)  # fmt: skip
SHAPES = {
    "smollm2-360m": ("llama", 960, 2560, 32, 15, 5, 49152, True),
    "qwen2.5-0.5b": ("qwen2", 896, 4864, 24, 14, 2, 151936, True),
    "qwen2.5-7b": ("qwen2", 3584, 18944, 28, 28, 4, 152064, False),
}


@dataclass
class ShapeConfig:
    shape: str = flag("qwen2.5-0.5b", "model to imitate", choices=tuple(SHAPES), positional=True)
    output: Path = flag(Path("runs/random"), "folder for the model", positional=True)

    def __post_init__(self) -> None:
        check_values(self)


def main(config: ShapeConfig) -> int:
    """Write the weights, in the machine's dtype, and the tokenizer of the embedded model."""
    device, tokenizer = pick_device(), load_tokenizer(EMBEDDED_MODEL)
    kind, *sizes = SHAPES[config.shape]
    shape = AutoConfig.for_model(
        str(kind),
        **dict(zip(COLUMNS, sizes, strict=True)),
        max_position_embeddings=8192,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    with torch.device(device.type):
        model = AutoModelForCausalLM.from_config(shape, dtype=device.dtype)
    model.save_pretrained(config.output)
    tokenizer.save_pretrained(config.output)
    terminal.line(f"written: {config.output}")
    return 0


if __name__ == "__main__":
    run_main(main, ShapeConfig, description=__doc__)
