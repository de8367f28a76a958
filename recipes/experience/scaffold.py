"""A causal scaffold: which quantities a problem has, which causes which, in what order to compute.

    {"target_variable": "total", "knowns": {"price": 3, "count": 4},
     "causal_graph": [{"cause": ["price", "count"], "effect": "total", "rule": "price * count"}],
     "computation_plan": [{"id": "step1", "target": "total", "inputs": ["price", "count"],
                           "description": "multiply"}],
     "constraints": ["total is positive"]}

A step computes its target with the rule of the link that has this target as its effect.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any

import networkx
from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from recipes.experience.rules import RuleError, Value, evaluate_rule
from rlm.grading import parse_number, split_completion

MAX_TEXT = 50_000  # characters of a reply that are searched for JSON
MAX_OPENINGS = 50  # "{" at which an object is looked for


class ScaffoldError(Exception):
    """There is no usable scaffold. kind: no_json, bad_json, schema or cycle."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


def _known(value: Any) -> Any:
    """ "12 km" is 12, other words are no value; what is no text is left to the schema."""
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


class Scaffold(_Part):
    target_variable: Name
    knowns: dict[str, Annotated[int | float | None, BeforeValidator(_known)]]
    causal_graph: list[Link] = Field(min_length=1)
    computation_plan: list[Step] = Field(min_length=1)
    constraints: list[str] = Field(
        [], validation_alias=AliasChoices("constraints", "constraints_and_premises")
    )

    def text(self) -> str:
        """As parseable JSON."""
        return json.dumps(self.model_dump(), ensure_ascii=False)

    def graph(self) -> networkx.DiGraph:
        """An edge from each cause to its effect."""
        graph = networkx.DiGraph()
        for link in self.causal_graph:
            graph.add_node(link.effect)
            graph.add_edges_from((cause, link.effect) for cause in link.cause)
        return graph

    def refuse_cycle(self) -> None:
        """
        Raises:
            ScaffoldError: cycle, with the quantities that it goes through.
        """
        with suppress(networkx.NetworkXNoCycle):
            edges = networkx.find_cycle(self.graph())
            way = " → ".join([edges[0][0], *(effect for _, effect in edges)])
            raise ScaffoldError("cycle", way)


def find_object(reply: str, key: str) -> dict[str, Any]:
    """The first JSON object after the thinking that has `key`, at its top or one level below.

    Raises:
        ScaffoldError: no_json, bad_json, or schema where objects are there without the key.
    """
    text = split_completion(reply)[1][:MAX_TEXT]
    start, error = text.find("{"), ScaffoldError("no_json", "the reply holds no {")
    for _ in range(MAX_OPENINGS):
        if start < 0:
            break
        try:
            candidate, end = json.JSONDecoder().raw_decode(text, start)
            candidate = _storable(candidate)
        except (ValueError, RecursionError):  # the latter from nesting very deep
            end, error = start + 1, ScaffoldError("bad_json", "what follows { is not JSON")
        else:
            for value in (candidate, *candidate.values()):
                if isinstance(value, dict) and key in value:
                    return value
            if error.kind == "no_json":  # a part of a broken object is no object
                error = ScaffoldError("schema", f"no object has {key}")
        start = text.find("{", end)
    raise error


def _storable(content: Any) -> Any:
    """Without lone surrogates: JSON can spell them, but no file or request can hold them."""
    return json.loads(json.dumps(content, ensure_ascii=False).encode(errors="replace"))


def parse_scaffold(reply: str) -> Scaffold:
    """The scaffold in a model's reply.

    Raises:
        ScaffoldError: none is there, or it lacks something; the message says what.
    """
    try:
        return Scaffold.model_validate(find_object(reply, "causal_graph"))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ScaffoldError("schema", f"{where}: {first['msg']}") from error


@dataclass(frozen=True)
class Execution:
    """What became of a plan: a value for each quantity that could be computed."""

    values: dict[str, Value]  # the knowns included
    targets: frozenset[str]  # computed by a step
    with_inputs: int  # steps whose inputs were all there


def execute(scaffold: Scaffold) -> Execution:
    """Follow the computation plan. A step without a value does not end it; it gives nothing."""
    values = {k: Fraction(repr(v)) for k, v in scaffold.knowns.items() if v is not None}
    names, targets, with_inputs = dict(values), set[str](), 0
    for step in scaffold.computation_plan:
        inputs = [i.ref if isinstance(i, Reference) else i for i in step.inputs]
        if not all(name in names for name in inputs):
            continue
        with_inputs += 1
        rules = [link.rule for link in scaffold.causal_graph if link.effect == step.target]
        for rule in filter(None, rules):
            with suppress(RuleError):
                value = evaluate_rule(rule, names)
                values[step.target] = names[step.target] = names[step.id] = value
                targets.add(step.target)
                break
    return Execution(values, frozenset(targets), with_inputs)
