"""Runs the orchestrator: a model writes graphs of agents, and the agents solve problems.

All agents are played by one frozen model. This model is either local, and then shares the
orchestrator's weights if possible, or is served by an API.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from transformers import PreTrainedTokenizerBase

from recipes.orchestrator.config import OrchestratorConfig
from recipes.orchestrator.graph import parse_graph
from recipes.orchestrator.runner import Call, LocalLLM, RemoteLLM, Runner, Trajectory
from rlm.api_client import APIClient
from rlm.cli import UsageError, command_of, parse, required, terminal
from rlm.data import FORMATS, Format, Problem, render_prompt
from rlm.model import (
    AdapterInfo,
    adapter_hash,
    base_model_hash,
    check_adapter,
    check_base,
    load_adapter,
    load_base,
    load_tokenizer,
    pick_device,
    using_adapter,
)
from rlm.runs import changed_inputs
from rlm.sampling import Sampler, SamplingParams, prompt_seed
from rlm.tools import load_tool
from rlm.training import KEPT_AS

if TYPE_CHECKING:
    from peft import PeftModel

    from rlm.sampling import RolloutSampler

PROMPTS = yaml.safe_load(Path(__file__).with_name("prompts.yaml").read_text(encoding="utf-8"))
MAX_REQUESTS = 16  # maximum number of concurrent requests to the agents' server
SYSTEM_PROMPTS = PROMPTS["orchestrator"]  # one for each value of --graph-form


def render(tokenizer: PreTrainedTokenizerBase, question: str, form: str = "prompts") -> list[int]:
    """Render the orchestrator's prompt for a question and a --graph-form as token ids."""
    system_prompt = SYSTEM_PROMPTS[form]
    return render_prompt(tokenizer, question, FORMATS["deepseek"], system_prompt=system_prompt)


@dataclass(frozen=True)
class AgentModel:
    """Describes the agents' frozen model, whose weights `load_agents` loads if necessary."""

    name: str
    adapter: Path | None = None
    quantize: str = "none"
    tokenizer: PreTrainedTokenizerBase | None = None

    def __str__(self) -> str:
        return f"{self.name} + {self.adapter}" if self.adapter else self.name

    @property
    def info(self) -> AdapterInfo:
        return AdapterInfo.load(self.adapter) if self.adapter else AdapterInfo(Path())

    @property
    def format(self) -> Format:
        """The reasoning format that the agents were trained with."""
        return self.info.format


def choose_agents(config: OrchestratorConfig) -> AgentModel | RemoteLLM:
    """Return the agents that the config selects."""
    if config.agent_url:
        limits = {"api_key_env": config.agent_key, "concurrency": MAX_REQUESTS}
        name = required(config.agent_model, "--agent-model")
        return RemoteLLM(APIClient(config.agent_url, **limits), name)
    name = config.agent_model or required(config.model, "--model")
    if config.agent_adapter:
        check_adapter(config.agent_adapter, f"run: {command_of('train_grpo')}")
        check_base(config.agent_adapter, name, base_model_hash(name))
    return AgentModel(name, config.agent_adapter, config.quantize)


def identify_agents(agents: AgentModel | RemoteLLM) -> dict[str, str]:
    """Return {description of the agents: hashes of their weights}; {} if no hash is known.

    A server's hash is known only if it is this project's own server.
    """
    weights: list[str] = []
    if isinstance(agents, RemoteLLM):
        weights += map(str, agents.client.served_weights(agents.model).items())
    if isinstance(agents, AgentModel):
        weights.append(base_model_hash(agents.name))
        weights += [adapter_hash(agents.adapter)] if agents.adapter else []
    return {f"the model of the agents ({agents})": " ".join(weights)} if weights else {}


def load_agents(
    agents: AgentModel | RemoteLLM,
    config: OrchestratorConfig,
    policy: PeftModel,
    writer: LocalLLM,
) -> LocalLLM | RemoteLLM:
    """Load the agents' model, if it is a local one.

    If the agents and the orchestrator use the same base model, it is loaded only once. The agents
    can call the tool that their adapter was trained with.
    """
    if not isinstance(agents, AgentModel):
        return agents
    tool = load_tool(agents.info.resolve_tool())
    limit = config.max_num_seqs
    if agents.adapter:
        check_base(agents.adapter, agents.name, base_model_hash(agents.name))
    if (agents.name, agents.quantize) != (config.model, config.quantize):
        model = load_base(agents.name, pick_device(config.dtype), quantize=agents.quantize)
        if agents.adapter:
            model = load_adapter(model, agents.adapter, trainable=False)
        tokenizer = agents.tokenizer or load_tokenizer(agents.name)
        return LocalLLM(Sampler(model, tokenizer, max_num_seqs=limit, tool=tool), tokenizer)
    sampler, tokenizer, name = writer.sampler, writer.tokenizer, None
    if agents.adapter:
        name = "agent"
        load_adapter(policy, agents.adapter, trainable=False, name=name)
    # A vLLM server serves only the orchestrator's adapter, and the orchestrator's own sampler has
    # no tool. In both cases the agents need a sampler of their own.
    if tool or not isinstance(sampler, Sampler):
        options = {"dtype": getattr(sampler, "dtype", None), "max_num_seqs": limit, "tool": tool}
        sampler = Sampler(policy, tokenizer, **options)
    return LocalLLM(sampler, tokenizer, partial(using_adapter, policy, name))


def exported_adapter(run_dir: Path) -> Path:
    """Return the copy of the exported adapter in the folder of the run.

    This copy is also found if the folder of the run was renamed, unlike the adapter in --output.
    """
    unfinished = "the run is not finished: continue it with --resume"
    last = check_adapter(run_dir / KEPT_AS["last"], unfinished)
    name = AdapterInfo.load(last).run.get("exported", "last")
    return check_adapter(run_dir / KEPT_AS[name], unfinished)


class Orchestrator:
    """Writes graphs with a policy, and runs these graphs with the agents."""

    def __init__(
        self,
        config: OrchestratorConfig,
        agents: AgentModel | RemoteLLM,
        policy: PeftModel,
        tokenizer: PreTrainedTokenizerBase,
        sampler: RolloutSampler,
    ) -> None:
        self.config, self.agents, self.policy = config, agents, policy
        self.writer = LocalLLM(sampler, tokenizer)
        loaded = load_agents(agents, config, policy, self.writer)
        options = (config.agent_max_tokens, config.agent_temperature, agents.format)
        self.runner = Runner(loaded, *options)

    @classmethod
    def load(cls, run_dir: Path) -> Orchestrator:
        """Load the orchestrator of a finished run, with the adapter that the run exported."""
        file = run_dir / "config.json"
        if not file.is_file():
            raise UsageError(
                f"{run_dir} contains no run: create one with python -m recipes.orchestrator.train"
            )
        config = parse(OrchestratorConfig, ["--config", str(file)])
        model, adapter = required(config.model, "--model"), exported_adapter(run_dir)
        check_base(adapter, model, base_model_hash(model))
        tokenizer = load_tokenizer(model)
        base = load_base(model, pick_device(config.dtype), quantize=config.quantize)
        policy = load_adapter(base, adapter, trainable=False)
        sampler = Sampler(policy, tokenizer, max_num_seqs=config.max_num_seqs)
        loaded = cls(config, agents := choose_agents(config), policy, tokenizer, sampler)
        trained_with = AdapterInfo.load(adapter).run.get("inputs", {})
        for what in changed_inputs(trained_with, identify_agents(agents)):
            terminal.line(
                f"warning: {what} has changed since the training in {run_dir}: the results are "
                "those of the changed model"
            )
        return loaded

    def render(self, problem: Problem) -> list[int]:
        """Render the orchestrator's prompt for a problem as token ids."""
        return render(self.writer.tokenizer, problem.question, self.config.graph_form)

    def solve(
        self,
        problems: Sequence[Problem],
        *,
        temperature: float = 0.0,
        seed: int = 0,
        on_finish: Callable[[], None] = lambda: None,
    ) -> list[Trajectory]:
        """Write a graph for each problem with the policy's active adapter, and run the graph."""
        questions, told = [p.question for p in problems], SYSTEM_PROMPTS[self.config.graph_form]
        calls = [Call(told, text, prompt_seed(seed, text)) for text in questions]
        params = SamplingParams(self.config.max_new_tokens, temperature)
        replies = self.writer.chat(calls, params, on_finish)
        self.writer.release()
        graphs = [parse_graph(reply.text, self.config.graph_form) for reply in replies]
        trajectories = self.runner.run(problems, graphs, [0] * len(graphs), seed)
        for trajectory, reply in zip(trajectories, replies, strict=True):
            trajectory.written = reply
        return trajectories
