"""The rollout engine: many completions of many prompts, reproducible whatever shares the batch."""

from rlm.sampling.draw import sample_tokens
from rlm.sampling.engine import Sampler
from rlm.sampling.kv_cache import CacheConfig
from rlm.sampling.linear import fused_linear
from rlm.sampling.managed_vllm import (
    VLLM_COMMAND,
    ManagedVLLM,
    server_command,
    server_options,
    split_command,
)
from rlm.sampling.params import Completion, ForceTokens, Request, SamplingParams, Token, prompt_seed
from rlm.sampling.scheduler import common_prefix_length
from rlm.sampling.tool_tokens import ToolTokens, tool_spans
from rlm.sampling.vllm import VLLMSampler
from rlm.sampling.weights import FUSED_MODEL_TYPES, choose_sampling_dtype, sampling_dtype

__all__ = [
    "FUSED_MODEL_TYPES",
    "VLLM_COMMAND",
    "CacheConfig",
    "Completion",
    "ForceTokens",
    "ManagedVLLM",
    "Request",
    "Sampler",
    "SamplingParams",
    "Token",
    "ToolTokens",
    "VLLMSampler",
    "choose_sampling_dtype",
    "common_prefix_length",
    "fused_linear",
    "prompt_seed",
    "sample_tokens",
    "sampling_dtype",
    "server_command",
    "server_options",
    "split_command",
    "tool_spans",
]
