"""README and the pages of docs/: links lead somewhere, named files exist, options are options."""

import re
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

from rlm.cli.flags import flags_of
from rlm.cli.synonyms import with_underscores

ROOT = Path(__file__).parent.parent
PAGES = [
    *ROOT.glob("*.md"),
    *(page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "failures"),
    *(ROOT / "recipes").rglob("*.md"),
    *(ROOT / folder / "README.md" for folder in ("benchmarks", "data", "weights")),
]
OLD = {"docs/log.md", "CHANGELOG.md"}  # they tell what was: files and options may be gone
NAMING_OPTIONS = (  # in running text, and those of our scripts
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
OTHER_PROGRAMS = {"logprobs_mode"}  # vLLM's
FENCE = re.compile(r"^```.*?^```$", re.M | re.S)
COMMAND = re.compile(
    r"^(?:[A-Z_]+=\S+ )*(?:\S*python|torchrun .*?|rlm) (?:-m )?"
    r"(train_sft|train_grpo|eval|inference|server)(?:\.py)?\b(.*)",
    re.M,
)
SCRIPT_CONFIGS = {
    "train_sft": ("rlm.training", "SFTConfig"),
    "train_grpo": ("rlm.training", "GRPOConfig"),
    "eval": ("eval", "EvaluateConfig"),
    "inference": ("inference", "InferenceConfig"),
    "server": ("server", "ServerConfig"),
}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@cache
def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def anchors_of(page: Path) -> set[str]:
    """As GitHub and mkdocs make them from headings, repeated ones numbered."""
    found: list[str] = []
    for heading in re.findall(r"^#+ (.+)$", FENCE.sub("", text_of(page)), re.M):
        plain = re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
        found.append(plain + (f"-{found.count(plain)}" if plain in found else ""))
    return {*found, *(re.sub("-+", "-", anchor) for anchor in found)}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path):
    text = FENCE.sub("", text_of(page))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"(https?|mailto):", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), target
        if anchor and there.suffix == ".md":
            assert anchor in anchors_of(there), target


@pytest.mark.parametrize("page", [p for p in PAGES if name_of(p) not in OLD], ids=name_of)
def test_named_files_exist(page: Path):
    if page.name == "names.md":  # which files other projects have
        return
    folders = "rlm|tests|docs|configs|examples|benchmarks|recipes|data|weights"
    for name in re.findall(
        rf"`((?:{folders})/[\w./-]+\.(?:py|md|c|yaml|json|jsonl|svg))`", text_of(page)
    ):
        assert (ROOT / name).exists() or "api_keys" in name or "grpo_experiences" in name, name


@cache
def options_of(script: str) -> set[str]:
    """Every name that a script's options have, with underscores."""
    module, name = SCRIPT_CONFIGS[script]
    found = import_module(module)
    flags = flags_of(getattr(found, name))
    return {"config", "preset", "help"} | {key for flag in flags for key in flag.keys}


def commands_of(page: Path):
    for block in FENCE.findall(text_of(page)):
        for script, rest in COMMAND.findall(block.replace("\\\n", " ")):
            yield script, re.sub(r"'[^']*'|\"[^\"]*\"|(?<!\S)#.*", "", rest)


@pytest.mark.parametrize("page", [p for p in PAGES if name_of(p) not in OLD], ids=name_of)
def test_commands_have_options_that_exist(page: Path):
    for script, rest in commands_of(page):
        for option in re.findall(r"(?<!\S)--([\w-]+)", rest):
            plain = with_underscores(option)
            plain = plain.removeprefix("no_") if plain.startswith("no_") else plain
            assert plain in options_of(script), f"{script}.py --{option}"


def test_there_are_commands_to_check():
    found = [command for page in PAGES for command in commands_of(page)]
    assert len(found) > 60
    assert "learning_rate" in options_of("train_grpo")
    assert "no_such" not in options_of("train_grpo")


@pytest.mark.parametrize("name", NAMING_OPTIONS)
def test_options_named_in_the_text_exist(name: str):
    known = set().union(*map(options_of, SCRIPT_CONFIGS), OTHER_PROGRAMS)
    for option in re.findall(r"`--([a-z][\w-]+)", FENCE.sub("", text_of(ROOT / name))):
        plain = with_underscores(option)
        assert plain in known or plain.removeprefix("no_") in known, f"--{option}"


def test_every_page_is_in_the_index_and_on_the_site():
    index = text_of(ROOT / "docs/index.md")
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for folder in ("tutorials", "how-to", "reference", "explanation"):
        for page in (ROOT / "docs" / folder).glob("*.md"):
            name = f"{folder}/{page.name}"
            assert f"]({name})" in index, name
            assert f"- {name}\n" in site, name
