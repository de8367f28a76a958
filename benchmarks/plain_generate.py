"""Decodes greedily from a saved model with transformers alone, without importing `rlm`.

python benchmarks/plain_generate.py FOLDER MAX_NEW_TOKENS < conversations.json
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def greedy(model: Any, prompt: list[int], **options: Any) -> list[int]:
    """Return the token ids that `generate` adds to one prompt, including the end token."""
    ids = torch.tensor([prompt])
    found = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **options)
    return found[0, len(prompt) :].tolist()


def main(folder: str, max_new_tokens: int) -> None:
    """Read lists of chat messages from stdin; write the token ids of prompts and completions."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompts = [
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        for messages in json.load(sys.stdin)
    ]
    completions = [greedy(model, prompt, max_new_tokens=max_new_tokens) for prompt in prompts]
    if "rlm" in sys.modules:
        raise ImportError("rlm was imported, but this script must use transformers alone")
    json.dump({"prompts": prompts, "completions": completions}, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
