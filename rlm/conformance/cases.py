"""Loads and runs the cases of cases.yaml, each with its inputs and expected results.

Shape letters: n rows (completions), T padded length of the completions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import yaml
from torch import Tensor

FILE = Path(__file__).with_name("cases.yaml")
# The default options of a case with the formula "loss".
LOSS = {
    "aggregation": "sequence",  # "sequence", "token", or "constant": sum / (rows · constant)
    "constant": 8,
    "ratio": "token",  # or "sequence"
    "objective": "ppo",  # or "weighted"
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
    # The known differences of peers: peer → {"line": …, "why": …}.
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
    given = {name: _without_null(value) for name, value in case.given.items()}
    answer = adapter(case.formula, SimpleNamespace(**given))
    return None if answer is None else {"values": answer.tolist()}


def _without_null(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_null(item) for item in value]
    return float("nan") if value is None else value


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
