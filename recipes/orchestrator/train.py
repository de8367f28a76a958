"""Train a model to design the two agents that solve the problem. The loop is train_grpo.py's.

For each problem the orchestrator writes several graphs of agents with their system prompts; a
frozen model runs each graph, the last agent's number is verified 0/1, and GRPO with a KL term
compares the graphs of a problem and updates the orchestrator's LoRA alone.

    python -m recipes.orchestrator.train --config configs/orchestrator_quickstart.yaml
    python -m recipes.orchestrator.train --steps 100 --batch-problems 4 --trajectories 4 --lr 1e-4
    python -m recipes.orchestrator.train --resume
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from recipes.orchestrator.agents import AgentModel, choose_agents, open_runner
from recipes.orchestrator.cold_start import make_start_adapter
from recipes.orchestrator.config import Config
from recipes.orchestrator.orchestrator import render, write_graphs
from recipes.orchestrator.reward import GraphReward, Outcome, try_graphs
from recipes.orchestrator.runner import Agents
from rlm.cli import terminal
from rlm.cli.main import run_main
from rlm.cli.options import UsageError
from rlm.data.loaders import is_file, load_problems, only_numbers
from rlm.data.problem import Problem
from rlm.model import adapters
from rlm.model import base as models
from rlm.model import hardware as machine
from rlm.model.export import check_output
from rlm.runs.atomic_files import replace_json
from rlm.training.advantages import Group
from train_grpo import GRPOTrainer

if TYPE_CHECKING:  # bitsandbytes comes before peft: rlm.model.base and rlm.model.adapters see to it
    from peft import PeftModel

# Column of train_logs.csv → metric of a step.
LOGS = {
    "step": "step",
    "reward_mean": "reward/mean",
    "reward_std": "reward/std",
    "loss": "loss/total",
    "policy_loss": "loss/policy",
    "kl_penalty": "loss/kl_penalty",
    "kl_value": "loss/kl",
    "val_acc": "eval/accuracy",
    "valid_json_rate": "graph/valid_rate",
    "distinct_graphs": "graph/distinct",
    "answer_leak_rate": "graph/leak_rate",
    "tokens_per_problem": "graph/tokens",
}
SHOWN = ("reward_mean", "reward_std", "loss", "kl_penalty", "val_acc", "valid_json_rate")


class OrchestratorTrainer(GRPOTrainer):
    """GRPO whose completions are graphs, and whose reward is what the agents make of them."""

    def __init__(
        self,
        config: Config,
        agents: Agents | AgentModel,
        *,
        given: tuple[PreTrainedTokenizerBase, PeftModel] | None = None,
        agent_tokenizer: PreTrainedTokenizerBase | None = None,
        device: machine.Device | None = None,
    ) -> None:
        """
        Args:
            given: tokenizer and orchestrator, where they are loaded already.
        """
        self._given = given
        super().__init__(config.model, config, device=device)
        shared = (self.policy, self.sampler, self.tokenizer, agent_tokenizer)
        self.runner = open_runner(config, agents, *shared)
        self.scorer = GraphReward(
            self.runner,
            max_agents=config.max_agents,
            zero_leaks=config.zero_leaks,
            format_reward=config.format_reward,
            seed=config.seed,
        )
        self._val_acc: float | None = None  # the last one measured

    def load_model(self, device: machine.Device) -> tuple[PreTrainedTokenizerBase, PeftModel]:
        return self._given or super().load_model(device)

    def render(self, problem: Problem) -> list[int]:
        return render(self.tokenizer, problem.question, self.config.max_agents)

    def count_correct(self, problems: Sequence[Problem], advance: Callable[[], None]) -> int:
        outcomes = self.greedy_outcomes(problems, advance)
        return sum(outcome.earns(self.config.zero_leaks) for outcome in outcomes)

    def greedy_outcomes(
        self, problems: Sequence[Problem], advance: Callable[[], None] = lambda: None
    ) -> list[Outcome]:
        """What comes of the graph that the orchestrator finds most likely for each problem."""
        questions = [problem.question for problem in problems]
        tools = (self.sampler, self.tokenizer)
        written = write_graphs(*tools, questions, self.config, on_finish=advance)
        graphs = [one.graph for one in written]
        outcomes = try_graphs(self.runner, problems, graphs, seed=self.config.seed)
        if failed := sum(not outcome.judged for outcome in outcomes):
            terminal.line(f"{failed} problems count as unsolved: the agents' server failed")
        return outcomes

    def log(self, metrics: dict[str, float], groups: Sequence[Group], advantages: Tensor) -> None:
        """Also the named figures, and every graph with its trace in rollouts.jsonl."""
        penalty = metrics.get("loss/kl_weight", 0.0) * metrics.get("loss/kl_weighted", 0.0)
        metrics = metrics | {
            "loss/kl_penalty": penalty,
            "loss/total": metrics.get("loss/policy", 0.0) + penalty,
            "graph/tokens": metrics["completion/length_mean"] + metrics["agents/tokens_written"],
        }
        super().log(metrics, groups, advantages)
        for name in ("eval/start_accuracy", "eval/accuracy"):
            self._val_acc = metrics.get(name, self._val_acc)
        shown = as_log(metrics) | {"val_acc": self._val_acc}
        figures = [f"{name} {shown[name]:.4g}" for name in SHOWN if shown[name] is not None]
        terminal.line("  " + "  ".join(figures))

        graphs: list[list[dict[str, Any]]] = []  # in the order of the groups
        for outcomes in self.scorer.take_outcomes():
            graphs += self.distributed.gather([[o.record() for o in row] for row in outcomes])
        if self.distributed.is_main:
            rows = [
                {
                    "step": metrics["step"],
                    "problem": group.problem.id,
                    "question": group.problem.question,
                    "answer": group.problem.answer,
                    "graphs": [
                        record | {"reward": reward}
                        for record, reward in zip(records, group.rewards, strict=True)
                    ],
                }
                for group, records in zip(groups, graphs, strict=True)
            ]
            self.run.append(self.run.path / "rollouts.jsonl", rows)


def as_log(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """A step as a line of train_logs.csv; None where nothing was measured."""
    return {column: metrics.get(name) for column, name in LOGS.items()}


def fit(
    trainer: OrchestratorTrainer,
    train: Sequence[Problem],
    validation: Sequence[Problem],
    test: Sequence[Problem],
) -> tuple[list[dict[str, float | None]], dict[str, object]]:
    """Train, then test the best adapter; the lines of train_logs.csv, and the summary."""
    summary = trainer.train(train, validation)
    logs = [as_log(row) for row in trainer.distributed.broadcast(trainer.run.metrics())]
    mine = trainer.distributed.shard(test)
    correct = trainer.count_correct(mine, lambda: None) if mine else 0
    found = {"correct": sum(trainer.distributed.gather([correct])), "total": len(test)}
    summary["test"] = found | {"accuracy": found["correct"] / len(test) if test else None}
    if trainer.distributed.is_main:
        trainer.run.write_csv(logs)
        replace_json(trainer.run.path / "summary.json", summary)
    return logs, summary


# --- the same from Python, part by part ----------------------------------------------------------


def load_gsm8k(
    val_rows: int | None = None, path: str | Path | None = None
) -> tuple[list[Problem], list[Problem], list[Problem]]:
    """Train, validation (its first `val_rows`) and test; `path` as in `load_gsm8k`."""
    name = "gsm8k" if path is None else f"gsm8k:{path}"
    train, validation, test = (load_problems(name, s) for s in ("train", "validation", "test"))
    return train, validation[:val_rows], test


def load_tokenizers(
    orchestrator_id: str | None, agent_id: str | None
) -> tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase]:
    """The orchestrator's and the agents'."""
    names = (_model(orchestrator_id)[0], _model(agent_id)[0])
    return models.load_tokenizer(names[0]), models.load_tokenizer(names[1])


def make_lora_orchestrator(
    orchestrator_id: str | None, start_adapter: Path | None = None, seed: int = 0
) -> PeftModel:
    """The base with the adapter to train: a given one, or a new one that changes nothing yet."""
    name, quantize = _model(orchestrator_id)
    base = models.load_base(name, machine.pick_device(), quantize=quantize, attn="auto")
    if start_adapter:
        policy = adapters.load_adapter(base, start_adapter, trainable=True)
    else:
        torch.manual_seed(seed)
        policy = adapters.new_adapter(base, r=Config.lora_r, alpha=Config.lora_alpha).eval()
    policy.origin = {"model": name, "quantize": quantize, "sft_adapter": start_adapter}
    return policy


def load_agent_model(agent_id: str | None, adapter: Path | None = None) -> AgentModel:
    """The agents' frozen model. The run loads its weights, unless the orchestrator's will do."""
    name, quantize = _model(agent_id)
    return AgentModel(name, adapter, quantize)


def _model(name: str | None) -> tuple[str, str]:
    """A model and how it is packed; None is what suits this machine."""
    if name is not None:
        return name, "none"
    setup = machine.default_setup()
    return setup.model, setup.quantize


def run_grpo_training(
    cfg: Config,
    orchestrator: PeftModel,
    orchestrator_tokenizer: PreTrainedTokenizerBase,
    agent_model: AgentModel | Agents,
    agent_tokenizer: PreTrainedTokenizerBase,
    ds_train: Sequence[Problem],
    ds_val: Sequence[Problem],
    ds_test: Sequence[Problem],
    seed: int = 42,
) -> list[dict[str, float | None]]:
    """One run; the lines of its train_logs.csv."""
    cfg = replace(cfg, seed=seed, **orchestrator.origin)
    given = (orchestrator_tokenizer, orchestrator)
    trainer = OrchestratorTrainer(cfg, agent_model, given=given, agent_tokenizer=agent_tokenizer)
    return fit(trainer, ds_train, ds_val, ds_test)[0]


def main(config: Config) -> int:
    machine.prepare_process()
    start = config.sft_adapter
    missing = start is not None and not (start / adapters.ADAPTER_FILES[0]).is_file()
    agents = choose_agents(config)
    load = partial(load_problems, config.dataset, seed=config.seed)
    train = load("train", max_samples=config.max_samples)
    validation = load("validation", max_samples=config.eval_samples)
    test = []
    if config.test_samples and not is_file(config.dataset):  # of which the test split is all
        test = load("test", max_samples=config.test_samples)
    only_numbers(config.dataset, [*train, *validation, *test])
    check_output(config.output)
    if missing:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise UsageError(f"{start} is not there: make it in one process first (--steps 1)")
        check_output(start, "--sft-adapter")
        make_start_adapter(config, train[: config.start_questions])
    trainer = OrchestratorTrainer(config, agents)
    counts = f"{len(train)} problems, {len(validation)} to validate and {len(test)} to test on"
    facts = {
        "orchestrator": f"{config.model} + {config.sft_adapter or 'a new adapter'}",
        "agents": f"{agents}, temperature {config.agent_temperature:g}",
        "data": f"{config.dataset}: {counts}",
        "a step": f"{config.batch_size} problems × {config.group_size} graphs",
        "sampler": trainer.sampler.description,
        "run": config.run_dir,
    }
    terminal.facts("Orchestrator: GRPO over graphs of agents", facts)
    _, summary = fit(trainer, train, validation, test)
    tested = summary["test"]
    facts = {
        "validation accuracy": f"{summary['accuracy']:.1%} at step {summary['step']}",
        "test accuracy": f"{tested['accuracy']:.1%} of {tested['total']}" if test else "not asked",
        "time": terminal.duration(summary["seconds"]),
        "peak memory": f"{summary['peak_memory_gb']:.1f} GB",
        "adapter": config.output,
        "next": f"python -m recipes.orchestrator.evaluate --run {config.run_dir}",
    }
    terminal.facts("Done", facts)
    return 0


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    run_main(main, Config, description=__doc__)
