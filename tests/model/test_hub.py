"""--push-to-hub: what would be uploaded, without paths of this machine; the push, to a fake hub."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import tiny_model
from fake_hub import FakeHub
from peft import PeftModel
from transformers import AutoModelForCausalLM

import inference
from rlm.cli import UsageError
from rlm.cli.options import parse
from rlm.model import AdapterInfo, base_model_hash, collect_uploads, new_adapter, public_dataset
from rlm.model.export import save_adapter

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def adapter(model_dir, tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("home") / "my_lora"
    run = {
        "stage": "grpo", "base_model": str(model_dir), "step": 36, "accuracy": 0.625,
        "base_hash": base_model_hash(str(model_dir)), "start_accuracy": 0.5, "validated_on": 80,
        "dataset": f"elementary+gsm8k:{path.parent}+{path.parent}/mine.jsonl",
        "start_adapter": str(path.parent / "sft"),
        "config": {"reasoning_format": "simple", "run_dir": str(path.parent / "run"),
                   "group_size": 8, "batch_size": 20, "learning_rate": 1e-4,
                   "system_prompt": "Reason in <reasoning>, answer in <answer>."},
    }  # fmt: skip
    save_adapter(new_adapter(tiny_model(), r=4, alpha=8), tokenizer, path, run)
    (path / "notes.bin").write_bytes(b"mine")
    return path


# The hub's library reads its address when it is imported, so it needs a process; one for all runs,
# because importing takes longer than they do.
CHILD = """
import contextlib, io, json, os, sys
import inference
from rlm.cli import run_main
for line in sys.stdin:
    os.environ["HF_TOKEN"], *argv = json.loads(line)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            run_main(inference.main, inference.InferenceConfig, argv=argv)
        except SystemExit as end:
            code = end.code or 0
    print(json.dumps([code, out.getvalue(), err.getvalue()]), flush=True)
"""


@pytest.fixture(scope="module")
def hub():
    with FakeHub({}) as hub:
        yield hub


@pytest.fixture(scope="module")
def push(hub):
    """What `python inference.py --push-to-hub me/lora` does: its exit code, stdout and stderr."""
    environment = os.environ | {
        "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"
    }  # fmt: skip
    with subprocess.Popen(
        [sys.executable, "-c", CHILD], cwd=ROOT, env=environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as child:  # fmt: skip

        def push(*arguments, token="hf_x"):
            words = [token, "--push-to-hub", "me/lora", *map(str, arguments)]
            child.stdin.write(json.dumps(words) + "\n")
            child.stdin.flush()
            return json.loads(child.stdout.readline())

        yield push
        child.stdin.close()


def test_without_yes_it_is_listed_and_nothing_is_asked_of_the_hub(adapter, hub, push):
    before = len(hub.requests)
    code, said, error = push("--adapter", adapter)
    assert code == 0, error
    assert len(hub.requests) == before
    assert "nothing is uploaded without --yes" in said
    listed = [line.split()[-1] for line in said.splitlines() if " MB  " in line]
    assert "adapter_model.safetensors" in listed
    assert "notes.bin" not in listed
    size = (adapter / "adapter_model.safetensors").stat().st_size / 1e6
    assert f"{size:9.3f} MB  adapter_model.safetensors" in said
    # 50 of 80: Wilson's interval by hand is 0.5155 to 0.7231.
    assert "62.5% of 80 validation problems" in said
    assert "(95 % interval 51.5% to 72.3%); 50.0% before this stage" in said
    for line in ("- gsm8k: MIT.", "- elementary: Apache-2.0", "- mine.jsonl: not known here"):
        assert line in said
    assert "Reason in <reasoning>, answer in <answer>." in said


def test_with_yes_it_is_there_and_loads_from_what_was_uploaded(
    adapter, hub, push, model_dir, tmp_path
):
    code, said, error = push("--adapter", adapter, "--yes")
    assert code == 0, error + said
    assert f"uploaded: {hub.url}/me/lora" in said
    refused, _, error = push("--adapter", adapter, "--yes", token="")
    assert refused == 2
    assert error.startswith("error: --push-to-hub me/lora: ")
    assert "hf auth login" in error
    asked = hub.created["me/lora"]
    assert asked.get("private") or asked.get("visibility") == "private"
    files = hub.uploads["me/lora"]
    everything = b"".join(files.values())
    assert str(adapter.parent).encode() not in everything
    run = json.loads(files["run.json"])
    assert run["dataset"] == "elementary+gsm8k+mine.jsonl"
    assert run["config"]["reasoning_format"] == "simple"
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_dir), tmp_path)
    assert loaded.peft_config["default"].r == 4
    assert AdapterInfo.load(tmp_path).format.system_prompt.startswith("Reason in <reasoning>")


def test_a_merged_model_is_uploaded_with_a_card_of_its_own(adapter, tmp_path, capsys):
    options = ["--adapter", str(adapter), "--merge", str(tmp_path / "merged")]
    inference.main(parse(inference.InferenceConfig, [*options, "--push-to-hub", "me/model"]))
    said = capsys.readouterr().out
    assert "model.safetensors" in said
    assert "adapter_model.safetensors" not in said
    assert "with an adapter merged into it" in said
    assert "library_name: peft" not in said


def test_a_card_of_the_users_own_is_kept(adapter, tmp_path):
    shipped = ROOT / "weights/final_rlm_lora"
    from rlm.evaluation import model_card

    card = model_card(shipped, AdapterInfo.load(shipped), merged=False)
    assert card == (shipped / "README.md").read_text("utf-8")
    uploads = collect_uploads(shipped, AdapterInfo.load(shipped), card)
    assert [*uploads] == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
        "run.json",
    ]


def test_mistakes(tmp_path):
    with pytest.raises(UsageError, match="--yes goes with --push-to-hub"):
        parse(inference.InferenceConfig, ["--yes"])
    with pytest.raises(UsageError, match="no question"):
        parse(inference.InferenceConfig, ["2 + 2?", "--push-to-hub", "me/lora"])
    with pytest.raises(UsageError, match="holds no weights"):
        collect_uploads(tmp_path, AdapterInfo(tmp_path), "card")


@pytest.mark.parametrize(
    ("dataset", "name"),
    [
        ("gsm8k", "gsm8k"),
        ("gsm8k:/data", "gsm8k"),
        ("org/name:main", "org/name:main"),
        ("word-problems:1-2", "word-problems:1-2"),
        ("/home/me/a.csv", "a.csv"),
        ("b.jsonl", "b.jsonl"),
    ],
)
def test_data_sets_are_named_without_directories(dataset, name):
    assert public_dataset(dataset) == name
