"""Compares the results of trainers with values computed by hand."""

from __future__ import annotations

import importlib.metadata
import inspect
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch

from rlm.conformance.cases import Adapter, Case, run_case
from rlm.conformance.ours import ours

# Each peer has a module peer_<name>. The constant SOURCE of this module is the peer's module from
# which lines are cited.
PEERS = ("trl", "verl")


def load_peers() -> tuple[dict[str, tuple[Adapter, ModuleType]], dict[str, str]]:
    """Import the adapters of the installed peers.

    Returns:
        A map from the name of each installed peer to (adapter, source module), and a map from the
        name of each other peer to the import error.
    """
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
    """Compare the result of a trainer with the expected result of a case.

    Args:
        peer: the name of the peer in the case's known differences.
        source: the peer's module, which contains the line of a known difference.

    Returns:
        A dictionary with "status" ("equal", "differs", "documented" or "not offered"), and, if the
        trainer offers the formula, with "answer" and details of a difference.
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
    """Return the largest absolute difference.

    A difference within fp32 rounding counts as 0, unless `exact` is set. Results of different
    shapes have an infinite difference.
    """
    found, wanted = (torch.as_tensor(x, dtype=torch.float64) for x in (answer, expected))
    if found.shape != wanted.shape:
        return float("inf")
    apart = (found - wanted).abs().nan_to_num(nan=float("inf")).max().item()
    allowed = 0.0 if exact else 1e-6 + 1e-5 * wanted.abs().max().item()
    return apart if apart > allowed else 0.0


def place(source: ModuleType, line: str) -> str:
    """Return the location of a line in the installed source, as package/file.py:number."""
    for number, text in enumerate(inspect.getsource(source).splitlines(), start=1):
        if line in text:
            return f"{source.__name__.replace('.', '/')}.py:{number}"
    return f"{source.__name__.replace('.', '/')}.py (the line has changed)"


def table(cases: list[Case], user: Callable[..., Any] | None) -> dict[str, Any]:
    """Run every case with this trainer, the installed peers and the user's trainer, if given."""
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
