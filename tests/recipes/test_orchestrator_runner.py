"""Running graphs, and their rewards, with scripted agents."""

import threading
from types import SimpleNamespace

import pytest
from conftest import tiny_model
from scripted_llm import ScriptedLLM
from scripted_server import BASE, ScriptedServer, chat_reply, refuse

from recipes.orchestrator.config import OrchestratorConfig
from recipes.orchestrator.graph import Graph
from recipes.orchestrator.orchestrator import AgentModel, Orchestrator
from recipes.orchestrator.runner import GraphReward, LocalLLM, RemoteLLM, Reply, Runner
from rlm.api_client import APIClient
from rlm.cli import UsageError
from rlm.data.problem import Problem
from rlm.data.prompts import FORMATS
from rlm.sampling import Sampler

SUMS = [Problem(f"p{i}", f"{i} + {i}?", str(2 * i)) for i in range(40)]
CHAIN = Graph.chain("solve", "check")


def test_the_second_agent_sees_the_draft_and_has_the_last_word():
    agents = ScriptedLLM()
    run, alone = Runner(agents, 9).run(SUMS[1:3], [CHAIN, Graph.chain("x")], range(2))
    draft = "<solve|1 + 1?>"
    read = f"PROBLEM: 1 + 1?\n\nDRAFT of agentA: {draft}"
    final = f"<check|{read}>"
    told = {
        name: dict(
            zip(("system_prompt", "input_payload", "output_text"), texts, strict=True),
            truncated=False,
        )
        for name, texts in {
            "agentA": ("solve", "1 + 1?", draft),
            "agentB": ("check", read, final),
        }.items()
    }
    assert run.to_dict() == {
        "verdict": "not_a_number", "correct": False, "leak": False, "graph": CHAIN.to_dict(),
        "trace": {"agents": told, "final_text": final},
        "tokens_read": 20, "tokens_written": len(draft) + len(final),
    }  # fmt: skip
    # The single agent is a graph with one node, which ends after the first batch.
    assert (alone.replies[-1].text, agents.sizes) == ("<x|2 + 2?>", [2, 1])


def test_equal_greedy_calls_are_asked_once():
    agents = ScriptedLLM()
    runner = Runner(agents, 9)
    first = runner.run(SUMS[:1] * 5, [CHAIN] * 5, range(5))
    assert agents.sizes == [1, 1]
    assert runner.run(SUMS[:1], [CHAIN], [0])[0].to_dict() == first[0].to_dict()
    assert agents.sizes == [1, 1]


def test_a_failed_call_ends_its_graph_alone_and_is_asked_again():
    broken = True

    def answer(call):
        return Reply("", error="no reply") if broken and call.system_prompt == "bad" else "4"

    runner = Runner(ScriptedLLM(answer), 9)
    graphs = [Graph.chain("bad", "check"), CHAIN]
    lost, good = runner.run(SUMS[2:3] * 2, graphs, range(2))
    assert (lost.error, lost.verdict.reason, len(lost.calls)) == ("no reply", "agent_failed", 1)
    assert good.error is None
    broken = False
    assert runner.run(SUMS[2:3], graphs[:1], [0])[0].error is None


# --- rewards ------------------------------------------------------------------------------------


def solver(call):
    """Answer correctly if the prompt says "careful", and repeat a draft."""
    if "DRAFT" in call.text:
        return call.text.rpartition(": ")[2]
    number = int(call.text.split()[0])
    return f"[{2 * number}]" if "careful" in call.system_prompt else "[999]"


GOOD, BAD = (Graph.chain(*p).to_json() for p in (("be careful", "repeat"), ("x", "y")))
BROKEN = "{"


def reward_of(agents, temperature=0.0, **options):
    return GraphReward(Runner(agents, 9, temperature), OrchestratorConfig(**options))


def test_nothing_is_run_where_no_graph_is_valid():
    agents = ScriptedLLM(solver)
    reward = reward_of(agents)
    scores = reward(SUMS[:1], [[BROKEN, ""]])
    assert (scores.rewards, agents.batches) == ([[0.0, 0.0]], [])
    assert scores.metrics["graph/distinct"] == 0
    assert reward.records[0][0][1] == {
        "verdict": "no_json", "correct": False, "leak": False, "graph": None,
        "detail": "the text contains no {", "reward": 0,
    }  # fmt: skip
    other_form = reward_of(agents, graph_form="questions")(SUMS[:1], [[GOOD]])
    assert (other_form.rewards, other_form.metrics["graph/schema"]) == ([[0.0]], 1)
    assert agents.batches == []
    # A process may have no group to replace.
    none = reward_of(agents)([], [])
    assert (none.rewards, none.metrics) == ([], {})


def test_agents_that_always_fail_end_the_run(capsys):
    """A graph whose agents are never called does not show whether the server works."""
    down = True

    def answer(call):
        return Reply("", error="quota exhausted") if down else solver(call)

    reward = reward_of(ScriptedLLM(answer))
    for _ in range(2):
        assert reward(SUMS[:1], [[GOOD, BROKEN]]).rewards == [[None, 0.0]]
    assert reward(SUMS[:1], [[BROKEN, BROKEN]]).rewards == [[0.0, 0.0]]
    assert reward.records[0][0][0]["error"] == "quota exhausted"
    assert capsys.readouterr().out.count("quota exhausted") == 1
    down = False
    assert reward(SUMS[1:2], [[GOOD]]).rewards == [[1.0]]
    down = True
    for number in (2, 3):
        assert reward(SUMS[number : number + 1], [[GOOD]]).rewards == [[None]]
    with pytest.raises(UsageError, match="failed for every graph: quota exhausted"):
        reward(SUMS[4:5], [[GOOD]])


def test_agents_are_read_by_the_tags_of_their_adapter(tmp_path):
    (tmp_path / "run.json").write_text('{"config": {"reasoning_format": "simple"}}')
    format = AgentModel("base", tmp_path).format
    assert format == FORMATS["simple"]
    assert AgentModel("base").format == FORMATS["deepseek"]
    still_thinking = ScriptedLLM(lambda call: "<reasoning>2")
    for tags, solved in ((FORMATS["deepseek"], True), (format, False)):
        (run,) = Runner(still_thinking, 9, format=tags).run(SUMS[1:2], [CHAIN], [0])
        assert run.verdict.correct is solved


@pytest.mark.parametrize(
    ("options", "rewards"),
    [
        ({}, [0, 1, 0, 0]),
        ({"zero_leaks": False}, [1, 1, 0, 0]),
    ],
)
def test_what_a_leak_earns(options, rewards):
    leaking = Graph.chain("careful: it is 6", "repeat").to_json()
    scores = reward_of(ScriptedLLM(solver), **options)([SUMS[3]], [[leaking, GOOD, BAD, BROKEN]])
    assert scores.rewards == [rewards]
    assert (scores.metrics["graph/leak_rate"], scores.metrics["agents/correct"]) == (0.25, 0.5)


def test_agents_that_draw_do_so_whatever_else_is_in_the_batch():
    """The seeds depend on the problem and on the graph's number in its group, not on the batch."""

    def seeds(problems):
        agents = ScriptedLLM(solver)
        reward = reward_of(agents, temperature=0.5, seed=3)
        for _ in range(2):  # and nothing is cached
            reward(problems, [[GOOD, BAD, GOOD]] * len(problems))
        calls = [call for batch in agents.batches for call in batch]
        return [call.seed for call in calls if SUMS[2].question in call.text]

    alone = seeds([SUMS[2]])
    assert (len(alone), len(set(alone))) == (12, 6)
    assert seeds(SUMS[:4]) == alone


def test_validation_draws_the_same_in_any_share_of_the_problems():
    """Several processes validate a share each."""
    agents, config = ScriptedLLM(solver), OrchestratorConfig()
    chat = lambda calls, *_: [Reply(GOOD)] * len(calls)  # noqa: E731
    writer = SimpleNamespace(chat=chat, release=lambda: None)
    runner = Runner(agents, 9, temperature=0.5)
    orchestrator = SimpleNamespace(config=config, writer=writer, runner=runner)
    for share in (SUMS[2:3], SUMS[:4]):
        Orchestrator.solve(orchestrator, share)
    calls = [call for batch in agents.batches for call in batch]
    seeds = [call.seed for call in calls if SUMS[2].question in call.text]
    assert (len(seeds), len(set(seeds))) == (4, 2)


# --- the two kinds of agents --------------------------------------------------------------------


def test_a_server_answers_for_the_agents():
    barrier = threading.Barrier(3, timeout=10)

    def answer(body):
        barrier.wait()  # three requests at once, or the test times out
        return body["messages"][0]["content"].upper()

    with ScriptedServer(answer) as server:
        agents = RemoteLLM(APIClient(server.url, concurrency=3), BASE)
        graphs = [Graph.chain(f"solve {i}", f"check {i}") for i in range(3)]
        runs = Runner(agents, 7).run(SUMS[:3], graphs, range(3))
        asked = server.asked("chat/completions")
    assert [run.replies[-1].text for run in runs] == ["CHECK 0", "CHECK 1", "CHECK 2"]
    assert [run.prompt_tokens for run in runs] == [20] * 3
    assert {(body["max_tokens"], body["temperature"]) for body in asked} == {(7, 0.0)}
    roles = [[message["role"] for message in body["messages"]] for body in asked]
    assert roles == [["system", "user"]] * 6
    questions = {body["messages"][1]["content"] for body in asked[:3]}
    assert questions == {problem.question for problem in SUMS[:3]}


def test_a_refused_request_is_recorded_not_scored():
    with ScriptedServer() as server:
        cut_off = chat_reply("[2]", finish="length")
        server.script(refuse(400, "too long"), chat_reply("[2]"), cut_off)
        reward = reward_of(RemoteLLM(APIClient(server.url, concurrency=1), BASE))
        scores = reward([SUMS[1]], [[GOOD, BAD, BROKEN]])
    assert scores.rewards == [[None, 1.0, 0.0]]
    assert scores.metrics["agents/failed_rate"] == pytest.approx(1 / 3)
    assert scores.metrics["agents/truncated_rate"] == 0.5  # of the two replies that came
    assert reward.records[0][0][0]["verdict"] == "agent_failed"


@pytest.mark.parametrize(
    ("sent", "draft", "answer"),
    [
        (("4", "2 + 2 = 4"), "<think>\n2 + 2 = 4\n</think>\n<answer>4</answer>", "4"),
        (("2 and 2 are 4.", "2 + 2"), "<think>\n2 + 2\n</think>\n2 and 2 are 4.", "4"),
        (("", "2 + 2 is"), "<think>\n2 + 2 is", None),  # the reasoning was cut off
        (("4", None), "4", "4"),
        (("<answer>4</answer>", ""), "<answer>4</answer>", "4"),
    ],
)
def test_the_second_agent_sees_the_reasoning_that_a_server_sends_apart(sent, draft, answer):
    text, reasoning = sent
    with ScriptedServer() as server:
        server.script(chat_reply(text, reasoning=reasoning), chat_reply("4"))
        agents = RemoteLLM(APIClient(server.url, concurrency=1), BASE)
        (run,) = Runner(agents, 9).run(SUMS[2:3], [CHAIN], [0])
        asked = server.asked("chat/completions")[1]["messages"][1]["content"]
    assert asked == f"PROBLEM: 2 + 2?\n\nDRAFT of agentA: {draft}"
    assert FORMATS["deepseek"].grade(run.replies[0].text, None, strict=False).answer == answer


def test_local_agents_say_what_the_model_says(tokenizer):
    agents = LocalLLM(Sampler(tiny_model(), tokenizer), tokenizer)
    graphs = [CHAIN, Graph.chain("other", "check")]
    together = Runner(agents, 8).run(SUMS[:2], graphs, range(2))
    alone = [Runner(agents, 8).run(SUMS[i : i + 1], graphs[i : i + 1], [0])[0] for i in (0, 1)]
    assert [run.to_dict() for run in together] == [run.to_dict() for run in alone]
    assert all(0 < run.completion_tokens <= 16 for run in together)
