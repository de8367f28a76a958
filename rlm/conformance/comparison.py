"""Compare trainers' results with values computed by hand."""

from __future__ import annotations

import importlib.metadata
import inspect
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch

from rlm.conformance.cases import Adapter, Case, run_case
from rlm.conformance.ours import ours

# Each has a module peer_<name>, whose SOURCE is the module of which lines are cited.
PEERS = ("trl", "verl")


def load_peers() -> tuple[dict[str, tuple[Adapter, ModuleType]], dict[str, str]]:
    """Return the installed peers, name → (adapter, source), and why others are missing."""
    found, missing = {}, {}
    for name in PEERS:
        try:
            module = importlib.import_module(f"rlm.conformance.peer_{name}")
        except ImportError as error:
            missing[name] = f"{type(error).__name__}: {error}"
        else:
            version = importlib.metadata.version(name)
            found[f"{name} {version}"] = (module.adapter, module.SOURCE)
    return found, missing


def compare(case: Case, adapter: Adapter, peer: str = "", source: ModuleType | None = None) -> dict:
    """Return {"status": "equal" | "differs" | "documented" | "not offered", "answer": …, …}.

    Args:
        peer: its name in the case's known differences.
        source: the module that contains the line of a difference.
    """
    answer = run_case(adapter, case)
    if answer is None:
        return {"status": "not offered"}
    apart = max(
        _distance(answer[name], expected, case.exact) for name, expected in case.expected.items()
    )
    if apart == 0:
        return {"status": "equal", "answer": answer}
    found = {"status": "differs", "by": apart, "answer": answer}
    if peer in case.known and source:
        why, where = case.known[peer]["why"], place(source, case.known[peer]["line"])
        found |= {"status": "documented", "why": why, "place": where}
    return found


def _distance(answer: Any, expected: Any, exact: bool) -> float:
    """Return the largest absolute difference; 0 within fp32 rounding, inf for another shape."""
    found, wanted = (torch.as_tensor(x, dtype=torch.float64) for x in (answer, expected))
    if found.shape != wanted.shape:
        return float("inf")
    apart = (found - wanted).abs().nan_to_num(nan=float("inf")).max().item()
    allowed = 0.0 if exact else 1e-6 + 1e-5 * wanted.abs().max().item()
    return apart if apart > allowed else 0.0


def place(source: ModuleType, line: str) -> str:
    """Locate a line in the installed source: package/file.py:number."""
    for number, text in enumerate(inspect.getsource(source).splitlines(), start=1):
        if line in text:
            return f"{source.__name__.replace('.', '/')}.py:{number}"
    return f"{source.__name__.replace('.', '/')}.py (the line has changed)"


def table(cases: list[Case], user: Callable[..., Any] | None) -> dict[str, Any]:
    """Run every case for ours, the installed peers and a user's trainer."""
    peers, missing = load_peers()
    rows = []
    for case in cases:
        trainers: Mapping[str, dict] = {"rlm": compare(case, ours)}
        if user:
            trainers["yours"] = compare(case, user)
        for name, (adapter, source) in peers.items():
            try:
                trainers[name] = compare(case, adapter, name.split()[0], source)
            except Exception as error:  # the installed version has another interface
                why = f"{type(error).__name__}: {error}"
                trainers[name] = {"status": "cannot be called", "why": why}
        rows.append({"formula": case.name, "by hand": case.expected, "how": case.by, **trainers})
    return {"trainers": list(rows[0])[3:], "not installed": missing, "formulas": rows}
