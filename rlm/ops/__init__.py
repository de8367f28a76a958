"""One interface to what sampling and training compute: matmuls, attention, sampling, scoring.

`ops_for(model)` returns `Kernels`, C code compiled for this CPU, or `TorchOps`, the same in torch.
"""

import lazy_loader

# __init__.pyi maps each name to its file, which is loaded when the name is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
