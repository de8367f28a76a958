"""C code for the CPU: compiled at first use, loaded with ctypes, called with tensors."""

import lazy_loader

# File → what other packages import of it; the first needs no torch.
EXPORTS = {
    "build": "cpu_features kernels_digest",
    "functions": "ATTENTION_BLOCK VOCAB_BLOCK Kernels load_kernels",
}
__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__, submod_attrs={file: names.split() for file, names in EXPORTS.items()}
)
