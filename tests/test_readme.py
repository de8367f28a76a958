"""README.md stays short: a visitor reads it in five minutes."""

import json
import re
from pathlib import Path

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
NUMBER = re.compile(r"\d[\d.,%]*")  # a run of digits with the marks inside it


def test_it_is_short():
    assert len(README.splitlines()) <= 130
    assert len(README.split()) <= 1300


def test_it_has_few_numbers():
    assert NUMBER.findall("95 % of 1,319 (+11.2 to 20%), SmolLM2-135M") == [
        "95", "1,319", "11.2", "20%", "2", "135",
    ]  # fmt: skip
    # Those of an example or a command claim nothing.
    numbers = NUMBER.findall(re.sub(r"```.*?```", "", README, flags=re.DOTALL))
    assert len(numbers) <= 25, numbers


def test_its_figures_of_the_demo_are_those_of_the_file():
    file = Path(__file__).parent.parent / "docs/results/demo/summary.json"
    figures = json.loads(file.read_text())

    def greedy(row):
        verdicts = figures["accuracy"][row]["strict"]
        return f"{100 * verdicts['correct'] / verdicts['total']:.1f}"

    def sampled(row):
        return f"{100 * figures['sampled_accuracy'][row]['strict']['mean']:.1f}"

    assert f"| base | {greedy('base')} | – |" in README
    for row, title in (("sft", "after SFT"), ("grpo", "after GRPO")):
        assert f"| {title} | {greedy(row)} | {sampled(row)} |" in README
    gain = figures["gain"]
    low, high = (format(gain[end], "+.1f") for end in ("low", "high"))
    assert f"gains {gain['points']:+.1f} points" in README
    assert f"{low} to {high}" in README
