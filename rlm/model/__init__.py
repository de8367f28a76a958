"""Selects device and dtype; loads base models and LoRA adapters; quantizes and exports models."""

import lazy_loader

# __init__.pyi maps each name to its file, which is imported when the name is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
