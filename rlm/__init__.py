"""What the stage scripts share. Importing this package loads no torch and touches no network."""

import os

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # before a hub library is imported

from rlm.data import load_gsm8k
from rlm.training import GRPOConfig

__all__ = ["GRPOConfig", "load_gsm8k"]
