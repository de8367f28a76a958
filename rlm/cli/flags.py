"""Flags: dataclass fields as command-line options, and the checks of their values.

`option_groups.yaml` lists the options under each heading of --help, for all scripts.
`synonyms.yaml` contains the names of the same options in TRL, transformers and other GRPO trainers.
The error for an unknown name suggests the option with the most similar name.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import io
import math
import operator
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import cache, wraps
from numbers import Real
from pathlib import Path
from types import NoneType, UnionType
from typing import IO, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Flag:
    """An option on the command line and in YAML files."""

    help: str = ""
    choices: Sequence[Any] | None = None  # allowed values, or for a tuple field the allowed items
    aliases: Sequence[str] = ()  # other names, besides those in synonyms.yaml
    # Maps a value of an alias to the fields that the value sets. This is used for the aliases in
    # `OTHER_SPELLINGS` of a config.
    becomes: Callable[[Any], Mapping[str, Any]] | None = None
    positional: bool = False
    bare: object = None  # the value of an option that is given without a value
    default_text: str = ""  # replaces the default value in --help
    hidden: bool = False  # accepted, but not in --help
    group: str | None = None  # the heading of the option in --help
    min: float | None = None  # bounds of a number, or of each item of a tuple
    above: float | None = None
    max: float | None = None
    name: str = ""  # name, kind and default are set from the dataclass field
    kind: Any = None
    default: object = None

    @property
    def keys(self) -> list[str]:
        return [with_underscores(name) for name in (self.name, *self.aliases)]

    @property
    def spelling(self) -> str:
        return self.name if self.positional else with_dashes(self.name)

    @property
    def expects(self) -> str:
        return "|".join(map(str, self.choices or map(_describe, members_of(self.kind))))

    def converted(self, value: Any) -> Any:
        """Return a value as a config stores it: None, or a value of the type of the option.

        Any spelling of a choice, such as Dr.GRPO, becomes the choice.

        Raises:
            ValueError: the value has another type than the option.
        """
        kinds, choices = members_of(self.kind), self.choices or ()
        if isinstance(value, str) and value == "none" and NoneType in kinds:
            return None
        if value is None and (self.default is None or NoneType in kinds):
            return None  # not set; `complete` or `resolve` may set it
        if isinstance(value, str) and value.startswith("~/") and not self.positional:
            value = os.path.expanduser(value)
        for kind in kinds:
            with suppress(ValueError, OverflowError):
                found = _convert(kind, value)
                if isinstance(found, tuple):
                    return tuple(find_choice(item, choices) for item in found)
                return find_choice(found, choices)
        raise ValueError(f"{self.spelling}: expected {self.expects}, got {value!r:.60}")

    def allows(self, value: object) -> bool:
        """Return whether a value is valid according to `check`."""
        try:
            self.check(value)
        except ValueError:
            return False
        return True

    def check(self, value: Any) -> None:
        """Check a value, or each item of a list, against the choices and bounds.

        Raises:
            ValueError: the value is not one of the choices, or it is out of bounds.
        """
        bounds = (
            ("at least", self.min, operator.ge),
            ("above", self.above, operator.gt),
            ("at most", self.max, operator.le),
        )
        for item in value if isinstance(value, tuple) else (value,):
            if item is None:
                continue
            if self.choices and item not in self.choices:
                known = ", ".join(map(str, self.choices))
                raise ValueError(f"{self.spelling}: unknown value {item!r}; choose from {known}")
            for words, bound, holds in bounds:
                if bound is not None and not holds(item, bound):
                    raise ValueError(f"{self.spelling} must be {words} {bound:g}")

    @property
    def help_text(self) -> str:
        """Return the text in --help: the description and the default value."""
        items = self.default if isinstance(self.default, tuple) else [self.default]
        words = {"None": "none", "True": "on", "False": "off"}
        values = ",".join(words.get(str(item), str(item)) for item in items)
        return f"{self.help} (default: {self.default_text or values or 'empty'})"

    def add_to(self, parser: Any) -> None:
        text = argparse.SUPPRESS if self.hidden else self.help_text.replace("%", "%%")
        if self.positional:
            parser.add_argument(self.name, nargs="?", help=text)
        elif bool in members_of(self.kind):
            parser.add_argument(self.spelling, action=argparse.BooleanOptionalAction, help=text)
        elif self.bare is not None:
            bare = {"nargs": "?", "const": str(self.bare), "metavar": self.expects}
            parser.add_argument(self.spelling, **bare, help=text)
        else:
            many = any(get_origin(member) is tuple for member in members_of(self.kind))
            action = "append" if many else "store"
            parser.add_argument(self.spelling, action=action, metavar=self.expects, help=text)


def flag(default: Any, help: str, **about: Any) -> Any:
    """Declare a dataclass field with its command-line option.

    Choices and bounds are also checked in Python if `__post_init__` calls `check_values`.

    Args:
        help: the description in --help.
        about: the other fields of `Flag`.
    """
    return dataclasses.field(default=default, metadata={"flag": Flag(help, **about)})


@cache
def read_table(name: str) -> Any:
    """Read a YAML file of this folder. The result is cached."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # CSafeLoader is ten times as fast
    return yaml.load(Path(__file__).with_name(f"{name}.yaml").read_text(encoding="utf-8"), loader)


FIRST = "options that people change first"
GROUPS: dict[str, str] = read_table("option_groups")  # heading of --help → names of its options


@cache  # resolving the annotations takes milliseconds, and each config is checked several times
def flags_of(cls: type) -> Sequence[Flag]:
    """Return the flags of a dataclass: its fields in order, then the entries of OTHER_SPELLINGS.

    The options of a class without CHANGED_FIRST have no headings, because they are few.
    """
    kinds, fields = get_type_hints(cls), dataclasses.fields(cls)
    spellings: Mapping[str, Flag] = getattr(cls, "OTHER_SPELLINGS", {})
    others = synonyms([*(field.name for field in fields), *spellings])
    first, not_used = getattr(cls, "CHANGED_FIRST", ()), getattr(cls, "NOT_USED", ())
    headings = {name: group for group, names in GROUPS.items() for name in names.split()}
    headings = headings | dict.fromkeys(first, FIRST) if first else {}
    flags = [(field, field.metadata.get("flag", Flag())) for field in fields]
    named = [
        dataclasses.replace(
            flag,
            name=field.name,
            group=flag.group or headings.get(field.name),
            hidden=flag.hidden or field.name in not_used,
            kind=kinds[field.name],
            default=field.default,
        )
        for field, flag in flags
    ]
    named += [dataclasses.replace(f, name=name, hidden=True) for name, f in spellings.items()]
    return tuple(
        dataclasses.replace(flag, aliases=(*flag.aliases, *others.get(flag.name, ())))
        for flag in named
    )


def takes_aliases(cls: type[T]) -> type[T]:
    """Class decorator: let the constructor of a dataclass accept aliases of its fields.

    If the class defines `complete`, this function is applied to the values. An unknown name raises
    TypeError with the same suggestion as on the command line.
    """
    options_of: Any = cls
    make, fields = cls.__init__, dataclasses.fields(options_of)
    names, defaults = [f.name for f in fields], {f.name: f.default for f in fields}

    @wraps(make)
    def init(self: T, *args: Any, **options: Any) -> None:
        given = by_field(cls, dict(zip(names, args, strict=False)) | options)
        flags = {flag.name: flag for flag in flags_of(cls)}
        values = defaults | {name: flags[name].converted(given[name]) for name in given}
        complete = getattr(cls, "complete", None)
        make(self, **(complete(values) if complete else values))

    cls.__init__ = init
    return cls


def by_field(cls: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """Replace aliases among the names of the options with the names of the fields.

    Raises:
        TypeError: a name is unknown, or an option is given twice.
        ValueError: two options contradict each other.
    """
    fields = {key: flag for flag in flags_of(cls) for key in flag.keys}
    values: dict[str, Any] = {}
    for key, value in options.items():
        if key not in fields:
            said = hint(key, {name: flag.name for name, flag in fields.items()})
            raise TypeError(f"{cls.__name__}: unknown option {key!r}{said}")
        name = fields[key].name
        if name in values or (name != key and name in options):
            raise TypeError(f"{cls.__name__}: {name} is given twice, once as {key}")
        values[name] = value
    return merge_spellings(cls, values)


def merge_spellings(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the aliases in `values` with the fields that they set (`Flag.becomes`).

    Raises:
        ValueError: the fields already have other values, or the value of an alias is invalid.
    """
    merged = dict(values)
    for flag in flags_of(cls):
        if flag.becomes is None or flag.name not in merged:
            continue
        value = merged.pop(flag.name)
        if value is None:
            continue
        flag.check(value)
        sets = flag.becomes(value)
        taken = {name: merged[name] for name in sets if merged.get(name) is not None}
        if value is not False and sets and taken.keys() == sets.keys() and taken != dict(sets):
            typed = " and ".join(f"{with_dashes(name)} {other}" for name, other in taken.items())
            raise ValueError(f"{flag.spelling} and {typed} contradict each other; leave one out")
        merged |= {name: new for name, new in sets.items() if name not in taken}
    return merged


def check_values(config: object) -> None:
    """Check the values of a config against the choices and bounds of their flags; None is valid.

    Values are converted to the types of their options, even if the config is frozen.

    Raises:
        ValueError: a value is invalid; the message names its flag.
    """
    for flag in flags_of(type(config)):
        if flag.becomes:
            continue
        value = getattr(config, flag.name)
        new = flag.converted(value)
        if new is not value:  # `takes_aliases` may have converted the value already
            object.__setattr__(config, flag.name, new)
        flag.check(new)


def print_stderr(text: str) -> None:
    """Print a line to stderr, and ignore a closed pipe."""
    with suppress(OSError):
        sys.stderr.write(f"{text}\n")


print_once = cache(print_stderr)  # a script may parse its command line twice


def replace_unencodable(stream: IO[str]) -> None:
    """Make a stream write "?" for characters that its encoding lacks, instead of failing.

    Python's stderr needs no such change, because it escapes these characters.
    """
    if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
        with suppress(OSError):  # the reader has gone, so the stream cannot be flushed
            stream.reconfigure(errors="replace")


def with_dashes(name: str) -> str:
    return "--" + name.replace("_", "-")


def members_of(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _convert(kind: Any, value: Any) -> Any:
    """Convert a value to a type; raise ValueError if the value is not of this or a similar type."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)  # also numpy's numbers
    if get_origin(kind) is tuple and isinstance(value, list | tuple):  # JSON has lists
        return tuple(_convert(get_args(kind)[0], item) for item in value)
    if kind is int and is_number and value % 1 == 0:  # 1e3
        return math.floor(value)
    if kind is float and is_number and math.isfinite(value):
        return value if isinstance(value, int) else float(value)  # run.json contains 32, not 32.0
    if kind is Path and isinstance(value, str | Path) and value != "":  # Path("") would be "."
        return Path(os.path.expanduser(value))
    if kind is str and isinstance(value, Path):
        return str(value)
    if kind in (bool, str) and isinstance(value, kind):
        return value
    raise ValueError


def _describe(kind: Any) -> str:
    args = get_args(kind)
    return f"{_describe(args[0])},..." if args else kind.__name__.lower().removesuffix("type")


def find_choice(value: Any, choices: Sequence[Any]) -> Any:
    """Return the choice with the same letters and digits, ignoring case, or the value itself."""
    if value in choices or not isinstance(value, str):
        return value
    plain = {_letters(choice): choice for choice in choices if isinstance(choice, str)}
    return plain.get(_letters(value), value)


def _letters(text: str) -> str:
    return "".join(filter(str.isalnum, text)).casefold()


# Maps options of other trainers to our option for the same purpose, with a description of its value
# (docs/how-to/coming-from.md).
OTHER_UNITS = {
    "warmup_ratio": ("warmup_steps", "a number of updates"),
    "warmup_steps": ("warmup_share", "a share of the steps"),
    **dict.fromkeys(
        ("num_train_epochs", "num_epochs", "epochs"),
        ("steps", "problems times passes, divided by the batch size"),
    ),
    **dict.fromkeys(
        ("gradient_accumulation_steps", "gradient_accumulation"),
        ("batch_size", "a number of problems or examples per step"),
    ),
    "val_size": ("eval_samples", "a number of problems"),
    "val_set_size": ("eval_samples", "a number of problems"),
    "per_device_train_batch_size": ("train_batch_size", "a number of completions"),
    "loss_type": ("algorithm", "such as dapo or drgrpo"),
    "importance_sampling_level": ("algorithm", "with the value gspo"),
    "scale_rewards": ("advantage", "with the value std or centred"),
    "no_lora": ("use_lora", "which is always on: the base model is never trained"),
    "use_vllm": ("sampler", "with the value vllm"),
    "bf16": ("dtype", "with the value bfloat16"),
    **dict.fromkeys(("use_8bit", "load_in_8bit"), ("quantize", "with the value 8bit")),
}
CUTOFF = 0.75  # minimum ratio of difflib; less similar names are seldom meant


def synonyms(fields: Collection[str]) -> dict[str, list[str]]:
    """Return the synonyms of each field from synonyms.yaml; fields without synonyms are omitted."""
    found: dict[str, list[str]] = {}
    for name, options in read_table("synonyms").items():
        ours = [option for option in options.split() if option in fields]
        if ours and name not in fields:
            found.setdefault(ours[0], []).append(name)
    return found


def hint(word: str, known: Mapping[str, str]) -> str:
    """Suggest an option for an unknown name: an option with the same purpose or a similar name.

    Args:
        word: the unknown name.
        known: maps every option name of a script, with underscores, to the option.
    """
    name = with_underscores(word)
    option, unit = OTHER_UNITS.get(name, ("", ""))
    if option in known:
        return f"; here it is {known[option]}, {unit}"
    own = [key for key, option in known.items() if with_underscores(option) == key]
    begun = [key for key in own if name and key.startswith(name)]
    close = begun or difflib.get_close_matches(name, known, 1, CUTOFF)
    return f"; did you mean {known[close[0]]}?" if close else ""


def with_underscores(name: str) -> str:
    return name.lstrip("-").replace("-", "_")
