"""What makes a CPU fast: C code compiled at first use, attention, number types by measurement."""

import lazy_loader

# __init__.pyi says which file has which name; a file is loaded when a name of it is used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
