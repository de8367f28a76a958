"""Writes the pages of docs/reference that are made from the code: options.md, python-api.md's end.

PYTHONPATH=. python tests/reference_pages.py      # or: make reference
"""

from __future__ import annotations

import importlib
import inspect
import os
import re

from golden import ROOT, run

REFERENCE = ROOT / "docs" / "reference"
SCRIPTS = ("train_sft.py", "train_grpo.py", "eval.py", "inference.py", "server.py")
MODULES = (
    "recipes.orchestrator.train",
    "recipes.orchestrator.evaluate",
    "recipes.experience.train",
    "recipes.experience.select",
    "recipes.experience.evaluate",
)
OPTIONS = """# Options

Every option of every script, made from the code by `make reference`. `--help` prints the same.

A value comes from the first of these that sets it: the command line, `--config FILE.yaml`, a
`--preset`, the default. Names may be written with dashes or underscores. Many names of TRL and
transformers are taken too ([names](names.md),
[algorithms](../explanation/algorithms.md#presets-and-options)).
"""
API = """## Signatures and docstrings

Made from the code by `make reference`.
"""
OBJECTS = (  # module, name, methods
    ("train_grpo", "GRPOTrainer", ("__init__", "train", "generate")),
    ("rlm.data", "load_problems", ()),
    ("rlm.data", "load_gsm8k", ()),
    ("inference", "generate_reasoning", ()),
    ("rlm.reasoner", "load_rlm_model", ()),
    ("rlm.rewards", "RewardFunction", ("__call__",)),
    ("rlm.rewards", "CorrectnessReward", ()),
    ("rlm.rewards", "StepsReward", ()),
    ("rlm.rewards", "GSM8KReward", ()),
    ("rlm.rewards", "FormatReward", ()),
    ("rlm.rewards", "ReasoningQualityReward", ()),
    ("rlm.rewards", "ConstantReward", ()),
    ("rlm.rewards", "BinaryReward", ()),
    ("rlm.rewards", "CombinedReward", ()),
    ("rlm.data", "apply_experiences", ()),
    ("rlm.data", "load_experiences", ()),
)


def options_page() -> str:
    os.environ["COLUMNS"] = "4000"  # an option a line
    trained = _options_of("train_grpo.py")
    sections = [
        trained if script == "train_grpo.py" else _options_of(script)
        for script in (*SCRIPTS, *MODULES)
    ]
    known = {row for row in trained.splitlines() if row.startswith("| `--")}
    place = (*SCRIPTS, *MODULES).index("recipes.orchestrator.train")
    sections[place] = _without(known, sections[place])
    return "\n".join([OPTIONS, *sections])


def _without(known: set[str], section: str) -> str:
    """A section without the options that train_grpo.py has just the same, and a line about them."""
    rows = [row for row in section.splitlines() if row not in known]
    text = "\n".join(rows)
    empty = r"(?:^### [^\n]*\n\n)?^\| option [^\n]*\n\|---[^\n]*\n(?!\|)"
    text = re.sub(empty, "", text, flags=re.M)
    said = "It also takes these options of [train_grpo.py](#train_grpopy), with the same defaults:"
    names = sorted(re.findall(r"`--([\w-]+)", "\n".join(known & set(section.splitlines()))))
    title, _, rest = text.partition("\n")
    listed = ", ".join(f"`--{name}`" for name in names)
    return f"{title}\n\n{said} {listed}.\n{rest}"


def _options_of(script: str) -> str:
    code, text = run(script, "--help")
    assert code == 0, script
    name = script if script.endswith(".py") else f"python -m {script}"
    rows: list[str] = [f"## {name}\n"]
    after = re.split(r"^(?:positional arguments|options):$", text, maxsplit=1, flags=re.M)[1]
    heading, table, notes = "", [], []
    for line in [*after.splitlines(), "end:"]:
        option = re.match(r"  (-\S.*?|\w+)(?:\s{2,}(\S.*))?$", line) if not notes else None
        if option and "--help" not in option[1]:
            said, default = _split_default(option[2] or "")
            name = option[1].replace("|", "\\|")
            table.append(f"| `{name}` | {said} | {default} |")
        elif table and re.match(r"\s{20,}\S", line):  # the text of a long option
            said, default = _split_default(line.strip())
            table[-1] = f"{table[-1].removesuffix('|  |  |')}| {said} | {default} |"
        elif line.strip() and not line.startswith(" "):
            if table:
                title = [f"### {heading[0].upper()}{heading[1:]}\n"] if heading else []
                head = ["| option | meaning | default |", "|---|---|---|"]
                rows += [*title, *head, *table, ""]
            heading, table = line.rstrip(":"), []
            if heading in ("algorithms", "presets", "end"):
                heading = ""
    return "\n".join(rows)


def _split_default(text: str) -> tuple[str, str]:
    said, _, default = text.rpartition("(default: ")
    return _escaped(said.strip()), _escaped(default.removesuffix(")"))


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def api_section() -> str:
    parts = [API]
    for module, name, methods in OBJECTS:
        found = getattr(importlib.import_module(module), name)
        where = "rlm" if name in ("GRPOTrainer", "load_gsm8k") else module
        title = f"### `{name}`\n\nfrom `{where}`"
        if not methods:
            parts.append(f"{title}\n\n{_documented(name, found)}")
            continue
        parts.append(f"{title}\n\n{_block(inspect.getdoc(found) or '')}")
        for method in methods:
            shown = name if method == "__init__" else method
            parts.append(_documented(shown, getattr(found, method)))
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _documented(name: str, found: object) -> str:
    signature = re.sub(r"(?<=: |> )'([^']*)'", r"\1", str(inspect.signature(found)))
    signature = re.sub(r"\(self(?:, )?", "(", signature)
    signature = re.sub(r"<function \w+ at 0x\w+>", "…", signature)
    documentation = inspect.getdoc(found) or ""
    return f"```python\n{name}{signature}\n```\n\n{_block(documentation)}"


def _block(documentation: str) -> str:
    """A docstring as text: its first paragraphs as they are, what is indented as a block."""
    text, _, more = documentation.partition("\n\nArgs:")
    head, _, raises = text.partition("\n\nRaises:")
    rest = (f"Args:{more}" if more else "") or (f"Raises:{raises}" if raises else "")
    return f"{head}\n\n```text\n{rest}\n```" if rest else head


def with_section(page: str, section: str) -> str:
    return page.partition(API.splitlines()[0])[0] + section


def main() -> None:
    (REFERENCE / "options.md").write_text(options_page(), encoding="utf-8")
    api = REFERENCE / "python-api.md"
    api.write_text(with_section(api.read_text(encoding="utf-8"), api_section()), encoding="utf-8")


if __name__ == "__main__":
    main()
