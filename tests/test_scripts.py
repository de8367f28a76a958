"""Four scripts in this process with a tiny model: SFT → GRPO → evaluation → inference."""

import ast
import json
import os
import pkgutil
import re
import shutil
import signal
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import exit_code
from peft import PeftModel
from safetensors.torch import load_file, save_file
from scripted_sampler import END, ScriptedSampler
from transformers import AutoModelForCausalLM

import eval as evaluate
import inference
import train_grpo
import train_sft
from examples import demo
from rlm.cli.flags import flags_of
from rlm.cli.options import UsageError, parse
from rlm.data import load_problems
from rlm.data.prompts import FORMATS, render_prompt
from rlm.evaluation.evaluator import Evaluation
from rlm.evaluation.records import RowRecord
from rlm.evaluation.report import write_report
from rlm.model import base as models
from rlm.model import hardware as machine
from rlm.model.adapters import ADAPTER_FILES, same_weights
from rlm.runs.atomic_files import Journal, lock_file
from rlm.tools import Calculator
from tests.evaluation.test_evaluation import graded, problem
from tests.test_train_grpo import a_start_adapter

ROOT = Path(__file__).parent.parent
SCRIPTS = ("train_sft", "train_grpo", "eval", "inference", "server")
DATA = ["--dataset", "word-problems:1"]
ROWS = ("base", "SFT", "GRPO")


@pytest.fixture(autouse=True)
def no_hub(monkeypatch):
    """Make the hub unreachable, so that the tests do not depend on a network."""
    for module in (machine, models):
        monkeypatch.setattr(module, "hub_reachable", lambda: False)


CONFIG_OF = {
    train_sft: train_sft.SFTConfig,
    train_grpo: train_grpo.GRPOConfig,
    evaluate: evaluate.EvaluateConfig,
    inference: inference.InferenceConfig,
}


def run(script, *arguments):
    """Run `python script.py arguments` in this process, and return the exit code."""
    return exit_code(script, CONFIG_OF[script], *arguments)


def an_adapter(path, **history):
    """Create empty adapter files with a run.json, and return their folder."""
    path.mkdir(exist_ok=True)
    for file in ADAPTER_FILES:
        (path / file).touch()
    (path / "run.json").write_text(json.dumps({"base_model": "a", **history}))
    return path


@pytest.fixture(scope="module")
def trained(model_dir, tmp_path_factory):
    """Run SFT and GRPO once, and return the folder of their results."""
    path = tmp_path_factory.mktemp("trained")
    common = ["--model", model_dir, *DATA]
    assert run(
        train_sft, *common, "--max-samples", 16, "--batch-size", 8, "--micro-batch", 4,
        "--learning-rate", 1e-2,  # two steps must change the output, even in bf16
        "--output", path / "sft", "--run-dir", path / "run_sft",
    ) == 0  # fmt: skip
    assert run(
        train_grpo, *common, "--sft-adapter", path / "sft", "--output", path / "grpo",
        "--run-dir", path / "run_grpo", "--steps", 2, "--batch-size", 2, "--group-size", 2,
        "--max-new-tokens", 8, "--max-samples", 40, "--eval-samples", 4,
    ) == 0  # fmt: skip
    return path


def test_both_stages_leave_an_adapter_with_its_history(trained):
    for stage in ("sft", "grpo"):
        files = {file.name for file in (trained / stage).iterdir()}
        assert {"adapter_config.json", "adapter_model.safetensors", "run.json"} <= files
        history = json.loads((trained / stage / "run.json").read_text())
        assert history["stage"] == stage
        assert history["dataset"] == "word-problems:1"
    assert (trained / "run_grpo" / "curves.png").stat().st_size > 10_000
    assert not list(trained.glob(".*"))  # no partial files are left
    tensors = load_file(trained / "sft" / "adapter_model.safetensors")
    assert all(tensor.abs().max() > 0 for name, tensor in tensors.items() if "lora_B" in name)


@pytest.mark.parametrize(
    ("options", "trained_on", "split"),
    [
        ({}, "mine.jsonl", "validation"),  # the test split is the whole file
        ({"split": "test"}, "mine.jsonl", "test"),
        ({"dataset": "other.jsonl"}, "mine.jsonl", "test"),
        ({}, "word-problems:1", "test"),
        ({"dataset": "./mine.jsonl"}, "mine.jsonl", "validation"),
        ({"dataset": "sft.jsonl"}, "mine.jsonl", "validation"),  # the dataset of the SFT row
        ({}, None, "test"),
        ({}, "gsm8k", "test"),
        ({"dataset": "word-problems+gsm8k"}, "word-problems+gsm8k", "test"),
    ],
)
def test_nothing_is_evaluated_on_what_it_practised(options, trained_on, split, tmp_path):
    given = dict(options)
    for option, dataset in {"sft_adapter": "sft.jsonl", "adapter": trained_on}.items():
        given[option] = an_adapter(tmp_path / option, dataset=dataset, quantize="4bit")
    config = evaluate.EvaluateConfig(**evaluate.EvaluateConfig.resolve(given))
    dataset = options.get("dataset") or trained_on or "word-problems"
    assert (config.dataset, config.split) == (dataset, split)
    assert (config.model, config.quantize, config.reasoning_format) == ("a", "4bit", "deepseek")


@pytest.mark.parametrize(
    ("splits", "split", "count"),
    [
        ("test", "test[:40]", 4),  # a tenth of the 40 rows
        ("test train", "test[:40]", 4),
        ("test train", "train[:40]", 50),  # all test problems
        ("validation train", "train[40:]", 50),  # all validation problems
        ("validation train", "validation[:40]", 4),
    ],
)
def test_no_training_problem_of_a_hub_dataset_is_evaluated(splits, split, count, tmp_path):
    for name in splits.split():
        rows = [{"question": f"{name}: {n} + 1?", "answer": str(n + 1)} for n in range(50)]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(lines)
    adapter = an_adapter(tmp_path / "adapter", dataset=f"{tmp_path}", config={"split": split})
    given = {"sft_adapter": None, "adapter": adapter}
    config = evaluate.EvaluateConfig(**evaluate.EvaluateConfig.resolve(given))
    found = load_problems(str(tmp_path), config.split, rows=config.rows)
    trained_on = load_problems(str(tmp_path), rows=split)
    assert len(found) == count
    assert not {p.question for p in found} & {p.question for p in trained_on}


@pytest.mark.parametrize(
    ("trained_on", "evaluated_on", "left_out"),
    [
        ("word-problems+gsm8k", "word-problems", "gsm8k"),
        ("OpenAI/gsm8k+elementary:1+aime2024", "elementary:1", "gsm8k, aime2024"),
        ("word-problems+gsm8k:DIRECTORY", "word-problems+gsm8k:DIRECTORY", ""),
        ("gsm8k+org/name", "gsm8k+org/name", ""),  # no other part would be left
    ],
)
def test_by_default_nothing_of_a_mixture_comes_from_the_hub(
    trained_on, evaluated_on, left_out, tmp_path, capsys
):
    columns = {"columns": "question=prompt,answer=target"}
    adapter = an_adapter(tmp_path, dataset=trained_on, config=columns)
    given = {"sft_adapter": None, "adapter": adapter}
    given["split"] = "test"  # otherwise the hub is asked for the splits
    values = evaluate.EvaluateConfig.resolve(given)
    # Generated data refuse columns, which are for the parts that are left out.
    has_own = "org/name" in evaluated_on
    assert (values["dataset"], bool(values["columns"])) == (evaluated_on, has_own)
    said = " ".join(capsys.readouterr().out.split())
    line = f"evaluated on {evaluated_on} alone: {left_out} would need the Hugging Face hub"
    assert (line in said) == bool(left_out)


@pytest.mark.parametrize(
    ("script", "option"),
    [(evaluate, "adapter"), (train_grpo, "sft_adapter"), (train_sft, "adapter")],
)
def test_the_tool_is_the_adapters_unless_one_is_named(script, option, tmp_path):
    cls = CONFIG_OF[script]

    def resolved(taught="calculator", **options):
        config = {"tool": taught} if taught else {}
        adapter = an_adapter(tmp_path, dataset="gsm8k", config=config)
        return cls(**cls.resolve({option: adapter, **options})).tool

    assert resolved() == "calculator"
    assert resolved(tool="none") == "none"  # both settings can be compared
    assert resolved(tool="mine.py:Mine") == "mine.py:Mine"
    with pytest.raises(UsageError, match="name it again with --tool"):
        resolved("mine.py:Mine")
    assert resolved(None) == cls().tool == "none"


def test_evaluation_with_and_without_a_tool(model_dir, tmp_path, monkeypatch):
    """The scripted model would write a wrong result, which the calculator replaces."""
    wrong = "<think>\n2 + 3 = <<2+3=6>>6\n</think>\n<answer>6</answer>"

    class Scripted(ScriptedSampler):
        def __init__(self, model, tokenizer, *, dtype, tool):
            super().__init__(model, tokenizer, {"": wrong}, tool=tool)

        def _next(self, row):  # continues after the tool's text
            corrected = "5>>" in self.tokenizer.decode(row.ids)
            wanted = wrong.replace("6", "5") if corrected else wrong
            return [*self.tokenizer.encode(wanted, add_special_tokens=False), END][len(row.ids)]

    monkeypatch.setattr("rlm.sampling.Sampler", Scripted)
    data = tmp_path / "sum.jsonl"
    data.write_text(json.dumps({"question": "What is 2 + 3?", "answer": "5"}) + "\n")
    found = {}
    for tool in ("none", "calculator"):
        assert run(
            evaluate, "--base-only", "--model", model_dir, "--dataset", data, "--few-shot", 0,
            "--max-new-tokens", 60, "--output", tmp_path / tool, "--tool", tool,
        ) == 0  # fmt: skip
        record = json.loads((tmp_path / tool / "completions.jsonl").read_text().splitlines()[0])
        found[tool] = "<<2+3=5>>" in json.dumps(record), "--tool" in json.dumps(record)
        rows = json.loads((tmp_path / tool / "evaluation.json").read_text())["greedy"]["rows"]
        assert rows["base"]["strict"]["accuracy"]["mean"] == (tool == "calculator")
    assert found == {"none": (False, False), "calculator": (True, True)}


def test_sft_teaches_the_marks_where_the_tool_is_on(model_dir, capsys):
    shown = {}
    for tool in ("none", "calculator"):
        options = ["--model", model_dir, "--dataset", "elementary", "--dry-run", 3, "--tool", tool]
        assert run(train_sft, *options) == 0
        shown[tool] = capsys.readouterr().out
    marked = re.findall(r"<<[^<>]*>>", shown["calculator"])
    assert marked
    assert "<<" not in shown["none"]
    for mark in marked:  # the results in the marks are right
        expression, _, result = mark.removeprefix("<<").partition("=")
        assert Calculator()(f"<<{expression}=") == result
    assert re.sub(r"<<[^<>]*>>", "", shown["calculator"]).count("\n") == shown["none"].count("\n")
    assert run(train_sft, *options[:-1], "abacus") == 2


def moved(folder, tensors):
    (folder / "moved").mkdir(exist_ok=True)
    save_file(tensors, folder / "moved/adapter_model.safetensors")
    return folder / "moved"


def test_adapters_with_the_same_weights_are_named(trained, tmp_path, capsys):
    shutil.copytree(trained / "sft", tmp_path / "copy")
    file = tmp_path / "copy/adapter_model.safetensors"
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(file).items()}
    save_file(tensors, file)  # GRPO may export in bf16 what SFT wrote in fp32
    assert same_weights(trained / "sft", tmp_path / "copy")
    name = next(iter(tensors))
    assert not same_weights(
        trained / "sft", moved(tmp_path, tensors | {name: tensors[name] * 1.01})
    )
    assert not same_weights(trained / "sft", moved(tmp_path, {name: tensors[name]}))
    assert run(
        evaluate, "--sft-adapter", trained / "sft", "--adapter", tmp_path / "copy", *DATA,
        "--max-samples", 1, "--max-new-tokens", 2, "--few-shot", 0, "--output", tmp_path / "out",
    ) == 0  # fmt: skip
    assert "SFT and GRPO have the same weights" in capsys.readouterr().out


def test_evaluate_refuses_an_adapter_before_the_bases_row(trained, tmp_path, monkeypatch, capsys):
    shutil.copytree(trained / "sft", tmp_path / "dora")
    file = tmp_path / "dora/adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"use_dora": True}))
    monkeypatch.setattr(evaluate, "evaluate_row", lambda *_, **__: pytest.fail("too late"))
    options = ("--max-samples", 1, "--few-shot", 0, "--output", tmp_path / "out")
    adapters = ("--sft-adapter", trained / "sft", "--adapter", tmp_path / "dora")
    assert run(evaluate, *adapters, *DATA, *options) == 2
    assert f"adapter {tmp_path / 'dora'} is more than plain LoRA" in capsys.readouterr().err
    file.write_text((trained / "sft/adapter_config.json").read_text())
    file.with_name("adapter_model.safetensors").write_bytes(b"version https://git-lfs")
    assert run(evaluate, *adapters, *DATA, *options) == 2
    assert "adapter_model.safetensors is a Git LFS pointer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "reward", "said"),
    [
        ("open", "steps", "open answers (answer_type), which no built-in reward can judge"),
        ("open", None, "use --reward FILE.py:NAME with a reward that judges them"),
        ("text", "mine.py:columns", "requires colour, which the data does not have"),
    ],
)
def test_evaluate_refuses_a_reward_before_a_model_is_loaded(
    kind, reward, said, trained, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("def columns(completion, colour):\n    return 0.0\n")
    Path("data.jsonl").write_text(
        json.dumps({"question": "Who?", "answer": "I", "answer_type": kind})
    )
    adapter = ("--sft-adapter", trained / "sft", "--adapter", trained / "grpo")
    judged = ("--reward", reward) if reward else ()
    monkeypatch.setattr("rlm.model.base_model_hash", lambda _: pytest.fail("too late"))
    assert run(evaluate, *adapter, "--dataset", "data.jsonl", *judged) == 2
    assert said in capsys.readouterr().err


def test_every_stage_warns_of_questions_that_ask_for_another_form(
    model_dir, tmp_path, monkeypatch, capsys
):
    file = tmp_path / "mine.jsonl"
    rows = [{"question": f"{i}? Put the answer after ####.", "answer": i} for i in range(20)]
    file.write_text("\n".join(json.dumps(row | {"solution": "It is said."}) for row in rows))
    said = "questions ask for a different answer format than the system prompt (answer after ####)"
    common = ("--model", model_dir, "--dataset", file)
    assert run(train_sft, *common, "--dry-run", 1) == 0
    assert f"warning: 18 of 18 {said}" in capsys.readouterr().out

    config = train_grpo.GRPOConfig(sft_adapter=None, lora_r=4, max_new_tokens=4)
    train_grpo.GRPOTrainer(model_dir, config).prepare(load_problems(str(file)), None)
    assert f"warning: 18 of 18 {said}" in capsys.readouterr().out

    def stop(name):
        raise UsageError("enough")

    monkeypatch.setattr("rlm.model.base_model_hash", stop)
    assert run(evaluate, *common, "--base-only", "--split", "test") == 2
    assert f"warning: 20 of 20 {said}" in capsys.readouterr().out


def test_evaluate_writes_its_files(trained, capsys):
    code = run(
        evaluate, "--sft-adapter", trained / "sft", "--adapter", trained / "grpo",
        "--max-samples", 6, "--samples", 2, "--max-new-tokens", 8, "--few-shot", 1,
        "--output", trained / "evaluation",
    )  # fmt: skip
    assert code == 0
    result = json.loads((trained / "evaluation" / "evaluation.json").read_text())
    assert list(result["greedy"]["rows"]) == ["base", "base, 1-shot", "SFT", "GRPO"]
    assert result["sampled"]["completions"] == 2
    assert (trained / "evaluation" / "accuracy.png").stat().st_size > 10_000
    failures = (trained / "evaluation" / "failures.jsonl").read_text().splitlines()
    assert {json.loads(line)["row"] for line in failures} >= {"base", "GRPO"}
    assert "SFT" in capsys.readouterr().out


def test_a_stopped_evaluation_goes_on(trained, capsys, monkeypatch):
    """The results are the same. A row is evaluated again only if its model or options change."""
    names = ("base, greedy", "base, sampled", "SFT, greedy", "SFT, sampled", "GRPO, greedy")
    draw, drawn = evaluate.evaluate, []

    def evaluated(output, *options, stop_after=99):
        def counted(*arguments, **keywords):
            if len(drawn) == stop_after:
                raise KeyboardInterrupt
            drawn.append(keywords["k"])
            return draw(*arguments, **keywords)

        drawn.clear()
        monkeypatch.setattr(evaluate, "evaluate", counted)
        code = run(
            evaluate, "--sft-adapter", trained / "sft", "--adapter", trained / "grpo",
            "--max-samples", 3, "--samples", 2, "--max-new-tokens", 8, "--few-shot", 0,
            "--output", trained / output, *options,
        )  # fmt: skip
        return code, len(drawn), capsys.readouterr()

    def figures(output):
        found = json.loads((trained / output / "evaluation.json").read_text())
        return found["greedy"], found["sampled"]

    assert evaluated("whole")[:2] == (0, 6)
    code, count, said = evaluated("parts", stop_after=0)
    assert (code, said.err) == (130, "interrupted\n")  # nothing is saved
    code, _, said = evaluated("parts", "--resume")
    assert code == 2
    assert "start without --resume" in said.err

    code, count, said = evaluated("parts", stop_after=3)
    assert (code, count) == (130, 3)
    assert "; ".join(names[:3]) in said.err
    assert "--resume" in said.err
    assert not (trained / "parts" / "evaluation.json").exists()
    with lock_file(trained / "parts" / ".eval.lock", "here", ""):  # another process evaluates
        code, count, said = evaluated("parts")
    assert (code, count) == (2, 0)
    assert "runs eval.py" in said.err
    code, count, said = evaluated("parts", "--resume")
    assert (code, count) == (0, 3)
    assert f"{names[2]}: reused from the earlier evaluation" in said.out
    assert figures("parts") == figures("whole")
    assert evaluated("parts", "--resume")[:2] == (0, 0)

    code, count, said = evaluated("parts", "--resume", "--temperature", 0.5)
    assert (code, count) == (0, 3)  # greedy rows do not depend on it
    assert f"{names[1]}: evaluated again (temperature: 1.0 → 0.5)" in said.out
    shutil.copytree(trained / "grpo", trained / "other")
    tensors = load_file(trained / "other/adapter_model.safetensors")
    halved = {name: tensor / 2 for name, tensor in tensors.items()}
    save_file(halved, trained / "other/adapter_model.safetensors")
    other = ["--adapter", trained / "other"]
    code, count, said = evaluated("parts", "--resume", "--temperature", 0.5, *other)
    assert (code, count) == (0, 2)  # the GRPO adapter has other weights
    assert f"{names[4]}: evaluated again (adapter: " in said.out
    assert evaluated("parts", "--tool", "calculator")[:2] == (0, 6)
    code, count, said = evaluated("parts", "--resume", "--tool", "none")
    assert (code, count) == (0, 6)
    assert f"{names[0]}: evaluated again (--tool: calculator → None)" in said.out
    assert evaluated("parts")[:2] == (0, 6)  # without --resume, all rows are evaluated
    before = (trained / "parts" / "completions.jsonl").read_bytes()

    def broken(*_, **__):
        raise UsageError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr("rlm.model.load_adapter", broken)
        assert evaluated("parts")[:2] == (2, 0)
    assert (trained / "parts" / "completions.jsonl").read_bytes() == before


def test_an_evaluation_on_a_full_disk_is_one_line(tmp_path):
    journal = Journal(tmp_path / "completions.jsonl")
    journal.path = Path("/dev/full")
    one = Evaluation([problem()], [[graded("correct")]])
    with pytest.raises(UsageError, match="/dev/full cannot be written: No space left"):
        RowRecord(journal, "base", {}).add("greedy", {}, one)
    output = tmp_path / "evaluation"
    output.touch()
    with pytest.raises(UsageError, match="cannot be written"):
        write_report({"base": {"greedy": one}}, [], "data", {}, output)


def test_a_row_is_that_of_its_adapter_alone(model_dir, tmp_path, tokenizer, monkeypatch):
    """A row does not contain the adapters of earlier rows."""
    monkeypatch.setattr("rlm.evaluation.report.accuracy_bars", lambda *_: None)
    adapters = {name: tmp_path / name for name in ("sft", "grpo")}
    for seed, path in enumerate(adapters.values()):
        torch.manual_seed(seed)
        a_start_adapter(model_dir, tokenizer, path)

    def greedy_texts(sft):
        output = tmp_path / "evaluation"
        code = run(
            evaluate, "--model", model_dir, *DATA, "--sft-adapter", sft, "--adapter",
            adapters["grpo"], "--max-samples", 2, "--few-shot", 0, "--max-new-tokens", 8,
            "--output", output,
        )  # fmt: skip
        assert code == 0
        failed = list(map(json.loads, (output / "failures.jsonl").open()))
        return {name: [f["completion"] for f in failed if f["row"] == name] for name in ROWS}

    both, alone = greedy_texts(adapters["sft"]), greedy_texts("none")
    assert [len(texts) for texts in both.values()] == [2, 2, 2]  # all completions are wrong
    assert len({text for texts in both.values() for text in texts}) == 6
    assert (both["base"], both["GRPO"]) == (alone["base"], alone["GRPO"])

    monkeypatch.setattr(evaluate, "write_report", lambda *_: None)
    settings = evaluate.EvaluateConfig(
        model=str(model_dir), reasoning_format="deepseek", samples=1, max_new_tokens=8
    )
    clock = demo.Clock({f"evaluate {row}": 1.0 for row in ("base", *adapters)}, {})
    problems = load_problems(DATA[1], "test", max_samples=2)
    rows = demo._evaluate(settings, problems, {"base": None, **adapters}, clock)
    texts = [[g.text for g in kinds["greedy"].completions] for kinds in rows.values()]
    assert dict(zip(ROWS, texts, strict=True)) == both


def test_the_demos_gain_is_grpos_lead_over_sft():
    right, wrong = graded("correct"), graded("wrong")
    greedy = Evaluation([problem()], [[right]])
    worse = Evaluation([problem()] * 2, [[right, wrong], [wrong, wrong]])
    better = Evaluation([problem()] * 2, [[right, right], [right, wrong]])
    summary = demo._summary(
        {
            "base": {"greedy": greedy},
            "sft": {"greedy": greedy, "sampled": worse},
            "grpo": {"greedy": greedy, "sampled": better},
        }
    )
    assert summary["gain"]["points"] == 50


def test_the_demo_says_how_long_is_left_by_the_speed_of_what_is_done(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(demo.time, "monotonic", lambda: now[0])
    expected = {"base": 10.0, "sft": 60.0, "grpo": 200.0, "last": 30.0}
    clock = demo.Clock(expected, limits={"grpo": 300.0})
    for stage, takes in (("base", 20.0), ("sft", 50.0), ("grpo", 30.0), ("last", 5.0)):
        with clock(stage):
            now[0] += takes
    said = [line for line in capsys.readouterr().out.splitlines() if line]
    assert said == [
        "[1 of 4] base: no estimate of the time left yet",
        "[2 of 4] sft: about 8 min left",  # twice as slow; GRPO has a limit: 120 + 300 + 60 s
        "[3 of 4] grpo: about 4 min left",  # now as fast as expected: 200 + 30 s
        "[4 of 4] last: about 11 s left",
    ]
    assert clock.seconds == {"base": 20.0, "sft": 50.0, "grpo": 30.0, "last": 5.0}


def test_the_demo_counts_first_and_shows_a_right_answer_before_wrong_ones(capsys):
    """The five results are: both right, both wrong, only GRPO, only SFT, and only GRPO."""
    asked = [problem(id=name, question=f"Question {name}?", answer="7") for name in "abcde"]
    right, wrong = (replace(graded(r), text=f"<answer>{r}</answer>") for r in ("correct", "wrong"))
    sft = Evaluation(asked, [[right], [wrong], [wrong], [right], [wrong]])
    grpo = Evaluation(asked, [[right], [wrong], [right], [wrong], [right]])
    demo._show_three(sft, grpo)
    said = capsys.readouterr().out
    assert "1 after both stages, 2 only after GRPO, 1 only after SFT, 1 after neither" in (
        " ".join(said.split())
    )
    order = (
        "Right only after GRPO:", "Question c? [7]", "after SFT: WRONG", "after GRPO: RIGHT",
        "<answer>wrong", "<answer>correct", "Right only after SFT:", "Question d? [7]",
        "Right after neither:",
    )  # fmt: skip
    assert sorted(order, key=said.index) == [*order]
    demo._show_three(sft, sft)
    assert "0 only after GRPO, 0 only after SFT, 3 after neither" in (
        " ".join((said := capsys.readouterr().out).split())
    )
    assert "Right only after GRPO" not in said


def test_inference_with_lessons_in_front(trained, tmp_path, capsys):
    library = tmp_path / "library.json"
    library.write_text(json.dumps([{"id": "G1-001", "content": "Add the numbers."}]))
    common = ["2 + 2?", "--json", "--adapter", trained / "grpo", "--max-new-tokens", 4]
    results = []
    for more in ([], ["--experiences", library]):
        assert run(inference, *common, *more) == 0
        results.append(json.loads(capsys.readouterr().out))
    plain, informed = results
    assert plain["question"] == informed["question"] == "2 + 2?"
    assert (plain["experiences"], informed["experiences"]) == ([], ["G1-001"])
    lesson = "Lessons from earlier problems:\n1. Add the numbers.\n\nProblem:\n"
    assert informed["prompt_tokens"] - plain["prompt_tokens"] == len(lesson)  # each byte is a token


def test_inference_json_and_base(trained, capsys):
    common = ["2 + 2?", "--adapter", trained / "grpo", "--max-new-tokens", 8]
    assert run(inference, *common) == 0  # streams the text, and then prints the answer
    text = capsys.readouterr().out
    assert "answer: " in text
    assert 1 <= int(re.search(r"(\d+) tokens, \d+ tokens/s", text)[1]) <= 8
    responses = []
    for more in ([], ["--base"]):
        assert run(inference, *common, "--json", *more) == 0
        result = json.loads(capsys.readouterr().out)
        assert result["completion_tokens"] <= 8
        assert result["finish_reason"] in ("stop", "length")
        responses.append(result["response"])
    assert responses[0] != responses[1]


def test_plain_peft_loads_the_adapter_and_says_the_same(trained, model_dir, in_fp32):
    """transformers and PEFT generate the same greedy text; only the prompt is ours."""
    model, tokenizer = inference.load_rlm_model(trained / "grpo")
    text = inference.generate_reasoning("Tom has 3?", model, tokenizer, max_new_tokens=24)
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    plain = PeftModel.from_pretrained(base, trained / "grpo").eval()
    prompt = render_prompt(tokenizer, "Tom has 3?", FORMATS["deepseek"])
    ids = plain.generate(
        input_ids=torch.tensor([prompt]), max_new_tokens=24, do_sample=False, pad_token_id=258
    )
    assert tokenizer.decode(ids[0, len(prompt) :], skip_special_tokens=True) == text


def test_grpo_takes_model_and_data_from_the_sft_adapter_and_stops_in_time(trained, capsys):
    code = run(
        train_grpo, "--sft-adapter", trained / "sft", "--output", trained / "short",
        "--run-dir", trained / "run_short", "--steps", 500, "--batch-size", 2, "--group-size", 2,
        "--max-new-tokens", 4, "--max-samples", 40, "--eval-samples", 2, "--max-minutes", 0.0001,
        "--eval-every", 0,
    )  # fmt: skip
    assert code == 0
    assert "taken from the initial adapter" in capsys.readouterr().out
    (row,) = (trained / "run_short" / "metrics.jsonl").read_text().splitlines()
    assert "eval/accuracy" in json.loads(row)
    assert (trained / "short" / "run.json").exists()


def test_importing_rlm_loads_no_torch():
    code = (
        "import rlm.cli.options, rlm.data.loaders, rlm.grading.answers, rlm.data.prompts\n"
        "import rlm.evaluation.evaluator, rlm.rewards, rlm.runs.plots, sys\n"
        "print({'torch', 'datasets', 'transformers', 'huggingface_hub'} & sys.modules.keys())\n"
        "print(rlm.data.load_word_problem_table.cache_info().currsize)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("set()\n0\n", "")  # the table is read at its first use


def test_ctrl_c_while_torch_is_imported_prints_no_traceback():
    code = (
        "from rlm.cli import check_command_line\nfrom rlm.training import GRPOConfig\n"
        "check_command_line(GRPOConfig, argv=['--sft-adapter', 'none'])\nraise KeyboardInterrupt"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "interrupted\n")


BEFORE_TORCH = """
import contextlib, io, json, runpy, sys
sys.modules["torch"] = None  # loading it takes seconds; here it fails at once
said = []
for script, *typed in json.loads(sys.argv[1]):
    sys.argv, code, out, err = [f"{script}.py", *typed], 0, io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_path(f"{script}.py", run_name="__main__")
        except SystemExit as exit:
            code = exit.code or 0
        except BaseException as error:
            code = repr(error)
    said.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(said))
"""
WRONG_FILES = [
    ("train_sft", ["--dataset", "DATA"], "line 2: not JSON"),
    ("train_sft", ["--adapter", "nowhere"], "adapter nowhere does not exist"),
    ("train_grpo", ["--dataset", "DATA", "--model", "m"], "line 2: not JSON"),
    ("train_grpo", ["--sft-adapter", "nowhere"], "adapter nowhere does not exist"),
    ("train_grpo", ["--sft-adapter", "none", "--tool", "spoon"], "--tool spoon"),
    ("eval", ["--dataset", "DATA", "--base-only", "--model", "m"], "line 2: not JSON"),
    ("inference", ["--response-format", "nowhere", "?"], "--response-format nowhere"),
    ("inference", ["--tool", "spoon", "?"], "--tool spoon"),
    ("server", ["--host", "0.0.0.0"], "RLM_API_KEY"),
    ("server", ["--adapters", "nowhere"], "no such directory"),
]


def test_help_and_mistakes_are_answered_before_torch_is_loaded(tmp_path):
    """All commands run in one process that cannot import torch."""
    (tmp_path / "bad.jsonl").write_text('{"question": "1 + 1?", "answer": 2}\n{"question": \n')
    asked = [[script, option] for script in SCRIPTS for option in ("--help", "--hlep")]
    asked += [[script, *typed] for script, typed, _ in WRONG_FILES]
    typed = json.dumps(asked).replace("DATA", str(tmp_path / "bad.jsonl"))
    environment = {key: value for key, value in os.environ.items() if key != "RLM_API_KEY"}
    command = [sys.executable, "-c", BEFORE_TORCH, typed]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    answers = dict(zip(map(tuple, asked), json.loads(done.stdout), strict=True))
    for script in SCRIPTS:
        code, out, _ = answers[script, "--help"]
        assert (code, "usage: " in out, out.count("\n  --") > 8) == (0, True, True), script
        code, out, err = answers[script, "--hlep"]
        assert (code, "usage: " in out, "--help?" in err) == (2, False, True), (script, err)
    for script, words, said in WRONG_FILES:
        code, _, err = answers[script, *words]
        assert (code, said in err) == (2, True), (script, words, code, err)


def importers():
    """Return, for each library, our files that import it other than for annotations."""
    found = defaultdict(set)
    for file in [*ROOT.glob("*.py"), *ROOT.glob("rlm/**/*.py")]:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                node.body = []
        names = [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
        names += [n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
        for name in names:
            found[name.partition(".")[0]].add(str(file.relative_to(ROOT)))
    return found


def test_who_imports_what():
    """The GRPO loop does not use TRL, and bitsandbytes is imported before PEFT imports it.

    See `rlm.model.quantize.import_bitsandbytes`.
    """
    found = importers()
    assert found["trl"] == {"rlm/training/sft.py", "rlm/conformance/peer_trl.py"}
    assert found["peft"] <= {
        "rlm/model/base.py",
        "rlm/model/adapters.py",
        "rlm/serving/models.py",
    }


@pytest.mark.slow
def test_importing_a_script_runs_nothing(tmp_path):
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import {', '.join(SCRIPTS)}"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert (result.returncode, result.stdout) == (0, "")
    assert list(tmp_path.iterdir()) == []


# --- prompts that are too long --------------------------------------------------------------------


def questions_in(path, questions):
    rows = [{"id": f"p{i}", "question": text, "answer": "1"} for i, text in enumerate(questions)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


SUMS, LONG = [f"{i} + 1?" for i in range(40)], [f"{i} {'x' * 990}" for i in range(5)]


def test_prompts_beyond_the_window_are_left_out_and_counted(model_dir, tmp_path, capsys):
    """Each byte is a token, and the window has 1,024 tokens."""
    file = questions_in(tmp_path / "mine.jsonl", SUMS + LONG)  # some of both kinds are held out
    grpo, found = tmp_path / "grpo", tmp_path / "found"
    arguments = [
        "--model", model_dir, "--dataset", file, "--sft-adapter", "none", "--steps", 1,
        "--batch-size", 2, "--group-size", 2, "--max-new-tokens", 8, "--output", grpo,
        "--run-dir", tmp_path / "run",
    ]  # fmt: skip
    assert run(train_grpo, *arguments) == 0
    said = capsys.readouterr().out
    limit = "prompts over 1016 tokens (the context window of 1024 minus --max-new-tokens 8)"
    assert f"4 of 41 problems left out: {limit}" in said
    assert f"1 of 4 validation problems left out: {limit}" in said
    assert json.loads((grpo / "run.json").read_text())["validated_on"] == 3

    arguments = ["--adapter", grpo, "--sft-adapter", "none", "--split", "test", "--few-shot", 3]
    arguments += ["--max-new-tokens", 8, "--output", found]
    assert run(evaluate, *arguments) == 0
    said = capsys.readouterr().out
    left_out = "prompts over 1016 tokens (the context window of 1024 minus --max-new-tokens 8)"
    assert f"5 of 45 problems left out: {left_out}" in said
    report = json.loads((found / "evaluation.json").read_text())
    assert report["left_out"] == 5
    assert "test, n = 40; " in said


def test_a_few_shot_row_whose_prompts_are_too_long_is_left_out(model_dir, tmp_path, capsys):
    """Only the row is left out; the problems of the other rows stay the same."""
    arguments = ["--base-only", "--model", model_dir, *DATA, "--max-samples", 2, "--few-shot", 9]
    assert run(evaluate, *arguments, "--max-new-tokens", 8, "--output", tmp_path) == 0
    said = capsys.readouterr().out
    assert "the few-shot row is left out: its prompts exceed the 1016 tokens" in said
    report = json.loads((tmp_path / "evaluation.json").read_text())
    assert (list(report["greedy"]["rows"]), report["left_out"]) == (["base"], 0)


def test_few_worked_examples_are_found_among_many_rows(tmp_path):
    rows = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(100)]
    for n in range(0, 100, 20):
        rows[n]["solution"] = f"{n} + 1 = {n + 1}"
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"few_shot": 3, "tool": "none", "reasoning_format": "deepseek"}
    config = evaluate.EvaluateConfig(dataset=str(file), **options)
    examples = evaluate.worked_examples(config, [])
    assert len(examples) == 3
    assert all(question[8:-1] in completion for question, completion in examples)


def test_where_all_are_too_long_it_is_one_line(model_dir, tmp_path, capsys):
    file = questions_in(tmp_path / "mine.jsonl", LONG)
    common = ["--model", model_dir, "--dataset", file, "--max-new-tokens", 200]
    grpo = [*common, "--sft-adapter", "none", "--output", tmp_path / "o", "--run-dir", tmp_path]
    for script, arguments in (
        (train_grpo, grpo),
        (train_grpo, [*grpo, "--doctor"]),
        (evaluate, [*common, "--base-only", "--output", tmp_path / "found"]),
    ):
        assert run(script, *arguments) == 2
        said = capsys.readouterr().err
        assert re.fullmatch(
            r"error: no prompt of the problems fits: the context window of 1024 minus "
            r"--max-new-tokens 200 is 824 tokens, but the shortest prompt has \d{3,}\n", said
        ), said  # fmt: skip


# --- a user's mistakes: one line that says what to do, exit code 2, nothing written --------------

NO_START = ("--sft-adapter", "none")
MISTAKES = [
    (train_sft, ["--model", "no/such-model", *DATA], "no such directory"),
    (train_grpo, ["--model", "no/such-model", *DATA], "no such directory"),
    (evaluate, ["--model", "no/such-model", "--base-only", *DATA], "no such directory"),
    (train_sft, ["--dataset", "missing.jsonl"], "missing.jsonl"),
    (train_sft, ["--batch-size", "10", "--micro-batch", "4"], "multiple"),
    (train_sft, ["--learning-rate", "0"], "above 0"),
    (train_grpo, ["--sft-adapter", "nowhere"], "python train_sft.py"),
    (train_sft, ["--adapter", "nowhere"], "does not exist"),
    (train_grpo, ["--train-batch-size", "0"], "at least 1"),
    (train_grpo, ["--reward", "steps", "--reward", "steps"], "put a list of them into FILE.py"),
    (
        train_grpo,
        ["--model", "no/such", *DATA, "--resume", *NO_START],
        "no checkpoint in runs/grpo",
    ),
    (train_sft, ["--model", "no/such", *DATA, "--resume"], "no checkpoint in runs/sft"),
    (evaluate, ["--audit-reward"], "samples.jsonl does not exist"),
    (evaluate, ["--adapter", "nowhere"], "python train_grpo.py"),
    (evaluate, ["--adapter", "none"], "no adapter to evaluate"),
    (evaluate, ["--temperature", "0"], "above 0"),
    # A file at --output is detected before the evaluation.
    (evaluate, ["--base-only", *DATA, "--output", __file__], "--output"),
    (
        train_grpo,
        [*DATA, "--max-samples=9", "--sft-adapter=none", f"--run-dir={__file__}/run", "--output=x"],
        "written",
    ),
    (inference, ["hi", "--adapter", "nowhere"], "python train_sft.py"),
    (inference, ["--json"], "one question"),
    (inference, ["hi", "--top-p", "2"], "at most 1"),
    (inference, ["hi", "--experiences", "nowhere.json"], "cannot read the library"),
]


@pytest.mark.parametrize(("script", "arguments", "message"), MISTAKES, ids=str)
def test_a_mistake_is_one_line(
    script, arguments, message, model_dir, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    if script is not inference and "--model" not in arguments:
        arguments = ["--model", str(model_dir), *arguments]
    assert run(script, *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message in error
    assert "Traceback" not in error
    assert list(tmp_path.iterdir()) == []


def test_sft_under_a_launcher_is_refused(model_dir, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run(train_sft, "--model", model_dir, *DATA) == 2
    assert "SFT runs in one process" in capsys.readouterr().err


CONFIGS = [
    "train_sft.SFTConfig",
    "rlm.training.config.GRPOConfig",
    "eval.EvaluateConfig",
    "inference.InferenceConfig",
    "server.ServerConfig",
    "examples.demo.DemoConfig",
    "recipes.orchestrator.config.OrchestratorConfig",
    "recipes.orchestrator.evaluate.EvaluateConfig",
    "recipes.orchestrator.ask.AskConfig",
    "recipes.experience.train.TrainConfig",
    "recipes.experience.evaluate.EvaluateConfig",
    "benchmarks.grpo_step.GRPOStepConfig",
    "benchmarks.rollout.RolloutConfig",
    "benchmarks.serving.ServingConfig",
    "benchmarks.evidence.plan.EvidenceConfig",
]
# Flags that accept negative numbers.
SIGNED = {"seed", "seeds"}


@pytest.mark.parametrize("path", CONFIGS)
def test_every_flag_refuses_what_makes_no_sense(path):
    """Each flag rejects text instead of a number, a negative count, and an unknown choice."""
    cls = pkgutil.resolve_name(path)
    for flag in flags_of(cls):
        kinds = str(flag.kind)
        tried = []  # empty for text and paths, which are checked when the script runs
        if flag.choices:
            tried = ["nonsense"]
        elif "int" in kinds or "float" in kinds:
            tried = ["nonsense", "nan", "1e400", *(["-1"] if flag.name not in SIGNED else [])]
        for value in [] if flag.positional else tried:
            with pytest.raises(UsageError) as refused:
                parse(cls, [f"{flag.spelling}={value}"])
            assert flag.spelling in str(refused.value)
            assert "\n" not in str(refused.value)


def test_an_adapter_of_another_base_is_refused(trained, tmp_path, tokenizer, capsys):
    from conftest import tiny_model

    other = tmp_path / "other"
    tiny_model(seed=1).save_pretrained(other)
    tokenizer.save_pretrained(other)
    for script, arguments in (
        (train_grpo, ["--sft-adapter", trained / "sft", *DATA]),
        (evaluate, ["--adapter", trained / "grpo", "--sft-adapter", "none"]),
        (inference, ["hi", "--adapter", trained / "grpo"]),
    ):
        assert run(script, *arguments, "--model", other) == 2
        assert "other weights" in capsys.readouterr().err


def test_another_chat_template_than_in_training_is_refused(trained, model_dir, tmp_path, capsys):
    """With another template, the prompts would differ from those of training."""
    other = shutil.copytree(model_dir, tmp_path / "other")
    template = other / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|im_start|>", "<|im_start|> ", 1))
    assert run(inference, "hi", "--adapter", trained / "grpo", "--model", other) == 2
    assert "another chat template" in capsys.readouterr().err
    template.unlink()  # as of a base model without chat training
    assert run(inference, "hi", "--adapter", trained / "grpo", "--model", other) == 2
    assert "no chat template; use an instruct model" in capsys.readouterr().err


@pytest.mark.parametrize(
    "file", sorted((ROOT / "configs").glob("[dos]*.yaml")), ids=lambda f: f.name
)
def test_yaml_configs_parse(file):
    """These are configs of demos, the shipped run and recipes; test_configs.py tests the others."""
    classes = {"sft": "train_sft.SFTConfig", "grpo": "train_grpo.GRPOConfig"}
    kind = file.stem.rpartition("_")[2]
    cls = pkgutil.resolve_name(classes.get(kind, "recipes.orchestrator.config.OrchestratorConfig"))
    dataset = parse(cls, ["--config", str(file)]).dataset
    assert {name.partition(":")[0] for name in dataset.split("+")} <= {
        *("word-problems", "elementary", "runs/shipped/gsm8k.jsonl"),
    }


def test_the_demo_runs_to_its_summary(model_dir, tmp_path, capsys):
    """Run `make demo` with options that take a few seconds."""
    common = f"model: {model_dir}\ndataset: word-problems:1\nbatch_size: 4\neval_samples: 0\n"
    (tmp_path / "sft.yaml").write_text(common + "max_samples: 8\nmicro_batch: 4\n")
    (tmp_path / "grpo.yaml").write_text(
        common.replace("samples: 0", "samples: 3")
        + "steps: 2\ngroup_size: 2\nmax_new_tokens: 8\neval_every: 1\nmax_samples: 40\n"
    )
    config = demo.DemoConfig(
        output=tmp_path / "demo",
        problems=6,
        sft_config=tmp_path / "sft.yaml",
        grpo_config=tmp_path / "grpo.yaml",
    )
    assert not demo.main(config)
    summary = json.loads((tmp_path / "demo" / "summary.json").read_text())
    assert set(summary["accuracy"]) == {"base", "sft", "grpo"}
    for row in summary["accuracy"].values():
        for grading in ("strict", "lenient"):
            assert row[grading]["total"] == 6
            assert 0 <= row[grading]["low"] <= row[grading]["high"] <= 1
    assert summary["gain"]["low"] <= summary["gain"]["points"] <= summary["gain"]["high"]
    assert set(summary["seconds"]) > {"sft", "grpo", "total"}
    assert summary["peak_memory_gb"] > 0
    curve = summary["curve"]
    lengths = {name: len(points) for name, points in curve.items()}
    assert lengths == {
        "greedy": 3,
        "sampled": 2,
        "validation": 3,
    }  # at the start and after each step
    for points in curve.values():
        assert [seconds for seconds, _ in points] == sorted(seconds for seconds, _ in points)
    assert (tmp_path / "demo" / "learning.png").read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr().out
    assert "[5 of 5] evaluate grpo: about" in said
    assert "0 only after GRPO, 0 only after SFT, 6 after neither" in said
    assert "final_rlm_lora" in said.splitlines()[-1]
    assert "weights" not in said.partition("Next:")[2]
