"""The Python API: imports, arguments, data, the output of a run, and rejected values."""

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
from conftest import byte_tokenizer, tiny_model

import rlm
import train_grpo
from rlm import load_gsm8k
from rlm.cli.options import UsageError
from rlm.data.loaders import load_gsm8k as loader
from rlm.data.problem import Problem, as_problems
from rlm.evaluation.evaluator import evaluate
from rlm.rewards import CorrectnessReward, StepsReward
from rlm.rewards.base import RewardFunction
from tests import test_train_grpo
from tests.test_train_grpo import CPU

ROWS = [{"question": f"{i} + {i}?", "answer": f"{2 * i}"} for i in range(9)]


def letters(completion, reference_answer):
    return float(any(letter in completion for letter in "etaoin"))


a_config = partial(test_train_grpo.a_config, steps=None, lr_schedule="linear", save_every=0)


def test_the_imports_load_torch_only_with_the_trainer():
    code = (
        "import rlm, sys\n"
        "from rlm import GRPOConfig, load_gsm8k\n"
        "from rlm.data import load_gsm8k\n"
        "from rlm.rewards import CombinedReward, FormatReward\n"
        "from rlm.rewards.base import RewardFunction\n"
        "assert 'GRPOTrainer' in rlm.__all__\n"
        "assert not {'torch', 'train_grpo'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert rlm.GRPOTrainer is train_grpo.GRPOTrainer
    assert rlm.rewards.RewardFunction is RewardFunction
    assert load_gsm8k is loader
    with pytest.raises(AttributeError, match="no attribute 'GRPOTrainr'"):
        rlm.GRPOTrainr  # noqa: B018


# --- a run from Python ----------------------------------------------------------------------------


def test_the_reward_of_a_config_is_used_unless_one_is_passed(model_dir, tmp_path):
    config = replace(a_config(tmp_path), reward="steps")
    assert isinstance(rlm.GRPOTrainer(model_dir, config, device=CPU).scorer.reward, StepsReward)
    passed = rlm.GRPOTrainer(model_dir, config, CorrectnessReward(), device=CPU)
    assert not isinstance(passed.scorer.reward, StepsReward)


def test_a_run_is_one_pass_over_a_dataset_and_says_what_it_does(model_dir, tmp_path, capsys):
    from datasets import Dataset

    dataset = Dataset.from_list(
        [{"prompt": row["question"], "response": f"So.\n#### {row['answer']}"} for row in ROWS]
    )
    trainer = rlm.GRPOTrainer(model_name=str(model_dir), config=a_config(tmp_path), device=CPU)
    summary = trainer.train(dataset, eval_dataset=ROWS[:2])
    assert summary["steps_run"] == 3  # 9 problems, and 4 in each step
    assert summary["validated_on"] == 2
    recorded = json.loads((tmp_path / "run" / "config.json").read_text())
    assert recorded["steps"] == 3
    said = capsys.readouterr().out
    first = said.index("step 1/3")
    for text in (
        f"model: {model_dir} + a new adapter",
        "data: from Python: 9 problems, 2 to validate on",
        "steps: 3 (",
        "algorithm: grpo: A = ",
        "2 of 2 validation problems are training problems too",
        "training starts without an SFT adapter",
        f"python train_sft.py --model {model_dir}",
        "reward_fn=[FormatReward(), CorrectnessReward()]",
        "memory",
    ):
        assert 0 <= said.find(text) < first, text

    assert trainer.model is trainer.policy
    [[greedy]] = evaluate(
        trainer.sampler, trainer.tokenizer, [Problem("", "1 + 1?", "")], trainer.format,
        max_new_tokens=6,
    ).groups  # fmt: skip
    assert trainer.generate("1 + 1?") == greedy.text != ""
    with pytest.raises(TypeError, match=r"one question as a str, not \['1 \+ 1\?'\]"):
        trainer.generate(["1 + 1?"])


def test_a_taught_start_and_a_reward_of_ones_own_are_not_warned_of(model_dir, tmp_path, capsys):
    config = a_config(tmp_path, steps=2)
    trainer = rlm.GRPOTrainer(model_dir, config, letters, device=CPU)
    assert trainer.train(ROWS, [])["steps_run"] == 2
    said = capsys.readouterr().out
    assert "without an SFT adapter" not in said
    assert "training problems too" not in said
    taught = a_config(
        tmp_path, sft_adapter=tmp_path / "run_adapter", output=tmp_path / "next", steps=1
    )
    rlm.GRPOTrainer(str(model_dir), taught, device=CPU).train(ROWS)
    assert "without an SFT adapter" not in capsys.readouterr().out


def test_a_tokenizer_of_ones_own_is_used(tmp_path):
    tiny_model().save_pretrained(tmp_path / "model")  # the folder has no tokenizer
    tokenizer = byte_tokenizer()
    config = a_config(tmp_path)
    trainer = rlm.GRPOTrainer(str(tmp_path / "model"), config, tokenizer=tokenizer, device=CPU)
    assert trainer.tokenizer is tokenizer is trainer.sampler.tokenizer
    with pytest.raises(UsageError):
        rlm.GRPOTrainer(str(tmp_path / "model"), config, device=CPU)


# --- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"reward_funcs": [letters]}, "unexpected keyword argument 'reward_funcs'"),
        ({"model_name": tiny_model}, "model_name is a function: pass a hub id or a directory"),
        ({"config": {"steps": 3}}, "config is a builtins.dict: pass an rlm.GRPOConfig"),
        ({"reward_fn": []}, "CombinedReward needs at least one reward"),
    ],
)
def test_a_wrong_argument_is_refused_before_anything_is_loaded(arguments, message, monkeypatch):
    monkeypatch.setattr(train_grpo, "base_model_hash", lambda *_, **__: pytest.fail("it loads"))
    with pytest.raises((TypeError, ValueError)) as refused:
        rlm.GRPOTrainer(**{"model_name": "smollm2-135m"} | arguments)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


# --- data -----------------------------------------------------------------------------------------


def test_rows_and_problems_are_taken_alike():
    from datasets import Dataset, DatasetDict

    problems = as_problems([{**row, "level": 2, "id": str(i)} for i, row in enumerate(ROWS)])
    assert problems[3] == Problem("3", "3 + 3?", "6", columns={"level": 2})
    assert as_problems(problems) == problems
    dataset = Dataset.from_list(ROWS)
    assert as_problems(dataset)[8].answer == "16"
    numbers = [{"question": "3 + 3?", "answer": 6}]
    assert as_problems(Dataset.from_list(numbers).with_format("numpy"))[0].answer == "6"
    with pytest.raises(UsageError, match="dataset is a dict of train: pass one split, or a list"):
        as_problems(DatasetDict({"train": dataset}))
    assert as_problems(iter(ROWS))[0].id == "dataset-1"
    mixed = as_problems([problems[0], ROWS[1]])
    assert [p.question for p in mixed] == ["0 + 0?", "1 + 1?"]


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ([], "dataset is empty: expected rows with question or prompt or problem, and answer or"),
        ("gsm8k", "dataset is 'gsm8k': expected rows with"),
        (None, "dataset is None: expected rows"),
        (["1 + 1?"], "row 1 of dataset is '1 + 1?': expected rows"),
        ([Problem("a", "?", "1"), 3], "row 2 of dataset is 3: expected"),
        ([{"input": "?", "target": 1}], "dataset has the columns input, target: expected rows"),
        ([{"question": "?", "gold": 1}], "dataset has the columns question, gold: expected"),
        ([{"question": "?", "answer": "many"}], "the answer is not a number: 'many'"),
    ],
)
def test_what_is_no_data_gets_one_line(dataset, message):
    with pytest.raises(UsageError) as refused:
        as_problems(dataset)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
