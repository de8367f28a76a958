"""The rollout engine: many completions of many prompts, reproducible whatever shares the batch."""

import lazy_loader

# File → what other packages import of it.
EXPORTS = {
    "draw": "sample_tokens",
    "engine": "Sampler",
    "kv_cache": "CacheConfig",
    "linear": "fused_linear",
    "managed_vllm": "ManagedVLLM server_command server_options split_command",
    "params": "AllowedTokens Completion ForceTokens Request SamplingParams Token prompt_seed",
    "scheduler": "common_prefix_length",
    "structured_outputs": "GrammarCompiler GrammarMatcher StructuredOutputs",
    "tool_tokens": "ToolTokens tool_spans",
    "vllm": "VLLMSampler",
    "weights": "FUSED_MODEL_TYPES choose_sampling_dtype sampling_dtype",
}
__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__, submod_attrs={file: names.split() for file, names in EXPORTS.items()}
)
