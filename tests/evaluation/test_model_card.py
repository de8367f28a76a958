"""The model card, and the names of datasets in it without directories of this machine."""

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import tiny_model

import inference
from rlm.cli.options import parse
from rlm.evaluation import model_card
from rlm.model import AdapterInfo, base_model_hash, new_adapter, public_dataset
from rlm.model.export import save_adapter

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def adapter(model_dir, tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("home") / "my_lora"
    run = {
        "stage": "grpo", "base_model": str(model_dir), "step": 36,
        "base_hash": base_model_hash(str(model_dir)), "exported": "best", "validated_on": 80,
        "validation": {"measure": "accuracy", "completions": 2, "start": {"mean": 0.5},
                       "best": {"mean": 0.625, "low": 0.515, "high": 0.723}},
        "dataset": f"elementary+OpenAI/gsm8k:{path.parent}+{path.parent}/mine.jsonl",
        "start_adapter": str(path.parent / "sft"),
        "config": {"reasoning_format": "simple", "run_dir": str(path.parent / "run"),
                   "group_size": 8, "batch_size": 20, "learning_rate": 1e-4,
                   "system_prompt": "Reason in <reasoning>, answer in <answer>."},
    }  # fmt: skip
    save_adapter(new_adapter(tiny_model(), r=4, alpha=8), tokenizer, path, run)
    (path / "notes.bin").write_bytes(b"mine")
    return path


def test_the_card_of_an_adapter(adapter):
    command = [sys.executable, "-m", "rlm.evaluation.model_card", str(adapter)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    said = done.stdout
    assert "accuracy is 62.5% (95 % interval 51.5% to 72.3%) in the strict format, with 2" in said
    assert "completions of each of 80 problems. Before this stage, it was 50.0%." in said
    for line in (
        "- OpenAI/gsm8k: MIT.",
        "- elementary: Apache-2.0",
        "- mine.jsonl: unknown licence",
    ):
        assert line in said
    assert "Reason in <reasoning>, answer in <answer>." in said
    assert str(adapter.parent) not in said


def test_a_merged_model_has_a_card_of_its_own(adapter, tmp_path):
    options = ["--adapter", str(adapter), "--merge", str(tmp_path / "merged")]
    inference.main(parse(inference.InferenceConfig, options))
    said = (tmp_path / "merged/README.md").read_text()
    assert "with an adapter merged into it" in said
    assert "library_name: peft" not in said


def test_a_card_of_the_users_own_is_kept():
    shipped = ROOT / "weights/final_rlm_lora"
    card = model_card(shipped, AdapterInfo.load(shipped), merged=False)
    assert card == (shipped / "README.md").read_text("utf-8")


def test_a_reward_is_not_said_to_be_in_a_format(tmp_path):
    one = {"mean": 0.5, "low": 0.25, "high": 0.75}
    found = {"measure": "reward", "completions": 1, "start": {"mean": None}, "best": one}
    run = {"validation": found, "exported": "best", "validated_on": 80}
    info = AdapterInfo(tmp_path, base_model="smollm2-135m", run=run)
    said = model_card(tmp_path, info, merged=False)
    assert "0.500 (95 % interval 0.250 to 0.750), with 1 sampled completion of each of 80" in said
    averaged = AdapterInfo(
        tmp_path, base_model="smollm2-135m", run=run | {"average": {"weight": 0.75}}
    )
    said = model_card(tmp_path, averaged, merged=True)
    assert "No result of these averaged weights is recorded" in said
    assert "0.500" not in said


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
