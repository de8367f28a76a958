"""The orchestrator at work: what it is asked, the graphs it writes, a trained one opened."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from recipes.orchestrator.agents import AgentModel, RemoteAgents, choose_agents, open_runner
from recipes.orchestrator.config import Config
from recipes.orchestrator.graph import AGENTS, Graph, Invalid, read_graph
from recipes.orchestrator.prompts import PLAIN, orchestrator_prompt
from recipes.orchestrator.runner import Runner
from rlm.cli.options import UsageError, parse
from rlm.data.prompts import render_prompt
from rlm.model import adapters
from rlm.model import base as models
from rlm.model import hardware as machine
from rlm.sampling import Completion, Sampler, SamplingParams, prompt_seed

if TYPE_CHECKING:  # bitsandbytes comes before peft: rlm.model.base and rlm.model.adapters see to it
    from peft import PeftModel


@dataclass(frozen=True)
class Written:
    """A completion (its tokens have their log-probabilities), and the graph that is in it."""

    prompt_tokens: int
    completion: Completion
    text: str
    graph: Graph | Invalid


def render(
    tokenizer: PreTrainedTokenizerBase, question: str, max_agents: int = AGENTS
) -> list[int]:
    """The orchestrator's prompt for a problem, as token ids."""
    return render_prompt(tokenizer, question, PLAIN, system_prompt=orchestrator_prompt(max_agents))


def write_graphs(
    sampler: Sampler,
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[str],
    config: Config,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    on_finish: Callable[[], None] = lambda: None,
) -> list[Written]:
    """One graph for each question, by whatever model the sampler draws from now."""
    prompts = [render(tokenizer, question, config.max_agents) for question in questions]
    params = SamplingParams(config.max_new_tokens, temperature)
    seeds = [prompt_seed(seed, question) for question in questions]
    groups = sampler.sample(prompts, 1, params, seeds, on_finish)
    sampler.release()
    written = []
    for prompt, (completion,) in zip(prompts, groups, strict=True):
        text = tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        graph = read_graph(text, config.max_agents)
        written.append(Written(len(prompt), completion, text, graph))
    return written


@dataclass
class OpenRun:
    """A finished run: the orchestrator in three states (adapters "default", "start", none)."""

    config: Config
    policy: PeftModel
    sampler: Sampler
    tokenizer: PreTrainedTokenizerBase
    agents: AgentModel | RemoteAgents
    runner: Runner

    @classmethod
    def open(cls, path: Path) -> OpenRun:
        """Load what a run directory names.

        Raises:
            UsageError: it holds no finished run.
        """
        if not (path / "config.json").is_file():
            raise UsageError(f"{path} holds no run; python -m recipes.orchestrator.train makes one")
        config = parse(Config, ["--config", str(path / "config.json")])
        adapters.check_adapter(config.output, "the run has not ended: train with --resume")
        adapters.check_base(config.output, config.model, models.base_hash(config.model))
        tokenizer = models.load_tokenizer(config.model)
        device = machine.pick_device()
        base = models.load_base(config.model, device, quantize=config.quantize)
        policy = adapters.load_adapter(base, config.output, trainable=False)
        if config.sft_adapter:
            adapters.check_adapter(config.sft_adapter, "it is what the run began with")
            adapters.load_adapter(policy, config.sft_adapter, trainable=False, name="start")
        sampler = Sampler(policy, tokenizer, max_num_seqs=config.max_num_seqs)
        agents = choose_agents(config)
        runner = open_runner(config, agents, policy, sampler, tokenizer)
        return cls(config, policy, sampler, tokenizer, agents, runner)

    def write(
        self, questions: Sequence[str], temperature: float = 0.0, seed: int = 0
    ) -> list[Written]:
        """One graph for each question, by the adapter that the policy wears."""
        options = {"temperature": temperature, "seed": seed}
        return write_graphs(self.sampler, self.tokenizer, questions, self.config, **options)
