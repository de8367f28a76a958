"""`train_grpo.py --doctor` finds deliberate faults, and reports none in a sound setup."""

import shlex
from dataclasses import replace

import pytest
from conftest import byte_tokenizer, tiny_model

import train_grpo
from examples import roman
from rlm.data.problem import Problem
from rlm.data.prompts import FORMATS
from rlm.rewards import FormatReward, Scorer, as_reward
from rlm.rewards.scorer import Scores
from rlm.sampling import Completion
from rlm.training.config import GRPOConfig, judge_learning_rate
from rlm.training.doctor import _reward, _signal, diagnose, run_doctor
from tests.test_scripts import run
from tests.test_train_grpo import CPU, PROBLEMS

LLAMA3 = (
    "{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
NO_SYSTEM = (
    "{% for m in messages if m['role'] != 'system' %}<|im_start|>{{ m['role'] }}\n"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Scripted:
    """A sampler whose completions are text(problem number, completion number)."""

    exact, path, stop_ids = True, "scripted", frozenset({257})

    def __init__(self, tokenizer, text, truncated=False):
        self.tokenizer, self.text, self.truncated = tokenizer, text, truncated

    def bytes_for(self, *_):
        return 0

    def start(self):
        pass

    def release(self):
        pass

    def sample(self, prompts, n, params, seeds, on_finish=lambda: None):
        ending, reason = ([], "length") if self.truncated else ([257], "stop")

        def completion(i, j):
            on_finish()
            ids = self.tokenizer.encode(self.text(i, j), add_special_tokens=False) + ending
            return Completion(ids, [-1.0] * len(ids), reason)

        return [[completion(i, j) for j in range(n)] for i in range(len(prompts))]


def half_right(i, j, tags=FORMATS["deepseek"]):
    return tags.completion("so", str(2 * i + (i + j) % 2))


def look(
    model_dir, tmp_path, text=half_right, reward=None, truncated=False, problems=PROBLEMS, **options
):
    config = GRPOConfig(
        sft_adapter=None, group_size=4, max_new_tokens=8, run_dir=tmp_path / "run",
        output=tmp_path / "out", **options,
    )  # fmt: skip
    trainer = train_grpo.GRPOTrainer(str(model_dir), config, reward, device=CPU)
    trainer.sampler = Scripted(trainer.tokenizer, text, truncated)
    return trainer, *diagnose(trainer, problems)[:2]


def test_a_sound_set_up_gets_no_advice(model_dir, tmp_path, capsys):
    trainer, metrics, findings = look(model_dir, tmp_path)
    assert findings == []
    assert metrics == {
        "reward, mean": 0.5,
        "pass@1, strict": 0.5,
        "pass@1, lenient": 0.5,
        "pass@4, strict": 1.0,
        "pass@4, lenient": 1.0,
        "groups with equal rewards": 0.0,
        "answer in the right tags": 1.0,
        "answer anywhere": 1.0,
        "truncated": 0.0,
    }
    assert run_doctor(trainer, PROBLEMS) == 0
    out = capsys.readouterr().out
    assert "ready to train" in out
    for name, reward, verdict in (
        ("best", 1, "correct"),
        ("typical", 0, "wrong"),
        ("worst", 0, "wrong"),
    ):
        assert f"sample ({name}: reward {reward}, {verdict}, reference answer " in out
    assert "on 32 problems" in out
    assert "GB at the peak" in out


@pytest.mark.parametrize("template", [LLAMA3, NO_SYSTEM])
def test_a_wrong_template_is_named(tmp_path, template):
    path = tmp_path / "base"
    tiny_model().save_pretrained(path)
    byte_tokenizer(template=template).save_pretrained(path)
    findings = look(path, tmp_path)[-1]
    if template == NO_SYSTEM:  # the system prompt is put into the first user message
        assert findings == []
        return
    (finding,) = findings
    assert (finding.name, finding.fault) == ("wrong chat template", True)
    assert "<|eot_id|>" in finding.text


ROMAN = [
    Problem(f"r{i}", f"Write {i} in Roman numerals.", "XL", answer_type="text") for i in range(9)
]


@pytest.mark.parametrize("solution", ["", "40 is XL"])
def test_numbers_for_a_task_of_words_are_named_in_plain_words(model_dir, tmp_path, solution):
    """The shipped adapter, which was trained on arithmetic, answers with a calculation."""
    problems = [replace(problem, solution=solution) for problem in ROMAN]
    options = {"problems": problems, "dataset": "my roman.jsonl"}

    def calculate(i, j):
        return FORMATS["deepseek"].completion("first: <<14*100=1400>>", "1400")

    finding, *_ = look(model_dir, tmp_path, calculate, **options)[-1]
    assert (finding.name, finding.fault) == ("another kind of answer", True)
    text = "100% of the completions answer with a calculation; the task requires text"
    assert finding.text == text
    command = (
        f"python train_sft.py --model {shlex.quote(str(model_dir))} --dataset 'my roman.jsonl'"
    )
    write = "" if solution else "write `solution` for a dozen rows, then "
    assert finding.advice == f"teach the format first: {write}{command}"

    def words(i, j):
        return FORMATS["deepseek"].completion("so", "XL" if j % 2 else "LX")

    assert look(model_dir, tmp_path, words, **options)[-1] == []


def blind(completions, answer):
    """A reward that expects the bare answer, which no completion in the format is."""
    return [float(text == answer[0]) for text in completions]


TOO_LOW, NO_SIGNAL = "learning rate too low", "no signal"
IGNORES = "the reward ignores correctness"
BROKEN = {  # fault → (options, {finding: whether it is a fault}, text in the first finding)
    "other tags": (
        {"text": lambda i, j: half_right(i, j, FORMATS["simple"])},
        {"parser mismatch": True, NO_SIGNAL: True},
        "--reasoning-format simple",
    ),
    "no tags": (
        {"text": lambda i, j: rf"so \boxed{{{2 * i + j % 2}}}"},
        {"parser mismatch": True, NO_SIGNAL: True},
        "no_reasoning",
    ),
    "a rate that moves nothing": ({"learning_rate": 1e-8}, {TOO_LOW: True}, "1e-08"),
    "a low rate": ({"learning_rate": 5e-6}, {TOO_LOW: False}, "5e-06"),
    "a rate that breaks": ({"learning_rate": 0.1}, {"learning rate too high": True}, "0.1"),
    "a high rate without warmup": (
        {"learning_rate": 6e-4, "warmup_steps": 4},
        {"learning rate too high": False},
        "0.0006 may break a policy without --warmup-steps 5",
    ),
    "nothing ends": (
        {"text": lambda i, j: "<think>and then", "truncated": True},
        {NO_SIGNAL: True, "truncation": True},
        "all rewards are equal",
    ),
    "nothing to read": (
        {"text": lambda i, j: "I do not know"},
        {"no answers": True, NO_SIGNAL: True},
        "0% of the completions",
    ),
    "too easy": (
        {"text": lambda i, j: FORMATS["deepseek"].completion("so", str(2 * i))},
        {NO_SIGNAL: True},
        "harder problems",
    ),
    "a reward of the format": (
        {"reward": FormatReward()},
        {IGNORES: True, "a wrong answer is rewarded": False},
        "check the reward function",
    ),
    "a blind reward": (
        {"reward": blind},
        {IGNORES: True, "a wrong answer is rewarded": False},
        "all completions get the same reward",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_was_broken_is_named(model_dir, tmp_path, what):
    options, expected, said = BROKEN[what]
    _, _, findings = look(model_dir, tmp_path, **options)
    assert {finding.name: finding.fault for finding in findings} == expected
    assert said in findings[0].text + findings[0].advice


def test_a_warmup_allows_a_higher_rate():
    assert judge_learning_rate(6e-4, 5) is None
    assert judge_learning_rate(5e-4, 0) is None


def test_a_reward_may_be_below_zero_but_not_the_same_for_all():
    """A third of the completions is right, so rewards of 1 and -1 have a mean of -1/3."""
    figures = {"pass@1, strict": 1 / 3}
    problem = Problem("a", "1 + 1?", "2")

    def found(scores, rewards):
        asked = (lambda *_: Scores([scores])), FORMATS["deepseek"], problem
        return [finding.name for finding in _reward(*asked, figures, rewards)]

    better = [1.0, 1.0, -1.0, -1.0, -1.0, -1.0, -1.0]
    assert found(better, [[1.0, -1.0, -1.0]]) == []
    assert found(better, [[-1.0, -1.0], [-1.0]]) == ["the reward ignores correctness"]


def test_a_reward_may_ask_for_steps():
    def found(solution):
        problem = Problem("a", "Write 14.", "XIV", solution, answer_type="text")
        asked = Scorer(as_reward(roman.reward), "deepseek"), FORMATS["deepseek"], problem
        return [finding.name for finding in _reward(*asked, {"pass@1, strict": 0.5}, [[1.0, 0.0]])]

    assert found("10 is X\n4 is IV") == []
    assert found("10 is X\n4 is V") == ["a wrong answer is rewarded"]


@pytest.mark.parametrize(("share", "faults"), [(0.4, []), (0.9, [False]), (0.98, [True])])
def test_a_few_groups_without_a_difference_are_usual(share, faults):
    figures = {"groups with equal rewards": share, "pass@1, strict": 0.3, "reward, mean": 0.3}
    assert [finding.fault for finding in _signal(figures, GRPOConfig(), "teach")] == faults


def test_from_the_command_line(model_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    argv = "--doctor --learning_rate 1e-8 --group_size 2 --max_new_tokens 4 --max_samples 40"
    assert run(train_grpo, "--model", model_dir, *argv.split()) == 1
    out = capsys.readouterr().out
    assert "FAULT  learning rate too low" in out
    assert not (tmp_path / "runs").exists()
