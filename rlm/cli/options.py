"""Options of a script: one dataclass, read from defaults < preset < YAML < command line.

Every layer goes through the same converters, and a mistake in any of them is refused in one line.
"""

import argparse
import dataclasses
import difflib
import json
import math
import os
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

T = TypeVar("T")
_Row = tuple[str, Any, Any]  # where it is written, key, value


class UsageError(Exception):
    """A user's mistake: one line and exit code 2, no traceback: see `rlm.cli.main`."""


class Interrupted(KeyboardInterrupt):
    """A signal was obeyed between two steps, when everything was saved."""

    def __init__(self, number: int, note: str) -> None:
        """
        Args:
            note: what is saved where; "" where another process says it.
        """
        super().__init__(note)
        self.number, self.note = number, note


def flag(
    default: Any,
    help: str,
    *,
    choices: Sequence[Any] | None = None,  # of a tuple field: for each item
    aliases: Sequence[str] = (),
    positional: bool = False,
    group: str | None = None,
    spells: str | None = None,
    min: float | None = None,  # bounds of a number; of a tuple field: of each item
    above: float | None = None,
    max: float | None = None,
) -> Any:
    """A dataclass field, and what the command line needs to know about it.

    Choices and bounds hold for values from Python too, where `__post_init__` calls `check_values`.

    Args:
        spells: the field of which this is another spelling; see `layered`.
    """
    metadata = dict(locals())  # the arguments above, as `_Option` takes them
    return dataclasses.field(default=default, metadata=metadata)


def parse(
    cls: type[T],
    argv: Sequence[str] | None = None,
    *,
    presets: Mapping[str, Mapping[str, Any]] | None = None,
    description: str | None = None,
    epilog: str | None = None,
) -> T:
    """Build a `cls` from `argv` (default: sys.argv[1:]); a user's mistake raises UsageError."""
    kinds = get_type_hints(cls)
    options = fields = [
        _Option(field.name, kinds[field.name], **{"default": field.default, **field.metadata})
        for field in dataclasses.fields(cls)
    ]
    if presets:
        options = [_Option("preset", str, help="start from it", choices=list(presets)), *fields]
        listed = "\n  ".join(["presets:", *(f"{k}: {dict(v)}" for k, v in presets.items())])
        epilog = f"{epilog}\n\n{listed}" if epilog else listed
    file = _Option("config", Path, help="YAML file of options; the command line beats it")
    typed = _read_argv([file, *options], argv, description=description, epilog=epilog)

    values = _layer(options, _read_yaml(typed.pop("config")) if "config" in typed else [])
    values = layered(cls, values, _layer(options, [("", *i) for i in typed.items()], True))
    set_by_user = values.keys() - {"preset"}
    if presets and (name := values.pop("preset", None)):
        rows = [(f"preset {name}", *item) for item in presets[name].items()]
        values = layered(cls, _layer(fields, rows), values)
    try:
        config = cls(**values)
    except ValueError as error:  # a contradiction that __post_init__ found
        raise UsageError(str(error)) from error
    object.__setattr__(config, "_explicit", frozenset(values))  # works on frozen classes too
    mark_preset(config, values.keys() - set_by_user)
    return config


def layered(cls: type, low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    """Values of two layers. What the higher one says of a field in either of its spellings,
    the lower one does not contradict in the other."""
    for field in dataclasses.fields(cls):
        pair = {field.name, field.metadata.get("spells")} - {None}
        if len(pair) == 2 and pair & high.keys():
            low = {name: value for name, value in low.items() if name not in pair}
    return {**low, **high}


def explicit(config: Any) -> frozenset[str]:
    """The fields that a preset, the YAML file or the command line set, even to their default."""
    return getattr(config, "_explicit", frozenset())


def mark_preset(config: Any, fields: Iterable[str]) -> None:
    """Remember which of a config's values are a preset's and nobody's own wish."""
    object.__setattr__(config, "_preset", frozenset(fields))


def set_by_preset(config: Any) -> frozenset[str]:
    """The fields that have their value from a preset."""
    return getattr(config, "_preset", frozenset())


def changed(config: T, **values: Any) -> T:
    """A copy with other values. What `__post_init__` had filled in is filled in anew."""
    new = dataclasses.replace(config, **dict.fromkeys(getattr(config, "_filled_in", ())) | values)
    object.__setattr__(new, "_explicit", explicit(config))
    mark_preset(new, set_by_preset(config) - values.keys())
    return new


def check_values(config: Any) -> None:
    """Hold a config's values against the choices and bounds of their flags; None is always one.

    A text where a path belongs becomes one, as on the command line.

    Raises:
        ValueError: the first that fails; the message names its flag.
    """
    kinds = get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value, limits = getattr(config, field.name), field.metadata
        members = _members(kinds[field.name])
        if isinstance(value, str) and Path in members and str not in members:
            object.__setattr__(config, field.name, Path(os.path.expanduser(value)))
        least, above, most = (limits.get(name) for name in ("min", "above", "max"))
        flag = "--" + field.name.replace("_", "-")
        for item in value if isinstance(value, list | tuple) else (value,):  # JSON has lists
            if item is None:
                continue
            if limits.get("choices") and item not in limits["choices"]:
                known = ", ".join(map(str, limits["choices"]))
                raise ValueError(f"{flag}: unknown {item!r}; there are {known}")
            if least is not None and item < least:
                raise ValueError(f"{flag} must be at least {least:g}")
            if above is not None and item <= above:
                raise ValueError(f"{flag} must be above {above:g}")
            if most is not None and item > most:
                raise ValueError(f"{flag} must be at most {most:g}")


def to_dict(config: Any) -> dict[str, Any]:
    """The fields as JSON holds them (paths as text); dumped as YAML, `--config` reads them back."""
    return json.loads(json.dumps(dataclasses.asdict(config), default=str))


@dataclasses.dataclass
class _Option:
    name: str
    kind: Any  # the annotation
    default: Any = None
    help: str = ""
    choices: Sequence[Any] | None = None
    aliases: Sequence[str] = ()
    positional: bool = False
    group: str | None = None
    spells: str | None = None
    min: float | None = None
    above: float | None = None
    max: float | None = None

    def __post_init__(self) -> None:
        self.keys = [self.name, *(alias.lstrip("-").replace("-", "_") for alias in self.aliases)]
        self.flag = self.name if self.positional else "--" + self.name.replace("_", "-")
        self.expects = "|".join(map(str, self.choices or map(_describe, _members(self.kind))))

    def add_to(self, parser: Any) -> None:
        items = self.default if isinstance(self.default, tuple) else [self.default]
        words = (str(i).lower() if i is None or isinstance(i, bool) else str(i) for i in items)
        text = f"{self.help} (default: {','.join(words) or 'empty'})".replace("%", "%%")
        if self.positional:
            parser.add_argument(self.name, nargs="?", help=text)
        elif bool in _members(self.kind):
            parser.add_argument(self.flag, action=argparse.BooleanOptionalAction, help=text)
        else:
            many = any(get_origin(member) is tuple for member in _members(self.kind))
            action = "append" if many else "store"
            parser.add_argument(self.flag, action=action, metavar=self.expects, help=text)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message.removeprefix("argument "))


def _read_argv(options: list[_Option], argv: Sequence[str] | None, **texts: Any) -> dict[str, Any]:
    """What was typed, by field name: strings, bools for --x and --no-x, lists for tuple fields."""
    names = "".join(f" [{option.name}]" for option in options if option.positional)
    style, absent = argparse.RawDescriptionHelpFormatter, argparse.SUPPRESS
    parser = _Parser(formatter_class=style, argument_default=absent, allow_abbrev=False, **texts)
    parser.usage = f"%(prog)s{names} [options]"
    group = cache(parser.add_argument_group)
    flags = {"--help": "--help"}  # every spelling, with dashes
    for option in options:
        option.add_to(group(option.group) if option.group else parser)
        for key in () if option.positional else option.keys:
            flags["--" + key.replace("_", "-")] = option.flag
            if bool in _members(option.kind):
                flags["--no-" + key.replace("_", "-")] = "--no-" + option.flag[2:]

    tokens = [token.partition("=") for token in (sys.argv[1:] if argv is None else argv)]
    dashed = [(flags.get(name.replace("_", "-"), name), *rest) for name, *rest in tokens]
    for name in ("--config", "--preset"):
        if sum(token[0] == name for token in dashed) > 1:
            raise UsageError(f"{name} is given twice")
    typed, rest = parser.parse_known_args(["".join(token) for token in dashed])
    for token in sorted(rest, key=lambda token: not token.startswith("-")):
        name = token.partition("=")[0]
        raise UsageError(f"unknown option {name}{_hint(name, flags.values())}")
    return vars(typed)


def _read_yaml(path: str) -> list[_Row]:
    """The file's top level, repeated keys included."""
    try:
        loader = yaml.SafeLoader(Path(path).read_bytes())
        root, get = loader.get_single_node(), loader.construct_object
        if not isinstance(root, yaml.MappingNode):
            raise UsageError(f"{path}: expected lines of `option: value`")
        return [(f"{path}:{k.start_mark.line + 1}", get(k), get(v, True)) for k, v in root.value]
    except OSError as error:
        raise UsageError(f"--config: cannot read {path!r}: {error.strerror}") from error
    except yaml.MarkedYAMLError as error:
        where = f"{path}:{error.problem_mark.line + 1}"
        raise UsageError(f"{where}: {error.context or 'bad YAML'}: {error.problem}") from error
    except (yaml.YAMLError, ValueError) as error:  # bytes that are no text; a 13th month
        raise UsageError(f"{path}: {error}") from error


def _layer(options: list[_Option], rows: Iterable[_Row], text: bool = False) -> dict[str, Any]:
    """Checked values by field name; `text` says that the rows were typed on the command line."""
    values, by_key = {}, {key: option for option in options for key in option.keys}
    for where, key, value in rows:
        option = by_key.get(str(key).replace("-", "_"))
        if option is None:
            raise UsageError(f"{where}: unknown key {key!r}{_hint(str(key), by_key)}")
        label = option.flag if text else f"{where}: {key}"
        if option.name in values:
            raise UsageError(f"{label} is given twice")
        try:
            values[option.name] = new = _convert(option.kind, value, text)
            items = new if isinstance(new, tuple) else [new]
            if option.choices and not all(i is None or i in option.choices for i in items):
                raise ValueError
        except (ValueError, OverflowError):
            got = ",".join(value) if text and isinstance(value, list) else value
            expects = option.expects if text else option.expects.replace(",...", " list")
            raise UsageError(f"{label}: expected {expects}, got {got!r:.80}") from None
    return values


def _hint(word: str, known: Collection[str]) -> str:
    close = [k for k in known if k.startswith(word)] or difflib.get_close_matches(word, known, 1)
    return f"; did you mean {close[0]}?" if close else ""


def _members(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _describe(kind: Any) -> str:
    args = get_args(kind)
    return f"{_describe(args[0])},..." if args else kind.__name__.lower().removesuffix("type")


def _convert(kind: Any, value: Any, text: bool) -> Any:
    """`value` as a `kind`, or ValueError. Only typed `text` may stand for an int or a list."""
    args, origin, members = get_args(kind), get_origin(kind), _members(kind)
    if NoneType in members and value in (None, "none", ["none"]):
        return None
    for member in members if len(members) > 1 else ():
        with suppress(ValueError, OverflowError):
            return _convert(member, value, text)
    if origin is tuple and isinstance(value, list | tuple):
        items = filter(None, map(str.strip, ",".join(value).split(","))) if text else value
        return tuple(_convert(args[0], item, text) for item in items)
    if kind is int and (text or type(value) is int):
        return int(value)
    # YAML 1.1 reads 1e-4 (no dot) as a string, so a float may be one in every layer.
    if kind is float and type(value) in (int, float, str) and math.isfinite(float(value)):
        return float(value)
    if kind is Path and isinstance(value, str | Path) and value != "":  # Path("") is "."
        return Path(os.path.expanduser(value))
    if kind in (bool, str) and isinstance(value, kind):
        return value
    raise ValueError
