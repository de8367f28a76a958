"""Runs the orchestrator: a model writes graphs of agents, and the agents solve problems."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from transformers import PreTrainedTokenizerBase

from recipes.orchestrator.agents import AgentModel, APIAgents, choose_agents, load_agents
from recipes.orchestrator.config import OrchestratorConfig
from recipes.orchestrator.graph import AGENT_IDS, MIN_AGENTS, Graph, parse_graph
from recipes.orchestrator.runner import Generation, Runner, Trajectory
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


def orchestrator_prompt(max_agents: int = MIN_AGENTS) -> str:
    """Write the orchestrator's system prompt; the problem follows as the user's text."""
    shape = Graph.chain("...", "...").to_json()
    text = PROMPTS["two_agents" if max_agents == MIN_AGENTS else "more_agents"]
    last = AGENT_IDS[max_agents - 1]
    return f"{text.format(least=MIN_AGENTS, most=max_agents, last=last)} {shape}"


def render(
    tokenizer: PreTrainedTokenizerBase, question: str, max_agents: int = MIN_AGENTS
) -> list[int]:
    """Render the orchestrator's prompt for a problem to token ids."""
    system_prompt = orchestrator_prompt(max_agents)
    return render_prompt(tokenizer, question, FORMATS["deepseek"], system_prompt=system_prompt)


class Orchestrator:
    """Writes graphs with a policy, and runs them with the agents."""

    def __init__(
        self,
        config: OrchestratorConfig,
        agents: AgentModel | APIAgents,
        policy: PeftModel,
        tokenizer: PreTrainedTokenizerBase,
        sampler: Sampler,
    ) -> None:
        self.config, self.agents, self.policy = config, agents, policy
        self.tokenizer, self.sampler = tokenizer, sampler
        loaded = load_agents(agents, config, policy, tokenizer, sampler)
        self.runner = Runner(loaded, config.agent_max_tokens, config.agent_temperature)

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

    def solve(
        self,
        problems: Sequence[Problem],
        *,
        temperature: float = 0.0,
        seed: int = 0,
        on_finish: Callable[[], None] = lambda: None,
    ) -> list[Trajectory]:
        """Write a graph for each problem, with the adapter that is active, and run it."""
        config, questions = self.config, [problem.question for problem in problems]
        prompts = [render(self.tokenizer, question, config.max_agents) for question in questions]
        params = SamplingParams(config.max_new_tokens, temperature)
        seeds = [prompt_seed(seed, question) for question in questions]
        groups = self.sampler.sample(prompts, 1, params, seeds, on_finish)
        self.sampler.release()
        generations = [
            Generation(
                len(prompt),
                completion,
                self.tokenizer.decode(completion.token_ids, skip_special_tokens=True),
            )
            for prompt, (completion,) in zip(prompts, groups, strict=True)
        ]
        graphs = [parse_graph(generation.text, config.max_agents) for generation in generations]
        trajectories = self.runner.run(problems, graphs, seed)
        for trajectory, generation in zip(trajectories, generations, strict=True):
            trajectory.generation = generation
        return trajectories
