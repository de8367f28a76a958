"""Who speaks for the agents: a frozen model of ours, shared where possible, or a server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from recipes.orchestrator.config import Config
from recipes.orchestrator.prompts import PLAIN
from recipes.orchestrator.runner import Agents, Call, Reply, Runner
from rlm.api_client import APIClient, APIError
from rlm.cli.options import UsageError
from rlm.data.prompts import render_prompt
from rlm.model import adapters
from rlm.model import base as models
from rlm.model import hardware as machine
from rlm.sampling import Request, Sampler

if TYPE_CHECKING:  # bitsandbytes comes before peft: rlm.model.base and rlm.model.adapters see to it
    from peft import PeftModel


@dataclass(frozen=True)
class AgentModel:
    """A frozen model, by name. Its weights are loaded when a run opens it, if at all."""

    name: str
    adapter: Path | None = None
    quantize: str = "none"

    def __str__(self) -> str:
        return f"{self.name} + {self.adapter}" if self.adapter else self.name


class LocalAgents:
    """A model of ours, through the sampling engine."""

    def __init__(
        self,
        sampler: Sampler,
        tokenizer: PreTrainedTokenizerBase,
        wears: Callable[[], AbstractContextManager] = nullcontext,
    ) -> None:
        """
        Args:
            wears: makes the sampler's model the agents' while they speak, where it is shared.
        """
        self._sampler, self._tokenizer, self._wears = sampler, tokenizer, wears

    def reply(self, calls: Sequence[Call]) -> list[Reply]:
        # Whatever a system prompt holds, it was written by a model: plain text, no special tokens.
        prompts = [
            render_prompt(self._tokenizer, call.text, PLAIN, system_prompt=call.system_prompt)
            for call in calls
        ]
        asked = zip(prompts, calls, strict=True)
        with self._wears():
            groups = self._sampler.complete([Request(p, c.params, c.seed) for p, c in asked])
        ids = [completion.token_ids for (completion,) in groups]
        return [
            Reply(self._tokenizer.decode(row, skip_special_tokens=True), len(prompt), len(row))
            for prompt, row in zip(prompts, ids, strict=True)
        ]

    def release(self) -> None:
        self._sampler.release()


class RemoteAgents:
    """A model behind an OpenAI-compatible API. A request that fails is recorded, not scored."""

    def __init__(self, client: APIClient, model: str) -> None:
        self._client, self._model = client, model

    def __str__(self) -> str:
        return f"{self._model} at {self._client.url}"

    def reply(self, calls: Sequence[Call]) -> list[Reply]:
        with ThreadPoolExecutor(self._client.concurrency) as pool:
            return list(pool.map(self._one, calls))

    def _one(self, call: Call) -> Reply:
        roles = {"system": call.system_prompt, "user": call.text}
        try:
            said = self._client.chat(
                [{"role": role, "content": text} for role, text in roles.items()],
                model=self._model,
                temperature=call.params.temperature,
                max_tokens=call.params.max_new_tokens,
                seed=call.seed % 2**31,
            )
        except APIError as error:
            return Reply("", error=str(error))
        return Reply(said.text, said.prompt_tokens, said.completion_tokens)

    def release(self) -> None:
        """Nothing is held."""


def choose_agents(config: Config) -> AgentModel | RemoteAgents:
    """Whom the config names.

    Raises:
        UsageError: the adapter is not there, or the server's URL or key is none.
    """
    if config.agent_url:
        limits = {"api_key_env": config.agent_key, "concurrency": config.max_num_seqs}
        return RemoteAgents(APIClient(config.agent_url, **limits), config.agent_model)
    adapter = config.agent_adapter
    if adapter:
        adapters.check_adapter(adapter, "run: python train_grpo.py")
    return AgentModel(config.agent_model or config.model, adapter, config.quantize)


def open_runner(
    config: Config,
    agents: Agents | AgentModel,
    policy: PeftModel,
    sampler: Sampler | object,
    tokenizer: PreTrainedTokenizerBase,
    agent_tokenizer: PreTrainedTokenizerBase | None = None,
) -> Runner:
    """The agents, ready to speak. On the orchestrator's base they share it, sampler included.

    Args:
        policy, sampler, tokenizer: the orchestrator's; another sampler is made where it is no
            `Sampler` but a server.

    Raises:
        UsageError: the agents' adapter is not there, or belongs to another base; or it cannot be
            worn on the orchestrator's.
    """
    if isinstance(agents, AgentModel):
        agents = _open(config, agents, policy, sampler, tokenizer, agent_tokenizer)
    return Runner(agents, config.agent_max_tokens, config.agent_temperature)


def _open(
    config: Config,
    agents: AgentModel,
    policy: PeftModel,
    sampler: Sampler | object,
    tokenizer: PreTrainedTokenizerBase,
    agent_tokenizer: PreTrainedTokenizerBase | None,
) -> LocalAgents:
    if agents.adapter:
        adapters.check_base(agents.adapter, agents.name, models.base_hash(agents.name))
    if (agents.name, agents.quantize) == (config.model, config.quantize):
        name = "agent" if agents.adapter else None
        if agents.adapter:
            was_plain = adapters.has_plain_lora(policy)
            adapters.load_adapter(policy, agents.adapter, trainable=False, name=name)
            if was_plain and not adapters.has_plain_lora(policy):  # its layers take no other
                raise UsageError(
                    f"adapter {agents.adapter} is more than plain LoRA: agents with it need a base "
                    "of their own (--agent-model with another copy's path)"
                )
        if not isinstance(sampler, Sampler):
            sampler = Sampler(policy, tokenizer)
        return LocalAgents(sampler, tokenizer, partial(adapters.using_adapter, policy, name))
    device = machine.pick_device()
    model = models.load_base(agents.name, device, quantize=agents.quantize)
    if agents.adapter:
        model = adapters.load_adapter(model, agents.adapter, trainable=False)
    agent_tokenizer = agent_tokenizer or models.load_tokenizer(agents.name)
    return LocalAgents(Sampler(model, agent_tokenizer), agent_tokenizer)
