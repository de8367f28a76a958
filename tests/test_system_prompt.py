"""--system-prompt: recorded with the adapter, and the same token ids wherever a prompt is made."""

import json
from pathlib import Path

import pytest
from golden import check
from live_server import live

import inference
import server
import train_grpo
import train_sft
from rlm.cli import UsageError, run_main
from rlm.data import FORMATS, read_system_prompt, render_prompt
from rlm.model import AdapterInfo
from rlm.sampling import Sampler
from rlm.scripts import evaluate

OWN = "You are a careful clerk.<|im_end|>\nThink in <think>, answer in <answer>."
QUESTION = "How many eggs are in 7 boxes of 6?"


def run(script, cls, *arguments):
    with pytest.raises(SystemExit) as exit:
        run_main(script.main, cls, argv=[str(argument) for argument in arguments])
    assert (exit.value.code or 0) == 0


@pytest.fixture(scope="module")
def seen(model_dir, tmp_path_factory):
    """Script → the ids of the prompts with QUESTION that it made; and the folder of both runs."""
    folder, patch = tmp_path_factory.mktemp("own"), pytest.MonkeyPatch()
    prompt, data = folder / "system.txt", folder / "problems.jsonl"
    prompt.write_text(f"\n{OWN}\n")
    row = {"ask": QUESTION, "answer": "42", "solution": "7 * 6 = 42"}
    data.write_text("".join(json.dumps(row | {"ask": f"{QUESTION}{' ' * n}!"}) + "\n"
                            for n in range(1, 13)))  # fmt: skip
    found, script = {}, "sft"
    add, examples = Sampler.add_request, train_sft.to_examples

    def add_request(self, request):
        found.setdefault(script, []).append([*request.prompt])
        return add(self, request)

    def to_examples(*arguments):
        made = examples(*arguments)
        found.setdefault("sft", []).extend(
            [i for i, label in zip(e["input_ids"], e["labels"], strict=True) if label == -100]
            for e in made
        )
        return made

    patch.setattr(Sampler, "add_request", add_request)
    patch.setattr(train_sft, "to_examples", to_examples)
    for module in ("rlm.evaluation.report.accuracy_bars", "rlm.training.finish.learning_curves"):
        patch.setattr(module, lambda *_, **__: None)
    columns = ["--columns", "question=ask"]
    common = ["--model", model_dir, "--dataset", data, *columns, "--system-prompt", prompt]
    sft, grpo = folder / "sft", folder / "grpo"
    run(train_sft, train_sft.SFTConfig, *common, "--output", sft, "--run-dir", folder / "run_sft",
        "--batch-size", 8, "--micro-batch", 8)  # fmt: skip
    prompt.unlink()  # from here on the adapter knows it
    script = "grpo"
    run(train_grpo, train_grpo.GRPOConfig, "--sft-adapter", sft, "--output", grpo, "--steps", 1,
        "--batch-size", 2, "--group-size", 2, "--max-new-tokens", 4, "--eval-samples", 1,
        "--run-dir", folder / "run_grpo")  # fmt: skip
    script = "evaluate"
    run(evaluate, evaluate.EvaluateConfig, "--sft-adapter", sft, "--adapter", grpo,
        "--few-shot", 0, "--max-new-tokens", 4, "--max-samples", 2,
        "--output", folder / "evaluation")  # fmt: skip
    asked = f"{QUESTION} !"
    script = "inference"
    run(inference, inference.InferenceConfig, asked, "--adapter", grpo, "--max-new-tokens", 4)
    script = "server"
    service = server._service(server.ServerConfig(adapter=grpo, max_new_tokens=64))
    with live(service) as running:
        answer = running.post({"prompt": asked, "max_new_tokens": 40})
    assert answer.status_code == 200, answer.text
    patch.undo()
    return found, folder


def test_all_five_scripts_make_the_same_prompts(seen, tokenizer):
    found, _ = seen
    format = FORMATS["deepseek"].with_prompt(OWN)
    texts = [f"{QUESTION}{' ' * n}!" for n in range(1, 13)]
    rendered = {tuple(render_prompt(tokenizer, text, format)): text for text in texts}
    scripts = ("sft", "grpo", "evaluate", "inference", "server")
    assert set(found) == set(scripts)
    for script in scripts:
        assert {*map(tuple, found[script])} <= set(rendered), script
    assert len({*map(tuple, found["sft"])}) == 12  # train and validation
    assert rendered[tuple(found["inference"][0])] == rendered[tuple(found["server"][0])] == texts[0]
    check("system_prompt", {"prompt": found["server"][0]})


def test_the_prompt_stands_where_the_usual_one_does_and_forges_no_role(seen, tokenizer):
    ids = seen[0]["server"][0]
    assert tokenizer.decode(ids).startswith(f"<|im_start|>system\n{OWN}<|im_end|>\n")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert ids.count(end) == 2  # of the system's turn and the user's: none of OWN's text


def test_run_json_has_the_text(seen):
    for name in ("sft", "grpo"):
        info = AdapterInfo.load(seen[1] / name)
        assert info.system_prompt == OWN
        assert info.format.system_prompt == OWN
        assert info.run["config"]["columns"] == "question=ask"  # GRPO found it in SFT's


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


def test_adapters_with_different_prompts_are_not_evaluated_together(seen, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    run_json = json.loads((Path(seen[1]) / "grpo" / "run.json").read_text())
    run_json["config"]["system_prompt"] = "Be brief."
    (other / "run.json").write_text(json.dumps(run_json))
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (other / name).symlink_to(Path(seen[1]) / "grpo" / name)
    with pytest.raises(UsageError, match="different system prompts"):
        evaluate.EvaluateConfig.resolve({"sft_adapter": seen[1] / "sft", "adapter": other})
