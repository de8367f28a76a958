"""Parses and checks plans, which describe how to compute the answer of a problem.

A plan has a graph of quantities and their causes, and the order in which to compute the quantities:

    {"target_variable": "total", "knowns": {"price": 3, "count": 4},
     "causal_graph": [{"cause": ["price", "count"], "effect": "total", "rule": "price * count"}],
     "computation_plan": [{"id": "step1", "target": "total", "inputs": ["price", "count"],
                           "description": "multiply"}],
     "constraints": ["total is positive"]}

A step computes its target by the rule of the link whose effect is this target. In records and in
the name of its prompt, a plan is called `scaffold`.
"""

from __future__ import annotations

import ast
import json
import math
import operator
from collections.abc import Mapping
from fractions import Fraction
from functools import partial
from typing import Annotated, Any

import networkx
from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from rlm.grading import parse_number, split_completion

MAX_TEXT = 50_000  # maximum characters of a reply that are searched for JSON
MAX_OPENINGS = 50  # maximum number of "{" at which decoding is tried
MAX_RULE = 300  # maximum characters of a rule
MAX_BITS = 4096  # maximum size of the numerator and the denominator of a value, in bits
OPERATORS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip
# Errors that are raised if a formula cannot be parsed or has no exact value.
NOT_COMPUTABLE = (
    ArithmeticError, LookupError, MemoryError, RecursionError, SyntaxError, TypeError, ValueError,
)  # fmt: skip
EXACT_FUNCTIONS = {"abs": abs, "min": min, "max": max, "floor": math.floor, "ceil": math.ceil}
ARITHMETIC = (
    ast.BinOp, ast.operator, ast.UnaryOp, ast.USub, ast.UAdd, ast.Call, ast.Constant, ast.Name,
    ast.Load,
)  # fmt: skip


class ReplyError(Exception):
    """Raised if a model's reply is not in the requested form."""


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _referenced(value: Any) -> Any:
    """Return the name of a step that is given as a name or as {"ref": name}."""
    return value.get("ref") if isinstance(value, dict) else value


Name = Annotated[str, Field(min_length=1, max_length=200)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, allow_inf_nan=False, strict=True)


class Link(_Part):
    cause: Annotated[list[Name], BeforeValidator(_listed)]
    effect: Name
    rule: str = ""


class Step(_Part):
    id: Name
    target: Name
    inputs: list[Annotated[Name, BeforeValidator(_referenced)]]
    description: str = ""


class Plan(_Part):
    target_variable: Name
    knowns: dict[str, int | float | str | None]  # a string if the value includes a unit
    causal_graph: list[Link] = Field(min_length=1)
    computation_plan: list[Step] = Field(min_length=1)
    constraints: list[str] = Field(
        [], validation_alias=AliasChoices("constraints", "constraints_and_premises")
    )

    def text(self) -> str:
        """Serialize the plan as JSON that `parse_plan` can parse."""
        return json.dumps(self.model_dump(), ensure_ascii=False)

    def graph(self) -> networkx.DiGraph:
        """Build the graph with an edge from each cause to its effect."""
        graph = networkx.DiGraph()
        for link in self.causal_graph:
            graph.add_node(link.effect)
            graph.add_edges_from((cause, link.effect) for cause in link.cause)
        return graph


_NAME = {"type": "string", "pattern": "^[A-Za-z_][A-Za-z0-9_]{0,31}$"}
_RULE = {"type": "string", "pattern": "^[A-Za-z0-9_ .,()+*/%-]{1,80}$"}


def object_schema(**properties: Any) -> dict[str, Any]:
    """Return the JSON schema of an object that has exactly these keys."""
    shape = {"properties": properties, "required": list(properties)}
    return {"type": "object", "additionalProperties": False} | shape


def _list_of(items: Any, most: int = 8, *, least: int = 1) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


# The JSON schema of a plan, for endpoints with structured outputs. `parse_plan` accepts every plan
# that matches the schema. The lists are bounded, because a small model would otherwise list
# quantities until it reaches the token limit.
PLAN_SCHEMA = object_schema(
    target_variable=_NAME,
    knowns={
        "type": "object",
        "additionalProperties": {"type": ["number", "null"]},
        "maxProperties": 8,
    },
    causal_graph=_list_of(object_schema(cause=_list_of(_NAME, 4), effect=_NAME, rule=_RULE)),
    computation_plan=_list_of(
        object_schema(
            id=_NAME,
            target=_NAME,
            inputs=_list_of(_NAME, 4),
            description={"type": "string", "maxLength": 80},
        )
    ),
    constraints=_list_of({"type": "string", "maxLength": 80}, 2, least=0),
)


def find_object(reply: str, key: str) -> dict[str, Any]:
    """Find the first JSON object after the reasoning that has the key `key`.

    The key may also be in a value of the object; then this value is returned.

    Raises:
        ReplyError: there is no such object. The message starts with no_json, bad_json or schema.
    """
    text = split_completion(reply)[1][:MAX_TEXT]
    start, problem = text.find("{"), None
    for _ in range(MAX_OPENINGS):
        if start < 0:
            break
        try:
            found, end = json.JSONDecoder().raw_decode(text, start)
            # JSON escapes can encode lone surrogates, which no file or request can contain.
            found = json.loads(json.dumps(found, ensure_ascii=False).encode(errors="replace"))
        except (ValueError, RecursionError):  # RecursionError: very deep nesting
            end, problem = start + 1, "bad_json: the text after { is not valid JSON"
        else:
            for value in (found, *found.values()):
                if isinstance(value, dict) and key in value:
                    return value
            problem = problem or f"schema: no object has the key {key}"  # bad_json takes precedence
        start = text.find("{", end)
    raise ReplyError(problem or "no_json: the reply contains no {")


def parse_plan(reply: str, *, acyclic: bool = False) -> Plan:
    """Parse the plan in a model's reply; a cycle in its causal graph is an error if `acyclic`."""
    try:
        plan = Plan.model_validate(find_object(reply, "causal_graph"))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ReplyError(f"schema: {where}: {first['msg']}") from error
    if acyclic and not networkx.is_directed_acyclic_graph(graph := plan.graph()):
        (start, _), *rest = networkx.find_cycle(graph)
        names = [start, *(cause for cause, _ in rest), start]
        raise ReplyError("cycle: " + " → ".join(names))
    return plan


def check_plan(plan: Plan) -> dict[str, float]:
    """Check the form of a plan, and return scores from 0 to 1.

    - `inputs_there` is the share of steps whose inputs are all known or computed earlier.
    - `target_reached` is 1 if such a step computes the target by an arithmetic rule, else 0.
    - `rules_parse` is the share of rules that are arithmetic.
    """
    rules = [(link.effect, is_arithmetic(link.rule)) for link in plan.causal_graph]
    known, steps, with_inputs = set(plan.knowns), plan.computation_plan, 0
    computed = set[str]()
    for step in steps:
        if known.issuperset(step.inputs):
            with_inputs += 1
            if (step.target, True) in rules:
                computed.add(step.target)
                known |= {step.id, step.target}
    return {
        "inputs_there": with_inputs / len(steps),
        "target_reached": float(plan.target_variable in computed),
        "rules_parse": sum(parses for _, parses in rules) / len(rules),
    }


def plan_value(plan: Plan) -> Fraction | None:
    """Compute the target by the plan's own steps in exact arithmetic.

    Return None if it cannot be computed: a value is unknown, is a percentage or has more than
    MAX_BITS bits, a formula is invalid, or a formula uses other operations than + - * / // % ** and
    EXACT_FUNCTIONS.
    """
    known = {name: parse_number(str(value)) for name, value in plan.knowns.items()}
    # "30%" may be meant as 30 or as 0.3.
    values = {n: v for n, v in known.items() if v is not None and "%" not in str(plan.knowns[n])}
    rules = {link.effect: link.rule for link in plan.causal_graph}
    try:
        for step in plan.computation_plan:
            formula = _formula(rules[step.target])
            values[step.target] = values[step.id] = _evaluate(formula, values)
        return values[plan.target_variable]
    except NOT_COMPUTABLE:
        return None


def _evaluate(node: ast.AST, values: Mapping[str, Fraction]) -> Fraction:
    """Evaluate an expression; raise one of NOT_COMPUTABLE if the expression has no exact value."""
    of = partial(_evaluate, values=values)
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            value = Fraction(str(number))
        case ast.Name(id=name):
            value = values[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = -of(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            base, exponent = of(left), of(right)
            if exponent.denominator > 1 or _bits(base) * abs(exponent) > MAX_BITS:
                raise ValueError("the power is too large, or is a root")
            value = Fraction(base ** int(exponent))
        case ast.BinOp(left=left, op=op, right=right):
            value = Fraction(OPERATORS[type(op)](of(left), of(right)))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
            value = Fraction(EXACT_FUNCTIONS[name](*map(of, arguments)))
        case _:
            raise ValueError(f"{ast.dump(node)} has no exact value")
    if _bits(value) > MAX_BITS:
        raise ValueError(f"a value has more than {MAX_BITS} bits")
    return value


def _bits(value: Fraction) -> int:
    """Return the size of the larger of the numerator and the denominator in bits."""
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def is_arithmetic(rule: str) -> bool:
    """Return whether a rule, or the right-hand side of an assignment, is arithmetic over names."""
    if len(rule) > MAX_RULE:
        return False
    try:
        return all(isinstance(node, ARITHMETIC) for node in ast.walk(_formula(rule)))
    except NOT_COMPUTABLE:
        return False


def _formula(rule: str) -> ast.expr:
    """Parse a formula such as `a * b`, or the right-hand side of `c = a * b`."""
    (statement,) = ast.parse(rule.strip()).body
    if not isinstance(statement, ast.Expr | ast.Assign):
        raise ValueError(f"{rule} is not a formula")
    return statement.value
