from .draw import sample_tokens as sample_tokens
from .engine import Sampler as Sampler
from .kv_cache import CacheConfig as CacheConfig
from .requests import Completion as Completion
from .requests import FinishReason as FinishReason
from .requests import ForceTokens as ForceTokens
from .requests import Request as Request
from .requests import SamplingParams as SamplingParams
from .requests import Token as Token
from .requests import ToolTokens as ToolTokens
from .requests import common_prefix_length as common_prefix_length
from .requests import prompt_seed as prompt_seed
from .requests import tool_spans as tool_spans
from .tinker import TinkerEngine as TinkerEngine
from .vllm import VLLMSampler as VLLMSampler
from .weights import check_architecture as check_architecture
from .weights import sampling_dtype as sampling_dtype

RolloutSampler = Sampler | VLLMSampler | TinkerEngine  # only for type checkers
