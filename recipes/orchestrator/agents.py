"""Answers the agents' calls with a frozen model: ours, shared where possible, or an API's."""

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
from rlm.cli import command_of
from rlm.data import FORMATS, Format, render_prompt
from rlm.model import (
    AdapterInfo,
    base_model_hash,
    check_adapter,
    check_base,
    load_adapter,
    load_base,
    load_tokenizer,
    pick_device,
    using_adapter,
)
from rlm.sampling import Sampler, SamplingParams, VLLMSampler
from rlm.tools import load_tool

if TYPE_CHECKING:
    from peft import PeftModel


@dataclass(frozen=True)
class Call:
    """Holds what an LLM is asked; equal greedy calls have equal replies."""

    system_prompt: str
    text: str
    seed: int = 0


@dataclass(frozen=True)
class Reply:
    """Holds the reply to a call; where an API failed `error` says why, and the text is empty."""

    text: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    error: str | None = None
    logprobs: Sequence[float] = ()  # of its tokens, where the model is ours


@dataclass(frozen=True)
class AgentModel:
    """Names a frozen model; `load_agents` loads its weights, if they are not there already."""

    name: str
    adapter: Path | None = None
    quantize: str = "none"
    tokenizer: PreTrainedTokenizerBase | None = None

    def __str__(self) -> str:
        return f"{self.name} + {self.adapter}" if self.adapter else self.name


@dataclass
class LocalLLM:
    """Answers calls with a model of ours, through the sampling engine."""

    sampler: Sampler | VLLMSampler
    tokenizer: PreTrainedTokenizerBase
    use_adapter: Callable[[], AbstractContextManager] = nullcontext  # while it writes

    def chat(
        self,
        calls: Sequence[Call],
        params: SamplingParams,
        on_finish: Callable[[], None] = lambda: None,
    ) -> list[Reply]:
        """Reply to each call, all in one batch."""
        # Whatever a system prompt holds, it was written by a model: plain text, no special tokens.
        render = partial(render_prompt, self.tokenizer, format=FORMATS["deepseek"])
        prompts = [render(call.text, system_prompt=call.system_prompt) for call in calls]
        with self.use_adapter():
            seeds = [call.seed for call in calls]
            groups = self.sampler.sample(prompts, 1, params, seeds, on_finish)
        decode = partial(self.tokenizer.decode, skip_special_tokens=True)
        return [
            Reply(decode(c.token_ids), len(prompt), len(c.token_ids), logprobs=c.logprobs)
            for prompt, (c,) in zip(prompts, groups, strict=True)
        ]

    def release(self) -> None:
        """Free the memory that only a batch needs."""
        if isinstance(self.sampler, Sampler):  # a server's adapter stays: the trainer says when
            self.sampler.release()


@dataclass
class RemoteLLM:
    """Answers calls through an OpenAI-compatible API; failed requests get no verdict."""

    client: APIClient
    model: str

    def __str__(self) -> str:
        return f"{self.model} at {self.client.url}"

    def chat(self, calls: Sequence[Call], params: SamplingParams) -> list[Reply]:
        """Reply to each call, as many at a time as the client sends."""
        with ThreadPoolExecutor(self.client.concurrency) as pool:
            return list(pool.map(partial(self._chat, params), calls))

    def _chat(self, params: SamplingParams, call: Call) -> Reply:
        system = {"role": "system", "content": call.system_prompt}
        try:
            reply = self.client.chat(
                [system, {"role": "user", "content": call.text}],
                model=self.model,
                temperature=params.temperature,
                max_tokens=params.max_new_tokens,
                seed=call.seed % 2**31,
            )
        except APIError as error:
            return Reply("", error=str(error))
        return Reply(reply.text, reply.prompt_tokens, reply.completion_tokens)

    def release(self) -> None:
        """Do nothing: no memory is held."""


def agents_format(agents: AgentModel | RemoteLLM) -> Format:
    """Return the tags that the agents were trained with."""
    adapter = agents.adapter if isinstance(agents, AgentModel) else None
    return AdapterInfo.load(adapter).format if adapter else FORMATS["deepseek"]


def choose_agents(config: OrchestratorConfig) -> AgentModel | RemoteLLM:
    """Return the agents that the config names.

    Raises:
        UsageError: the adapter is not there, or the URL or key of the API is none.
    """
    if config.agent_url:
        limits = {"api_key_env": config.agent_key, "concurrency": config.max_num_seqs}
        return RemoteLLM(APIClient(config.agent_url, **limits), config.agent_model)
    if config.agent_adapter:
        check_adapter(config.agent_adapter, f"run: {command_of('train_grpo')}")
    return AgentModel(config.agent_model or config.model, config.agent_adapter, config.quantize)


def load_agents(
    agents: AgentModel | RemoteLLM,
    config: OrchestratorConfig,
    policy: PeftModel,
    writer: LocalLLM,
) -> LocalLLM | RemoteLLM:
    """Load the agents' model, if it is ours; where it is the orchestrator's, they share weights.

    They have the tool that their adapter was trained with.

    Raises:
        UsageError: the adapter belongs to another base, or cannot share the orchestrator's.
    """
    if not isinstance(agents, AgentModel):
        return agents
    tool = None
    if agents.adapter:
        check_base(agents.adapter, agents.name, base_model_hash(agents.name))
        tool = load_tool(AdapterInfo.load(agents.adapter).resolve_tool())
    if (agents.name, agents.quantize) != (config.model, config.quantize):
        model = load_base(agents.name, pick_device(), quantize=agents.quantize)
        if agents.adapter:
            model = load_adapter(model, agents.adapter, trainable=False)
        tokenizer = agents.tokenizer or load_tokenizer(agents.name)
        return LocalLLM(Sampler(model, tokenizer, tool=tool), tokenizer)
    name = "agent" if agents.adapter else None
    if name:
        load_adapter(policy, agents.adapter, trainable=False, name=name)
    sampler, tokenizer = writer.sampler, writer.tokenizer
    # A vLLM server has the orchestrator's adapter only; the orchestrator has no tool.
    if tool or not isinstance(sampler, Sampler):
        sampler = Sampler(policy, tokenizer, dtype=getattr(sampler, "dtype", None), tool=tool)
    return LocalLLM(sampler, tokenizer, partial(using_adapter, policy, name))
