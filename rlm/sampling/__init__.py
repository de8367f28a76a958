"""Samples completions in this process, on vLLM servers or on a server with Tinker's protocol."""

import lazy_loader

# __init__.pyi maps each name to its file, which is imported when the name is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
