"""Compares the orchestrator with a single agent on the same problems.

All rows use the same agents. An attempt at a problem may use twice --agent-max-tokens: a single
agent in one reply, and two agents in two replies. The tokens that the orchestrator writes are not
part of this limit and have a separate column. In the row with a vote, the number of votes is chosen
so that they use about as many tokens as the orchestrator and its agents together. Rows are paired
by problem, so a problem on which an agent's API failed is left out of all rows. The confidence
intervals are over the problems, and do not cover the differences between seeds.

    python -m recipes.orchestrator.evaluate --run runs/orchestrator
    python -m recipes.orchestrator.evaluate --run runs/seed_0,runs/seed_1     # means over the runs
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from statistics import fmean
from typing import Any

from recipes.orchestrator.config import OrchestratorConfig, has_unseen_test
from recipes.orchestrator.graph import Graph
from recipes.orchestrator.orchestrator import PROMPTS, Orchestrator, exported_adapter
from recipes.orchestrator.plans import WHOLE_PROBLEM, oracle_plan
from recipes.orchestrator.runner import Runner, Trajectory, graph_metrics
from rlm.cli import UsageError, check_values, flag, required, run_main, terminal, to_dict
from rlm.data import Problem, drop_long_prompts, load_problems
from rlm.evaluation import paired_bootstrap, percent, points, show_table, summarize_scores
from rlm.grading import majority_score
from rlm.model import (
    AdapterInfo,
    adapter_hash,
    check_adapter,
    context_window,
    load_adapter,
    prepare_process,
    using_adapter,
)
from rlm.runs import check_writable, json_lines, replace_file, replace_json

SINGLE = "single agent"
BARE, UNTRAINED, TRAINED = (f"orchestrator, {s}" for s in ("bare model", "untrained", "trained"))
ADAPTERS = {BARE: None, UNTRAINED: "start", TRAINED: "default"}
# The oracle's plan is made from the worked solution. Its row shows the accuracy of a good plan.
ORACLE = "two agents, oracle's plan"
# Maps each column heading of the second table to the metric of a row and its number format.
COLUMNS = {
    "agents": ("written", ".0f"),
    "graph": ("orchestrator", ".0f"),
    "read": ("read", ".0f"),
    "valid": ("graph/valid_rate", ".2f"),
    "differ": ("graph/distinct", ".2f"),
    "leaks": ("graph/leak_rate", ".2f"),
    "cut off": ("agents/truncated_rate", ".2f"),
}
# The trajectories of each problem: one trajectory, one per training run, or one per vote.
Row = Sequence[Sequence[Trajectory]]


@dataclass
class EvaluateConfig:
    run: tuple[Path, ...] = flag(
        (Path("runs/orchestrator"),),
        "folder of the training run, or folders of several runs with different seeds",
    )
    split: str | None = flag(
        None,
        "split of the run's dataset",
        default_text="test; validation if it has a local file or no unseen test split",
    )
    max_samples: int = flag(200, "evaluate at most this many problems of each dataset", min=1)
    seed: int = flag(0, "random seed for the samples of the majority vote")
    output: Path = flag(Path("runs/orchestrator_evaluation"), "folder for the results and traces")

    def __post_init__(self) -> None:
        check_values(self)


def fixed_graphs(solver: str) -> dict[str, Graph]:
    """Return the fixed graphs that the orchestrator is compared with."""
    return {
        name: Graph.chain(*(text.replace("{solver}", solver) for text in texts), field=field)
        for name, arm in PROMPTS["fixed_graphs"].items()
        for field, texts in arm.items()
    }


def make_rows(
    orchestrator: Orchestrator, others: Sequence[Path], problems: Sequence[Problem], seed: int
) -> dict[str, Row]:
    """Run every row of the comparison on the problems.

    The trajectories of further training runs (`others`) are added to those of `orchestrator`. The
    vote is run last, because its number of votes depends on the tokens of other rows.
    """
    config, format = orchestrator.config, orchestrator.agents.format

    def run_agents(arm: Sequence[Graph], on: Sequence[Problem], temperature: float) -> list:
        limit = 2 * config.agent_max_tokens // len(arm[0].agents)
        runner = Runner(orchestrator.runner.agents, limit, temperature, format)
        return runner.run(on, arm, range(len(arm)), seed)

    graphs = {
        name: [graph] * len(problems) for name, graph in fixed_graphs(format.system_prompt).items()
    }
    if any(plans := [oracle_plan(problem) for problem in problems]):
        graphs[ORACLE] = [plan or WHOLE_PROBLEM for plan in plans]
    rows: dict[str, Row] = {
        name: [[run] for run in run_agents(arm, problems, config.agent_temperature)]
        for name, arm in graphs.items()
    }
    rows |= orchestrator_rows(orchestrator, problems)
    for number, run in enumerate(others, 2):
        for name, row in orchestrator_rows(load_another(run, orchestrator), problems).items():
            rows[name] = [[*a, *b] for a, b in zip(rows[name], row, strict=True)]
        terminal.line(f"run {number} of {1 + len(others)}: done")
    judged = without_failures(rows)
    single, trained = (tokens(judged[name]) for name in (SINGLE, TRAINED))
    k = round((trained["written"] + trained["orchestrator"]) / max(1.0, single["written"])) or 1
    voters = [problem for problem in problems for _ in range(k)]
    votes = run_agents(graphs[SINGLE][:1] * len(voters), voters, 1.0)
    return rows | {f"{SINGLE}, vote of {k}": [votes[i : i + k] for i in range(0, len(votes), k)]}


def load_run(run_dir: Path) -> Orchestrator:
    """Load a finished run, and also its initial adapter, under the name "start"."""
    orchestrator = Orchestrator.load(run_dir)
    start = orchestrator.config.sft_adapter
    if start:
        check_adapter(start, "the run was started from this adapter")
        load_adapter(orchestrator.policy, start, trainable=False, name="start")
        before = AdapterInfo.load(exported_adapter(run_dir)).run.get("start_adapter_hash")
        if before and before != adapter_hash(start):
            terminal.line(f"warning: {start} has changed since {run_dir} was started from it")
    return orchestrator


def orchestrator_rows(orchestrator: Orchestrator, problems: Sequence[Problem]) -> dict[str, Row]:
    """Solve the problems with the base model, the initial adapter and the trained adapter."""
    rows = {}
    for name, adapter in ADAPTERS.items():
        if adapter == "start" and orchestrator.config.sft_adapter is None:
            continue  # training started from the base model
        with using_adapter(orchestrator.policy, adapter):
            rows[name] = [[run] for run in orchestrator.solve(problems)]
        terminal.line(f"{name}: done")
    return rows


def load_another(run: Path, first: Orchestrator) -> Orchestrator:
    """Load a further training run, whose results are averaged with those of the first run.

    Both runs must have used the same data, agents and limits. Either both or neither must have
    started from an adapter.
    """
    other = load_run(run)
    compared = ("dataset", "columns", "split", "graph_form", "agent_max_tokens")
    for name in (*compared, "agent_temperature"):
        ours, theirs = getattr(first.config, name), getattr(other.config, name)
        if ours != theirs:
            option = name.replace("_", "-")
            raise UsageError(f"{run} used --{option} {theirs}, but the first run used {ours}")
    if str(other.agents) != str(first.agents):
        raise UsageError(
            f"the agents of {run} are {other.agents}, but those of the first run are {first.agents}"
        )
    if bool(other.config.sft_adapter) != bool(first.config.sft_adapter):
        raise UsageError(
            f"cannot compare {run} with the first run: only one started from an adapter"
        )
    return other


def without_failures(rows: Mapping[str, Row]) -> dict[str, Row]:
    """Return the rows without the problems on which an API call failed in any row.

    A failed call must not count as a wrong answer.
    """
    judged = [
        not any(run.error for group in groups for run in group)
        for groups in zip(*rows.values(), strict=True)
    ]
    if not any(judged):
        raise UsageError("a call failed on every problem: check the agents' endpoint")
    return {name: list(compress(row, judged)) for name, row in rows.items()}


def scores(row: Row) -> list[float]:
    """Return the accuracy on each problem, from 0 to 1.

    The accuracy is the mean over training runs if the orchestrator wrote the graphs. Otherwise it
    is that of the majority vote, which for a single reply is the reply itself.
    """
    if row[0][0].written:
        return [fmean(run.verdict.correct for run in group) for group in row]
    return [majority_score([run.verdict for run in group]) for group in row]


def tokens(row: Row) -> dict[str, float]:
    """Return the mean number of tokens per problem.

    The keys are "written" (by the agents), "orchestrator" (written by the orchestrator) and "read"
    (by both). The tokens of all replies of a vote are added; those of training runs are averaged.
    """
    runs = [run for group in row for run in group]
    graphs = [run.written for run in runs if run.written]
    totals = {
        "written": sum(run.completion_tokens for run in runs),
        "orchestrator": sum(graph.completion_tokens for graph in graphs),
        "read": sum(one.prompt_tokens for one in (*runs, *graphs)),
    }
    solutions = len(runs) if graphs else len(row)
    return {name: total / solutions for name, total in totals.items()}


def row_metrics(row: Row, single: Row) -> dict[str, object]:
    """Compute the metrics of a row for evaluation.json."""
    solved, graphs = scores(row), {}
    if row[0][0].written:
        of_runs = [graph_metrics(run) for run in zip(*row, strict=True)]
        graphs = {name: fmean(run[name] for run in of_runs) for name in of_runs[0]}
    replies = [reply for group in row for run in group for reply in run.replies]
    return {
        "problems": len(row),
        "accuracy": summarize_scores(solved, trials=set(solved) <= {0.0, 1.0}),
        "against_single": paired_bootstrap(scores(single), solved),
        **tokens(row),
        **graphs,
        "agents/truncated_rate": fmean(r.truncated for r in replies) if replies else 0.0,
    }


def compare_trained(rows: Mapping[str, Row]) -> dict[str, dict[str, float]]:
    """Compare the trained orchestrator with its initial model and with the best other row.

    The differences are paired by problem. The best other row is selected on the same problems,
    which favours that row.
    """
    solved = {name: scores(row) for name, row in rows.items() if name != ORACLE}
    trained = solved.pop(TRAINED)
    start = UNTRAINED if UNTRAINED in rows else BARE
    best = max(solved, key=lambda name: sum(solved[name]))
    return {
        f"{TRAINED} − {name}": paired_bootstrap(solved[name], trained)
        for name in dict.fromkeys((start, best))
    }


def show(metrics: Mapping[str, Mapping], title: str) -> None:
    """Print the accuracies, then the tokens and rates, in two tables, as one would be too wide."""
    accuracy = {
        name: {
            "accuracy, %": percent(row["accuracy"]),
            "against single": points(row["against_single"]),
        }
        for name, row in metrics.items()
    }
    used = {
        name: {head: format(row[key], kind) for head, (key, kind) in COLUMNS.items() if key in row}
        for name, row in metrics.items()
    }
    show_table(title, accuracy)
    show_table("Tokens per problem, and rates of graphs and replies", used)


def choose_split(
    config: EvaluateConfig, trained: OrchestratorConfig, dataset: str
) -> tuple[str, dict[str, Any]]:
    """Return the split to evaluate, and the options of the run with which it is loaded.

    The test split of a local file contains the problems that the run was trained on. The default is
    therefore the validation split if the dataset contains a local file, if it has no test split, or
    if the run was trained on this split. The validation problems are held out of the rows that the
    run's --split selects.
    """
    split = config.split or ("test" if has_unseen_test(dataset, trained) else "validation")
    own_rows = split in ("train", "validation")  # without a slice such as train[:500]
    return split, {"columns": trained.columns, "rows": trained.split if own_rows else None}


def main(config: EvaluateConfig) -> int:
    prepare_process()
    check_writable("--output", config.output)  # checked before hours of work
    orchestrator = load_run(config.run[0])
    dataset = required(orchestrator.config.dataset, "--dataset")
    split, chosen = choose_split(config, orchestrator.config, dataset)
    problems = load_problems(dataset, split, max_samples=config.max_samples, **chosen)
    policy, render = orchestrator.policy, orchestrator.render
    limit = orchestrator.config.max_new_tokens
    problems = drop_long_prompts(problems, render, context_window(policy), limit)
    rows = make_rows(orchestrator, config.run[1:], problems, config.seed)
    judged = without_failures(rows)
    single = judged[SINGLE]
    metrics = {name: row_metrics(row, single) for name, row in judged.items()}
    title = f"{dataset}, {split}, n = {len(single)}; agents: {orchestrator.agents}"
    if len(config.run) > 1:
        title += f"; means over {len(config.run)} runs, intervals over the problems alone"
    show(metrics, title)
    compared = compare_trained(judged)
    for pair, difference in compared.items():
        terminal.line(f"  {pair}: {points(difference)} points, paired by problem")
    left_out = len(problems) - len(single)
    if left_out:
        terminal.line(
            f"{left_out} of {len(problems)} problems are left out of all rows: an agent's server "
            "failed on them (agent_failed in traces.jsonl)"
        )
    about = {"title": title, "config": to_dict(config), "run": to_dict(orchestrator.config)}
    about |= {"left_out": left_out, "rows": metrics, "compared": compared}
    replace_json(config.output / "evaluation.json", about)
    traces = [
        {"row": name, "problem": run.problem.id, "number": number} | run.to_dict()
        for name, row in rows.items()
        for group in row
        for number, run in enumerate(group, 1)  # number of the training run, or of the vote
    ]
    replace_file(config.output / "traces.jsonl", json_lines(traces))
    terminal.line(f"written: {config.output}/evaluation.json, traces.jsonl")
    return 0


if __name__ == "__main__":
    run_main(main, EvaluateConfig, description=__doc__)
