"""C code for the CPU: compiled at first use, loaded with ctypes, called with tensors."""

from rlm.kernels.functions import ATTENTION_BLOCK, VOCAB_BLOCK, Kernels, load_kernels

__all__ = ["ATTENTION_BLOCK", "VOCAB_BLOCK", "Kernels", "load_kernels"]
