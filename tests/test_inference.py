"""inference.py: several samples, a budget, JSON, the prompt, and the shipped adapter."""

from __future__ import annotations

import io
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import exit_code
from golden import check
from live_server import ADD, FORMAT
from safetensors.torch import load_file
from scripted_sampler import ScriptedSampler

import inference
import server
from rlm.data.prompts import render_prompt
from rlm.model import AdapterInfo, load_tokenizer
from rlm.ops import TorchOps
from rlm.reasoner import local
from rlm.sampling import Request, Sampler, SamplingParams, prompt_seed, sampling_dtype
from tests.test_goldens_texts import compute_prompts
from tests.test_server import weights  # noqa: F401 (a fixture)

ROOT = Path(__file__).parent.parent
SIX = ADD.replace("5", "6")
SCRIPT = {
    "marked": "<think>\n2 + 3 = <<2+3=5>>5\n</think>\n<answer>5</answer>",
    "two and three": ADD,
    "poem": FORMAT.completion("so", "one\ntwo"),
    "vote": [SIX, ADD, ADD, "no idea"],
    "long": "<think>\n" + "word " * 8 + "\n</think>\n<answer>9</answer>",
}


@pytest.fixture
def adapter(weights) -> Path:  # noqa: F811
    return weights / "final_rlm_lora"


@pytest.fixture
def scripted(monkeypatch) -> list[Request]:
    """Make the model answer with SCRIPT, and return the list of its requests."""
    asked = []

    class Watched(ScriptedSampler):
        def __init__(self, model, tokenizer, *, max_num_seqs, dtype, tool):
            super().__init__(model, tokenizer, SCRIPT, max_num_seqs=max_num_seqs, tool=tool)

        def stream(self, requests):
            asked.extend(requests)
            return super().stream(requests)

    monkeypatch.setattr("rlm.sampling.Sampler", Watched)
    return asked


@pytest.fixture
def ask(adapter, capsys):
    """Return a function that runs `python inference.py arguments`: its output and exit code."""

    def run(*arguments: object) -> tuple[str, int]:
        code = exit_code(inference, inference.InferenceConfig, "--adapter", adapter, *arguments)
        return capsys.readouterr().out, code

    return run


def test_several_answers_vote(ask, scripted):
    out, code = ask("vote", "--n", 4)
    assert code == 0
    first, _, rest = out.partition("the most likely completion with the winning answer:")
    assert first.strip() == SIX  # the first sample was streamed, but is outvoted
    assert rest.strip().startswith(ADD)
    assert [line.split()[-3:] for line in rest.splitlines() if " of 4" in line] == [
        ["2", "of", "4"],
        ["1", "of", "4"],
    ]
    assert "answer: 5  (" in rest
    assert (len(scripted), scripted[0].n) == (1, 4)
    lines = ask("poem", "--n", 2, "--answer-type", "open")[0].splitlines()
    assert f"{'one two':>14} {'█' * 24} 2 of 2" in lines


def test_json_is_one_object_with_the_votes(ask, scripted, tokenizer):
    out, code = ask("vote", "--n", 4, "--json")
    assert (code, out.count("\n")) == (0, 1)
    reply = json.loads(out)
    assert reply.pop("seconds") > 0
    assert reply.pop("mean_logprob") <= 0
    assert reply == {
        "question": "vote",
        "response": ADD,
        "reasoning": "2 + 3 = 5",
        "answer": "5",
        "final_answer": "5",
        "answer_type": "number",
        "finish_reason": "stop",
        "format": "strict",
        "thinking": {"status": "closed", "tokens": len("\n2 + 3 = 5\n"), "budget": None},
        "vote": {
            "n": 4,
            "valid": 3,
            "winner": "5",
            "agreement": 0.5,
            "counts": {"5": 2, "6": 1},
        },
        "prompt_tokens": len(render_prompt(tokenizer, "vote", FORMAT)),
        "completion_tokens": 3 * (len(ADD) + 1) + len("no idea") + 1,
        "experiences": [],
    }
    alone = json.loads(ask("two and three", "--json")[0])
    assert (alone["response"], alone["vote"]) == (ADD, None)


def test_a_budget_closes_the_reasoning(ask, scripted):
    reply = json.loads(ask("long", "--json", "--budget", 12)[0])
    assert (reply["thinking"]["status"], reply["thinking"]["budget"]) == ("forced", 12)
    assert 0 < reply["thinking"]["tokens"] <= 12
    assert reply["final_answer"] == "7"
    out, _ = ask("long", "--budget", 0)
    assert "answer: 7  (" in out
    assert ", reasoning forced)" in out
    assert json.loads(ask("long", "--json")[0])["final_answer"] == "9"


def test_a_tool_writes_into_the_answer(ask, adapter, scripted, monkeypatch):
    """The default is the tool of training. On a terminal, the tool's text is marked."""
    assert "tool_calls" not in json.loads(ask("marked", "--json")[0])  # trained without a tool
    reply = json.loads(ask("marked", "--json", "--tool", "calculator")[0])
    start = SCRIPT["marked"].index("5>>")
    assert reply["response"] == SCRIPT["marked"]
    assert reply["tool_calls"] == [{"text": "5>>", "start": start, "end": start + 3}]
    info = replace(AdapterInfo.load(adapter), tool="calculator")
    monkeypatch.setattr(AdapterInfo, "load", lambda path: info)
    assert "tool_calls" in json.loads(ask("marked", "--json")[0])
    assert "tool_calls" not in json.loads(ask("marked", "--json", "--tool", "none")[0])
    monkeypatch.setattr(inference.terminal.console, "_force_terminal", True)
    assert "".join(f"\x1b[4m{char}\x1b[24m" for char in "5>>") in ask("marked")[0]


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (["--response-format", '{"enum": ["six", "ten"]}'], '"six"|"ten"'),
        (["--response-format", "schema.json"], "true|false"),
        (["--regex", "[a-c]{2}"], "[a-c]{2}"),
        (["--choice", "yes, no"], "yes|no"),
    ],
)
def test_the_answer_is_what_it_has_to_be(ask, scripted, arguments, answer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("schema.json").write_text('{"type": "boolean"}')
    out, code = ask("two and three", *arguments, "--json")
    reply = json.loads(out)
    assert code == 0
    assert re.fullmatch(answer, reply["answer"])
    assert reply["reasoning"] == "2 + 3 = 5"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--regex", "("], "regex: unclosed group"),
        (["--response-format", "nowhere.json"], "--response-format nowhere.json cannot be read"),
        (["--response-format", "{"], "the JSON schema is not valid JSON"),
        (["--regex", "a", "--choice", "b"], "give only one of --response-format, --regex and"),
        (["--choice", "a,,b"], "choice contains an empty string"),
    ],
)
def test_what_the_answer_cannot_be_is_one_line(scripted, adapter, capsys, arguments, said):
    argv = ["--adapter", adapter, *arguments, "two and three"]
    assert exit_code(inference, inference.InferenceConfig, *argv) == 2
    assert said in capsys.readouterr().err


def test_an_empty_question_is_refused_before_the_model_is_loaded(capsys):
    asked = ["--adapter", "nowhere", " "]
    assert exit_code(inference, inference.InferenceConfig, *asked) == 2
    assert capsys.readouterr().err == "error: the question is empty\n"


@pytest.mark.parametrize(
    ("arguments", "drawn"),
    [
        ([], (1, 0, SamplingParams(512, 0.0, 1.0))),
        (["--n", 2], (2, 0, SamplingParams(512, 0.7, 1.0))),
        (
            ["--temperature", 0.3, "--top-p", 0.9, "--seed", 5, "--max-new-tokens", 60],
            (1, 5, SamplingParams(60, 0.3, 0.9)),
        ),
    ],
)
def test_tokens_are_drawn_as_asked_for(ask, scripted, arguments, drawn):
    ask("two and three", *arguments)
    n, seed, params = drawn
    assert [(r.n, r.seed, r.params) for r in scripted] == [(n, prompt_seed(seed), params)]


def test_one_line_says_that_other_code_multiplies(ask, scripted, monkeypatch):
    monkeypatch.setattr("rlm.sampling.engine.ops_for", lambda *_: TorchOps("a test"))
    note = "a completion may depend on its batch: kernels not compiled: a test"
    assert ask("two and three")[0].splitlines()[-1] == note
    assert note not in ask("two and three", "--json")[0]


def test_the_loop_answers_until_an_empty_line_or_the_end(ask, scripted, monkeypatch):
    def type_in(*lines: str | None) -> list[str | None]:
        left = list(lines)

        def read(prompt: str) -> str:
            line = left.pop(0)
            if line is None:
                raise EOFError
            return line

        monkeypatch.setattr("builtins.input", read)
        return left

    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    left = type_in("two and three", "long", "  ", "vote")
    out, code = ask("--budget", 12)
    assert (code, left) == (0, ["vote"])
    assert out.index("empty line ends") < out.index("answer: 5  (") < out.index("answer: 7  (")
    assert out.count("answer: ") == 2
    left = type_in("vote", None)
    out, code = ask("--n", 4)
    assert (code, left, out.count("answer: 5  (")) == (0, [], 1)
    assert ")\n\n" in out  # the prompt of the shell begins a line


def test_a_bad_question_ends_the_session_only_if_nobody_types_it(ask, scripted, monkeypatch):
    too_long, bad_bytes = "word " * 3000, UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad")
    for bad, says in ((too_long, "error: "), (bad_bytes, "error: the question is not utf-8 text")):
        for is_typed in (True, False):
            left = [bad, "two and three", ""]

            def read(prompt: str, left: list = left) -> str:
                line = left.pop(0)
                if isinstance(line, Exception):
                    raise line
                return line

            monkeypatch.setattr("builtins.input", read)
            monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda now=is_typed: now))
            monkeypatch.delitem(sys.modules, "readline", raising=False)
            out, code = ask()
            assert ("readline" in sys.modules) == is_typed  # readline handles the arrow keys
            assert (code, len(left)) == ((0, 0) if is_typed else (2, 2))
            assert (says in out, out.count("answer: 5  (")) == (is_typed, is_typed)


def test_no_question_is_a_mistake(ask, scripted, monkeypatch):
    assert ask(" \n") == ("", 2)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))  # an empty input, as from /dev/null
    assert ask()[1] == 2
    monkeypatch.setattr("sys.stdin", io.StringIO("\ntwo and three\n\n \ntwo and three\n"))
    out, code = ask()
    assert (code, out.count("answer: 5  ("), "Ask a question" in out) == (0, 2, False)


def test_what_is_shown_is_what_the_sampler_draws(ask, adapter, tokenizer):
    """The model is not scripted. No sample is in the format, so the most likely one is shown."""
    drawn = ["--n", 3, "--temperature", 1.0, "--seed", 5, "--max-new-tokens", 12]
    reply = json.loads(ask("hello", "--json", *drawn)[0])
    model, _ = inference.load_rlm_model(adapter)
    prompt = render_prompt(tokenizer, "hello", FORMAT)
    request = Request(prompt, SamplingParams(12, 1.0), prompt_seed(5), 3)
    one_by_one = Sampler(model, tokenizer, max_num_seqs=1, dtype=sampling_dtype(model)[0])
    [group] = one_by_one.complete([request])
    likeliest = max(group, key=lambda c: sum(c.logprobs) / len(c.logprobs))
    assert reply["response"] == tokenizer.decode(likeliest.token_ids, skip_special_tokens=True)
    assert (reply["vote"]["n"], reply["vote"]["valid"]) == (3, 0)


# --- what ships -----------------------------------------------------------------------------------

SHIPPED = ROOT / "weights" / "final_rlm_lora"
# Inputs and outputs of the linear layers in one of the 30 layers of SmolLM2-135M.
LINEAR = {
    "self_attn.q_proj": (576, 576),
    "self_attn.k_proj": (576, 192),
    "self_attn.v_proj": (576, 192),
    "self_attn.o_proj": (576, 576),
    "mlp.gate_proj": (576, 1536),
    "mlp.up_proj": (576, 1536),
    "mlp.down_proj": (1536, 576),
}


@pytest.fixture
def shipped() -> Path:
    run = json.loads((SHIPPED / "run.json").read_text())
    if not run.get("shipped"):
        pytest.skip("another adapter was trained in the place of the one that ships")
    return SHIPPED


def test_the_adapter_that_ships_answers(shipped, smollm2):
    """The tokens of these greedy answers are so likely that rounding does not change them."""
    model, tokenizer = inference.load_rlm_model(shipped)
    questions = {
        "Each box holds 6 eggs. How many eggs do 4 boxes hold?": "24",
        "What is half of ninety?": "45",
        "Tom has 17 apples and buys 26 more. How many apples does he have now?": "43",
    }
    for question, number in questions.items():
        reply = local.ask(question, model, tokenizer, SamplingParams(96, temperature=0.0))
        shown = reply.answer.shown
        assert (shown.final_answer, shown.format) == (number, "strict"), shown


def test_prompts_of_the_embedded_model(smollm2):
    check("prompts_smollm2", compute_prompts(load_tokenizer(smollm2)))


def test_the_adapter_that_ships_fits_its_base(shipped):
    assert inference.ADAPTER == server.ADAPTER == shipped.relative_to(ROOT)
    config = json.loads((SHIPPED / "adapter_config.json").read_text())
    assert set(config["target_modules"]) == {name.rpartition(".")[2] for name in LINEAR}
    expected = {}
    for layer in range(30):
        for name, (inputs, outputs) in LINEAR.items():
            place = f"base_model.model.model.layers.{layer}.{name}"
            expected[f"{place}.lora_A.weight"] = (config["r"], inputs)
            expected[f"{place}.lora_B.weight"] = (outputs, config["r"])
    tensors = load_file(SHIPPED / "adapter_model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == expected
    for name, tensor in tensors.items():
        assert tensor.isfinite().all(), name
        assert tensor.any(), name  # B is zero before training
