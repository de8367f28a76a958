"""The course's two scripts, typed as its pages and ours have them, on a tiny model."""

import json
import re
from dataclasses import replace

import pytest

import eval as evaluate
import inference
import server
import train_grpo
import train_sft
from rlm.cli.options import UsageError
from rlm.data import loaders
from rlm.data.loaders import dataset_name, load_problems
from rlm.data.prompts import FORMATS, render_prompt
from rlm.training.sft_config import SFTConfig
from tests.test_scripts import DATA, ROOT, no_hub, run  # noqa: F401  a fixture for all
from tests.test_train_grpo import a_config, a_trainer

OPENMATH = ROOT / "data" / "openmathinstruct_sample.jsonl"
SHORT = [
    "--steps", 1, "--batch-size", 2, "--group-size", 2, "--max-new-tokens", 8, "--max-samples", 4,
    "--eval-samples", 2,
]  # fmt: skip


# --- the tags are those of the adapter ------------------------------------------------------------


@pytest.fixture(scope="module")
def simple(model_dir, tmp_path_factory):
    """An SFT adapter that was taught --reasoning_format simple."""
    path = tmp_path_factory.mktemp("simple")
    assert run(
        train_sft, "--model", model_dir, *DATA, "--reasoning_format", "simple", "--max-samples", 4,
        "--batch-size", 4, "--micro-batch", 4, "--eval-samples", 0, "--output", path / "sft",
        "--run-dir", path / "run",
    ) == 0  # fmt: skip
    return path / "sft"


@pytest.fixture
def prompted(monkeypatch):
    """The reasoning tags of the prompts that scripts render, since the last call."""
    seen, render = [], train_grpo.render_problem

    def watched(tokenizer, problem, format, **options):
        seen.append(format.reasoning_tag)
        return render(tokenizer, problem, format, **options)

    for module in ("rlm.training.sft_examples", "train_grpo", "eval"):
        monkeypatch.setattr(f"{module}.render_problem", watched)
    monkeypatch.setattr("rlm.evaluation.evaluator.render_problem", watched)

    def take():
        found = set(seen)
        seen.clear()
        return found

    return take


def recorded_tags(adapter):
    return json.loads((adapter / "run.json").read_text())["config"]["reasoning_format"]


def test_what_sft_taught_is_trained_evaluated_and_asked(
    simple, tmp_path, tokenizer, prompted, capsys
):
    grpo, longer, found = tmp_path / "grpo", tmp_path / "longer", tmp_path / "evaluation"
    run_dir = ["--run-dir", tmp_path / "run"]
    assert run(train_grpo, "--sft-adapter", simple, *SHORT, "--output", grpo, *run_dir) == 0
    assert (prompted(), recorded_tags(grpo)) == ({"reasoning"}, "simple")
    assert run(
        train_sft, "--adapter", simple, "--max-samples", 2, "--batch-size", 2, "--micro-batch", 2,
        "--eval-samples", 0, "--output", longer, "--run-dir", tmp_path / "run_longer",
    ) == 0  # fmt: skip
    assert (prompted(), recorded_tags(longer)) == ({"reasoning"}, "simple")
    few = ["--max-samples", 2, "--max-new-tokens", 4, "--few-shot", 0, "--output", found]
    assert run(evaluate, "--sft-adapter", simple, "--adapter", grpo, *few) == 0
    config = json.loads((found / "evaluation.json").read_text())["config"]
    assert (prompted(), config["reasoning_format"]) == ({"reasoning"}, "simple")
    capsys.readouterr()
    assert run(inference, "2 + 2?", "--json", "--adapter", grpo, "--max-new-tokens", 4) == 0
    prompts = [len(render_prompt(tokenizer, "2 + 2?", format)) for format in FORMATS.values()]
    assert json.loads(capsys.readouterr().out)["prompt_tokens"] == prompts[1] != prompts[0]
    served = server._service(server.ServerConfig(adapter=grpo)).models
    assert served.adapters["grpo"].format == FORMATS["simple"]


@pytest.mark.parametrize("name", ["train_sft", "train_grpo", "evaluate"])
def test_other_tags_than_the_adapters_are_refused(name, simple, tmp_path, capsys):
    script, other = {
        "train_sft": (train_sft, ["--adapter", simple, "--output", tmp_path / "other"]),
        "train_grpo": (train_grpo, ["--sft-adapter", simple, *SHORT]),
        "evaluate": (evaluate, ["--sft-adapter", simple, "--adapter", "none"]),
    }[name]
    assert run(script, *other, "--reasoning-format", "deepseek") == 2
    assert capsys.readouterr().err == (
        f"error: --reasoning-format deepseek: the adapter {simple} was trained with simple; leave "
        "the option out, or name another adapter (or none)\n"
    )


def test_the_same_in_python(simple, model_dir, tmp_path, capsys):
    config = a_config(tmp_path, sft_adapter=simple, lora_r=16, lora_alpha=32)  # as it has
    trainer = a_trainer(model_dir, config)
    assert (trainer.config.reasoning_format, trainer.format) == ("simple", FORMATS["simple"])
    assert trainer.scorer.reasoning_format == "simple"
    with pytest.raises(UsageError, match="was trained with simple"):
        a_trainer(model_dir, replace(config, reasoning_format="deepseek"))
    assert a_trainer(model_dir, replace(config, sft_adapter=None)).format == FORMATS["deepseek"]
    config = SFTConfig(model=str(model_dir), adapter=simple, reasoning_format="deepseek")
    with pytest.raises(UsageError, match="was trained with simple"):
        train_sft.train(config, [])


def test_adapters_of_different_tags_have_no_rows_in_common(simple, model_dir, tmp_path, capsys):
    other = tmp_path / "other"
    more = ["--run-dir", tmp_path / "run", "--output", other, "--sft-adapter", "none"]
    assert run(train_grpo, "--model", model_dir, *DATA, *SHORT, *more) == 0
    capsys.readouterr()
    assert run(evaluate, "--sft-adapter", simple, "--adapter", other) == 2
    assert (
        "the adapters were trained with different tags (simple, deepseek): evaluate them one by one"
        in capsys.readouterr().err
    )


# --- prompts that are too long --------------------------------------------------------------------


def a_file(path, questions):
    rows = [{"id": f"p{i}", "question": text, "answer": "1"} for i, text in enumerate(questions)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


SUMS, LONG = [f"{i} + 1?" for i in range(40)], [f"{i} {'x' * 990}" for i in range(5)]


def test_prompts_beyond_the_window_are_left_out_and_counted(model_dir, tmp_path, capsys):
    """A byte is a token, and 1,024 of them the window."""
    file = a_file(tmp_path / "mine.jsonl", SUMS + LONG)  # of each kind some are held out
    grpo, found = tmp_path / "grpo", tmp_path / "found"
    arguments = [
        "--model", model_dir, "--dataset", file, "--sft-adapter", "none", "--steps", 1,
        "--batch-size", 2, "--group-size", 2, "--max-new-tokens", 8, "--output", grpo,
        "--run-dir", tmp_path / "run",
    ]  # fmt: skip
    assert run(train_grpo, *arguments) == 0
    said = capsys.readouterr().out
    limit = (
        "prompts over 1016 tokens (the model's window of 1024 less --max-new-tokens 8; "
        "--max-prompt-length sets less)"
    )
    assert f"4 of 41 problems left out: {limit}" in said
    assert f"1 of 4 validation problems left out: {limit}" in said
    assert json.loads((grpo / "run.json").read_text())["validated_on"] == 3

    arguments = ["--adapter", grpo, "--sft-adapter", "none", "--split", "test", "--few-shot", 3]
    arguments += ["--max-new-tokens", 8, "--output", found]
    assert run(evaluate, *arguments) == 0
    said = capsys.readouterr().out
    left_out = "prompts over 1016 tokens (the model's window of 1024 less --max-new-tokens 8)"
    assert f"5 of 45 problems left out: {left_out}" in said
    report = json.loads((found / "evaluation.json").read_text())
    assert report["left_out"] == 5
    assert "test, n = 40; " in said


def test_a_few_shot_row_whose_prompts_are_too_long_is_left_out(model_dir, tmp_path, capsys):
    """The problems stay."""
    arguments = ["--base-only", "--model", model_dir, *DATA, "--max-samples", 2, "--few-shot", 9]
    assert run(evaluate, *arguments, "--max-new-tokens", 8, "--output", tmp_path) == 0
    said = capsys.readouterr().out
    assert "no few-shot row: prompts over 1016 tokens" in said
    report = json.loads((tmp_path / "evaluation.json").read_text())
    assert (list(report["greedy"]["rows"]), report["left_out"]) == (["base"], 0)


def test_where_all_are_too_long_it_is_one_line(model_dir, tmp_path, capsys):
    file = a_file(tmp_path / "mine.jsonl", LONG)
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
            r"error: every prompt of the problems is over 824 tokens \(the model's window of 1024 "
            r"less --max-new-tokens 200.*\)\n", said
        ), said  # fmt: skip


# --- the data sets under the names that they have on the hub, and what SFT is shown of them -------

GSM8K = {
    "question": "Natalia sold 48 clips in April and half as many in May. How many in all?",
    "answer": "She sold 48/2 = <<48/2=24>>24 in May.\nIn all 48+24 = <<48+24=72>>72.\n#### 72",
}
LEARNED = "<think>\nShe sold 48/2 = 24 in May.\nIn all 48+24 = 72.\n</think>\n<answer>72</answer>"


@pytest.mark.parametrize(
    ("name", "known_as"),
    [
        ("openai/gsm8k", "gsm8k"),
        ("OpenAI/GSM8K", "gsm8k"),
        ("GSM8K", "gsm8k"),
        ("nvidia/OpenMathInstruct-1", "openmathinstruct"),
        ("HuggingFaceH4/aime_2024", "aime2024"),
        ("Word-Problems:1", "word-problems:1"),
        ("openai/gsm8k:a/Directory", "gsm8k:a/Directory"),
        ("Mine.jsonl", "Mine.jsonl"),
    ],
)
def test_names_of_data_sets(name, known_as):
    assert dataset_name(name) == known_as


def test_the_courses_data_sets_are_read(monkeypatch):
    rows = {
        "gsm8k": [GSM8K | {"question": f"{i}: {GSM8K['question']}"} for i in range(300)],
        "openmathinstruct": [json.loads(line) for line in OPENMATH.open(encoding="utf-8")],
    }
    monkeypatch.setattr(loaders, "read_hub", lambda name, split, config: enumerate(rows[name], 1))
    assert len(load_problems("openai/gsm8k")) == 270  # the others are for validation
    assert len(load_problems("nvidia/OpenMathInstruct-1", max_samples=5)) == 2


@pytest.mark.parametrize(
    ("boxed", "plain"),
    [
        (r"so $\boxed{42}$.", "so $42$."),
        (r"\boxed{\frac{1}{\sqrt{2}}} and \boxed{7}", r"\frac{1}{\sqrt{2}} and 7"),
        (r"\boxed{4", r"\boxed{4"),  # never closed
    ],
)
def test_boxes_are_taken_off(boxed, plain, tmp_path):
    file = tmp_path / "train.jsonl"
    row = {"question": "?", "expected_answer": "42", "is_correct": True}
    rows = [row | {"question": f"{i}?", "generated_solution": boxed} for i in range(3)]
    file.write_text("\n".join(map(json.dumps, rows)))
    for problem in load_problems(f"nvidia/OpenMathInstruct-1:{file}"):
        taught = FORMATS["deepseek"].completion(problem.solution, problem.answer)
        assert taught == f"<think>\n{plain}\n</think>\n<answer>42</answer>"


@pytest.mark.parametrize(("typed", "shown"), [(["--dry-run", 2], 2), (["--dry-run"], 3)])
def test_a_dry_run_shows_what_is_learned_and_what_is_left_out(
    typed, shown, model_dir, tmp_path, capsys
):
    rows = [GSM8K | {"question": f"{i} {GSM8K['question']}"} for i in range(9)]
    rows += [GSM8K | {"question": "x" * 900}]
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    common = ["--model", model_dir, "--dataset", f"openai/gsm8k:{tmp_path}"]
    output = ["--output", tmp_path / "sft", "--run-dir", tmp_path / "run"]
    before = sorted(tmp_path.iterdir())
    assert run(train_sft, *common, *output, *typed) == 0
    said = capsys.readouterr().out
    parts = re.findall(r"^--- (.*) \((\d+) tokens\)\n((?:(?!---).+\n)+)", said, re.M)
    assert [what for what, *_ in parts] == ["prompt, no loss", "completion, learned"] * shown
    for (_, length, prompt), (_, learned_length, learned) in zip(
        parts[::2], parts[1::2], strict=True
    ):
        assert GSM8K["question"] in prompt
        assert "72" not in prompt
        assert learned.rstrip() == f"{LEARNED}<|im_end|>"
        assert int(learned_length) == len(LEARNED) + 1  # a byte a token, and the end
        assert int(length) > len(GSM8K["question"])
    assert "problems: 9 read, 8 used, 1 left out (over --max-length 1024 tokens)" in said
    assert "validation problems: 1 read, 1 used, 0 left out" in said
    assert sorted(tmp_path.iterdir()) == before  # nothing was trained


def test_a_dry_run_says_why_rows_were_left_out(model_dir, caplog):
    arguments = ["--dataset", f"openmathinstruct:{OPENMATH}", "--eval-samples", 0, "--dry-run", 1]
    assert run(train_sft, "--model", model_dir, *arguments) == 0
    reasons = "1 with code (--keep-code keeps them); 2 wrong; 1 without a number for an answer"
    assert f"2 of 6 rows used, 4 left out: {reasons}" in caplog.text


def test_grpos_dry_run_is_its_plan(model_dir, tmp_path, capsys):
    arguments = ["--model", model_dir, *DATA, "--sft-adapter", "none", *SHORT]
    arguments += ["--run-dir", tmp_path / "run", "--output", tmp_path / "adapter"]
    for typed in ("--plan", "--dry-run"):
        assert run(train_grpo, *arguments, typed) == 0
        said = capsys.readouterr()
        assert said.err == ""
        assert "Plan: estimated, nothing was trained" in said.out
    assert run(train_grpo, *arguments, "--dry-run", 5) == 2
    assert capsys.readouterr().err == "error: unknown option 5: --plan takes no value\n"
    assert list(tmp_path.iterdir()) == []
