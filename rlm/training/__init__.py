"""Training with GRPO and SFT: config, algorithms, advantages, batches, log-probabilities, loss,
training state, distributed training, doctor, plan."""

import lazy_loader

# __init__.pyi maps each name to its file, which is imported when the name is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
