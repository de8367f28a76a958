"""Plays the agents with a frozen model: one of ours, shared where possible, or an API's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from recipes.orchestrator.config import OrchestratorConfig
from rlm.api_client import APIClient, APIError
from rlm.data import FORMATS, render_prompt
from rlm.model import (
    base_model_hash,
    check_adapter,
    check_base,
    load_adapter,
    load_base,
    load_tokenizer,
    pick_device,
    using_adapter,
)
from rlm.sampling import Request, Sampler, SamplingParams

if TYPE_CHECKING:
    from peft import PeftModel

    from rlm.sampling import VLLMSampler


@dataclass(frozen=True)
class Call:
    """Holds what an agent is asked; equal greedy calls have equal replies."""

    system_prompt: str
    text: str
    seed: int = 0


@dataclass(frozen=True)
class Reply:
    """Holds an agent's reply; where an API failed `error` says why, and the text is empty."""

    text: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    error: str | None = None


@dataclass(frozen=True)
class AgentModel:
    """Names a frozen model; `load_agents` loads its weights, if they are not there already."""

    name: str
    adapter: Path | None = None
    quantize: str = "none"
    tokenizer: PreTrainedTokenizerBase | None = None

    def __str__(self) -> str:
        return f"{self.name} + {self.adapter}" if self.adapter else self.name


class LocalAgents:
    """Plays the agents with a model of ours, through the sampling engine."""

    def __init__(
        self,
        sampler: Sampler,
        tokenizer: PreTrainedTokenizerBase,
        use_adapter: Callable[[], AbstractContextManager] = nullcontext,
    ) -> None:
        self._sampler, self._tokenizer = sampler, tokenizer
        self._use_adapter = use_adapter  # while they write, where the orchestrator's base is theirs

    def chat(self, calls: Sequence[Call], params: SamplingParams) -> list[Reply]:
        """Reply to each call, all in one batch."""
        # Whatever a system prompt holds, it was written by a model: plain text, no special tokens.
        render = partial(render_prompt, self._tokenizer, format=FORMATS["deepseek"])
        prompts = [render(call.text, system_prompt=call.system_prompt) for call in calls]
        pairs = zip(prompts, calls, strict=True)
        with self._use_adapter():
            groups = self._sampler.complete([Request(p, params, call.seed) for p, call in pairs])
        ids = [completion.token_ids for (completion,) in groups]
        return [
            Reply(self._tokenizer.decode(row, skip_special_tokens=True), len(prompt), len(row))
            for prompt, row in zip(prompts, ids, strict=True)
        ]

    def release(self) -> None:
        """Free the memory that only a batch needs."""
        self._sampler.release()


class APIAgents:
    """Plays the agents through an OpenAI-compatible API; failed requests get no verdict."""

    def __init__(self, client: APIClient, model: str) -> None:
        self._client, self._model = client, model

    def __str__(self) -> str:
        return f"{self._model} at {self._client.url}"

    def chat(self, calls: Sequence[Call], params: SamplingParams) -> list[Reply]:
        """Reply to each call, as many at a time as the client sends."""
        with ThreadPoolExecutor(self._client.concurrency) as pool:
            return list(pool.map(partial(self._chat, params), calls))

    def _chat(self, params: SamplingParams, call: Call) -> Reply:
        system = {"role": "system", "content": call.system_prompt}
        try:
            reply = self._client.chat(
                [system, {"role": "user", "content": call.text}],
                model=self._model,
                temperature=params.temperature,
                max_tokens=params.max_new_tokens,
                seed=call.seed % 2**31,
            )
        except APIError as error:
            return Reply("", error=str(error))
        return Reply(reply.text, reply.prompt_tokens, reply.completion_tokens)

    def release(self) -> None:
        """Do nothing: no memory is held."""


def choose_agents(config: OrchestratorConfig) -> AgentModel | APIAgents:
    """Return the agents that the config names.

    Raises:
        UsageError: the adapter is not there, or the URL or key of the API is none.
    """
    if config.agent_url:
        limits = {"api_key_env": config.agent_key, "concurrency": config.max_num_seqs}
        return APIAgents(APIClient(config.agent_url, **limits), config.agent_model)
    if config.agent_adapter:
        check_adapter(config.agent_adapter, "run: python train_grpo.py")
    return AgentModel(config.agent_model or config.model, config.agent_adapter, config.quantize)


def load_agents(
    agents: AgentModel | APIAgents,
    config: OrchestratorConfig,
    policy: PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    sampler: Sampler | VLLMSampler,
) -> LocalAgents | APIAgents:
    """Load the agents' model, if it is ours; where it is the orchestrator's, they share weights.

    Raises:
        UsageError: the adapter belongs to another base, or cannot share the orchestrator's.
    """
    if not isinstance(agents, AgentModel):
        return agents
    if agents.adapter:
        check_base(agents.adapter, agents.name, base_model_hash(agents.name))
    if (agents.name, agents.quantize) != (config.model, config.quantize):
        model = load_base(agents.name, pick_device(), quantize=agents.quantize)
        if agents.adapter:
            model = load_adapter(model, agents.adapter, trainable=False)
        tokenizer = agents.tokenizer or load_tokenizer(agents.name)
        return LocalAgents(Sampler(model, tokenizer), tokenizer)
    name = "agent" if agents.adapter else None
    if name:
        load_adapter(policy, agents.adapter, trainable=False, name=name)
    if not isinstance(sampler, Sampler):  # a vLLM server has the orchestrator's adapter only
        sampler = Sampler(policy, tokenizer)
    return LocalAgents(sampler, tokenizer, partial(using_adapter, policy, name))
