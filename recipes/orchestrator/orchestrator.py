"""Runs the orchestrator: a model writes graphs of agents, and the agents solve problems."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from transformers import PreTrainedTokenizerBase

from recipes.orchestrator.agents import (
    AgentModel,
    Call,
    LocalLLM,
    RemoteLLM,
    agents_format,
    choose_agents,
    load_agents,
)
from recipes.orchestrator.config import OrchestratorConfig
from recipes.orchestrator.graph import Graph, parse_graph
from recipes.orchestrator.runner import Runner, Trajectory
from rlm.cli import UsageError, parse
from rlm.data import FORMATS, Problem, render_prompt
from rlm.model import (
    base_model_hash,
    check_adapter,
    check_base,
    load_adapter,
    load_base,
    load_tokenizer,
    pick_device,
)
from rlm.sampling import Sampler, SamplingParams, prompt_seed

if TYPE_CHECKING:
    from peft import PeftModel


PROMPTS = yaml.safe_load(Path(__file__).with_name("prompts.yaml").read_text(encoding="utf-8"))
_SHAPES = {"prompts": Graph.chain("...", "..."), "questions": Graph.plan("...", "...")}
SYSTEM_PROMPTS = {  # by --graph-form
    form: f"{PROMPTS['orchestrator'][form]} {shape.to_json()}" for form, shape in _SHAPES.items()
}


def render(tokenizer: PreTrainedTokenizerBase, question: str, form: str = "prompts") -> list[int]:
    """Render the orchestrator's prompt for a problem to token ids; `form` is its --graph-form."""
    system_prompt = SYSTEM_PROMPTS[form]
    return render_prompt(tokenizer, question, FORMATS["deepseek"], system_prompt=system_prompt)


class Orchestrator:
    """Writes graphs with a policy, and runs them with the agents."""

    def __init__(
        self,
        config: OrchestratorConfig,
        agents: AgentModel | RemoteLLM,
        policy: PeftModel,
        tokenizer: PreTrainedTokenizerBase,
        sampler: Sampler,
    ) -> None:
        self.config, self.agents, self.policy = config, agents, policy
        self.writer = LocalLLM(sampler, tokenizer)
        loaded = load_agents(agents, config, policy, self.writer)
        self.format = agents_format(agents)
        options = (config.agent_max_tokens, config.agent_temperature, self.format)
        self.runner = Runner(loaded, *options)

    @classmethod
    def load(cls, run_dir: Path) -> Orchestrator:
        """Load a finished run: its policy has the adapters "default" (trained) and "start".

        Raises:
            UsageError: the directory holds no finished run.
        """
        file = run_dir / "config.json"
        if not file.is_file():
            raise UsageError(
                f"{run_dir} holds no run; python -m recipes.orchestrator.train makes one"
            )
        config = parse(OrchestratorConfig, ["--config", str(file)])
        check_adapter(config.output, "the run has not ended: train with --resume")
        check_base(config.output, config.model, base_model_hash(config.model))
        tokenizer = load_tokenizer(config.model)
        base = load_base(config.model, pick_device(), quantize=config.quantize)
        policy = load_adapter(base, config.output, trainable=False)
        if config.sft_adapter:
            check_adapter(config.sft_adapter, "it is what the run began with")
            load_adapter(policy, config.sft_adapter, trainable=False, name="start")
        sampler = Sampler(policy, tokenizer, max_num_seqs=config.max_num_seqs)
        return cls(config, choose_agents(config), policy, tokenizer, sampler)

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
        """Write a graph for each problem, with the adapter that is active, and run it."""
        questions, told = [p.question for p in problems], SYSTEM_PROMPTS[self.config.graph_form]
        calls = [Call(told, text, prompt_seed(seed, text)) for text in questions]
        params = SamplingParams(self.config.max_new_tokens, temperature)
        replies = self.writer.chat(calls, params, on_finish)
        self.writer.release()
        graphs = [parse_graph(reply.text) for reply in replies]
        trajectories = self.runner.run(problems, graphs, seed)
        for trajectory, reply in zip(trajectories, replies, strict=True):
            trajectory.written = reply
        return trajectories
