"""C code for the CPU: compiled at first use, loaded with ctypes, called with tensors."""

from rlm.kernels.build import cpu_features, kernels_digest
from rlm.kernels.functions import VOCAB_BLOCK, Kernels, load_kernels

__all__ = ["VOCAB_BLOCK", "Kernels", "cpu_features", "kernels_digest", "load_kernels"]
