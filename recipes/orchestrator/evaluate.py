"""Is the orchestrator worth having? One table: same problems, same agents, same limit of tokens.

What may be written for a problem is two replies' length: the single agent has it in one reply, the
others in two. The orchestrator's own tokens come on top, in a column of their own; the vote lets
the single agent write about as many as the trained orchestrator and its agents did together.
A problem that an agent's server failed on in any row is in none: rows are paired by problem.

    python -m recipes.orchestrator.evaluate --run runs/orchestrator
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table

from recipes.orchestrator.graph import Graph
from recipes.orchestrator.orchestrator import OpenRun, Written
from recipes.orchestrator.prompts import ASKED_TWICE, HAND_WRITTEN, SINGLE
from recipes.orchestrator.reward import Outcome, summary, try_graphs
from recipes.orchestrator.runner import Runner
from rlm.api_client import Price
from rlm.cli import terminal
from rlm.cli.flags import check_values, flag
from rlm.cli.main import run_main
from rlm.cli.options import UsageError, to_dict
from rlm.data.loaders import is_file, load_problems
from rlm.data.problem import Problem
from rlm.evaluation.statistics import bootstrap_interval, paired_bootstrap, wilson_interval
from rlm.grading.voting import majority_score
from rlm.model import hardware as machine
from rlm.model.adapters import using_adapter
from rlm.runs.atomic_files import replace_file, replace_json
from rlm.runs.directory import check_writable

FIXED = {"asked twice": ASKED_TWICE, "two agents, by hand": HAND_WRITTEN}
SHARES = {
    "valid": "valid_rate",
    "differ": "distinct",
    "alike": "similarity",
    "leaks": "leak_rate",
}


@dataclass
class EvaluateConfig:
    run: Path = flag(Path("runs/orchestrator"), "directory of the training run")
    split: str | None = flag(
        None, "which part of its data set (none: test; of a file, all of which that is: validation)"
    )
    max_samples: int = flag(200, "problems", min=1)
    read_price: float = flag(0.0, "of a million tokens read", min=0)
    written_price: float = flag(0.0, "of a million tokens written", min=0)
    seed: int = flag(0, "of the vote's samples")
    output: Path = flag(Path("runs/orchestrator_evaluation"), "where figures and traces go")

    def __post_init__(self) -> None:
        check_values(self)


@dataclass
class Row:
    """A row of the table, problem by problem; tokens are means over problems."""

    groups: Sequence[Sequence[Outcome]]  # of each problem: one, or those that vote
    graphs: Sequence[Written] = ()  # of each problem, where the orchestrator wrote it

    @property
    def outcomes(self) -> list[Outcome]:
        return [outcome for group in self.groups for outcome in group]

    @property
    def scores(self) -> list[float]:
        """Of each problem, in 0…1."""
        return [
            majority_score([outcome.verdict for outcome in group])
            if len(group) > 1
            else float(group[0].correct)
            for group in self.groups
        ]

    @property
    def read(self) -> float:
        """By the agents, and by the orchestrator."""
        own = sum(graph.prompt_tokens for graph in self.graphs)
        return (own + sum(o.run.read for o in self.outcomes if o.run)) / len(self.groups)

    @property
    def written(self) -> float:
        """By the agents."""
        return sum(o.run.written for o in self.outcomes if o.run) / len(self.groups)

    @property
    def orchestrator(self) -> float:
        """Written by the orchestrator."""
        return sum(len(g.completion.token_ids) for g in self.graphs) / len(self.groups)

    def only(self, places: Sequence[int]) -> Row:
        """The same on some of the problems."""
        return Row(
            [self.groups[i] for i in places], [self.graphs[i] for i in places if self.graphs]
        )

    def figures(self, single: Row, price: Price) -> dict[str, object]:
        """What evaluation.json says of it. Ties in the vote make scores that are no 0 or 1."""
        correct, total = sum(self.scores), len(self.scores)
        exact = set(self.scores) <= {0.0, 1.0}
        ends = wilson_interval(int(correct), total) if exact else bootstrap_interval(self.scores)
        return {
            "accuracy": {"mean": correct / total, "low": ends[0], "high": ends[1], "n": total},
            "against_single": asdict(paired_bootstrap(single.scores, self.scores)),
            "written": self.written,
            "orchestrator": self.orchestrator,
            "read": self.read,
            "cost_of_1000": 1000 * price.cost(self.read, self.written + self.orchestrator),
            **(summary(self.outcomes) if self.orchestrator else {}),
        }


def fixed_row(run: OpenRun, problems: Sequence[Problem], graph: Graph) -> Row:
    """The same graph for all problems; a single agent may write as much as two."""
    limit = 2 * run.config.agent_max_tokens // len(graph.agents)
    graphs = [graph] * len(problems)
    return Row([[o] for o in try_graphs(run.runner, problems, graphs, max_new_tokens=limit)])


def written_row(run: OpenRun, problems: Sequence[Problem], adapter: str | None) -> Row:
    """The greedy graphs of the model with this adapter; an invalid one solves nothing."""
    with using_adapter(run.policy, adapter):
        written = run.write([problem.question for problem in problems])
    outcomes = try_graphs(run.runner, problems, [w.graph for w in written])
    return Row([[outcome] for outcome in outcomes], written)


def vote_row(run: OpenRun, problems: Sequence[Problem], k: int, seed: int) -> Row:
    """The number that most of k sampled replies of the single agent give."""
    runner = Runner(run.runner.agents, 2 * run.config.agent_max_tokens, temperature=1.0)
    asked = [problem for problem in problems for _ in range(k)]
    outcomes = try_graphs(runner, asked, [SINGLE] * len(asked), seed=seed)
    return Row([outcomes[i : i + k] for i in range(0, len(outcomes), k)])


def judged_in_all(rows: Mapping[str, Row]) -> dict[str, Row]:
    """The rows without the problems that some row has no verdict on.

    A failed call is no wrong answer, and what is paired needs the same problems in every row.

    Raises:
        UsageError: no problem is left.
    """
    count = len(next(iter(rows.values())).groups)
    kept = [i for i in range(count) if all(o.judged for r in rows.values() for o in r.groups[i])]
    if not kept:
        raise UsageError("a call failed on every problem; is the agents' endpoint all right?")
    return {name: row.only(kept) for name, row in rows.items()}


def show(figures: dict[str, dict], title: str) -> None:
    """Two tables, each as wide as a plain terminal: who is right, and what it takes."""
    right, takes = (_table(name) for name in (title, "Tokens a problem; cost of 1000; graphs"))
    for head in ("accuracy, %", "against single"):
        right.add_column(head, justify="right", no_wrap=True)
    for head in ("agents", "graph", "read", "cost", *SHARES):
        takes.add_column(head, justify="right", no_wrap=True)
    for name, row in figures.items():
        of, gain = row["accuracy"], row["against_single"]
        right.add_row(
            name,
            f"{100 * of['mean']:.1f} ({100 * of['low']:.0f}–{100 * of['high']:.0f})",
            f"{gain['points']:+.1f} ({gain['low']:+.1f} to {gain['high']:+.1f})",
        )
        shares = [row.get(f"graph/{share}") for share in SHARES.values()]
        takes.add_row(
            name,
            *(f"{row[kind]:.0f}" for kind in ("written", "orchestrator", "read")),
            f"{row['cost_of_1000']:.3g}",
            *("" if share is None else f"{share:.2f}" for share in shares),
        )
    terminal.console.print(right)
    terminal.console.print(takes)


def _table(title: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    return table


def main(config: EvaluateConfig) -> int:
    machine.prepare_process()
    check_writable("--output", config.output)  # before the hours, not after them
    run = OpenRun.open(config.run)
    dataset = run.config.dataset
    split = config.split or ("validation" if is_file(dataset) else "test")
    problems = load_problems(dataset, split, max_samples=config.max_samples)
    rows = {"single agent": fixed_row(run, problems, SINGLE)}
    rows |= {name: fixed_row(run, problems, graph) for name, graph in FIXED.items()}
    writers = {"bare model": None, "untrained": "start", "trained": "default"}
    if run.config.sft_adapter is None:
        del writers["untrained"]  # training began with the bare model
    for name, adapter in writers.items():
        rows[f"orchestrator, {name}"] = written_row(run, problems, adapter)
        terminal.line(f"orchestrator, {name}: done")
    paired = judged_in_all(rows)
    one, trained = max(1.0, paired["single agent"].written), paired["orchestrator, trained"]
    k = max(1, round((trained.written + trained.orchestrator) / one))
    rows[f"single agent, vote of {k}"] = vote_row(run, problems, k, config.seed)

    paired, price = judged_in_all(rows), Price(config.read_price, config.written_price)
    single = paired["single agent"]
    figures = {name: row.figures(single, price) for name, row in paired.items()}
    for name, row in rows.items():  # which were to blame
        figures[name]["failed"] = sum(not outcome.judged for outcome in row.outcomes)
    title = f"{dataset}, {split}, n = {len(single.groups)}; agents: {run.agents}"
    show(figures, title)
    left_out = len(problems) - len(single.groups)
    if left_out:
        terminal.line(
            f"{left_out} of {len(problems)} problems are left out of all rows: an agent's server "
            "failed on them (agent_failed in traces.jsonl)"
        )
    about = {"title": title, "config": to_dict(config), "run": to_dict(run.config)}
    about["left_out"] = left_out
    replace_json(config.output / "evaluation.json", about | {"rows": figures})
    traces = [{"row": name, **o.record()} for name, row in rows.items() for o in row.outcomes]
    lines = [json.dumps(trace, ensure_ascii=False) + "\n" for trace in traces]
    replace_file(config.output / "traces.jsonl", "".join(lines))
    terminal.line(f"written: {config.output}/evaluation.json, traces.jsonl")
    return 0


if __name__ == "__main__":
    run_main(main, EvaluateConfig, description=__doc__)
