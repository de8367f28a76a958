"""Parses and executes plans: which quantity causes which, and in what order to compute them.

    {"target_variable": "total", "knowns": {"price": 3, "count": 4},
     "causal_graph": [{"cause": ["price", "count"], "effect": "total", "rule": "price * count"}],
     "computation_plan": [{"id": "step1", "target": "total", "inputs": ["price", "count"],
                           "description": "multiply"}],
     "constraints": ["total is positive"]}

A step computes its target by the rule of the link that has this target as its effect. Records and
the prompt's name call a plan `scaffold`.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any

import networkx
from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from recipes.experience.formulas import Value, evaluate_formula
from rlm.grading import parse_number, split_completion

MAX_TEXT = 50_000  # characters of a reply that are searched for JSON
MAX_OPENINGS = 50  # "{" at which an object is looked for


class ReplyError(Exception):
    """A model's reply is not what was asked for; for JSON "no_json: …", "bad_json: …" and so on."""


def _known_value(value: Any) -> Any:
    """Read "12 km" as 12 and other words as no value; what is no text is left to the schema."""
    if not isinstance(value, str):
        return value
    number = parse_number(value)
    return None if number is None else float(number) if number % 1 else int(number)


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Name = Annotated[str, Field(min_length=1, max_length=200)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, allow_inf_nan=False, strict=True)


class Link(_Part):
    cause: Annotated[list[Name], BeforeValidator(_listed)]
    effect: Name
    rule: str = ""


class Reference(_Part):
    ref: Name


class Step(_Part):
    id: Name
    target: Name
    inputs: list[Name | Reference]
    description: str = ""


class Plan(_Part):
    target_variable: Name
    knowns: dict[str, Annotated[int | float | None, BeforeValidator(_known_value)]]
    causal_graph: list[Link] = Field(min_length=1)
    computation_plan: list[Step] = Field(min_length=1)
    constraints: list[str] = Field(
        [], validation_alias=AliasChoices("constraints", "constraints_and_premises")
    )

    def text(self) -> str:
        """Write it as JSON that `parse_plan` reads."""
        return json.dumps(self.model_dump(), ensure_ascii=False)

    def graph(self) -> networkx.DiGraph:
        """Build the graph with an edge from each cause to its effect."""
        graph = networkx.DiGraph()
        for link in self.causal_graph:
            graph.add_node(link.effect)
            graph.add_edges_from((cause, link.effect) for cause in link.cause)
        return graph

    def raise_if_cyclic(self) -> None:
        """Name the quantities of a cycle, if there is one."""
        with suppress(networkx.NetworkXNoCycle):
            edges = networkx.find_cycle(self.graph())
            raise ReplyError(
                "cycle: " + " → ".join([edges[0][0], *(effect for _, effect in edges)])
            )


def find_object(reply: str, key: str) -> dict[str, Any]:
    """Find the first JSON object after the thinking that has `key`, at its top or one level below.

    Raises:
        ReplyError: no_json, bad_json, or schema where objects are there without the key.
    """
    text = split_completion(reply)[1][:MAX_TEXT]
    start, problem = text.find("{"), None
    for _ in range(MAX_OPENINGS):
        if start < 0:
            break
        try:
            found, end = json.JSONDecoder().raw_decode(text, start)
            # JSON can spell lone surrogates, but no file or request can hold them.
            found = json.loads(json.dumps(found, ensure_ascii=False).encode(errors="replace"))
        except (ValueError, RecursionError):  # the latter from nesting very deep
            end, problem = start + 1, "bad_json: what follows { is not JSON"
        else:
            for value in (found, *found.values()):
                if isinstance(value, dict) and key in value:
                    return value
            problem = problem or f"schema: no object has {key}"  # a part of a broken one is none
        start = text.find("{", end)
    raise ReplyError(problem or "no_json: the reply holds no {")


def parse_plan(reply: str) -> Plan:
    """Parse the plan in a model's reply."""
    try:
        return Plan.model_validate(find_object(reply, "causal_graph"))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ReplyError(f"schema: {where}: {first['msg']}") from error


@dataclass(frozen=True)
class Execution:
    """Holds the values of the quantities that a plan could compute."""

    values: dict[str, Value]  # the knowns included
    targets: frozenset[str]  # computed by a step
    with_inputs: int  # steps whose inputs were all there


def execute_plan(plan: Plan) -> Execution:
    """Compute the plan's steps in order. One without a value does not end it; it gives nothing."""
    values = {k: Fraction(repr(v)) for k, v in plan.knowns.items() if v is not None}
    names, targets, with_inputs = dict(values), set[str](), 0
    for step in plan.computation_plan:
        inputs = [i.ref if isinstance(i, Reference) else i for i in step.inputs]
        if not all(name in names for name in inputs):
            continue
        with_inputs += 1
        rules = [link.rule for link in plan.causal_graph if link.effect == step.target]
        for rule in filter(None, rules):
            if (value := evaluate_formula(rule, names)) is not None:
                values[step.target] = names[step.target] = names[step.id] = value
                targets.add(step.target)
                break
    return Execution(values, frozenset(targets), with_inputs)
