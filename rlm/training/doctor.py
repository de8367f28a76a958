"""Diagnoses the causes of a flat reward before training (`train_grpo.py --doctor`).

The doctor samples a group of completions for each of up to 32 problems, with the model that
training would start from. It scores them with the reward function of the run, and prints its
findings with advice on what to change.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from rlm.cli import command_of, terminal
from rlm.data import FORMATS, Format, Problem, render_prompt
from rlm.evaluation import Evaluation
from rlm.grading import find_equations, parse_number
from rlm.training.advantages import has_signal, reward_tensor
from rlm.training.config import LORA_RATES, USUAL_RATES, GRPOConfig, judge_learning_rate
from rlm.training.trainer import StepScorer, Trainer, TrainingData

PROBLEMS = 32  # number of problems to sample
NOTABLE_SHARE, FAULT_SHARE = 0.2, 0.8  # usual thresholds of a note and of a fault
NO_MOVE = 1e-6  # learning rate below which the model learns nothing
SPECIAL_TOKEN = re.compile(r"<\|[^<>|\s]{1,40}\|>|</?s>|<(?:start|end)_of_turn>")


@dataclass(frozen=True)
class Finding:
    """An issue with the setup, and advice on how to fix it.

    Attributes:
        fault: whether the issue would make training useless; otherwise the finding is a note.
    """

    name: str
    text: str
    advice: str
    fault: bool = True


def run_doctor(trainer: Trainer, problems: Sequence[Problem]) -> int:
    """Diagnose the model, the data, the reward and the options, and print the findings.

    Returns:
        The exit code: 1 if a finding is a fault, otherwise 0.
    """
    config, data = trainer.config, TrainingData.read(trainer, problems, None)
    data.plan_memory(trainer)
    metrics, findings, examples = diagnose(trainer, data.problems)
    shown = {name: f"{value:.1%}" for name, value in metrics.items() if not math.isnan(value)}
    terminal.table(
        f"Doctor: {config.model} on {min(PROBLEMS, len(data.problems))} problems",
        {**shown, "learning rate": f"{config.learning_rate:g}"},
    )
    for example in examples:
        terminal.sample(*example)
    for finding in findings:
        terminal.line(f"{'FAULT' if finding.fault else 'note'}  {finding.name}: {finding.text}")
        terminal.line(f"       -> {finding.advice}")
    if not findings:
        terminal.line("ready to train")
    return int(any(finding.fault for finding in findings))


def diagnose(
    trainer: Trainer, problems: Sequence[Problem]
) -> tuple[dict[str, float], list[Finding], list[tuple[str, str, str]]]:
    """Sample and score completions of the first problems.

    Returns:
        The metrics, the findings, and three example completions (see `_examples`).
    """
    config, scorer, format = trainer.config, trainer.scorer, trainer.format
    problems = list(problems[:PROBLEMS])
    with terminal.progress("sampling", len(problems) * config.group_size) as advance:
        drawn = trainer.evaluate(problems, config.group_size, advance)
    rewards = drawn.score(scorer)
    metrics = _metrics(drawn, rewards, config.advantage)
    teach = _teach_the_format(config, problems)
    solved = next((problem for problem in problems if problem.has_steps), problems[0])
    of_reward = list(_reward(scorer, format, solved, metrics, rewards))
    ignored = any(finding.fault for finding in of_reward)
    findings = [
        *_template(trainer.tokenizer, format),
        *_kind(drawn, teach),
        *_parsing(drawn, format, metrics, teach),
        *of_reward,
        *(() if ignored else _signal(metrics, config, teach)),
        *_options(metrics, config),
    ]
    return metrics, findings, _examples(drawn, rewards)


def _teach_the_format(config: GRPOConfig, problems: Sequence[Problem]) -> str:
    """Return the SFT command that teaches the format, and advice to write missing solutions."""
    data = {"dataset": config.dataset, "columns": config.columns, "split": config.split}
    command = command_of("train_sft", model=config.model, **data)
    write = "" if any(p.has_steps for p in problems) else "write `solution` for a dozen rows, then "
    return f"{write}{command}"


def _examples(
    drawn: Evaluation, rewards: Sequence[Sequence[float | None]]
) -> list[tuple[str, str, str]]:
    """Return the completions with the highest, the median and the lowest reward.

    Each has its question, its text, and a line with its reward and its verdict.
    """
    rows = [
        (problem, graded, reward)
        for problem, group, of_group in zip(drawn.problems, drawn.groups, rewards, strict=True)
        for graded, reward in zip(group, of_group, strict=True)
    ]
    rows.sort(key=lambda row: -math.inf if row[2] is None else row[2], reverse=True)
    places = {"best": 0, "typical": len(rows) // 2, "worst": -1}
    if rows[0][2] == rows[-1][2]:  # if all rewards are equal, no completion is the best
        places = {"first": 0, "second": len(rows) // 2, "third": -1}
    examples = []
    for name, place in places.items():
        problem, graded, reward = rows[place]
        earned = "no reward" if reward is None else f"reward {reward:g}"
        verdict = graded.strict.reason.replace("_", " ")
        said = f"{name}: {earned}, {verdict}, reference answer {problem.answer}"
        examples.append((problem.question, graded.text, said))
    return examples


def _metrics(
    drawn: Evaluation, rewards: Sequence[Sequence[float | None]], kind: str
) -> dict[str, float]:
    values = reward_tensor(rewards)
    lenient = [g.lenient.is_answer for g in drawn.completions]
    k = drawn.k
    return {
        "reward, mean": values.nanmean().nan_to_num().item(),
        "pass@1, strict": drawn.pass_at(1, True)["mean"],
        "pass@1, lenient": drawn.pass_at(1, False)["mean"],
        f"pass@{k}, strict": drawn.pass_at(k, True)["mean"],
        f"pass@{k}, lenient": drawn.pass_at(k, False)["mean"],
        "groups with equal rewards": (~has_signal(values, kind)).float().mean().item(),
        "answer in the right tags": drawn.format_rate,
        "answer anywhere": sum(lenient) / len(lenient),
        "truncated": drawn.truncated_rate,
    }


def _template(tokenizer: PreTrainedTokenizerBase, format: Format) -> Iterator[Finding]:
    """Detect a chat template of another tokenizer, or one that drops the system prompt."""
    text = str(tokenizer.decode(render_prompt(tokenizer, "QUESTION", format)))
    foreign = sorted(
        marker
        for marker in set(SPECIAL_TOKEN.findall(text))
        if len(tokenizer.encode(marker, add_special_tokens=False)) > 1
    )
    if foreign:
        yield Finding(
            "wrong chat template",
            f"the template contains {', '.join(foreign)}, which are not tokens of this tokenizer: "
            "the model reads each of them as several ordinary tokens",
            "use the tokenizer and the template of this model",
        )
    if "".join(format.system_prompt.split()) not in "".join(text.split()):
        yield Finding(
            "wrong chat template",
            "the system prompt, which asks for the tags, does not reach the model",
            "use a template with a system role, or teach the format first: train_sft.py",
        )


def _kind(drawn: Evaluation, teach: str) -> Iterator[Finding]:
    """Detect numeric answers to a text task, which an adapter trained on arithmetic gives."""
    kinds = {"text": "text", "choice": "a letter"}
    pairs = [
        (problem, graded)
        for problem, group in zip(drawn.problems, drawn.groups, strict=True)
        for graded in group
        if problem.answer_type in kinds and parse_number(problem.answer) is None
    ]
    numbers = [g for _, g in pairs if parse_number(g.lenient.answer or "") is not None]
    if len(numbers) <= NOTABLE_SHARE * len(drawn.completions):
        return
    computed = sum(bool(find_equations(graded.text)) for graded in numbers) > len(numbers) / 2
    wanted = " or ".join(sorted({kinds[problem.answer_type] for problem, _ in pairs}))
    share = len(numbers) / len(pairs)
    yield Finding(
        "another kind of answer",
        f"{share:.0%} of the completions answer with a {'calculation' if computed else 'number'}; "
        f"the task requires {wanted}",
        f"teach the format first: {teach}",
        fault=share > 1 - NOTABLE_SHARE,
    )


def _parsing(
    drawn: Evaluation, format: Format, metrics: dict[str, float], teach: str
) -> Iterator[Finding]:
    """Detect answers that only the lenient grading accepts, because their format is wrong."""
    strict, lenient = metrics["answer in the right tags"], metrics["answer anywhere"]
    texts = [g.text for g in drawn.completions]
    for name, other in FORMATS.items():
        opened = sum(f"<{other.reasoning_tag}>" in text for text in texts) / len(texts)
        if other.tags != format.tags and opened > NOTABLE_SHARE and strict < NOTABLE_SHARE:
            yield Finding(
                "parser mismatch",
                f"{opened:.0%} of the completions think inside "
                f"<{other.reasoning_tag}>, but the reward looks for <{format.reasoning_tag}>",
                f"use --reasoning-format {name}",
            )
            return
    if lenient - strict > NOTABLE_SHARE:
        why = next((r for r in drawn.reasons(True) if r not in ("correct", "wrong")), "")
        yield Finding(
            "parser mismatch",
            f"{lenient:.0%} of the completions give an answer, but only {strict:.0%} in the format "
            f"that is rewarded (most frequent reason: {why})",
            f"teach the format first: {teach}; or reward the format that the model uses: --reward",
            fault=strict < 1 - FAULT_SHARE,
        )
    elif drawn.truncated_rate < 1 and strict < NOTABLE_SHARE:
        yield Finding(
            "no answers",
            f"only {strict:.0%} of the completions contain an answer that can be read",
            f"teach the format first: {teach}",
        )


def _reward(
    scorer: StepScorer,
    tags: Format,
    problem: Problem,
    metrics: dict[str, float],
    rewards: Sequence[Sequence[float | None]],
) -> Iterator[Finding]:
    """Detect a reward that does not prefer right answers.

    A right completion must earn more than each of several wrong ones, which are made here. If only
    some of the sampled completions are right, the sampled completions must have different rewards.
    """
    if problem.answer_type == "open":  # open answers have no reference
        return
    # A reward may also check the reasoning, and then only a worked solution earns it.
    brief = "It follows."
    right = [tags.completion(text, problem.answer) for text in (brief, problem.solution or brief)]
    worthless = {
        "an empty completion": "",
        "empty tags": tags.completion("", ""),
        "every number up to 200": tags.completion("x", " ".join(map(str, range(201)))),
        "the question": problem.question,
        "a wrong answer": tags.completion(brief, f"{problem.answer}7"),
    }
    asked = [*right, *worthless.values()]
    (found,) = scorer([problem], [asked], [[False] * len(asked)]).rewards
    without_steps, with_steps, *others = [-1e9 if r is None else r for r in found]
    best = max(without_steps, with_steps)
    given, share = {r for row in rewards for r in row}, metrics["pass@1, strict"]
    if len(given) == 1 and 0 < share < 1:
        yield Finding(
            "the reward ignores correctness",
            f"{share:.0%} of the completions are right, but all completions get the same reward",
            "check the reward function",
        )
    paid = [name for name, r in zip(worthless, others, strict=True) if r >= best]
    if paid:
        yield Finding(
            "a wrong answer is rewarded",
            f"these completions get at least the reward of a right answer in the right format: "
            f"{', '.join(paid)}",
            "this is fine if the reward is meant to allow it; otherwise check the reward function",
            fault=False,
        )


def _signal(metrics: dict[str, float], config: GRPOConfig, teach: str) -> Iterator[Finding]:
    """Detect that too many groups have no gradient because their rewards are equal."""
    share = metrics["groups with equal rewards"]
    advice = f"use easier problems or a larger --group-size, or teach the format first: {teach}"
    if metrics["pass@1, strict"] > 0.5:
        advice = "use harder problems or a higher --temperature"
    if share > FAULT_SHARE:
        yield Finding(
            "no signal",
            f"in {share:.0%} of the groups, all rewards are equal (mean reward "
            f"{metrics['reward, mean']:.3g}), so they have no gradient: about "
            f"{config.batch_size * (1 - share):.0f} of the {config.batch_size} groups in a step "
            "have one",
            advice,
            fault=share > 0.97,
        )


def _options(metrics: dict[str, float], config: GRPOConfig) -> Iterator[Finding]:
    rate = config.learning_rate
    if problem := judge_learning_rate(rate, config.warmup_steps):
        fault = not NO_MOVE <= rate <= LORA_RATES[1]
        yield Finding(f"learning rate {problem[0]}", problem[1], USUAL_RATES, fault=fault)
    if metrics["truncated"] > NOTABLE_SHARE:
        yield Finding(
            "truncation",
            f"{metrics['truncated']:.0%} of the completions are cut off after "
            f"{config.max_new_tokens} tokens, often before their answer",
            "raise --max-new-tokens, or teach shorter reasoning with train_sft.py",
            fault=metrics["truncated"] > FAULT_SHARE,
        )
