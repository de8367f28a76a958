"""Names that options have elsewhere and that mean the same here: TRL's, transformers', and those of
other GRPO trainers. `synonyms.yaml` has them; an unknown name gets the most similar one.
"""

import difflib
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

CUTOFF = 0.75  # difflib's ratio; below it a guess is seldom what was meant


@cache
def read_table(name: str) -> Any:
    """Read a YAML file of this folder, once."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the former takes a tenth of the time
    return yaml.load(Path(__file__).with_name(f"{name}.yaml").read_text(encoding="utf-8"), loader)


def synonyms(fields: Collection[str]) -> dict[str, list[str]]:
    """Return the names of synonyms.yaml that each field of a script has, where it has any."""
    found: dict[str, list[str]] = {}
    for name, options in read_table("synonyms").items():
        ours = [option for option in options.split() if option in fields]
        if ours and name not in fields:
            found.setdefault(ours[0], []).append(name)
    return found


def hint(word: str, known: Mapping[str, str]) -> str:
    """Return what to say behind an unknown name: which one is like it, if any.

    Args:
        known: every name of a script, with underscores → the option that it names.
    """
    name = with_underscores(word)
    own = [key for key, option in known.items() if with_underscores(option) == key]
    begun = [key for key in own if name and key.startswith(name)]
    close = begun or difflib.get_close_matches(name, known, 1, CUTOFF)
    return f"; did you mean {known[close[0]]}?" if close else ""


def with_underscores(name: str) -> str:
    return name.lstrip("-").replace("-", "_")
