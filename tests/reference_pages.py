"""Generates options.md and the end of python-api.md in docs/reference from the code.

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
OPTIONS = """# Options

`make reference` generates this page from the texts of `--help`, which also shows the types of the
values. The default of an option is in parentheses at the end, and `--no-NAME` turns a switch off.
The options of the [orchestrator](../../recipes/orchestrator/README.md) and the
[experience recipe](../../recipes/experience/README.md) are only in their `--help`.

Every script accepts `--config FILE.yaml`. An option on the command line takes precedence over this
file. The file takes precedence over a `--preset`, which takes precedence over the default. Option
names may contain dashes or underscores. [Many names of TRL's options](../how-to/coming-from.md)
also work.
"""
API = """## Signatures and docstrings

`make reference` generates this section from the code.
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
    ("rlm.rewards", "CombinedReward", ()),
)


def options_page() -> str:
    """Return the options page, which describes an option only at the first script that has it."""
    os.environ["COLUMNS"] = "4000"  # one line per option
    sections, known = [OPTIONS], {}
    for script in SCRIPTS:
        groups = _options_of(script)
        rows = [row for table in groups.values() for row in table]
        repeated = [row for row in rows if row in known]
        known |= {row: script for row in rows if row not in known}
        sections.append(f"## {script}\n\n{_repeated(repeated, known)}{_lists(groups, repeated)}")
    return "\n".join(sections)


def _repeated(rows: list[str], known: dict[str, str]) -> str:
    """Return a line with the names of the options that earlier scripts have, too."""
    said = []
    for script in dict.fromkeys(known[row] for row in rows):
        names = sorted(_name(row) for row in rows if known[row] == script)
        names = [name for name in names if name != "--config"]
        if names:
            said.append(f"`{'`, `'.join(names)}` of {script}")
    return f"It also accepts {'; '.join(said)}.\n\n" if said else ""


def _name(row: str) -> str:
    return row.split("`")[1].split(" ")[0]


def _lists(groups: dict[str, list[str]], repeated: list[str]) -> str:
    """Return the other options; a long list is divided into one list per group."""
    groups = {title: [r for r in rows if r not in repeated] for title, rows in groups.items()}
    if sum(map(len, groups.values())) < 40:
        return "".join(f"{row}\n" for rows in groups.values() for row in rows)
    lists = (f"**{t}**\n\n{chr(10).join(rows)}\n" for t, rows in groups.items() if rows)
    return "\n".join(lists)


def _options_of(script: str) -> dict[str, list[str]]:
    """Return the rows of a script's options by group, as --help prints them."""
    code, text = run(script, "--help")
    assert code == 0, script
    after = re.split(r"^(?:positional arguments|options):$", text, maxsplit=1, flags=re.M)[1]
    groups: dict[str, list[str]] = {}
    rows = groups.setdefault("Options", [])
    for line in after.splitlines():
        option = re.match(r"  (-\S.*?|\w+)(?:\s{2,}(\S.*))?$", line)
        if option and "--help" not in option[1]:
            rows.append(_row(option[1], option[2] or ""))
        elif rows and re.match(r"\s{20,}\S", line):  # the text of a long option
            rows[-1] = _row(rows[-1].split("`")[1], line.strip())
        elif line.strip() and not line.startswith(" "):
            heading = line.rstrip(":")
            if heading in ("algorithms", "presets"):
                break
            rows = groups.setdefault(heading[0].upper() + heading[1:], [])
    return groups


def _row(option: str, text: str) -> str:
    """Return a row with the name of an option, its meaning and its default."""
    name = re.sub(r"(, --no-.*| (str|path|int|float)(\|none)?)$", "", option)
    said = re.sub(r"\(default: (.*)\)$", r"(\1)", text)
    return f"- `{name}`: {said}".replace("<", "&lt;")


def api_section() -> str:
    parts = [API]
    for module, name, methods in OBJECTS:
        found = getattr(importlib.import_module(module), name)
        where = "rlm" if name in ("GRPOTrainer", "load_gsm8k") else module
        title = f"### `{where}.{name}`"
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
    signature = signature.removesuffix(" -> None")
    signature = re.sub(r"<function \w+ at 0x\w+>", "…", signature)
    documentation = (found.__doc__ and inspect.getdoc(found)) or ""
    return f"```python\n{name}{signature}\n```\n\n{_block(documentation)}"


def _block(documentation: str) -> str:
    """Return a docstring as Markdown, with its sections Args and Raises as a code block."""
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
