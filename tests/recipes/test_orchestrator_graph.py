"""Graphs: parsing them from completions, the order of agents, and leaks of the answer."""

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_llm import ScriptedLLM

from recipes.orchestrator.cold_start import random_graph
from recipes.orchestrator.evaluate import fixed_graphs
from recipes.orchestrator.graph import REASONS, Graph, InvalidGraph, parse_graph
from recipes.orchestrator.orchestrator import SYSTEM_PROMPTS
from recipes.orchestrator.runner import Call, Runner, Trajectory
from rlm.data.problem import Problem
from rlm.data.prompts import FORMATS
from rlm.grading.numbers import numbers_in

A, B, C = (
    {"id": name, "type": "llm", "system_prompt": text}
    for name, text in (("agentA", "solve"), ("agentB", "check"), ("agentC", "decide"))
)


def written(*agents, **more):
    return json.dumps({"agents": list(agents), **more})


GOOD = written(A, B)


@pytest.mark.parametrize(
    "text",
    [
        GOOD,
        f"  {GOOD}\n",
        f"```json\n{GOOD}\n```",
        f"```\n{GOOD}```",
        f"Here you are:\n{GOOD}",
        f"I use {{}} and {{A}} first. ```json\n{GOOD}\n```",
        f"An open {{ brace, then ```json {GOOD} ```",
        json.dumps(json.loads(GOOD), indent=2),
    ],
)
def test_a_graph_is_found_wherever_it_stands(text):
    graph = parse_graph(text, "prompts")
    assert isinstance(graph, Graph), graph
    assert graph.texts == ["solve", "check"]


@pytest.mark.parametrize(
    "prompt",
    [
        "write {x} and {{y}} and }",
        'say "done" \\ then stop',
        "```json\n{}\n``` is the format",
        "```{}``` is the format",
        "two\nlines",
        "żółć 👍 <|im_end|>",
    ],
)
def test_braces_quotes_and_fences_inside_a_prompt_are_text(prompt):
    texts = [written(A | {"system_prompt": prompt}, B), Graph.chain(prompt, "check").to_json()]
    for text in [*texts, *(f"```json\n{text}\n```" for text in texts)]:
        graph = parse_graph(text, "prompts")
        assert isinstance(graph, Graph), graph
        assert graph.texts == [prompt, "check"]


@pytest.mark.parametrize(
    ("form", "field", "other"),
    [("prompts", "system_prompt", "question"), ("questions", "question", "system_prompt")],
)
def test_each_agent_has_the_field_of_the_graph_form_and_no_other_text(form, field, other):
    one, two = ({"id": f"agent{name}", "type": "llm", field: "solve"} for name in "AB")
    assert isinstance(parse_graph(written(one, two), form), Graph)
    plain = {"id": "agentB", "type": "llm"}
    for agent in (plain, plain | {other: "check"}, two | {other: "check"}):
        found = parse_graph(written(one, agent), form)
        says = f"not every agent has a {field} and no other text"
        assert found == InvalidGraph("schema", says)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no_json"),
        ('["agents"]', "no_json"),
        (GOOD[:-1], "bad_json"),
        (GOOD.replace('"', "'"), "bad_json"),
        (GOOD.replace("solve", "so\nlve"), "bad_json"),
        (GOOD.replace('"solve"', "NaN"), "schema"),
        (GOOD.replace('{"agents"', '{"agents": [], "agents"'), "bad_json"),
        ('{"agents": ' * 100_000, "bad_json"),
        ("{" + "[" * 100_000, "bad_json"),
        (f"{GOOD} I hope that helps", "trailing_text"),
        (f"```json\n{GOOD}\n```\nDone.", "trailing_text"),
        (f"{GOOD} {GOOD}", "trailing_text"),
        ("{}", "schema"),
        (written(A), "schema"),
        (written(A, B, C), "schema"),
        (written(B, A), "schema"),
        (written(A, B | {"id": "agentC"}), "schema"),
        (written(A, B | {"type": "tool"}), "schema"),
        (written(A, B | {"system_prompt": ""}), "schema"),
        (written(A, B | {"system_prompt": " \n "}), "schema"),
        (written(A, B | {"system_prompt": "\ud800"}), "schema"),
        (written(A, B | {"\ud800": 1}), "schema"),
        (written(A, B | {"temperature": 1}), "schema"),
        (written(A, B | {"question": ""}), "schema"),
        (written(A, {"id": "agentB", "type": "llm"}), "schema"),
        (written(A, B, edges=[["agentA", "agentC"]]), "schema"),  # an unknown node
        (written(A, B, edges=[["agentA", "agentB"], ["agentB", "agentA"]]), "schema"),  # a cycle
    ],
)
def test_what_is_no_graph_has_a_reason(text, reason):
    found = parse_graph(text, "prompts")
    assert isinstance(found, InvalidGraph), found
    assert found.reason == reason
    json.dumps(found.detail).encode()
    found.detail.encode()  # it is written to a UTF-8 file


@given(st.one_of(st.text(), st.text(alphabet='{}[]",:`\\ agentsAB\n')))
def test_reading_never_raises(text):
    for candidate in (text, GOOD[: len(text) % len(GOOD)] + text):
        found = parse_graph(candidate, "prompts")
        assert isinstance(found, Graph) or found.reason in REASONS


def test_text_and_reading_are_inverse():
    def draw(name):
        return [random_graph(random.Random(seed), FORMATS[name]) for seed in range(200)]

    graphs = draw("deepseek")
    assert [parse_graph(graph.to_json(), "prompts") for graph in graphs] == graphs
    assert draw("deepseek") == graphs
    others = [graph.to_json().replace("think>", "reasoning>") for graph in graphs]
    assert [graph.to_json() for graph in draw("simple")] == others
    assert "<reasoning></reasoning>" in "".join(others)
    by_hand = fixed_graphs("Solve it.")["two agents, by hand"]
    assert parse_graph(by_hand.to_json(), "prompts") == by_hand
    # The example in the system prompt can be parsed.
    for form, prompt in SYSTEM_PROMPTS.items():
        assert isinstance(parse_graph(prompt[prompt.index('{"agents') :], form), Graph)


def test_agents_that_were_trained_without_a_system_prompt_have_rivals_too():
    agents, graphs = ScriptedLLM(), fixed_graphs("")
    problem, format = Problem("p", "1 + 1?", "2"), FORMATS["deepseek"].with_prompt("")
    Runner(agents, 9, format=format).run([problem], [graphs["single agent"]], [0])
    assert agents.batches == [[Call("", "1 + 1?")]]
    assert graphs["asked twice"].texts == ["Look for mistakes in your draft."]


# --- leaks and diversity ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("the answer is 17.", [17]),
        ("1,080 or 1080.0", [1080]),
        ("-5 and 2.50$", [2.5, 5]),
        ("5,12", [5, 12]),
        ("step2, agent3, v1", []),
        ("the 2nd and 33rd", []),
        ("17kg", [17]),
        ("3/4 or .5", [0.5, 0.75, 3, 4]),
        ("1.5e3 of 2e", [2, 1500]),
        ("is...42, _17_ or v1.5", [17, 42]),
        ("42e190", [42]),
        ("", []),
    ],
)
def test_numbers_that_stand_alone(text, found):
    assert sorted(map(float, numbers_in(text))) == found


@pytest.mark.parametrize(
    ("prompts", "question", "answer", "leak"),
    [
        (("Say [17].", "check"), "5 + 12?", "17", True),
        (("solve", "It is 17.0"), "5 + 12?", "17", True),
        (("solve", "It is 1,080"), "500 + 580?", "1080", True),
        (("solve", "It is 5"), "5 + 12?", "17", False),
        (("solve", "It is 117"), "5 + 12?", "17", False),
        (("solve", "Use 12"), "5 + 7 or 12?", "12", False),  # the problem says it itself
        (("solve", "owe 3"), "2 - 5?", "-3", True),
        (("solve", "It is 3/4"), "6 of 8?", "3/4", True),
        (("solve", "Say 1.602e-19"), "of an electron?", "1.602e-19", True),
        (("solve", "Take 4 parts"), "3/4 of 20 in parts?", "4", False),
        # A gold below 10: a digit that is no quantity of the problem is left out.
        (("solve", "Use 3 steps."), "5 + 2 - 4?", "3", False),
        (("Read it. 3. Check it.", "3) Say it."), "5 + 2 - 4?", "3", False),
        (("Step 3 is the sum.", "agent 3"), "5 + 2 - 4?", "3", False),
        (("write 1 line", "It is 30 or 3.5"), "5 + 2 - 4?", "3", False),
        (("solve", "Say 3."), "5 + 2 - 4?", "3", True),
        (("solve", "End with [3]"), "5 + 2 - 4?", "3", True),
        (("solve", "3 is right"), "5 + 2 - 4?", "3", True),
        (("What is 3 plus 0?", "check"), "5 + 2 - 4?", "3", True),
        (("solve", "3 apples are left"), "5 apples, 2 are eaten?", "3", True),
        (("solve", "3 steps are left"), "5 apples, 2 are eaten?", "3", False),
        (("solve", "It is 2"), "Of two pens none is lost?", "2", False),  # given in words
        (("solve", "Use 12 steps."), "5 + 7?", "12", True),  # no digit: no instruction has it
    ],
)
def test_the_gold_in_a_prompt_is_a_leak(prompts, question, answer, leak):
    assert Trajectory(Problem("p", question, answer), Graph.chain(*prompts)).leak is leak
