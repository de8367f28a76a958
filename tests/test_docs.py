"""Checks of every page: links, files and options exist, the parser accepts the commands, Python
code compiles and finds its imports, figures equal those of the results, and generated pages are up
to date. test_walkthroughs.py runs the commands."""

import ast
import dataclasses
import doctest
import json
import re
import shlex
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from golden import ROOT
from reference_pages import REFERENCE, api_section, options_page, with_section

from rlm.cli.flags import flags_of, with_underscores
from rlm.cli.options import read_options
from rlm.data import FORMATS
from rlm.training import PRESETS, GRPOConfig, SFTConfig

PAGES = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "recipes").rglob("*.md"),
    *(ROOT / folder / "README.md" for folder in ("benchmarks", "data", "weights")),
]
OLD = {"docs/log.md", "CHANGELOG.md"}  # these pages may name files and options that were removed
NAMING_OPTIONS = (  # pages that name options of our scripts in running text
    "README.md",
    "docs/tutorials/first-run.md",
    "docs/tutorials/your-own-task.md",
    "docs/tutorials/gpu.md",
    "docs/how-to/troubleshooting.md",
    "docs/how-to/training-guide.md",
    "docs/how-to/resume-and-track.md",
    "docs/how-to/gpu.md",
    "docs/reference/metrics.md",
    "docs/reference/run-folder.md",
    "docs/explanation/algorithms.md",
    "docs/explanation/reliability.md",
)
OTHER_PROGRAMS = {"logprobs_mode"}  # an option of vLLM
FENCE = re.compile(r"^```.*?^```$", re.M | re.S)
SCRIPT_CONFIGS = {
    "train_sft": ("rlm.training", "SFTConfig"),
    "train_grpo": ("rlm.training", "GRPOConfig"),
    "eval": ("eval", "EvaluateConfig"),
    "inference": ("inference", "InferenceConfig"),
    "server": ("server", "ServerConfig"),
    "recipes.orchestrator.train": ("recipes.orchestrator.train", "OrchestratorConfig"),
    "recipes.orchestrator.evaluate": ("recipes.orchestrator.evaluate", "EvaluateConfig"),
    "recipes.orchestrator.ask": ("recipes.orchestrator.ask", "AskConfig"),
    "recipes.experience.train": ("recipes.experience.train", "TrainConfig"),
    "recipes.experience.select": ("recipes.experience.select", "SelectConfig"),
    "recipes.experience.evaluate": ("recipes.experience.evaluate", "EvaluateConfig"),
}
COMMAND = re.compile(
    r"^(?:[A-Z_]+=\S+ )*(?:\S*python|torchrun .*?|rlm) (?:-m )?"
    rf"({'|'.join(map(re.escape, SCRIPT_CONFIGS))})(?:\.py)?\b(.*)",
    re.M,
)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@cache
def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def anchors_of(page: Path) -> set[str]:
    """Return the anchors that GitHub and mkdocs make from headings, with numbers if repeated."""
    found: list[str] = []
    for heading in re.findall(r"^#+ (.+)$", FENCE.sub("", text_of(page)), re.M):
        plain = re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
        found.append(plain + (f"-{found.count(plain)}" if plain in found else ""))
    return {*found, *(re.sub("-+", "-", anchor) for anchor in found)}


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", text_of(page))):
            if re.match(r"(https?|mailto):", target):
                continue
            path, _, anchor = target.partition("#")
            there = (page.parent / path).resolve() if path else page
            assert there.exists(), f"{name_of(page)}: {target}"
            if anchor and there.suffix == ".md":
                assert anchor in anchors_of(there), f"{name_of(page)}: {target}"


def test_named_files_exist():
    folders = "rlm|tests|docs|configs|examples|benchmarks|recipes|data|weights"
    named = re.compile(rf"`((?:{folders})/[\w./-]+\.(?:py|md|c|yaml|json|jsonl|svg))`")
    for page in PAGES:
        if name_of(page) in OLD or page.name == "names.md":  # names files of other projects
            continue
        for name in named.findall(text_of(page)):
            made = "api_keys" in name or "grpo_experiences" in name
            assert made or (ROOT / name).exists(), f"{name_of(page)}: {name}"


@cache
def options_of(script: str) -> set[str]:
    """Return all names of a script's options, with underscores."""
    module, name = SCRIPT_CONFIGS[script]
    found = import_module(module)
    flags = flags_of(getattr(found, name))
    return {"config", "preset", "help"} | {key for flag in flags for key in flag.keys}


def commands_of(page: Path):
    """Yield (script, words) for each command in a code block."""
    lines = re.findall(r"`(python [^`\n]*)`", text_of(page)) if page.name == "names.md" else []
    for block in [*FENCE.findall(text_of(page)), *lines]:
        for script, rest in COMMAND.findall(block.replace("\\\n", " ")):
            yield script, [word for word in shlex.split(rest, comments=True) if word != "…"]


COMMANDS = [
    pytest.param(script, words, id=f"{name_of(page)}: {script} {' '.join(words)}")
    for page in PAGES
    if name_of(page) not in OLD
    for script, words in commands_of(page)
]


@pytest.mark.parametrize(("script", "words"), COMMANDS)
def test_a_command_is_parsed(script: str, words: list[str]):
    module, name = SCRIPT_CONFIGS[script]
    config = getattr(import_module(module), name)
    read_options(config, words, presets=PRESETS if script == "train_grpo" else None)


def test_there_are_commands_to_check():
    assert len(COMMANDS) > 60


def test_options_named_in_the_text_exist():
    known = set().union(*map(options_of, SCRIPT_CONFIGS), OTHER_PROGRAMS)
    for name in NAMING_OPTIONS:
        for option in re.findall(r"`--([a-z][\w-]+)", FENCE.sub("", text_of(ROOT / name))):
            plain = with_underscores(option)
            assert plain in known or plain.removeprefix("no_") in known, f"{name}: --{option}"


def test_every_page_is_in_the_index_and_on_the_site():
    index = text_of(ROOT / "docs/index.md")
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for folder in ("tutorials", "how-to", "reference", "explanation"):
        for page in (ROOT / "docs" / folder).glob("*.md"):
            name = f"{folder}/{page.name}"
            assert f"]({name})" in index, name
            assert f"- {name}\n" in site, name


# --- the code that pages speak of --------------------------------------------------------------


def names_in(code: str) -> set[str]:
    """Return the names that a module defines, including methods as Class.method."""
    found = set()
    for node in ast.parse(code).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = [n for n in node.body if isinstance(n, ast.FunctionDef)]
            found |= {f"{node.name}.{method.name}" for method in methods}
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


ARCHITECTURE = text_of(ROOT / "docs/explanation/architecture.md").splitlines()


def test_what_a_row_of_the_architecture_names_is_there():
    for row in (row for row in ARCHITECTURE if row[:1] == "|" and "`" in row):
        cells = [re.findall(r"`([^`]+)`", cell) for cell in row.strip("|").split("|")]
        files = [name for cell in cells for name in cell if "/" in name or name.endswith(".py")]
        for file in files:
            assert (ROOT / file).exists() or (ROOT / f"{file}.py").exists(), file
        if len(files) == 1 and files[0].endswith(".py"):
            defined = names_in((ROOT / files[0]).read_text(encoding="utf-8"))
            column = next(i for i, cell in enumerate(cells) if files[0] in cell)
            for name in cells[column + 1] if column + 1 < len(cells) else []:
                assert name in defined, f"{files[0]} has no {name}"


def test_python_of_a_page_compiles_and_its_imports_work():
    for page in PAGES:
        blocks = re.findall(r"^```python\n(.*?)^```$", text_of(page), re.M | re.S)
        if page.name == "python-api.md":  # its signatures are not statements
            blocks = blocks[: text_of(page).partition("## Signatures")[0].count("```python")]
        for block in [*blocks, *re.findall(r"`(from (?:rlm|recipes)[^`…]*)`", text_of(page))]:
            for node in ast.walk(ast.parse(block, filename=name_of(page))):
                if isinstance(node, ast.ImportFrom) and node.module.startswith(("rlm", "recipes")):
                    exec(compile(ast.unparse(node), name_of(page), "exec"), {})


NAMES = text_of(ROOT / "docs/reference/names.md")
(TAKEN,) = re.findall(r"These options work unchanged: `([^`]*)`", NAMES)
VALUES = {"--algorithm": "Dr.GRPO", "--preset": "dapo", "--reasoning_format": "simple"}
VALUES |= {"--clip_eps": "0.1"}


def test_an_option_that_the_names_page_calls_taken_is_taken():
    for option in TAKEN.split():
        always = ("--use_lora", "--use_flash_attention")
        switches = (*always, "--use_4bit", "--use_wandb")
        value = [] if option in switches else [VALUES.get(option, "8")]
        given = read_options(GRPOConfig, [option, *value], presets=PRESETS)
        assert given or option in always, option


def test_the_examples_in_docstrings_are_right():
    for folder in ("rlm", "recipes", "benchmarks"):
        for file in (ROOT / folder).rglob("*.py"):
            if ">>> " in file.read_text():
                module = import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))
                assert doctest.testmod(module).failed == 0, file


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("options.md", lambda page: options_page()),
        ("python-api.md", lambda page: with_section(page, api_section())),
    ],
)
def test_a_generated_page_is_up_to_date(name: str, made, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "")  # options_page sets COLUMNS, and monkeypatch restores it
    page = (REFERENCE / name).read_text(encoding="utf-8")
    assert page == made(page), "make reference"
    assert "0x" not in page  # the address of an object differs in each run


# --- figures ------------------------------------------------------------------------------------


def test_the_figures_of_the_demo_are_those_of_the_file():
    readme = text_of(ROOT / "README.md")
    figures = json.loads((ROOT / "docs/results/demo/summary.json").read_text())

    def greedy(row):
        verdicts = figures["accuracy"][row]["strict"]
        return f"{100 * verdicts['correct'] / verdicts['total']:.1f}"

    assert f"| base | {greedy('base')} | – |" in readme
    for row, title in (("sft", "after SFT"), ("grpo", "after GRPO (TOPR)")):
        sampled = 100 * figures["sampled_accuracy"][row]["strict"]["mean"]
        assert f"| {title} | {greedy(row)} | {sampled:.1f} |" in readme
    gain = figures["gain"]
    assert f"gains {gain['points']:+.1f} points" in readme
    assert f"{gain['low']:+.1f} to {gain['high']:+.1f}" in readme


def test_the_figures_of_the_shipped_adapter_are_those_of_its_verdicts():
    """A verdict consists of one digit for the SFT adapter and one for the shipped adapter."""
    readme = text_of(ROOT / "README.md")
    card = text_of(ROOT / "weights/final_rlm_lora/README.md")
    verdicts = json.loads((ROOT / "docs/results/shipped/evaluation.json").read_text())["verdicts"]
    titles = {"gsm8k": "GSM8K", "multiarith": "MultiArith", "singleeq": "SingleEq"}
    titles["elementary"] = "our generated arithmetic, nearly solved after SFT with the calculator"
    for name, by_tool in verdicts.items():
        cells = []
        for tool in ("calculator", "none"):
            found = list(by_tool[tool].values())
            start, shipped = (100 * sum(v[i] == "1" for v in found) / len(found) for i in (0, 1))
            cells += [f"{shipped:.1f}", f"{shipped - start:+.1f}".replace("-", "−")]
            (row,) = re.findall(rf"^\| {name} \| {len(found)} \| {tool} \|.*$", card, re.M)
            assert f"| {shipped:.1f} (" in row
            assert f"| {shipped - start:+.1f} (" in row
        if name in titles:
            assert f"| {titles[name]} | {' | '.join(cells)} |" in readme


@pytest.mark.parametrize("grid", ["twenty", "six", "sixty", "sixty_topr"])
def test_the_leads_of_the_evidence_page_are_those_of_the_results(grid: str):
    """The generated pages contain each lead that the page quotes, with its interval."""
    evidence = text_of(ROOT / "docs/explanation/evidence.md")
    rows = text_of(ROOT / f"docs/results/{grid}/README.md")
    found = re.findall(r"[+−]\d+\.\d \([+−]?\d+\.\d to [+−]?\d+\.\d\)", rows)
    quoted = [lead for lead in found if lead in evidence]
    assert len(quoted) >= 2


def test_the_defaults_in_the_table_of_coming_from_are_ours_and_trls():
    import trl

    page = text_of(ROOT / "docs/how-to/coming-from.md")
    theirs = {f.name: f.default for f in dataclasses.fields(trl.GRPOConfig)}
    sft = {f.name: f.default for f in dataclasses.fields(trl.SFTConfig)}
    ours = GRPOConfig()
    assert (theirs["learning_rate"], sft["learning_rate"]) == (1e-6, 2e-5)
    assert (theirs["loss_type"], theirs["max_completion_length"]) == ("dapo", 512)
    assert f"| `algorithm {ours.algorithm}`:" in page
    assert f"| 1e-6 | {ours.learning_rate:.0e} |".replace("e-0", "e-") in page
    assert f"| 2e-5 | {SFTConfig().learning_rate:.0e} |".replace("e-0", "e-") in page
    assert f"| 512 | {ours.max_new_tokens} |" in page


def test_the_figures_of_the_lm_eval_page_are_those_of_the_run():
    page = text_of(ROOT / "docs/how-to/evaluate-with-lm-eval.md")
    record = json.loads((ROOT / "docs/results/lm_eval.json").read_text())
    cells = re.findall(r"^\| .*? \| (\d+) of 200 \| (\d+) of 200 .*? \| (\d+) \|$", page, re.M)
    rows = [
        [row[k] for k in ("lm_eval", "evaluate", "different_verdicts")] for row in record["rows"]
    ]
    assert [[int(cell) for cell in row] for row in cells] == rows
    assert FORMATS["deepseek"].system_prompt in page
    task = yaml.safe_load((ROOT / "examples/lm_eval/rlm_numbers.yaml").read_text())
    assert f"--tasks {task['task']} " in page
    ((filtered, _),) = [each["filter"] for each in task["filter_list"]]
    for text, number in (("1,080", "1,080"), ("<answer>-7</answer>", "-7"), ("3/4", "3/4")):
        assert re.findall(filtered["regex_pattern"], text)[-1] == number


def test_the_notebook_asks_the_server_for_the_most_likely_answer():
    cells = json.loads((ROOT / "notebooks/colab.ipynb").read_text(encoding="utf-8"))["cells"]
    [cell] = [text for cell in cells if "chat/completions" in (text := "".join(cell["source"]))]
    assert 'body["temperature"] = 0' in cell  # by default, /v1 does not decode greedily
