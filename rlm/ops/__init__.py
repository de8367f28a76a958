"""Fast CPU code: C compiled at first use, attention, and number types chosen by measuring."""

import lazy_loader

# __init__.pyi says which file has which name; a file is loaded when a name of it is used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
