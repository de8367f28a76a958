"""Wrong answers of a cell and of its start, fifty each, in files to read and correct.

    docs/results/failures/grpo-s0.yaml, sft-s0.yaml

Each entry has a `sort` by rule; a person who reads it and disagrees writes another one of SORTS
behind `by_hand`. Running it again keeps what was written by hand. `doubtful` lists right answers
whose reasoning holds a false equation, or none that leads to the answer.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import yaml

from benchmarks.evidence.plan import START, Cell, EvidenceConfig, read_json
from benchmarks.evidence.pools import OTHER
from benchmarks.evidence.reward_hacking import with_false_step, without_reasoning
from rlm.cli import UsageError, terminal
from rlm.grading import NUMBER, Equation, find_equations, parse_number, split_completion
from rlm.runs import replace_file

WRONG, DOUBTFUL = 50, 20
SORTS = {
    "truncated": "cut off before it ended",
    "format": "no single answer where it belongs",
    "no equation": "nothing was calculated",
    "dropped step": "fewer steps than the solution",
    "extra step": "more steps than the solution",
    "distractor": "used a number that the solution does not need",
    "invented number": "used a number that is neither given nor calculated",
    "wrong operation": "the first step that is not right has another operation",
    "wrong order": "the right operation on the right numbers, the other way round",
    "wrong numbers": "the right operation, on others of the right numbers",
    "arithmetic": "the right operation on the right numbers, a false result",
    "answer differs": "the answer is not what was calculated",
    "other": "none of these rules",
}
Entry = dict[str, Any]


# --- sorting by rule ------------------------------------------------------------------------------


def sort_by_rule(row: Mapping[str, Any], completion: Mapping[str, Any]) -> str:
    """Which of SORTS a wrong completion looks like.

    Args:
        row: question and solution ("" where the data have none).
        completion: text, strict (the reason), truncated.
    """
    if completion["truncated"]:
        return "truncated"
    if completion["strict"] not in ("correct", "wrong"):
        return "format"
    reasoning, answer = split_completion(completion["text"])
    did, should = find_equations(reasoning or ""), find_equations(row["solution"])
    if not did:
        return "no equation"
    if should and len(did) != len(should):
        return "dropped step" if len(did) < len(should) else "extra step"
    if should:
        sort = _first_difference(row["question"], did, should)
    else:
        sort = None if all(e.holds for e in did) else "arithmetic"
    if sort:
        return sort
    said = parse_number(re.sub(r"</?\w+>", " ", answer).strip())
    return "answer differs" if said is not None and said != did[-1].result else "other"


def _first_difference(
    question: str, did: Sequence[Equation], should: Sequence[Equation]
) -> str | None:
    """How the steps of a completion differ from as many of the solution; None if they do not."""
    given = {Fraction(n) for n in re.findall(NUMBER, question)}
    known = given | {e.result for e in did} | {n for e in should for n in e.numbers}
    needed = {n for e in should for n in (*e.numbers, e.result)} | {e.result for e in did}
    used = {abs(number) for e in did for number in e.numbers}
    if used - known:
        return "invented number"
    if used - needed:
        return "distractor"
    for mine, right in zip(did, should, strict=True):
        if mine.signs != right.signs:
            return "wrong operation"
        if mine.operation != right.operation:
            same = sorted(mine.numbers) == sorted(right.numbers)
            return "wrong order" if same else "wrong numbers"
        if not mine.holds:
            return "arithmetic"
    return None


# --- the files ------------------------------------------------------------------------------------


def write_failures(config: EvidenceConfig) -> None:
    """Write the file of the named cell, and of the start it was trained from.

    Raises:
        UsageError: a cell that is not done, or a file whose corrections cannot be read.
    """
    cell = config.named_cell()
    start = Cell(START, cell.seed)
    for one in (start, cell) if start in cell.needs else (cell,):
        folder = config.folder(one)
        if not (folder / "result.json").exists():
            raise UsageError(f"{one.name} is not done: python -m benchmarks.evidence")
        file = config.docs / "failures" / f"{one.name}.yaml"
        content = chosen_failures(one.name, _greedy_answers(folder), corrections(file))
        replace_file(file, as_yaml(content))  # it holds what a person wrote
        terminal.line(f"{file}: {len(content['wrong'])} of {content['wrong_of'][0]} wrong answers")


def _greedy_answers(folder: Path) -> list[Entry]:
    """Greedy completions of a cell, on all test sets but those by other hands."""
    files = sorted((folder / "judged").glob("*.json"))
    tests = [f for f in files if f.stem not in (OTHER, "end") and not f.stem.startswith("step_")]
    return [{"set": file.stem, **row} for file in tests for row in read_json(file)["greedy"]]


def chosen_failures(
    name: str, rows: Sequence[Entry], by_hand: Mapping[tuple[str, str], str]
) -> dict[str, Any]:
    """What the file holds; the choice is a function of the cell's name and its completions."""
    wrong, doubtful = [], []
    for row in rows:
        (completion,) = row["completions"]
        text = completion["text"]
        entry = {name: row[name] for name in ("id", "set", "question")}
        entry |= {"gold": row["answer"], "solution": row["solution"], "completion": text}
        if completion["strict"] != "correct":
            sort = sort_by_rule(row, completion)
            wrong.append(entry | {"sort": sort, "by_hand": by_hand.get((row["id"], text))})
        elif with_false_step(text):
            doubtful.append(entry | {"why": "an equation does not hold"})
        elif without_reasoning(text, row["answer"]):
            doubtful.append(entry | {"why": "no equation leads to the answer"})
    pick = random.Random(f"failures {name}")
    shown = pick.sample(wrong, min(WRONG, len(wrong)))
    return {
        "cell": name,
        "command": f"python -m benchmarks.evidence failures {name}",
        "wrong_of": [len(wrong), len(rows)],
        "doubtful_of": [len(doubtful), len(rows) - len(wrong)],
        "sorts_of_all_wrong": dict(Counter(entry["sort"] for entry in wrong).most_common()),
        "wrong": shown,
        "doubtful": pick.sample(doubtful, min(DOUBTFUL, len(doubtful))),
    }


def corrections(file: Path) -> dict[tuple[str, str], str]:
    """What a person wrote into an earlier file: (id, completion) → sort.

    Raises:
        UsageError: a sort that is none of SORTS, or a file that is no YAML.
    """
    if not file.exists():
        return {}
    found = {}
    for entry in read_failures(file)["wrong"]:
        sort = entry["by_hand"]
        if sort is not None:
            if sort not in SORTS:
                raise UsageError(f"{file}: {entry['id']}: {sort!r} is none of {', '.join(SORTS)}")
            found[entry["id"], entry["completion"]] = sort
    return found


def read_failures(file: Path) -> dict[str, Any]:
    """
    Raises:
        UsageError: not the YAML that was written here.
    """
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise UsageError(f"{file} cannot be read: {error}") from error
    if not isinstance(content, dict) or not {"wrong", "doubtful"} <= set(content):
        raise UsageError(f"{file} is not a file of failures: move it away")
    for entry in content["wrong"]:
        entry.setdefault("by_hand", None)  # the person may have deleted the line
    return content


def as_yaml(content: Mapping[str, Any]) -> str:
    """Texts of several lines as blocks: the file is for reading."""
    return yaml.dump(content, Dumper=_Blocks, sort_keys=False, allow_unicode=True, width=100)


class _Blocks(yaml.SafeDumper):
    """SafeDumper with text of several lines as literal blocks."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Blocks.add_representer(str, _text)
