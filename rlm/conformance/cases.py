"""Run the cases of cases.yaml, and compare the results of trainers with the expected results.

In the shapes, n is the number of rows (completions), and T is their padded length.
"""

from __future__ import annotations

import importlib.metadata
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import yaml
from torch import Tensor

# The peers are the other trainers. Each has a module peer_<name>, whose constant SOURCE is the
# trainer's own module. The notes on known differences cite lines of this module.
PEERS = ("trl", "verl")
FILE = Path(__file__).with_name("cases.yaml")
# The default options of a case with the formula "loss".
LOSS = {
    "aggregation": "sequence",  # "sequence", "token", or "constant": sum / (rows · constant)
    "constant": 8,
    "ratio": "token",  # or "sequence" (GSPO)
    "objective": "ppo",  # or "weighted" (CISPO) or "tapered" (TOPR)
    "clip_low": 0.2,
    "clip_high": 0.2,
    "kl_weight": 0.0,
    "importance_cap": None,  # cap of each token's π_old / π_sampler; None: no correction
    "processes": 1,
}
OLD_LOGPROB = -3.0  # old log-probability of every token

# A function of (formula, inputs). It returns a tensor, or None if the trainer does not offer the
# formula.
Adapter = Callable[[str, SimpleNamespace], Tensor | None]


@dataclass(frozen=True)
class Case:
    """A formula with its inputs and the expected result."""

    name: str
    formula: str
    given: dict[str, Any]
    expected: dict[str, Any]  # "values", or "loss" and "gradient"
    by: str  # how `expected` was computed by hand
    exact: bool = False
    # The known differences by peer, each {"line": …, "why": …}.
    known: dict[str, dict[str, str]] = field(default_factory=dict)


def load_cases() -> list[Case]:
    """Load all cases from cases.yaml."""
    return [Case(**row) for row in yaml.safe_load(FILE.read_text(encoding="utf-8"))]


def run_case(adapter: Adapter, case: Case) -> dict[str, Any] | None:
    """Compute a trainer's result in the format of `Case.expected`.

    Return None if the trainer does not offer the formula.
    """
    if case.formula == "loss":
        return _run_loss(adapter, case.given)
    answer = adapter(case.formula, SimpleNamespace(**case.given))
    return None if answer is None else {"values": answer.tolist()}


def _run_loss(adapter: Adapter, given: dict[str, Any]) -> dict[str, Any] | None:
    """Sum the losses of all parts (micro-batches) of a step, and compute the gradient."""
    ratios = torch.tensor(given["ratios"], dtype=torch.float32)  # (n, T)
    old = torch.full_like(ratios, OLD_LOGPROB)
    logprobs = (old + ratios.log()).requires_grad_(True)
    as_tensor = {
        name: torch.tensor(given.get(name, torch.ones_like(ratios).tolist())).float()
        for name in ("mask", "ref_ratios", "sampler_ratios")
    }
    step = {
        "old_logprobs": old,
        "ref_logprobs": logprobs.detach() + as_tensor["ref_ratios"].log(),
        "sampler_logprobs": old - as_tensor["sampler_ratios"].log(),
        "mask": as_tensor["mask"],
        "advantages": torch.tensor(given["advantages"], dtype=torch.float32),
    }
    parts = given.get("parts", [list(range(len(ratios)))])
    options = {name: given.get(name, value) for name, value in LOSS.items()}
    micro_batches = len(parts) // options["processes"]  # number of micro-batches per process
    whole = {f"step_{name}": value for name, value in step.items()}
    total = torch.zeros(())
    for rows in parts:
        own = {name: value[rows] for name, value in step.items()}
        part = {"rows": rows, "micro_batches": micro_batches, "logprobs": logprobs[rows]}
        loss = adapter("loss", SimpleNamespace(**whole, **own, **part, **options))
        if loss is None:
            return None
        total = total + loss
    total.backward()
    assert logprobs.grad is not None  # never None, because each row is in a part
    return {"loss": total.item(), "gradient": logprobs.grad.tolist()}


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
    from rlm.conformance.ours import ours  # imported here, because it imports the trainer

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
