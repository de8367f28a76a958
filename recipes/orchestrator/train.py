"""Trains a model to design the two agents that solve a problem, in the loop of train_grpo.py.

For each problem the orchestrator writes several graphs; a graph lists agents and their system
prompts or questions. A frozen model plays the agents, and the reward is 1 if the last agent's
number is correct, else 0. GRPO with a KL term compares the graphs of a problem and updates only the
orchestrator's LoRA adapter.

    python -m recipes.orchestrator.train --config configs/orchestrator_quickstart.yaml
    python -m recipes.orchestrator.train --steps 100 --batch-problems 4 --trajectories 4 --lr 1e-4
    python -m recipes.orchestrator.train --resume
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from recipes.orchestrator.cold_start import cold_start_dir, train_start_adapter
from recipes.orchestrator.config import (
    DEFAULT_START,
    Config,
    OrchestratorConfig,
    has_unseen_test,
)
from recipes.orchestrator.orchestrator import (
    AgentModel,
    Orchestrator,
    choose_agents,
    identify_agents,
    render,
)
from recipes.orchestrator.runner import GraphReward, RemoteLLM
from rlm import GRPOTrainer
from rlm.cli import Interrupted, UsageError, required, run_main, terminal
from rlm.data import (
    Problem,
    drop_long_prompts,
    load_problems,
    require_numeric_answers,
)
from rlm.model import (
    ADAPTER_FILES,
    AdapterInfo,
    Device,
    check_output,
    context_window,
    default_setup,
    load_tokenizer,
    prepare_process,
)
from rlm.runs import replace_json
from rlm.training import (
    Group,
    TrainingRun,
    check_output_place,
    load_data,
    load_policy,
    validation_facts,
)

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel

# Maps each column of train_logs.csv to the metric of a training step.
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
# Columns that are printed after each step.
SHOWN = ("reward_mean", "reward_std", "loss", "kl_penalty", "val_acc", "valid_json_rate")
Log = dict[str, float | None]
PUBLISHED_SEED = 42  # default seed in the original README (docs/reference/names.md)


class OrchestratorTrainer(GRPOTrainer):
    """Trains the orchestrator with GRPO.

    A completion is a graph, and its reward is computed from the agents' answer.
    """

    config: OrchestratorConfig  # a subclass of the GRPOTrainer's config type
    scorer: GraphReward

    def __init__(
        self,
        config: OrchestratorConfig,
        agents: AgentModel | RemoteLLM,
        *,
        loaded: tuple[PreTrainedTokenizerBase, PeftModel] | None = None,
        device: Device | None = None,
    ) -> None:
        """Load the orchestrator and the agents."""
        check_graph_form(config)
        self._loaded = loaded
        super().__init__(required(config.model, "--model"), config, device=device)
        models = (self.policy, self.tokenizer, self.sampler)
        self.orchestrator = Orchestrator(self.config, agents, *models)
        self.scorer = GraphReward(self.orchestrator.runner, self.config)
        self.state.inputs = identify_agents(agents)
        self._val_acc: float | None = None  # the last validation accuracy that was measured

    def load_model(
        self, tokenizer: PreTrainedTokenizerBase | None, device: Device | None
    ) -> tuple[PreTrainedTokenizerBase, PeftModel]:
        return self._loaded or super().load_model(tokenizer, device)

    def render(self, problem: Problem) -> list[int]:
        return render(self.tokenizer, problem.question, self.config.graph_form)

    def validation_scores(
        self, problems: Sequence[Problem], k: int, advance: Callable[[], None]
    ) -> dict[str, list[float | None]]:
        """Return 1 for each problem that its greedy graph solves, else 0.

        The score is None if the agents' server failed. Only one graph is written per problem, so
        `k` is always 1.
        """
        runs = self.orchestrator.solve(problems, seed=self.config.seed, on_finish=advance)
        if failed := sum(run.error is not None for run in runs):
            terminal.line(
                f"{failed} of {len(runs)} problems are left out of the accuracy: the agents' "
                "server failed"
            )
        return {"accuracy": [run.reward(self.config.zero_leaks) for run in runs]}

    def log(
        self,
        run: TrainingRun,
        metrics: dict[str, float],
        groups: Sequence[Group],
        advantages: Tensor,
    ) -> None:
        """Log the metrics of a step, and append every graph with its trace to rollouts.jsonl.

        This method adds the metrics that only train_logs.csv needs.
        """
        penalty = self.config.kl_weight * metrics.get("loss/kl_weighted", 0.0)
        metrics = metrics | {
            "loss/kl_penalty": penalty,
            "loss/total": metrics.get("loss/policy", 0.0) + penalty,
            "graph/tokens": metrics["completion/length_mean"] + metrics["agents/tokens_written"],
        }
        super().log(run, metrics, groups, advantages)
        for name in ("eval/start_accuracy", "eval/accuracy"):
            self._val_acc = metrics.get(name, self._val_acc)
        shown = as_log(metrics) | {"val_acc": self._val_acc}
        values = [f"{name} {shown[name]:.4g}" for name in SHOWN if shown[name] is not None]
        terminal.line("  " + "  ".join(values))

        records = [g for call in self.scorer.records for g in self.distributed.gather(call)]
        self.scorer.records.clear()
        if self.distributed.is_main:
            rows = [
                {
                    "step": metrics["step"],
                    "problem": group.problem.id,
                    "question": group.problem.question,
                    "answer": group.problem.answer,
                    "graphs": graphs,
                }
                for group, graphs in zip(groups, records, strict=True)
            ]
            run.directory.append(run.directory.path / "rollouts.jsonl", rows)

    def _start_advice(self) -> str:
        """Return advice on how to start training from an adapter that can write graphs."""
        if self._loaded is None:
            return "leave out --sft-adapter none, so that the cold start teaches the JSON format"
        given = f'pass start_adapter="{DEFAULT_START}" to make_lora_orchestrator'
        if (DEFAULT_START / ADAPTER_FILES[0]).is_file():
            return given
        model = f"--model {self.config.model} --steps 1"
        return f"run python -m recipes.orchestrator.train {model} once, then {given}"

    def train_and_test(
        self,
        train: Sequence[Problem],
        validation: Sequence[Problem] = (),
        test: Sequence[Problem] = (),
    ) -> tuple[list[Log], dict[str, Any]]:
        """Train the orchestrator, and evaluate the exported adapter on the test problems.

        Return the rows of train_logs.csv, and the content of summary.json.
        """
        if self.config.sft_adapter is None and self.distributed.is_main:
            terminal.line(
                "warning: the orchestrator starts without a trained adapter, so hardly any of its "
                f"graphs will be valid, and the others have a reward of 0: {self._start_advice()}"
            )
        room = context_window(self.policy), self.config.max_new_tokens
        test = drop_long_prompts(test, self.render, *room, "test problems")
        summary = self.train(train, validation)
        assert self.run is not None
        directory = self.run.directory
        if test:  # a signal during the export must not wait for the test
            directory.raise_if_interrupted(self.distributed.any(directory.interrupted))
        logs = [as_log(row) for row in self.distributed.broadcast(directory.metrics())]
        if self.distributed.is_main:
            directory.write_csv(logs)
        share = self.distributed.shard(test)
        try:
            solved = self.validation_scores(share, 1, lambda: None)["accuracy"] if share else []
        except KeyboardInterrupt:
            note = f"the adapter of {directory.path} is exported, but not tested"
            raise Interrupted(signal.SIGINT, note if directory.writes else "") from None
        scored = [score for score in self.distributed.gather(solved) if score is not None]
        correct, total = round(sum(scored)), len(scored)
        accuracy = correct / total if scored else None
        summary["test"] = {"correct": correct, "total": total, "accuracy": accuracy}
        if self.distributed.is_main:
            replace_json(directory.path / "summary.json", summary)
        return logs, summary


def check_graph_form(config: OrchestratorConfig) -> None:
    """Raise UsageError if the initial adapter exists and was trained with another --graph-form."""
    start, form = config.sft_adapter, config.graph_form
    trained = start and AdapterInfo.load(start).run.get("config", {}).get("graph_form")
    if start and trained and trained != form and not config.resume:
        raise UsageError(
            f"--sft-adapter {start} was trained with --graph-form {trained}, not {form}: pass "
            f"--graph-form {trained}, or train a new one with --sft-adapter {start}_{form}"
        )


def as_log(metrics: Mapping[str, float]) -> Log:
    """Return the row of train_logs.csv for a step, with None for metrics that were not measured."""
    return {column: metrics.get(name) for column, name in LOGS.items()}


# --- the Python API of the original README --------------------------------------------------------


def load_gsm8k(
    val_rows: int | None = None, path: str | Path | None = None
) -> tuple[list[Problem], list[Problem], list[Problem]]:
    """Load the train, validation and test problems of GSM8K.

    Args:
        val_rows: the number of validation problems to return; None returns all of them.
        path: a folder with the published files of GSM8K; None downloads them from the hub.
    """
    name = f"gsm8k:{path}" if path else "gsm8k"
    train, validation, test = (load_problems(name, s) for s in ("train", "validation", "test"))
    return train, validation[:val_rows], test


def load_tokenizers(
    orchestrator_id: str | None, agent_id: str | None
) -> tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase]:
    """Load the tokenizers of the orchestrator and of the agents."""
    orchestrator, agent = (load_agent_model(name).name for name in (orchestrator_id, agent_id))
    return load_tokenizer(orchestrator), load_tokenizer(agent)


def make_lora_orchestrator(
    orchestrator_id: str | None, start_adapter: Path | None = None, seed: int = 0
) -> PeftModel:
    """Load the base model with a trainable adapter: `start_adapter`, or a new adapter."""
    model = load_agent_model(orchestrator_id)
    origin: dict[str, Any] = {"model": model.name, "quantize": model.quantize}
    origin |= {"sft_adapter": start_adapter}
    policy = load_policy(OrchestratorConfig(**origin, seed=seed), model.name, None)
    lora = cast("LoraConfig", policy.peft_config["default"])
    origin |= {"lora_r": lora.r, "lora_alpha": lora.lora_alpha}
    policy.origin = origin  # pyright: ignore[reportArgumentType]  # torch's stub
    return policy


def load_agent_model(agent_id: str | None, adapter: Path | None = None) -> AgentModel:
    """Describe the agents' frozen model; the default is the model that fits this machine.

    The weights are loaded later, by the run, and only if the orchestrator uses another model.
    """
    if agent_id is not None:
        return AgentModel(agent_id, adapter)
    return AgentModel(default_setup().model, adapter)


def run_grpo_training(
    cfg: Config | OrchestratorConfig,
    orchestrator: PeftModel,
    orchestrator_tokenizer: PreTrainedTokenizerBase,
    agent_model: AgentModel | RemoteLLM,
    agent_tokenizer: PreTrainedTokenizerBase,
    ds_train: Sequence[Problem],
    ds_val: Sequence[Problem],
    ds_test: Sequence[Problem],
    seed: int | None = None,
) -> list[Log]:
    """Train the orchestrator once, and return the rows of its train_logs.csv.

    Args:
        seed: the default is the seed of an `OrchestratorConfig`, or 42 for a `Config`.
    """
    config = cfg.to_options() if isinstance(cfg, Config) else cfg
    if seed is None:
        seed = PUBLISHED_SEED if isinstance(cfg, Config) else config.seed
    # The run records the agents that are passed, which `Orchestrator.load` loads again.
    if isinstance(agent_model, AgentModel):
        agents: dict[str, Any] = {"agent_model": agent_model.name, "agent_url": None}
        agents |= {"agent_adapter": agent_model.adapter, "agent_key": None}
        agent_model = replace(agent_model, tokenizer=agent_tokenizer)
    else:
        client = agent_model.client
        agents = {"agent_model": agent_model.model, "agent_url": client.url}
        agents |= {"agent_key": client.api_key_env}
    config = replace(config, seed=seed, **orchestrator.origin, **agents)
    loaded = (orchestrator_tokenizer, orchestrator)
    trainer = OrchestratorTrainer(config, agent_model, loaded=loaded)
    return trainer.train_and_test(ds_train, ds_val, ds_test)[0]


# --- the command ----------------------------------------------------------------------------------


def refuse_overlap(run_dir: Path, start: Path, start_from: Path | None) -> None:
    """Check that the cold start, which trains `start`, replaces no run and no `start_from`."""
    cold = cold_start_dir(run_dir.resolve())
    if cold.is_relative_to(start.resolve()):
        raise UsageError(
            f"--sft-adapter {start} contains {cold}, the run of the cold start: pass another "
            f"folder, such as --sft-adapter {run_dir}_start"
        )
    try:
        check_output_place(start, cold, start_from, "--start-from", resume=False)
    except ValueError as error:
        replaced = f"--start-from {start_from} or its own run" if start_from else "its own run"
        raise UsageError(
            f"the cold start writes to --sft-adapter {start} and to {cold}, and would replace "
            f"{replaced}: pass another --sft-adapter or --run-dir"
        ) from error


def main(config: OrchestratorConfig) -> int:
    prepare_process()
    start = config.sft_adapter
    start_is_missing = start is not None and not (start / ADAPTER_FILES[0]).is_file()
    if start and start_is_missing:
        refuse_overlap(config.run_dir, start, config.start_from)
    agents = choose_agents(config)
    dataset, output = required(config.dataset, "--dataset"), required(config.output, "--output")
    train, validation = load_data(config)
    test = []
    is_testable = has_unseen_test(dataset, config)
    if config.test_samples and is_testable:
        own = {"columns": config.columns, "max_samples": config.test_samples}
        test = load_problems(dataset, "test", **own)
    require_numeric_answers(dataset, [*train, *validation, *test])
    check_output(output)
    if start and start_is_missing:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise UsageError(
                f"{start} does not exist: to create it, run the command once without torchrun "
                "(--steps 1 is enough)"
            )
        check_output(start, "--sft-adapter")
        train_start_adapter(config, train[: config.start_questions], agents.format)
    elif config.start_from and not config.resume:
        why = f"--sft-adapter {start} exists" if start else "--sft-adapter is none"
        terminal.line(f"--start-from {config.start_from} is not used: {why}")
    trainer = OrchestratorTrainer(config, agents)
    limit = f"at most {config.agent_max_tokens} tokens per reply (--agent-max-tokens)"
    terminal.line(f"agents: {agents}, temperature {config.agent_temperature:g}, {limit}")
    _, summary = trainer.train_and_test(train, validation, test)
    tested = "not evaluated" + ": the dataset has no unseen test split" * (not is_testable)
    if total := summary["test"]["total"]:
        tested = f"{summary['test']['accuracy']:.1%} of {total}"
    facts = {
        **validation_facts(summary),
        "test accuracy": tested,
        "time": terminal.duration(summary["seconds"]),
        "peak memory": f"{summary['peak_memory_gb']:.1f} GB",
        "adapter": output,
        "next": f"python -m recipes.orchestrator.evaluate --run {config.run_dir}",
    }
    terminal.table("Done", facts)
    return 0


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    run_main(main, OrchestratorConfig, description=__doc__)
