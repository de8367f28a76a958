"""Code shared by the scripts, such as train_grpo.py. Importing this package does not import torch
or use the network."""

import os
import sys
from importlib.util import find_spec

if missing := [
    name
    for name in ("transformers", "peft", "rich", "yaml", "lazy_loader")  # imported by every script
    if find_spec(name) is None
]:
    raise ImportError(
        f"{sys.executable} lacks {', '.join(missing)}: run `make install` once, then "
        "`source .venv/bin/activate`"
    )

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # before huggingface_hub is imported

from typing import TYPE_CHECKING, Any

from rlm.data import load_gsm8k
from rlm.training import GRPOConfig

if TYPE_CHECKING:
    from train_grpo import GRPOTrainer

__version__ = "0.1.0"
__all__ = ["GRPOConfig", "GRPOTrainer", "load_gsm8k"]


def __getattr__(name: str) -> Any:
    """Import GRPOTrainer from its script, which imports torch, when it is first used."""
    if name == "GRPOTrainer":
        from train_grpo import GRPOTrainer

        return GRPOTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
