"""Options: the sources of values, rejected values, and one-line error messages."""

import ast
import errno
import json
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import yaml

from inference import InferenceConfig
from recipes.experience import evaluate as experience_evaluate
from recipes.experience import train as experience_train
from recipes.experience.select import SelectConfig
from recipes.orchestrator import evaluate as orchestrator_evaluate
from recipes.orchestrator.ask import AskConfig
from recipes.orchestrator.config import OrchestratorConfig
from rlm.cli.flags import FIRST, GROUPS, Flag, check_values, flag, flags_of
from rlm.cli.main import run_main
from rlm.cli.options import UsageError, parse, read_options, resolve_config, to_dict
from rlm.evaluation import EvaluateConfig
from rlm.training import PRESETS as GRPO_PRESETS
from rlm.training import GRPOConfig, SFTConfig
from server import ServerConfig

ROOT = Path(__file__).parents[2]


def only_one(value: float) -> dict[str, object]:
    if value != 1:
        raise ValueError("--top-p must be 1")
    return {}


PRESETS = {"tiny": {"batch_size": 1, "learning_rate": 0.5}, "big": {"batch_size": 64}}


@dataclass
class Config:
    OTHER_SPELLINGS: ClassVar = {
        "fp32": Flag(kind=bool, becomes=lambda is_on: {"dtype": "fp32" if is_on else "bf16"}),
        "top_p": Flag(kind=float, becomes=only_one),
    }

    question: str | None = flag(None, "ask this", positional=True)
    learning_rate: float = flag(1e-5, "peak learning rate, 100% of it", group="optimizer")
    batch_size: int = flag(8, "sequences per step", aliases=["--batch", "micro_batch"], min=1)
    limit: int | None = flag(None, "use the first N")
    use_lora: bool = flag(True, "train adapters", aliases=["lora"])
    dtype: str = flag("bf16", "weights", choices=["bf16", "fp32"], group="model")
    steps: tuple[int, ...] = flag((1, 2), "evaluate at")
    layers: tuple[str, ...] | None = flag(None, "adapt these", default_text="every layer")
    top_k: int = flag(0, "always 0", hidden=True)
    tags: tuple[str, ...] = flag((), "labels")
    output: Path = flag(Path("runs"), "folder")

    def __post_init__(self):
        if self.limit is not None and self.limit < self.batch_size:
            raise ValueError(f"--limit {self.limit} is less than\n--batch-size {self.batch_size}")


def read(*argv, text=None, tmp_path=None):
    if text is not None:
        path = tmp_path / "c.yaml"
        path.write_text(text)
        argv = ("--config", str(path), *argv)
    return parse(Config, argv, presets=PRESETS)


def mistake(*argv, **source):
    with pytest.raises(UsageError) as caught:
        read(*argv, **source)
    return str(caught.value)


@pytest.mark.parametrize(
    ("argv", "text", "expected"),
    [
        ((), None, (1e-5, 8, None)),
        (("--preset", "tiny"), None, (0.5, 1, None)),
        (("--preset", "tiny", "--limit", "9"), "batch_size: 2\nlimit: 50", (0.5, 2, 9)),
        # A value equal to the default beats a preset.
        (("--preset", "tiny", "--batch-size", "8"), None, (0.5, 8, None)),
        (("--preset", "tiny"), "batch_size: 8", (0.5, 8, None)),
        # YAML may name a preset, and the command line another.
        ((), "preset: tiny", (0.5, 1, None)),
        (("--preset", "big"), "preset: tiny", (1e-5, 64, None)),
    ],
)
def test_layers(argv, text, expected, tmp_path):
    config = read(*argv, text=text, tmp_path=tmp_path)
    assert (config.learning_rate, config.batch_size, config.limit) == expected


def test_only_what_was_set_is_given_and_it_is_resolved_last(tmp_path):
    seen = []

    @dataclass
    class Resolved(Config):
        @classmethod
        def resolve(cls, given):
            seen.append(given)
            return {"limit": 70} | given

    argv = ["--preset", "big", "--batch-size=8"]
    assert resolve_config(Resolved, argv, presets=PRESETS).limit == 70
    assert seen == [{"batch_size": 8}] == [read_options(Config, argv, presets=PRESETS)]
    assert parse(Resolved, argv, presets=PRESETS).limit is None
    with pytest.raises(UsageError, match="--limit 4 is less"):
        resolve_config(Resolved, ["--limit=4"])
    assert len(seen) == 1  # the contradiction was found first
    assert resolve_config(Config, argv, presets=PRESETS) == read(*argv)


@pytest.mark.parametrize(
    ("typed", "name", "value"),
    [
        ("--batch-size 3", "batch_size", 3),
        ("--batch_size=3", "batch_size", 3),
        ("--batch 3", "batch_size", 3),
        ("--micro_batch=3", "batch_size", 3),
        ("--batch-size 2 --batch 3", "batch_size", 3),
        ("--no-lora", "use_lora", False),
        ("--no_use_lora", "use_lora", False),
        ("--no_lora --use_lora", "use_lora", True),
        ("--no-lora why?", "question", "why?"),
        ("-- -why", "question", "-why"),
        ("\N{MINUS SIGN}3+5?", "question", "\N{MINUS SIGN}3+5?"),
    ],
)
def test_spellings_of_a_flag(typed, name, value):
    assert getattr(read(*typed.split()), name) == value
    assert read("what is 2_0 = x?", "--limit", "9").question == "what is 2_0 = x?"


@pytest.mark.parametrize(
    ("source", "name", "value"),
    [
        (["--learning-rate", "1e-4"], "learning_rate", 1e-4),
        (["--learning-rate", "3"], "learning_rate", 3.0),
        (["--limit", "none"], "limit", None),
        (["--dtype", "fp32"], "dtype", "fp32"),
        (["--steps", "3,4"], "steps", (3, 4)),
        (["--steps", "3", "--steps", "4, 5"], "steps", (3, 4, 5)),
        (["--steps", ""], "steps", ()),
        (["--layers", "q,v"], "layers", ("q", "v")),
        (["--layers", "none"], "layers", None),
        (["--output", "a/b"], "output", Path("a/b")),
        ("learning_rate: 1e-4", "learning_rate", 1e-4),  # PyYAML reads a string
        ("learning_rate: 3", "learning_rate", 3.0),
        ("batch_size: 3.0", "batch_size", 3),  # as other programs write them
        ("batch_size: [3]", "batch_size", 3),
        ("preset: [big]", "batch_size", 64),
        ("micro_batch: -1", "batch_size", 8),
        ("learning-rate: 0.5", "learning_rate", 0.5),
        ("limit: null", "limit", None),
        ("limit: none", "limit", None),
        ("use_lora: false", "use_lora", False),
        ("steps: [3, 4]", "steps", (3, 4)),
        ("layers: [q, v]", "layers", ("q", "v")),
        ("batch: 3", "batch_size", 3),
        ("output: ~/a", "output", Path.home() / "a"),
        ("question: why", "question", "why"),
    ],
)
def test_values_that_are_typed_or_in_yaml(source, name, value, tmp_path):
    typed = read(*source) if isinstance(source, list) else read(text=source, tmp_path=tmp_path)
    got = getattr(typed, name)
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--batch-size", "1e3"], "--batch-size: expected int, got '1e3'"),
        (["--batch-size", "none"], "--batch-size: expected int, got 'none'"),
        (["--limit", "x"], "--limit: expected int|none, got 'x'"),
        (["--learning_rate", "fast"], "--learning-rate: expected float, got 'fast'"),
        (["--learning-rate", "nan"], "--learning-rate: expected float, got 'nan'"),
        (["--learning-rate", "1e999"], "--learning-rate: expected float, got '1e999'"),
        (["--steps", "1,x"], "--steps: expected int,..., got '1,x'"),
        (["--dtype", "fp64"], "--dtype: expected bf16|fp32, got 'fp64'"),
        (["--output", ""], "--output: expected path, got ''"),
        (["--limit"], "--limit: expected one argument"),
        (["--config", "nowhere.yaml"], "--config: cannot read 'nowhere.yaml': No such file"),
        (["--config", "a", "--config=b"], "--config is given twice"),
        (["--preset", "tiny", "--preset", "tiny"], "--preset is given twice"),
        (["--preset", "huge"], "--preset: expected tiny|big, got 'huge'"),
        (["--learning-rat", "1"], "unknown option --learning-rat; did you mean --learning-rate?"),
        (["--learning_rat=1"], "unknown option --learning_rat; did you mean --learning-rate?"),
        (["--no-use-lor"], "unknown option --no-use-lor; did you mean --no-use-lora?"),
        (["--learn", "1"], "unknown option --learn; did you mean --learning-rate?"),
        (["--zzz"], "unknown option --zzz"),
        (["why", "seed"], "unknown option seed: put a [question] of several words in quotes"),
        (["\N{EN DASH}-use-lora"], "\N{EN DASH}-use-lora begins with a long dash: type --use-lora"),
        (["\N{EM DASH}limit=3"], "\N{EM DASH}limit begins with a long dash: type --limit"),
    ],
)
def test_mistakes_on_the_command_line(argv, message):
    assert mistake(*argv).startswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batch_size: '3'", ":1: batch_size: expected int, got '3'"),
        ("batch_size: true", ":1: batch_size: expected int, got True"),
        ("batch_size: 3.5", ":1: batch_size: expected int, got 3.5"),
        ("batch_size: [3, 4]", ":1: batch_size: expected int, got [3, 4]"),
        ("learning_rate: true", ":1: learning_rate: expected float, got True"),
        ("learning_rate: .nan", ":1: learning_rate: expected float, got nan"),
        ("learning_rate: .inf", ":1: learning_rate: expected float, got inf"),
        ("learning_rate: 1" + "0" * 400, ":1: learning_rate: expected float, got 1000"),
        ("use_lora: 1", ":1: use_lora: expected bool, got 1"),
        ("\ndtype: 3", ":2: dtype: expected bf16|fp32, got 3"),
        ("steps: 1,2", ":1: steps: expected int list, got '1,2'"),
        ("steps: ['1']", ":1: steps: expected int list, got ['1']"),
        ("steps: {a: 1}", ":1: steps: expected int list, got {'a': 1}"),
        ("limit: 9\nlimit: 9", ":2: limit is given twice"),
        ("batch_size: 9\nbatch: 9", ":2: batch is given twice"),
        ("limit: 9\nlimit: 9\nbatch: x", ":2: limit is given twice | :3: batch: expected int, got"),
        ("zzz: 1\nlearning_rat: 1", ":1: unknown key 'zzz' | "),
        ("learning_rat: 1", ":1: unknown key 'learning_rat'; did you mean learning_rate?"),
        ("on: 1", ":1: unknown key True"),
        ("[a]: 1", ":1: "),
        ("config: other.yaml", ":1: unknown key 'config'"),
        ("preset: [tiny, big]", ":1: preset: expected tiny|big, got ['tiny', 'big']"),
        ("limit: 9\nsteps: [1\ndtype: x", ":3: while parsing a flow sequence: expected ',' or ']'"),
        ("limit: !!python/object:os.system 1", ":1: "),
        ("limit: *x", ":1: "),
        ("base: &b {limit: 2}\n<<: *b", ":1: unknown key 'base'"),
        ("limit: 1\n---\nlimit: 2", ":2: expected a single document"),
        ("output: 2024-13-01", ": month must be in 1..12"),
        ("limit: \x00", ": "),
        ("- a", ": expected lines of `option: value`"),
        ("", ": expected lines of `option: value`"),
    ],
)
def test_mistakes_in_yaml(text, message, tmp_path):
    got = mistake(text=text, tmp_path=tmp_path)
    assert got.startswith(f"{tmp_path / 'c.yaml'}{message}")


def test_a_contradiction_and_a_bad_preset_are_usage_errors():
    assert mistake("--limit", "4") == "--limit 4 is less than\n--batch-size 8"
    with pytest.raises(UsageError, match=r"preset p: batch_size: expected int, got 1\.5"):
        parse(Config, ["--preset", "p"], presets={"p": {"batch_size": 1.5}})
    with pytest.raises(UsageError, match="unknown option --preset"):
        parse(Config, ["--preset", "tiny"])


@pytest.mark.parametrize(
    ("argv", "text", "dtype"),
    [
        (["--fp32"], None, "fp32"),
        (["--no-fp32"], "dtype: fp32", "bf16"),
        (["--dtype=bf16"], "fp32: true", "bf16"),
        (["--fp32", "--dtype=fp32"], None, "fp32"),
        (["--no-fp32", "--dtype=fp32"], None, "fp32"),
        ([], "fp32: true", "fp32"),
    ],
)
def test_a_switch_is_another_way_to_set_a_field(argv, text, dtype, tmp_path):
    assert read(*argv, text=text, tmp_path=tmp_path).dtype == dtype


@dataclass(frozen=True)
class Bounded:
    count: int | None = flag(1, "", min=1)
    share: float = flag(0.5, "", above=0, max=1)
    sizes: tuple[int, ...] = flag((2,), "", min=2)
    kind: str = flag("a", "", choices=("a", "b"))
    place: Path | None = flag(None, "")

    def __post_init__(self):
        check_values(self)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"count": 0}, "--count must be at least 1"),
        ({"share": 0.0}, "--share must be above 0"),
        ({"share": 1.01}, "--share must be at most 1"),
        ({"sizes": (2, 1)}, "--sizes must be at least 2"),
        ({"sizes": [2, 1]}, "--sizes must be at least 2"),  # as JSON hands them to a process
        ({"kind": "c"}, "--kind: unknown value 'c'; choose from a, b"),
    ],
)
def test_a_value_out_of_bounds_is_refused_in_python_and_when_typed(values, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        Bounded(**values)
    typed = [f"--{name}={str(value).strip('()[]')}" for name, value in values.items()]
    with pytest.raises(UsageError, match=message if "kind" not in values else "a|b"):
        parse(Bounded, typed)


def test_values_that_python_may_give():
    """Values on a bound are valid, a list may replace a tuple, and a text may replace a path."""
    Bounded(count=None, share=1.0, sizes=(), kind="b")
    assert parse(Bounded, ["--count=1", "--share=1", "--sizes=2,3"]).sizes == (2, 3)
    assert Bounded(sizes=[3, 2]).sizes == (3, 2)
    assert Bounded(place="a/b").place == Path("a/b")
    assert Bounded(place="~/x").place == Path.home() / "x"


def test_a_value_of_another_type_is_converted_or_refused_in_python():
    """This happens before a model is loaded: range(1e3) would fail in the first step."""
    made = GRPOConfig(steps=1e3, batch_size=np.int64(4), dataset=Path("a.jsonl"), max_minutes=5)
    assert (made.steps, made.batch_size, made.dataset) == (1000, 4, "a.jsonl")
    assert {type(made.steps), type(made.batch_size), type(made.lora_alpha)} == {int}  # also in JSON
    rate = GRPOConfig(learning_rate=np.float32(0.5)).learning_rate  # JSON cannot store a float32
    assert (rate, type(rate)) == (0.5, float)
    for name, value, expected in (
        ("steps", 10.5, "int|none, got 10.5"),
        ("steps", "10", "int|none, got '10'"),
        ("steps", True, "int|none, got True"),
        ("learning_rate", "1e-4", "float, got '1e-4'"),
        ("dataset", 5, "str|none, got 5"),
        ("reward", len, "str|none, got <built-in function len>"),
        ("plan", 1, "bool, got 1"),
    ):
        message = re.escape(f"--{name.replace('_', '-')}: expected {expected}")
        with pytest.raises(ValueError, match=f"^{message}$"):
            GRPOConfig(**{name: value})


def test_to_dict_survives_json_and_yaml(tmp_path):
    config = read("--limit", "9", "--layers", "q,v", "--output", "a", "--learning-rate", "1e-7")
    assert json.loads(json.dumps(to_dict(config))) == to_dict(config)
    assert to_dict(config)["output"] == "a"
    assert read(text=yaml.safe_dump(to_dict(config)), tmp_path=tmp_path) == config


def test_help_names_every_field_and_default(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as stop:
        parse(Config, ["--help"], presets=PRESETS, description="Trains.\n\n  example")
    text = capsys.readouterr().out
    assert stop.value.code == 0
    assert "Trains.\n\n  example" in text
    assert text.index("optimizer:") < text.index("--learning-rate float") < text.index("model:")
    for part in ["question", "--batch-size int", "--limit int|none", "--no-use-lora"]:
        assert part in text
    for part in ["--steps int,...", "--dtype bf16|fp32", "--output path", "--config", "tiny:"]:
        assert part in text
    for default in ["1e-05", "8", "none", "on", "bf16", "1,2", "every layer", "empty", "runs"]:
        assert f"(default: {default})" in " ".join(text.split())
    assert "_" not in text[text.index("options:") : text.index("presets:")]
    assert "top-k" not in text  # and is taken all the same
    assert read("--top-k", "3").top_k == 3
    assert "tiny: --batch-size 1 --learning-rate 0.5" in text


SCRIPTS = {
    "train_sft.py": SFTConfig,
    "train_grpo.py": GRPOConfig,
    "eval.py": EvaluateConfig,
    "inference.py": InferenceConfig,
    "server.py": ServerConfig,
    "-m recipes.orchestrator.train": OrchestratorConfig,
    "-m recipes.orchestrator.evaluate": orchestrator_evaluate.EvaluateConfig,
    "-m recipes.orchestrator.ask": AskConfig,
    "-m recipes.experience.train": experience_train.TrainConfig,
    "-m recipes.experience.evaluate": experience_evaluate.EvaluateConfig,
    "-m recipes.experience.select": SelectConfig,
}


@pytest.mark.parametrize("cls", SCRIPTS.values(), ids=SCRIPTS)
def test_a_long_list_of_options_is_in_groups_under_the_ten_that_people_change_first(cls):
    flags = [o for o in flags_of(cls) if not o.positional and not o.becomes]
    if len(flags) < 10:
        assert {option.group for option in flags} == {None}
        return
    assert len([option for option in flags if option.group == FIRST]) == 10
    assert set(cls.CHANGED_FIRST) <= {option.name for option in flags}
    assert {option.group for option in flags} <= {FIRST, *GROUPS}


def test_every_name_in_the_table_of_groups_is_an_option_somewhere():
    names = {option.name for cls in SCRIPTS.values() for option in flags_of(cls)}
    assert {name for group in GROUPS.values() for name in group.split()} <= names


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_examples_of_help_can_be_copied(script):
    """The parser accepts each example unchanged."""
    cls = SCRIPTS[script]
    module = script.removeprefix("-m ").replace(".", "/").removesuffix("/py") + ".py"
    text = ast.get_docstring(ast.parse((ROOT / module).read_text())).replace("\\\n", " ")
    found = re.findall(rf"^ *(?:\w+=\S+ )?python {re.escape(script)}(?= |$)(.*)", text, re.M)
    assert found
    for options in found:
        parse(cls, shlex.split(options, comments=True), presets=GRPO_PRESETS)


FULL = OSError(errno.ENOSPC, "No space left on device", "a.json")
OVER_QUOTA = OSError(errno.EDQUOT, "Disk quota exceeded")


def main_that(result):
    def main(config):
        if isinstance(result, BaseException):
            raise result
        return result

    return main


@pytest.mark.parametrize(
    ("result", "argv", "code", "stderr"),
    [
        (None, [], None, ""),
        (3, [], 3, ""),
        (None, ["--limit", "4"], 2, "error: --limit 4 is less than --batch-size 8\n"),
        (UsageError("no model\nin x"), [], 2, "error: no model in x\n"),
        (KeyboardInterrupt(), [], 130, "interrupted\n"),
        (FULL, [], 2, "error: a.json cannot be written: No space left on device; free disk space"),
        (OVER_QUOTA, [], 2, "error: the disk is full: Disk quota exceeded; free disk space"),
    ],
)
def test_run_main(result, argv, code, stderr, capsys):
    with pytest.raises(SystemExit) as stop:
        run_main(main_that(result), Config, argv=argv)
    assert stop.value.code == code
    rest = " and run it again\n" if stderr.endswith("free disk space") else ""
    assert capsys.readouterr() == ("", stderr + rest)


@pytest.mark.parametrize("bug", [ValueError("bug"), OSError(errno.EBADF, "bug")])
def test_a_bug_keeps_its_traceback(bug):
    with pytest.raises(type(bug), match="bug"):
        run_main(main_that(bug), Config, argv=[])


def run_script(body, **streams):
    script = f"""
import sys
from dataclasses import dataclass
from rlm.cli.flags import flag
from rlm.cli.main import run_main

@dataclass
class Config:
    size: int = flag(1, "lines")

def main(config):
{body}

run_main(main, Config)
assert False
"""
    return subprocess.run([sys.executable, "-c", script, "--size=9"], text=True, **streams)


def test_a_reader_that_left_is_no_error():
    reader = subprocess.Popen(["true"], stdin=subprocess.PIPE)
    reader.wait()
    for body in ("    sys.stdout.write('x')", "    sys.stdout.write('x' * 10**6)"):
        done = run_script(body, stdout=reader.stdin, stderr=subprocess.PIPE)
        assert (done.returncode, done.stderr) == (141, "")
    reader.stdin.close()


def test_another_broken_pipe_is_an_error_and_no_torch_is_imported():
    body = "    assert 'torch' not in sys.modules; raise BrokenPipeError('worker')"
    done = run_script(body, capture_output=True)
    assert done.returncode == 1
    assert "BrokenPipeError: worker" in done.stderr


@pytest.mark.parametrize(("written", "value"), [("false", 0), ("true", 3), ("5", 5)])
def test_an_option_that_was_a_switch_is_read_from_yaml(written, value, tmp_path):
    file = tmp_path / "old.yaml"
    file.write_text(f"dry_run: {written}\n")
    assert parse(SFTConfig, ["--config", str(file)]).dry_run == value


def test_a_home_that_no_shell_has_replaced(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("model: ~/a\n")
    config = parse(SFTConfig, ["--config", str(file), "--dataset=~/b.jsonl"])
    home = Path.home()
    assert (config.model, config.dataset) == (str(home / "a"), str(home / "b.jsonl"))


def test_a_number_that_is_not_set_is_skipped_in_files_of_other_programs(tmp_path):
    file = tmp_path / "theirs.yaml"
    theirs = "max_steps: -1\nnum_train_epochs: 3.0\nreport_to: [none]\nresume_from_checkpoint:\n"
    file.write_text(theirs)
    assert parse(SFTConfig, ["--config", str(file)]).epochs == 3
    file.write_text("resume:\nzzz: 1\n")
    with pytest.raises(UsageError, match=r":1: resume: expected bool, got None \| .*:2: .*'zzz'"):
        parse(SFTConfig, ["--config", str(file)])
    file.write_text("max_steps: 5\nzzz: -1\n")
    with pytest.raises(UsageError, match=r":1: unknown key 'max_steps'.* \| .*:2: .*'zzz'"):
        parse(SFTConfig, ["--config", str(file)])
