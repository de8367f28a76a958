"""Preparation of the shipped adapter: rounding, evaluation and model card, without local paths."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

import train_grpo
import train_sft
from benchmarks import ship
from inference import load_rlm_model
from rlm.cli import UsageError
from rlm.model import AdapterInfo
from rlm.training.config import GRPOConfig
from rlm.training.sft_config import SFTConfig
from tests.test_scripts import DATA

TEST_SET = '{"question": "What is 1 + 1?", "answer": "2"}\n{"question": "1 + 2?", "answer": "3"}\n'
OPEN = '{"question": "Say something.", "answer": "", "answer_type": "open"}\n'


@pytest.fixture(scope="module")
def run(model_dir, tmp_path_factory):
    """Return a directory with adapters of both stages that were trained with the calculator."""
    folder, dataset = tmp_path_factory.mktemp("run"), DATA[1]
    same = {"model": str(model_dir), "dataset": dataset, "tool": "calculator"}
    train_sft.main(
        SFTConfig(
            **same, max_samples=8, batch_size=4, micro_batch=4, eval_samples=0, lora_r=2,
            reasoning_format="deepseek", output=folder / "sft", run_dir=folder / "run_sft",
        )
    )  # fmt: skip
    train_grpo.main(
        GRPOConfig(
            **same, sft_adapter=folder / "sft", output=folder / "grpo", run_dir=folder / "run",
            steps=1, batch_size=2, group_size=2, max_new_tokens=8, eval_samples=2,
        )
    )  # fmt: skip
    (folder / "mine.jsonl").write_text(TEST_SET)
    return folder


def config_of(run, folder, **options):
    sets = ("elementary", str(run / "mine.jsonl"))
    places = {"weights": folder / "weights" / "final", "results": folder / "results" / "e.json"}
    more = {"sets": sets, "max_samples": 3, "validation": 2, "max_new_tokens": 8, **places}
    more |= options
    return ship.ShipConfig(adapter=run / "grpo", **more)


def test_an_adapter_is_shipped_with_its_figures(run, tmp_path):
    config = config_of(run, tmp_path)
    assert ship.main(config) == 0
    trained = load_file(run / "grpo" / "adapter_model.safetensors")
    tensors = load_file(config.weights / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert all(torch.equal(tensors[name], trained[name].bfloat16()) for name in trained)
    found = json.loads(config.results.read_text())
    assert {name: list(tools) for name, tools in found["sets"].items()} == {
        "elementary": ["none", "calculator"], "mine": ["none", "calculator"],
    }  # fmt: skip
    for tools in found["sets"].values():
        for figures in tools.values():
            assert figures["shipped"]["strict"]["correct"] == 0  # a random model is never right
            assert figures["lead"] == {"points": 0, "low": 0, "high": 0}
    assert set(found["verdicts"]["mine"]["none"].values()) == {"00"}
    assert [len(found["verdicts"][name]["calculator"]) for name in found["sets"]] == [3, 2]
    card = (config.weights / "README.md").read_text()
    assert "| elementary | 3 | none | 0.0 (0.0–56.2) | 0 | +0.0 (+0.0 to +0.0) |" in card
    assert "Wrong. " in card
    assert "Right. " not in card
    nothing_right = {"none": 0.0, "calculator": 0.0}
    assert found["average"] == {  # no candidate is better than the adapter after GRPO
        "weight": 1.0,
        "problems": 2,
        "accuracy": dict.fromkeys(("1", "0.75", "0.5", "0.25", "0"), nothing_right),
    }
    shipped = json.loads((config.weights / "run.json").read_text())
    assert (shipped["stage"], shipped["config"]["tool"]) == ("grpo", "calculator")
    texts = [file for file in config.weights.iterdir() if file.suffix != ".safetensors"]
    everything = "".join(file.read_text() for file in [*texts, config.results])
    assert str(run) not in everything
    model, _ = load_rlm_model(
        config.weights, model=json.loads((run / "grpo" / "run.json").read_text())["base_model"]
    )
    assert model.rlm_format.reasoning_tag == "think"


def test_the_average_that_is_best_on_validation_ships(run, tmp_path, monkeypatch):
    start, trained = {"a": torch.tensor([0.0, 8.0])}, {"a": torch.tensor([4.0, 0.0])}
    assert ship.average(start, trained, 0.25)["a"].tolist() == [1.0, 6.0]
    measured = {"1": 0.2, "0.75": 0.3, "0.5": 0.6, "0.25": 0.6, "0": 0.5}

    class Judged:
        def __init__(self, share):
            self.share = share

        def accuracy(self, strict):
            return {"mean": self.share}

    def judge(config, info, adapters, sets):
        assert [*adapters] == [*measured]
        return {"validation": {"none": {name: Judged(measured[name]) for name in adapters}}}

    config = config_of(run, tmp_path, sets=(str(run / "mine.jsonl"),))
    info = AdapterInfo.load(run / "grpo")
    monkeypatch.setattr(ship, "judge", judge)
    chosen = ship.choose_weight(config, info, run / "sft")
    assert chosen["weight"] == 0.5  # of two equals, the one with more of GRPO
    monkeypatch.undo()
    monkeypatch.setattr(ship, "choose_weight", lambda *_: chosen)
    assert ship.main(config) == 0
    before, after = (ship.load_weights(run / name) for name in ("sft", "grpo"))
    for name, tensor in ship.load_weights(config.weights).items():
        assert torch.equal(tensor, ((before[name] + after[name]) / 2).bfloat16())
    assert (
        "(50 % before, 50 % after, chosen on 2 validation problems)"
        in (config.weights / "README.md").read_text()
    )


def test_where_grpo_did_not_help_the_card_says_so(run, tmp_path):
    adapter = tmp_path / "grpo"
    shutil.copytree(run / "grpo", adapter)
    record = json.loads((adapter / "run.json").read_text())
    changed = {"step": 0, "start_accuracy": 0.25, "dataset": None}  # trained in Python, on a list
    (adapter / "run.json").write_text(json.dumps(record | changed))
    (tmp_path / "mine.jsonl").write_text(OPEN + TEST_SET)
    config = config_of(run, tmp_path, sets=(str(tmp_path / "mine.jsonl"),))
    assert ship.main(replace(config, adapter=adapter)) == 0
    card = (config.weights / "README.md").read_text()
    assert "**No step of GRPO was better than the SFT adapter** on 2 validation problems" in card
    assert "(25.0 %), so these are the weights after SFT" in card
    assert "| mine | 2 | none | 0.0 (0.0–65.8) | 0 |\n" in card
    assert "ahead of SFT" not in card
    assert "on a dataset without a name" in card
    verdicts = json.loads(config.results.read_text())["verdicts"]["mine"]["none"]
    assert len(verdicts) == 2  # the open problem has none


def test_what_is_too_large_or_no_result_of_grpo_is_refused_and_nothing_replaced(
    run, tmp_path, monkeypatch
):
    config = config_of(run, tmp_path, sets=(str(run / "mine.jsonl"),))
    shutil.copytree(run / "sft", config.weights)
    before = (config.weights / "run.json").read_bytes()
    with pytest.raises(UsageError, match=r"not made by train_grpo\.py"):
        ship.main(ship.ShipConfig(adapter=run / "sft", weights=config.weights))
    monkeypatch.setattr(ship, "LARGEST_MB", 1e-6)
    with pytest.raises(UsageError, match="too large to commit"):
        ship.main(config)
    assert (config.weights / "run.json").read_bytes() == before
    assert [path.name for path in config.weights.parent.iterdir()] == [config.weights.name]
