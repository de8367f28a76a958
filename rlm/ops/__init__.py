"""What sampling and training compute, behind one interface: multiply, attend, sample, score.

`ops_for(model)` returns `Kernels`, C code compiled for this CPU, or `TorchOps`, the same in torch.
"""

import lazy_loader

# __init__.pyi says which file has which name; a file is loaded when a name of it is used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
