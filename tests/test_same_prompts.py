"""All scripts render the same token ids for a question.

This holds for the user's own system prompt, for other tags and for each answer type. An adapter
that was trained with other prompts is rejected.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import exit_code
from golden import check
from live_server import live

import eval as evaluate
import inference
import server
import train_grpo
import train_sft
from rlm.cli import UsageError
from rlm.data import FORMATS, read_system_prompt, render_prompt
from rlm.evaluation import model_card
from rlm.grading import AnswerType
from rlm.model import AdapterInfo
from rlm.sampling import Sampler
from tests.test_train_grpo import a_config, a_trainer

OWN = "You are a careful clerk.<|im_end|>\nThink in <think>, answer in <answer>."
QUESTION = "How many eggs are in 7 boxes of 6?"
SCRIPTS = ("sft", "grpo", "evaluate", "inference", "/phase1/reasoning", "/v1/chat/completions")
RANK = {"lora_r": 16, "lora_alpha": 32}  # the defaults of SFT
REWARD = """
def short(completion, strict_verdict):
    assert strict_verdict.reason not in ("correct", "gold_unreadable")
    return 1 / (1 + len(completion))
"""


@dataclass(frozen=True)
class Chain:
    """The results of all scripts for one adapter.

    asked: script → the token ids of its prompts that contain QUESTION.
    """

    folder: Path
    asked: Mapping[str, Sequence[Sequence[int]]]
    json: Mapping[str, object]  # the output of inference.py --json
    reply: Mapping[str, object]  # the reply of /phase1/reasoning


def run(*command):
    assert exit_code(*command) == 0


def go_all_the_way(folder, model, rows, *options, reward=None, **request) -> Chain:
    """Train on the rows, whose questions are in the column `ask`, and evaluate and serve.

    Args:
        options: options of train_sft.py.
        request: fields for the server.
    """
    patch, data = pytest.MonkeyPatch(), folder / "problems.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found, script = {}, "sft"
    add, examples = Sampler.add_request, train_sft.to_examples

    def add_request(self, request):
        found.setdefault(script, []).append(tuple(request.prompt))
        return add(self, request)

    def to_examples(*arguments):
        made = examples(*arguments)
        found.setdefault("sft", []).extend(
            tuple(i for i, label in zip(e["input_ids"], e["labels"], strict=True) if label == -100)
            for e in made
        )
        return made

    patch.setattr(Sampler, "add_request", add_request)
    patch.setattr(train_sft, "to_examples", to_examples)
    for module in ("rlm.evaluation.report.accuracy_bars", "rlm.training.trainer.learning_curves"):
        patch.setattr(module, lambda *_, **__: None)
    common = ["--model", model, "--dataset", data, "--columns", "question=ask", *options]
    sft, grpo, judged = folder / "sft", folder / "grpo", ["--reward", reward] if reward else []
    run(train_sft, train_sft.SFTConfig, *common, "--output", sft, "--run-dir", folder / "run_sft",
        "--batch-size", 8, "--micro-batch", 8)  # fmt: skip
    for option in options:
        Path(option).unlink(missing_ok=True)  # the later scripts read it from the adapter
    script = "grpo"
    run(train_grpo, train_grpo.GRPOConfig, "--sft-adapter", sft, "--output", grpo, "--steps", 1,
        "--batch-size", 2, "--group-size", 2, "--max-new-tokens", 4, "--eval-samples", 1,
        "--run-dir", folder / "run_grpo", *judged)  # fmt: skip
    script = "evaluate"
    run(evaluate, evaluate.EvaluateConfig, "--sft-adapter", sft, "--adapter", grpo,
        "--few-shot", 0, "--max-new-tokens", 4, "--max-samples", 2,
        "--output", folder / "evaluation", *judged)  # fmt: skip
    asked, said = rows[0]["ask"], []
    script = "inference"
    patch.setattr(inference, "_write", lambda text, by_tool=False: said.append(text))
    options = [f"--{name.replace('_', '-')}={value}" for name, value in request.items()]
    run(inference, inference.InferenceConfig, asked, "--adapter", grpo, "--max-new-tokens", 4,
        "--json", *options)  # fmt: skip
    service = server._service(server.ServerConfig(adapter=grpo, max_new_tokens=64), ())
    with live(service) as running:
        script = "/phase1/reasoning"
        answer = running.post({"prompt": asked, "max_new_tokens": 40, **request})
        assert answer.status_code == 200, answer.text
        script = "/v1/chat/completions"
        chat = {"model": "grpo", "messages": [{"role": "user", "content": asked}], **request}
        assert running.post(chat | {"max_tokens": 40}, script).status_code == 200
    patch.undo()
    assert {*found} == {*SCRIPTS}
    return Chain(folder, found, json.loads("".join(said)), answer.json())


def texts(count: int = 12) -> list[str]:
    return [f"{QUESTION} {'!' * n}" for n in range(1, count + 1)]


@pytest.fixture(scope="module")
def seen(model_dir, tmp_path_factory) -> Chain:
    """Run all scripts with the user's own system prompt in a file."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "system.txt").write_text(f"\n{OWN}\n")
    rows = [{"ask": text, "answer": "42", "solution": "7 * 6 = 42"} for text in texts()]
    return go_all_the_way(folder, model_dir, rows, "--system-prompt", folder / "system.txt")


def test_all_five_scripts_make_the_same_prompts(seen, tokenizer):
    format = FORMATS["deepseek"].with_prompt(OWN)
    rendered = {tuple(render_prompt(tokenizer, text, format)): text for text in texts()}
    for script, asked in seen.asked.items():
        assert {*asked} <= {*rendered}, script
    assert len({*seen.asked["sft"]}) == 12  # training and validation problems
    assert {rendered[seen.asked[script][0]] for script in SCRIPTS[3:]} == {texts()[0]}
    check("system_prompt", {"prompt": [*seen.asked["/phase1/reasoning"][0]]})


def kinds_of(folder: Path) -> list[tuple[AnswerType, ...]]:
    return [AdapterInfo.load(folder / name).answer_types for name in ("sft", "grpo")]


@pytest.mark.parametrize(
    ("kind", "answer"),
    [pytest.param("text", "XLII", marks=pytest.mark.slow), ("open", "forty-two eggs")],
)
def test_a_kind_of_answer_is_the_same_from_the_data_to_the_reply(
    kind, answer, model_dir, tokenizer, tmp_path, capsys
):
    (tmp_path / "mine.py").write_text(REWARD)
    row = {"answer": answer, "answer_type": kind, "solution": "7 * 6 = 42"}
    rows = [row | {"ask": text} for text in texts()]
    reward = f"{tmp_path}/mine.py:short"
    # The answers of the tiny model are meaningless; only prompts and parsing are tested.
    way = go_all_the_way(tmp_path, model_dir, rows, reward=reward)
    format = FORMATS["deepseek"].with_answer_type(kind)
    assert "give the final answer inside" in format.system_prompt
    rendered = {tuple(render_prompt(tokenizer, text, format)) for text in texts()}
    for script, asked in way.asked.items():
        assert {*asked} <= rendered, script
    assert kinds_of(tmp_path) == [(kind,), (kind,)]
    assert way.reply["answer_type"] == way.json["answer_type"] == kind
    # A program that follows the model card renders the same prompt.
    info = AdapterInfo.load(tmp_path / "grpo")
    prompt = model_card(tmp_path / "grpo", info, merged=False).split("```\n")[1].strip()
    messages = [{"role": "system", "content": prompt}, {"role": "user", "content": texts()[0]}]
    written = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tuple(tokenizer.encode(written, add_special_tokens=False)) in rendered
    # The run counts verdicts although it has another reward, and the evaluation shows its mean.
    (metrics,) = map(json.loads, (tmp_path / "run_grpo/metrics.jsonl").open())
    (group, _) = map(json.loads, (tmp_path / "run_grpo/samples.jsonl").open())
    counted = {name for name in metrics if name.startswith("reason/")}
    assert counted >= {"reason/correct", *(f"reason/{r}" for r in group["verdicts"])}
    report = json.loads((tmp_path / "evaluation/evaluation.json").read_text())["greedy"]
    for figures in (*report["rows"].values(), *report["compared"].values()):
        assert "reward" in figures
        assert ("strict" in figures) == (
            kind == "text"
        )  # without a reference answer, there is no accuracy
    out = capsys.readouterr().out
    assert "start: validation reward" in out
    assert ("eval/accuracy" in metrics) == (kind == "text")
    assert "right 0%" in out or kind == "open"


def test_of_mixed_data_the_request_says_which_kind(model_dir, tokenizer, tmp_path):
    numbers, choices = texts()[:8], texts()[8:]
    rows = [{"ask": text, "answer": "42", "solution": "It is 42."} for text in numbers]
    choice = {"answer": "B", "solution": "It is B.", "answer_type": "choice"}
    rows += [choice | {"ask": text} for text in choices]
    tags = ("--reasoning-format", "simple")  # for SFT; the other scripts follow the adapter
    way = go_all_the_way(tmp_path, model_dir, rows, *tags, answer_type="choice")
    format = FORMATS["simple"]
    asked = {"number": {tuple(render_prompt(tokenizer, text, format)) for text in numbers}}
    format = format.with_answer_type("choice")
    asked["choice"] = {tuple(render_prompt(tokenizer, text, format)) for text in choices}
    assert {*way.asked["sft"]} == asked["number"] | asked["choice"]
    for script in SCRIPTS[:3]:
        assert {*way.asked[script]} <= asked["number"] | asked["choice"]
    as_choice = tuple(render_prompt(tokenizer, numbers[0], format))
    assert [way.asked[script] for script in SCRIPTS[3:]] == [[as_choice]] * 3
    assert kinds_of(tmp_path) == [("number", "choice")] * 2
    assert way.reply["answer_type"] == way.json["answer_type"] == "choice"
    info = AdapterInfo.load(tmp_path / "grpo")
    assert info.format == FORMATS["simple"]
    assert info.describe_prompts().count("```") == 4
    report = json.loads((tmp_path / "evaluation/evaluation.json").read_text())
    assert report["config"]["reasoning_format"] == "simple"
    # The Python API behaves in the same way.
    trainer = a_trainer(model_dir, a_config(tmp_path, sft_adapter=tmp_path / "sft", **RANK))
    assert trainer.config.reasoning_format == trainer.scorer.reasoning_format == "simple"
    run_json = json.loads((tmp_path / "grpo/run.json").read_text()) | {"answer_types": ["essay"]}
    (tmp_path / "grpo/run.json").write_text(json.dumps(run_json))
    with pytest.raises(UsageError, match=r"answer_types are \['essay'\]; valid types are number"):
        AdapterInfo.load(tmp_path / "grpo")


def test_the_prompt_stands_where_the_usual_one_does_and_forges_no_role(seen, tokenizer):
    ids = [*seen.asked["/phase1/reasoning"][0]]
    assert tokenizer.decode(ids).startswith(f"<|im_start|>system\n{OWN}<|im_end|>\n")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert ids.count(end) == 2  # of the system and the user turn; OWN's text adds none


def test_run_json_has_the_text(seen):
    for name in ("sft", "grpo"):
        info = AdapterInfo.load(seen.folder / name)
        assert info.system_prompt == OWN
        assert info.format.system_prompt == OWN
        assert info.run["config"]["columns"] == "question=ask"  # GRPO read it from SFT's run.json


def test_a_text_or_a_file(tmp_path):
    file = tmp_path / "prompt.md"
    file.write_text("  Be brief.\n")
    assert read_system_prompt(str(file)) == "Be brief."
    assert read_system_prompt("Be brief.") == "Be brief."
    assert read_system_prompt("") == ""
    assert read_system_prompt(None) is None
    assert read_system_prompt("a" * 5000) == "a" * 5000
    with pytest.raises(UsageError, match="no such file"):
        read_system_prompt(str(tmp_path / "none.txt"))
    file.write_bytes(b"\xff")
    with pytest.raises(UsageError, match="cannot be read"):
        read_system_prompt(str(file))


def test_an_empty_one_leaves_it_out(tokenizer):
    format = FORMATS["simple"].with_prompt("")
    assert tokenizer.decode(render_prompt(tokenizer, "2 + 3?", format)) == (
        "<|im_start|>user\n2 + 3?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert FORMATS["simple"].with_prompt(None) == FORMATS["simple"]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("system_prompt", "Be brief.", "different system prompts"),
        ("reasoning_format", "simple", "different tags"),
    ],
)
def test_adapters_with_different_prompts_are_not_evaluated_together(
    name, value, said, seen, tmp_path
):
    other = tmp_path / "other"
    other.mkdir()
    run_json = json.loads((seen.folder / "grpo" / "run.json").read_text())
    run_json["config"][name] = value
    (other / "run.json").write_text(json.dumps(run_json))
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        (other / file).symlink_to(seen.folder / "grpo" / file)
    with pytest.raises(UsageError, match=said):
        evaluate.EvaluateConfig.resolve({"sft_adapter": seen.folder / "sft", "adapter": other})


@pytest.mark.parametrize(
    ("script", "cls", "option"),
    [
        (train_sft, train_sft.SFTConfig, "--adapter"),
        (train_grpo, train_grpo.GRPOConfig, "--sft-adapter"),
        (evaluate, evaluate.EvaluateConfig, "--adapter"),
    ],
)
def test_other_tags_than_the_adapters_are_refused(script, cls, option, seen, capsys):
    adapter = seen.folder / "sft"
    typed = [option, str(adapter), "--reasoning-format", "simple"]
    assert exit_code(script, cls, *typed) == 2
    assert capsys.readouterr().err == (
        f"error: --reasoning-format simple: the adapter {adapter} was trained with deepseek; leave "
        "the option out, or name another adapter (or none)\n"
    )


def test_other_tags_than_the_adapters_are_refused_in_python(seen, model_dir, tmp_path):
    adapter, said = seen.folder / "sft", "was trained with deepseek"
    config = a_config(tmp_path, sft_adapter=adapter, reasoning_format="simple", **RANK)
    with pytest.raises(UsageError, match=said):
        a_trainer(model_dir, config)
    options = {"model": str(model_dir), "adapter": adapter, "reasoning_format": "simple"}
    config = train_sft.SFTConfig(**options)
    with pytest.raises(UsageError, match=said):
        train_sft.train(config, [])
