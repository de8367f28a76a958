"""The evidence grid: statistics by hand, rules of the report, and all methods on a tiny model."""

import importlib
import json
import math
import os
import re
import shutil
import subprocess
import threading
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise, permutations
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from benchmarks.evidence import __main__ as command_line
from benchmarks.evidence import grid, plan, pools, report, training
from benchmarks.evidence.intervals import crossed_bootstrap, difference, scores
from benchmarks.evidence.plan import ARMS, Cell, EvidenceConfig, read_json
from benchmarks.evidence.plots import _curve_points
from benchmarks.evidence.results import Results, copy_results, matrix
from rlm.cli.main import run_main
from rlm.cli.options import UsageError
from rlm.grading import grade
from rlm.model import AdapterInfo
from rlm.runs import file_hash, lock_file

ROOT = Path(__file__).parents[2]

TOY = {
    "solved": 8, "sft_batch": 4, "lora_r": 4, "steps": 2, "batch_size": 2, "group_size": 2,
    "max_new_tokens": 6, "base_new_tokens": 6, "greedy_problems": 4, "sampled_problems": 3,
    "base_sampled": 2, "samples": 3, "curve_problems": 4,
    "curve_every": 1, "seeds": (0,),
}  # fmt: skip


def toy(model_dir, folder: Path, **options) -> EvidenceConfig:
    paths = {"grid": folder / "grid", "docs": folder / "docs"}
    return EvidenceConfig(model=str(model_dir), **{**paths, **TOY, **options})


# --- the plan -----------------------------------------------------------------------------------


def test_cells_come_seed_by_seed_after_what_they_need():
    cells = EvidenceConfig().all_cells()
    assert len(cells) == len(set(cells)) == 2 + 3 * (len(ARMS) - 2)
    for place, cell in enumerate(cells):
        assert all(needed in cells[:place] for needed in cell.needs)
    seeds = [cell.seed for cell in cells]
    assert seeds == sorted(seeds)
    bases = [c for c in EvidenceConfig(seeds=(9,)).all_cells() if ARMS[c.arm].kind == "base"]
    assert bases == [Cell("base_zero", 0), Cell("base_few", 0)]  # whatever the seeds


def test_cells_are_chosen_by_pattern():
    config = EvidenceConfig(cells=("grpo-*", "*-s2"))
    names = [cell.name for cell in config.chosen_cells()]
    assert names[:2] == ["grpo-s0", "grpo-s1"]
    assert set(names[2:]) == {f"{arm}-s2" for arm in ARMS if not arm.startswith("base")}
    with pytest.raises(UsageError, match="no cell matches"):
        EvidenceConfig(cells=("gpro-*",)).chosen_cells()


def test_a_grid_keeps_the_settings_it_was_begun_with(tmp_path):
    def fix(**options) -> None:
        EvidenceConfig(grid=tmp_path, **options).fix()

    fix()
    fix(seeds=(0, 7))  # these may change
    with pytest.raises(UsageError, match="started with --steps 6, not 13"):
        fix(steps=13)
    assert read_json(tmp_path / "settings.json") == EvidenceConfig().settings()


def test_of_two_processes_that_begin_a_grid_the_second_is_held_to_the_settings(
    tmp_path, monkeypatch
):
    refused, write = [], plan.replace_json

    def other() -> None:
        try:
            EvidenceConfig(grid=tmp_path, steps=13).fix()
        except UsageError as error:
            refused.append(str(error))

    second = threading.Thread(target=other)

    def slowly(file, content) -> None:
        if threading.current_thread() is not second:
            second.start()
            second.join(0.2)
        write(file, content)

    monkeypatch.setattr(plan, "replace_json", slowly)
    EvidenceConfig(grid=tmp_path).fix()
    second.join()
    (said,) = refused
    assert "started with --steps 6, not 13" in said
    assert read_json(tmp_path / "settings.json")["steps"] == 6


@pytest.mark.parametrize(
    "arguments",
    [["--steps", "0"], ["--seeds", "1,1"], ["--samples", "1"], ["nonsense"]],
)
def test_mistakes_are_refused(arguments, tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        run_main(command_line.main, EvidenceConfig, argv=[*arguments, "--grid", str(tmp_path)])
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith("error: ")


# --- problems -----------------------------------------------------------------------------------


def test_only_grpo_meets_the_practised_families_and_nobody_their_solutions():
    config = EvidenceConfig()
    learned, same, other = (pools.pools(config, seed) for seed in (0, 0, 1))
    assert {p.columns["family"] for p in learned.solved} == set(pools.TAUGHT)
    practised = {p.columns["family"] for p in learned.practice}
    assert practised == {*pools.TAUGHT, *pools.PRACTISED}
    assert not any(p.solution for p in learned.practice)
    assert all(p.solution for p in learned.practice_solved)
    assert len(learned.practice) == config.steps * config.batch_size
    assert len(learned.solved) == config.solved
    assert learned == same
    assert learned.solved != other.solved
    assert learned.validation == other.validation  # what is judged does not depend on the seed


def test_no_problem_is_learned_and_judged():
    config = EvidenceConfig()
    learned, judged = pools.pools(config, seed=0), pools.judged_sets(config)
    parts = [learned.solved, learned.practice, learned.validation]
    parts += [one.problems for one in judged]
    questions = [{p.question for p in part} for part in parts]
    assert all(a.isdisjoint(b) for a, b in permutations(questions, 2))
    assert (judged[0].sampled, pools.judged_sets(config, base=True)[0].sampled) == (16, 8)


def test_each_operation_is_taught_and_practised():
    by_name = {family.name: family for family in pools.FAMILIES}
    signs = {name: by_name[name].steps[0].split()[3] for name in (*pools.TAUGHT, *pools.PRACTISED)}
    assert sorted(signs[name] for name in pools.PRACTISED) == ["*", "+", "-", "/"]
    assert {signs[name] for name in pools.TAUGHT} == {"*", "+", "-", "/"}


def test_shuffled_golds_are_other_problems_golds():
    problems = pools.pools(EvidenceConfig(), 0).practice
    mixed = pools.without_golds(problems, seed=0)
    assert [p.question for p in mixed] == [p.question for p in problems]
    assert sorted(p.answer for p in mixed) == sorted(p.answer for p in problems)
    kept = sum(a.answer == b.answer for a, b in zip(mixed, problems, strict=True))
    assert kept < 0.1 * len(problems)


def test_gsm8k_must_be_the_published_files(tmp_path, monkeypatch):
    config = EvidenceConfig(dataset=f"gsm8k:{tmp_path}", solved=8, greedy_problems=1319)
    with pytest.raises(UsageError, match="is missing"):
        pools.pools(config, 0)
    digests = {}
    for name, rows in zip(pools.GSM8K_FILES, (250, 3), strict=True):
        lines = [
            f'{{"question": "{i} + 1?", "answer": "1 more\\n#### {i + 1}"}}\n' for i in range(rows)
        ]
        (tmp_path / name).write_text("".join(lines))
        digests[name] = file_hash(tmp_path / name)
    with pytest.raises(UsageError, match="not the published file"):
        pools.judged_sets(config)
    monkeypatch.setattr(pools, "GSM8K_FILES", digests)
    judged, learned = pools.judged_sets(config)[0], pools.pools(config, 0)
    assert (judged.name, len(judged.problems), judged.sampled) == ("gsm8k", 3, 3)
    assert (len(learned.solved), len(learned.practice), len(learned.validation)) == (8, 96, 25)
    assert {p.question for p in learned.solved}.isdisjoint(p.question for p in learned.practice)
    assert not any(p.solution for p in learned.practice)
    with pytest.raises(UsageError, match="word-problems or gsm8k"):
        pools.check_gsm8k("gsm8k")


# --- statistics ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scores", "interval"),
    [
        (np.full((3, 7), 0.25), (0.25, 0.25, 0.25)),  # equal scores have no spread
        # One seed, scores 0 and 1: a resample is 0, ½ or 1 with chances ¼, ½, ¼.
        ([[0.0, 1.0]], (0.5, 0.0, 1.0)),
    ],
)
def test_intervals_by_hand(scores, interval):
    found = crossed_bootstrap(scores)
    assert (found.mean, found.low, found.high) == pytest.approx(interval)


def test_more_seeds_of_the_same_scores_do_not_make_the_problems_surer():
    row = np.arange(50) % 2
    one, ten = crossed_bootstrap([row]), crossed_bootstrap([row] * 10)
    # Were problems drawn anew for each seed, the interval would be √10 times narrower.
    assert ten.high - ten.low == pytest.approx(one.high - one.low, rel=0.05)
    expected = 1.96 * math.sqrt(0.25 / 50)  # of a mean of 50 coins
    assert one.mean - one.low == pytest.approx(expected, rel=0.15)
    differing = crossed_bootstrap([np.zeros(50), row, np.ones(50)])  # seeds that differ widen it
    assert differing.low < 0.1
    assert differing.high > 0.9


def test_a_difference_is_paired():
    before = np.random.default_rng(0).integers(0, 2, (3, 40)) * 0.5
    found = difference(before, before + 0.25)
    assert (found.mean, found.low, found.high) == pytest.approx((0.25, 0.25, 0.25))
    of_each = (before + 0.25 - before[0]).mean()  # an arm without seeds is paired with each seed
    assert difference(before[:1], before + 0.25).mean == pytest.approx(of_each)
    with pytest.raises(ValueError, match="not paired"):
        difference(before[:2], before)
    with pytest.raises(ValueError, match="no scores"):
        crossed_bootstrap(np.empty((0, 0)))


def a_test(greedy="01", sampled=("1100", "0000"), ids=("a", "b")):
    return {
        "problems": list(ids),
        "greedy": {"strict": greedy, "lenient": "1" * len(greedy)},
        "sampled": {"strict": sampled, "lenient": sampled},
    }


@pytest.mark.parametrize(
    ("metric", "grading", "expected"),
    [
        ("greedy", "strict", [0.0, 1.0]),
        ("greedy", "lenient", [1.0, 1.0]),
        ("sampled", "strict", [0.5, 0.0]),
        ("pass@1", "strict", [0.5, 0.0]),
        # 2 of 4 are right: two draws miss both with chance C(2,2) / C(4,2) = 1/6.
        ("pass@2", "strict", [5 / 6, 0.0]),
        ("pass@4", "strict", [1.0, 0.0]),
    ],
)
def test_scores_of_a_test_set_by_hand(metric, grading, expected):
    assert scores(a_test(), metric, grading) == pytest.approx(expected)


def test_arms_are_paired_on_the_seeds_and_problems_that_both_have():
    def result(arm, seed, sampled, ids=("a", "b")):
        return {"arm": arm, "seed": seed, "tests": {"t": a_test(sampled=sampled, ids=ids)}}

    ours = [result("grpo", 0, ("1111", "0000")), result("grpo", 1, ("0000", "1111"))]
    start = [result("sft", 1, ("1111", "1111")), result("sft", 2, ("1111", "1111"))]
    base = [result("base_few", 0, ("1111",))]  # sampled the first problem only
    found = Results({"grpo": ours, "sft": start, "base_few": base})
    a, b = found.paired("sft", "grpo", "sampled")
    assert (a.tolist(), b.tolist()) == ([[1, 1]], [[0, 1]])  # seed 1 alone
    a, b = found.paired("base_few", "grpo", "sampled")
    assert (a.tolist(), b.tolist()) == ([[1]], [[1], [0]])
    with pytest.raises(ValueError, match="no seed"):
        Results({"grpo": ours, "sft": start[1:]}).paired("sft", "grpo", "sampled")
    changed = [result("sft", 1, ("1111", "1111"), ids=("a", "c"))]
    with pytest.raises(ValueError, match="different problems"):
        Results({"grpo": ours, "sft": changed}).paired("sft", "grpo", "sampled")
    other = [result("grpo", 0, ("11",)), result("grpo", 1, ("11",), ids=("a", "c"))]
    with pytest.raises(ValueError, match="different problems"):
        matrix(other, ["t"], "greedy", "strict")


@pytest.mark.parametrize(
    "name",
    [
        "twenty",
        *(
            pytest.param(n, marks=pytest.mark.slow)
            for n in ("noise", "six", "sixty", "sixty_topr", "gsm8k")
        ),
    ],
)
def test_a_committed_page_comes_out_of_the_committed_cells(name, tmp_path):
    """The page contains all methods, and its last digits may differ by rounding."""
    committed, docs = ROOT / "docs/results" / name, tmp_path / "docs"
    shutil.copytree(committed, docs, ignore=shutil.ignore_patterns("*.png"))
    report.write_report(EvidenceConfig(grid=tmp_path / "none", docs=docs))
    number = re.compile(r"[+−-]?\b\d+(?:\.\d+)?\b")
    pages = [(folder / "README.md").read_text() for folder in (docs, committed)]
    texts = [number.sub("#", page.replace(",", "")).splitlines() for page in pages]
    assert texts[0] == texts[1]
    made, expected = (
        [float(n.replace("−", "-")) for n in number.findall(page.replace(",", ""))]
        for page in pages
    )
    assert made == pytest.approx(expected, abs=0.11)
    if (committed / "curves.png").exists():
        assert (docs / "curves.png").stat().st_size > 5000


# --- every arm on a tiny model ------------------------------------------------------------------


@pytest.fixture(scope="module")
def in_process():
    """Run cells in this process, because imports take longer than a cell with a tiny model."""

    def run_child(module, function, payload, log, inherited):
        return getattr(importlib.import_module(module), function)(**payload)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grid.harness, "run_child", run_child)
        # A random model is never right: rejection sampling keeps its first completions anyway.
        patch.setattr("rlm.training.trainer.learning_curves", lambda *_: None)  # tested elsewhere
        right = SimpleNamespace(correct=True, answer="5")
        patch.setattr(training, "grade", lambda *_, **__: right)
        patch.setattr(training, "split_completion", lambda text: ("5 + 0 = 5", "5"))
        few = ("drgrpo", "gspo", "cispo", "topr")  # as GRPO, with another loss
        for arm in [a for a in ARMS if ARMS[a].grpo.get("algorithm") in few]:
            patch.delitem(ARMS, arm)
        yield


@pytest.fixture(scope="module")
def finished(model_dir, tmp_path_factory, in_process) -> EvidenceConfig:
    config = toy(model_dir, tmp_path_factory.mktemp("evidence"))
    assert grid.run(config) == ([], [])
    return config


def result_of(config, name):
    arm, _, seed = name.rpartition("-s")
    return read_json(config.folder(Cell(arm, int(seed))) / "result.json")


def adapter_of(config, arm):
    return load_file(config.folder(Cell(arm, 0)) / "adapter" / "adapter_model.safetensors")


def same(a, b):
    """Return whether two adapters are equal after rounding to bf16, the dtype of an export."""
    return all(torch.equal(a[name].bfloat16(), b[name].bfloat16()) for name in a.keys() | b.keys())


def test_every_arm_trains_and_is_judged(finished):
    for cell in finished.all_cells():
        found = result_of(finished, cell.name)
        assert set(found["tests"]) >= set(pools.WORDS)
        taught = found["tests"]["taught"]
        assert len(taught["greedy"]["strict"]) == len(taught["problems"]) == 4
        drawn = 2 if cell.arm.startswith("base") else 3
        assert [len(bits) for bits in taught["sampled"]["lenient"]] == [3] * drawn
        assert found["command"].startswith("python -m benchmarks.evidence --cells")
        assert str(finished.grid) not in json.dumps(found)
        assert not list((finished.folder(cell) / "train").glob("checkpoint*"))


def test_rounds_of_rejection_sampling_draw_from_the_round_before(finished):
    folder = finished.folder(Cell("rejection_rounds", 0))
    adapters = [
        load_file(folder / name / "adapter" / "adapter_model.safetensors")
        for name in ("round_1", "round_2", "")
    ]
    start = adapter_of(finished, "sft")
    for before, after in pairwise([start, *adapters]):
        assert not same(before, after)
    found = read_json(folder / "round_2" / "train" / "config.json")
    assert found["adapter"].endswith("round_1/adapter")


def test_rivals_cost_what_grpo_costs(finished):
    ours = result_of(finished, "grpo-s0")["training"]
    assert ours["samples"] == 2 * 2 * 2
    assert result_of(finished, "trl-s0")["training"]["samples"] == ours["samples"]
    rejection = result_of(finished, "rejection-s0")["training"]
    assert rejection["samples"] == ours["samples"]
    assert rejection["kept"] == 4  # one distinct reasoning of each problem
    assert rejection["examples"] >= rejection["kept"]
    rounds = result_of(finished, "rejection_rounds-s0")["training"]
    assert (rounds["samples"], rounds["kept"], rounds["right"]) == (8, 4, 8)
    assert [record["right"] for record in rounds["rounds"]] == [2, 2, 4]  # 1, 1 and 2 problems
    harvest = result_of(finished, "harvest-s0")["training"]
    assert (harvest["samples"], harvest["right"], harvest["kept"]) == (8, 8, 4)
    drawing = sum(step["sample"] + step["score"] for step in ours["steps"])
    assert harvest["seconds"] > drawing
    start = result_of(finished, "sft-s0")["training"]
    more = result_of(finished, "sft_continued-s0")["training"]["examples"]
    assert more == max(1, round(ours["seconds"] / start["seconds"] * start["examples"]))


def test_algorithms_draw_what_they_are_named_for(finished):
    config = read_json(finished.folder(Cell("dapo", 0)) / "train" / "config.json")
    assert config["algorithm"] == "dapo"
    training = result_of(finished, "dapo-s0")["training"]
    drawn = [step["samples"] for step in training["steps"]]
    assert training["samples"] == sum(drawn) == training["samples_until"][-1]
    # Of 1 problem a step (0.6 of 2); nobody is ever right, so each is replaced as often as it may
    # be, until the practice problems are used up.
    assert drawn == [2 * 4, 2 * 4]


def test_continued_sft_goes_on_from_the_start(finished):
    run = read_json(finished.folder(Cell("sft_continued", 0)) / "adapter" / "run.json")
    assert run["start_adapter"] == str(finished.folder(Cell("sft", 0)).resolve() / "adapter")
    assert not same(adapter_of(finished, "sft_continued"), adapter_of(finished, "sft"))


def test_a_named_adapter_is_the_start_of_all_arms(finished, model_dir, tmp_path, in_process):
    given = tmp_path / "given"
    shutil.copytree(finished.folder(Cell("sft", 0)) / "adapter", given)
    run = read_json(given / "run.json")
    run["config"]["tool"] = "calculator"
    (given / "run.json").write_text(json.dumps(run))
    config = toy(model_dir, tmp_path, adapter=given, cells=("sft-s0", "grpo-s0"))
    assert grid.run(config) == ([], [])
    start = config.folder(Cell("sft", 0)) / "adapter"
    assert same(load_file(given / "adapter_model.safetensors"), adapter_of(config, "sft"))
    info = AdapterInfo.load(config.folder(Cell("grpo", 0)) / "adapter")
    assert (info.tool, info.run["start_adapter"]) == ("calculator", str(start))
    assert (
        result_of(config, "sft-s0")["training"]["seconds"] > 0
    )  # the baselines' budgets follow from it
    assert f"--adapter {given}" in result_of(config, "sft-s0")["command"]


def test_a_rate_of_zero_changes_nothing_and_a_random_reward_something(finished):
    start = adapter_of(finished, "sft")
    assert same(adapter_of(finished, "rate_zero"), start)
    assert not same(adapter_of(finished, "random_reward"), start)
    before, after = (result_of(finished, name)["tests"] for name in ("sft-s0", "rate_zero-s0"))
    exported = {tensor.dtype for tensor in adapter_of(finished, "rate_zero").values()}
    if exported == {torch.float32}:  # rounded to bf16 it may draw otherwise
        assert before == after


def test_curves_are_joined_by_samples_not_by_place():
    """An interrupted run has a point that the other seeds lack."""

    def point(samples, *bits):
        return {"seconds": samples / 2, "samples": samples, "greedy": {"strict": bits}}

    def cells(arm, *curves):
        return [{"arm": arm, "seed": seed, "curve": curve} for seed, curve in enumerate(curves)]

    way, end, more = point(20, 1, 0), point(40, 1, 1), point(10, 0, 0)
    start = cells("sft", [point(0, 0, 0)], [point(0, 0, 0)], [point(0, 1, 1)])  # no GRPO of seed 2
    arms = {"sft": start, "grpo": cells("grpo", [more, way, end], [way, end])}
    arms["trl"] = cells("trl", [point(40, 1, 1)], [point(60, 0, 0)])  # its ends are apart
    found = Results(arms)
    expected = {"grpo": [(0, 0.0), (20, 0.5), (40, 1.0)], "trl": [(0, 0.0), (50, 0.5)]}
    for arm, by_samples in expected.items():
        for axis, scale in (("samples", 1), ("seconds", 0.5)):
            points = _curve_points(found, arm, axis, "greedy")
            assert [(x, i.mean) for x, i in points] == [(scale * x, y) for x, y in by_samples]


def test_a_lead_that_comes_from_one_template_is_gone_without_it():
    """Two templates of two problems; GRPO solves all of one more than its baseline."""
    ids = [f"{template}-{'0' * 11}{n}" for template in ("age", "area") for n in (1, 2)]

    def cells(arm, bits):
        test = {"problems": ids, "greedy": {"strict": bits, "lenient": bits}}
        return [{"arm": arm, "seed": seed, "tests": {"taught": test}} for seed in (0, 1)]

    found = Results({"grpo": cells("grpo", "1110"), "sft": cells("sft", "0010")})
    assert found.templates == ["age", "area"]
    assert [found.right("sft", template) for template in found.templates] == [0.0, 0.5]
    assert found.largest_lead("grpo", "sft") == "age"
    assert found.lead("grpo", "sft", "greedy").mean == 0.5
    assert found.lead("grpo", "sft", "greedy", "age").mean == 0.0
    ids[0] = "gsm8k-7"
    assert found.templates == []


def test_curves_have_a_point_for_each_snapshot(finished):
    ours, theirs = (result_of(finished, f"{arm}-s0") for arm in ("grpo", "trl"))
    for one in (ours, theirs):
        assert [point["samples"] for point in one["curve"]] == [4, 8]
        assert one["curve"][0]["seconds"] < one["curve"][1]["seconds"]
        assert one["curve"][1]["seconds"] == one["training"]["seconds"]
    assert len(result_of(finished, "random_reward-s0")["curve"]) == 1


def test_a_cells_command_says_what_differs_from_the_defaults(tmp_path):
    from benchmarks.evidence.judging import command_of

    start = "python -m benchmarks.evidence --cells"
    assert command_of(EvidenceConfig(), Cell("grpo", 2)) == f"{start} grpo-s2"
    config = EvidenceConfig(steps=3, dataset=f"gsm8k:{tmp_path}", seeds=(9,))
    expected = f"{start} grpo-s9 --seeds 9 --dataset gsm8k:DIRECTORY --steps 3"
    assert command_of(config, Cell("grpo", 9)) == expected


def test_what_is_done_is_not_done_again(finished, monkeypatch):
    def fail(*_, **__):
        raise AssertionError("a finished cell was run again")

    monkeypatch.setattr(grid.harness, "run_child", fail)
    assert grid.run(finished) == ([], [])
    assert grid.run(replace(finished, cells=("grpo-*",))) == ([], [])


def test_the_list_says_what_is_left(finished, capsys):
    grid.show(replace(finished, seeds=(0, 1)))
    shown = capsys.readouterr().out
    assert re.search(r"grpo-s0 +done", shown)
    assert re.search(r"grpo-s1 +left", shown)
    assert f"{len(ARMS)} of {2 * len(ARMS) - 2} done" in shown


def test_a_cell_needs_its_start(model_dir, tmp_path, in_process):
    with pytest.raises(UsageError, match="grpo-s0 needs sft-s0"):
        grid.run(toy(model_dir, tmp_path, cells=("grpo-s0",)))


@contextmanager
def held(folder: Path):
    """Hold the lock of a cell, and yield its file descriptor."""
    folder.mkdir(parents=True, exist_ok=True)
    with lock_file(folder / "lock", "cell", "is running it") as stream:
        yield stream.fileno()


def test_a_cell_that_another_process_is_at_is_left_alone(model_dir, tmp_path, in_process, capsys):
    config = toy(model_dir, tmp_path, cells=("base_zero-s0",))
    with held(config.folder(Cell("base_zero", 0))):
        assert grid.run(config) == ([Cell("base_zero", 0)], [])
    assert re.search(r"base_zero-s0: process \d+ on .* is running it", capsys.readouterr().out)


def test_a_killed_grid_leaves_its_cell_to_the_child(tmp_path):
    """The child process inherits the lock, so no other process may begin the cell."""
    with held(tmp_path) as lock:
        child = subprocess.Popen(["sleep", "60"], pass_fds=(lock,))
    with pytest.raises(UsageError, match="is running it"), held(tmp_path):
        pass
    child.kill()
    child.wait()
    with held(tmp_path):
        pass


def test_a_cell_is_locked_from_training_to_judging(model_dir, tmp_path, monkeypatch):
    config = toy(model_dir, tmp_path, cells=("base_zero-s0",))
    parts = []

    def run_child(module, function, payload, log, inherited):
        with pytest.raises(UsageError), held(config.folder(Cell("base_zero", 0))):
            pass
        assert len(inherited) == 1
        os.fstat(*inherited)
        parts.append(function)

    monkeypatch.setattr(grid.harness, "run_child", run_child)
    grid.run(config)
    assert parts == ["train", "judge"]


def test_a_cell_that_fails_is_named_and_the_others_go_on(tmp_path, monkeypatch, capsys):
    config = toy("m", tmp_path, cells=("sft-*", "grpo-s0"), seeds=(0, 1))
    begun = []

    def run_child(module, function, payload, log, inherited):
        cell = Cell(payload["arm"], payload["seed"])
        begun.append((function, cell.name))
        if cell.name == "sft-s0":
            raise grid.harness.ChildFailed("exited with 1")
        if function == "judge":
            plan.replace_json(config.folder(cell) / "result.json", {})

    monkeypatch.setattr(grid.harness, "run_child", run_child)
    assert command_line.main(config) == 1
    assert begun == [("train", "sft-s0"), ("train", "sft-s1"), ("judge", "sft-s1")]
    said = capsys.readouterr().out
    assert f"sft-s0: failed; see the end of {config.folder(Cell('sft', 0))}/log.txt" in said
    assert "grpo-s0: skipped for now" in said
    assert "failed: sft-s0; 2 cells are left" in said


class Killed(Exception):
    pass


def test_a_killed_cell_goes_on_to_the_same_end(finished, model_dir, tmp_path, monkeypatch):
    """The cell is killed in the second step, and again between two test sets."""
    from rlm.training import TrainingRun

    config = toy(model_dir, tmp_path, cells=("sft-s0", "random_reward-s0"))
    source, target = (c.folder(Cell("sft", 0)) for c in (finished, config))
    target.parent.mkdir(parents=True)
    target.symlink_to(source.resolve())  # the same start

    first_steps, log_step = [], TrainingRun.log_step

    def killed_in_the_second_step(run, metrics, *rest):
        first_steps.append(metrics["step"])
        if metrics["step"] == 1 and first_steps.count(1) == 1:
            raise Killed
        log_step(run, metrics, *rest)

    monkeypatch.setattr(TrainingRun, "log_step", killed_in_the_second_step)
    with pytest.raises(Killed):
        grid.run(config)
    assert grid.state(config, Cell("random_reward", 0)) == "begun"

    judged, write = [], plan.replace_json

    def killed_after_one_set(file, content):
        if file.parent.name == "scores":
            judged.append(file.name)
            if len(judged) == 2:
                raise Killed
        write(file, content)

    monkeypatch.setattr(plan, "replace_json", killed_after_one_set)
    with pytest.raises(Killed):
        grid.run(config)
    assert first_steps == [0, 1, 1]  # step 0 was not run again
    assert grid.run(config) == ([], [])
    assert judged.count("taught.json") == 1  # nor this set judged again
    assert same(adapter_of(config, "random_reward"), adapter_of(finished, "random_reward"))
    assert (
        result_of(config, "random_reward-s0")["tests"]
        == result_of(finished, "random_reward-s0")["tests"]
    )


def test_trl_takes_a_rate_of_zero(finished, model_dir, tmp_path):
    from benchmarks import trl_arm

    start = finished.folder(Cell("sft", 0)) / "adapter"
    config = toy(model_dir, tmp_path, steps=1, learning_rate=0.0)
    options = config.grpo_config(Cell("trl", 0), start)
    trl_arm.train(options, pools.pools(config, 0).practice, trl_arm.strict_reward)
    assert same(
        adapter_of(finished, "sft"), load_file(options.output / "adapter_model.safetensors")
    )


@pytest.mark.parametrize(("share", "least", "most"), [(0.5, 150, 250), (0.2, 280, 360)])
def test_verdicts_are_turned_round_the_same_way_again(share, least, most, monkeypatch):
    """The verdicts of some of 400 right completions are inverted."""
    monkeypatch.setattr(training, "grade", grade)  # which `in_process` replaces
    texts = [f"<think>\n{i}\n</think>\n<answer>2</answer>" for i in range(400)]
    rows = {"prompts": ["p"] * 400, "completions": texts, "answer": ["2"] * 400}
    once, again, other = (training.flipped_reward(seed, share)(**rows) for seed in (0, 0, 1))
    assert once == again != other
    assert least < sum(once) < most
    wrong = training.flipped_reward(0, share)(**rows | {"answer": ["3"] * 400})
    assert wrong == [1 - reward for reward in once]


# --- what is written ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def page(finished) -> str:
    report.write_report(finished)
    return (finished.docs / "README.md").read_text()


def text_of(arms) -> str:
    found = Results(arms)
    return report.render(found, report.contents(found))


def section(page: str, title: str) -> str:
    return page.partition(f"## {title}")[2].partition("\n## ")[0]


def test_a_report_keeps_the_seeds_that_are_there(finished, tmp_path):
    config = replace(finished, docs=tmp_path / "docs")
    first = result_of(finished, "sft-s0") | {"cell": "sft-s7", "seed": 7}
    (config.docs / "evidence").mkdir(parents=True)
    (config.docs / "evidence" / "sft.json").write_text(json.dumps([first]))
    copy_results(config)
    assert [c["seed"] for c in Results.load(config.docs / "evidence").arms["sft"]] == [0, 7]


def test_a_report_of_nothing_is_refused(tmp_path):
    with pytest.raises(UsageError, match="no cell is finished"):
        report.write_report(EvidenceConfig(grid=tmp_path / "a", docs=tmp_path / "b"))


@pytest.mark.parametrize("arms", [["sft"], ["grpo"], ["base_zero"], ["sft", "trl"]])
def test_a_report_of_some_cells_says_no_more_than_they_do(finished, tmp_path, arms):
    config = replace(finished, grid=tmp_path / "grid", docs=tmp_path / "docs", seeds=(7,))
    for arm in arms:  # which are of a seed that this command does not name
        folder = config.folder(Cell(arm, 0))
        folder.mkdir(parents=True)
        source = finished.folder(Cell(arm, 0)) / "result.json"
        (folder / "result.json").write_bytes(source.read_bytes())
    report.write_report(config)
    page = (config.docs / "README.md").read_text()
    assert "Controls" not in page
    assert "Lead of" not in page


def test_only_test_sets_that_all_cells_share_are_compared(finished):
    found = Results({arm: [result_of(finished, f"{arm}-s0")] for arm in ("grpo", "sft")})
    assert found.left_out == []
    tests = found.arms["grpo"][0]["tests"]
    tests[pools.OTHER] = tests["taught"]
    assert found.pooled == list(pools.WORDS)
    page = text_of(found.arms)
    assert "because not every run was evaluated on them: reasoning-gym." in page
    assert page.count("reasoning-gym") == 1  # in no table


def test_cells_of_other_settings_are_not_reported_together(finished, tmp_path):
    folder = tmp_path / "evidence"
    folder.mkdir()
    found = result_of(finished, "sft-s0")
    other = found | {"cell": "sft-s1", "seed": 1, "settings": found["settings"] | {"steps": 99}}
    (folder / "sft.json").write_text(json.dumps([found, other]))
    with pytest.raises(UsageError, match="different settings"):
        Results.load(folder)
    (folder / "sft.json").write_text(before := json.dumps([other]))
    with pytest.raises(UsageError, match="different settings"):
        report.write_report(replace(finished, docs=tmp_path))
    assert {file.name: file.read_text() for file in folder.iterdir()} == {"sft.json": before}


def test_a_control_that_gains_is_named(finished, page):
    found = Results.load(finished.docs / "evidence").arms
    control = json.loads(json.dumps(found["random_reward"]))
    for test in control[0]["tests"].values():
        test["greedy"]["strict"] = "1" * len(test["greedy"]["strict"])
    shown = section(text_of(found | {"random_reward": control}), "Controls")
    assert "gains: find the cause" in shown
    assert "+100.0 (+100.0 to +100.0)" in shown
