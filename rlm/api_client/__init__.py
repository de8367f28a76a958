"""The one client for OpenAI-compatible servers: any LLM API for recipes, vLLM for rollouts."""

from rlm.api_client.client import APIClient, APIError, ChatReply
from rlm.api_client.limits import FREE, Budget, BudgetExceeded, Price, RateLimit, Usage

__all__ = [
    "FREE",
    "APIClient",
    "APIError",
    "Budget",
    "BudgetExceeded",
    "ChatReply",
    "Price",
    "RateLimit",
    "Usage",
]
