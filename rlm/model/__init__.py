"""Models: hardware and number type, base models, LoRA adapters, quantization, attention, export."""
