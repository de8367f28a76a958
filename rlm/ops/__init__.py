"""Runs the matmuls, attention, sampling and scoring of the sampler and the trainer.

`ops_for(model)` returns either `Kernels`, which calls C code compiled for this CPU, or `TorchOps`,
which implements the same operations in torch.
"""

import lazy_loader

# __init__.pyi maps each name to its file, which is imported when the name is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
