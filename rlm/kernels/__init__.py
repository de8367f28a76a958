"""C code for the CPU: compiled at first use, loaded with ctypes, called with tensors."""

from rlm.kernels.functions import VOCAB_BLOCK, Kernels, load_kernels

__all__ = ["VOCAB_BLOCK", "Kernels", "load_kernels"]
