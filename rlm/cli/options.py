"""Read the options of a script, which are the fields of one dataclass.

Values come from four layers: defaults, preset, YAML file and command line; later layers override
earlier layers. All layers use the same converters, and a mistake in any layer is a one-line error.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType, NoneType
from typing import Any, NoReturn, TypeVar, get_args, get_origin

import yaml

from rlm.cli.flags import (
    FIRST,
    GROUPS,
    Flag,
    flags_of,
    hint,
    members_of,
    merge_spellings,
    read_table,
    with_dashes,
    with_underscores,
)

T = TypeVar("T")
Values = dict[str, Any]  # values by field name
LONG_DASHES = "\N{EN DASH}\N{EM DASH}\N{MINUS SIGN}"
Row = tuple[str, Any, Any]  # location in the file, key, value


class UsageError(Exception):
    """A user's mistake. It is printed as one line without a traceback; the exit code is 2."""


class Interrupted(KeyboardInterrupt):
    """A signal ended the run between two steps, after everything was saved.

    The note is a message about the saved files; "" if another process prints the message.
    """

    def __init__(self, number: int, note: str) -> None:
        super().__init__(note)
        self.number, self.note = number, note


def parse(cls: type[T], argv: Sequence[str] | None = None, **options: Any) -> T:
    """Build a config of type `cls` from the command line.

    Args:
        options: presets, description and epilog, as for `read_options`.
    """
    return _build(cls, read_options(cls, argv, **options))


def check(cls: type[T], argv: Sequence[str] | None = None, **options: Any) -> T:
    """Like `parse`, but values that depend on the machine are taken from `cls.PROVISIONAL`."""
    return _build_provisional(cls, read_options(cls, argv, **options))


def required(value: T | None, option: str) -> T:
    """Return the value of an option, which is always set in a resolved config.

    Raises:
        UsageError: the value is None, which is possible in a config that was created in Python.
    """
    if value is None:
        raise UsageError(f"{option} is not set; give it a value")
    return value


def resolve_config(cls: type[T], argv: Sequence[str] | None = None, **options: Any) -> T:
    """Parse the command line and complete the values with `cls.resolve`, if the class defines it.

    `resolve(given)` receives the values that a preset, the YAML file or the command line sets, and
    returns the values of the config. Only `resolve` may inspect the machine or read files.
    """
    given = read_options(cls, argv, **options)
    config = _build_provisional(cls, given)  # rejects contradictions before `resolve` runs
    resolve: Callable[[Values], Values] | None = getattr(cls, "resolve", None)
    return _build(cls, resolve(given)) if resolve else config


def read_options(
    cls: type,
    argv: Sequence[str] | None = None,
    *,
    presets: Mapping[str, Mapping[str, Any]] | None = None,
    description: str | None = None,
    epilog: str | None = None,
) -> Values:
    """Return the values that are set by a preset, a YAML file or the command line, by field name.

    If the class defines `without_replaced(stored, chosen)`, this method drops values of the file
    that do not apply to those of the command line.

    Args:
        argv: the command line; None: sys.argv[1:].
        presets: maps the name of each preset to its values.
        description, epilog: texts of --help.
    """
    fields = flags_of(cls)
    text = "YAML or JSON file with options; the command line takes precedence"
    names = {"name": "config", "aliases": ["config_json"]}
    first = [Flag(text, default_text="no file", kind=Path, **names)]
    if presets:
        first.append(
            Flag(
                "named set of option values; the presets are listed at the end of --help",
                name="preset",
                kind=str,
                choices=list(presets),
                default_text="no preset",
            )
        )
        lines = (f"{name}: {_as_typed(values)}" for name, values in presets.items())
        listed = "\n  ".join(["presets:", *lines])
        epilog = f"{epilog}\n\n{listed}" if epilog else listed
    typed = _read_argv([*first, *fields], argv, description=description, epilog=epilog)
    options = [*first[1:], *fields]

    def layer(rows: Iterable[Row], typed: bool = False) -> Values:
        try:
            return merge_spellings(cls, _convert_rows(options, rows, typed))
        except ValueError as error:  # two options contradict each other
            raise UsageError(str(error)) from error

    given = layer(_read_yaml(typed.pop("config")) if "config" in typed else [])
    chosen = layer([("", key, value) for key, value in typed.items()], typed=True)
    without_replaced: Callable[[Values, Values], Values] | None
    if without_replaced := getattr(cls, "without_replaced", None):
        given = without_replaced(given, chosen)
    given |= chosen
    if presets and (name := given.pop("preset", None)):
        values = presets[name].items()
        given = layer([(f"preset {name}", key, value) for key, value in values]) | given
    return given


def _build(cls: type[T], values: Mapping[str, Any]) -> T:
    try:
        return cls(**values)
    except ValueError as error:  # a contradiction that __post_init__ found
        raise UsageError(str(error)) from error


def _build_provisional(cls: type[T], values: Mapping[str, Any]) -> T:
    return _build(cls, {**getattr(cls, "PROVISIONAL", {}), **values})


def to_dict(config: Any) -> dict[str, Any]:
    """Return the fields of a config as JSON values. `--config` can read a YAML dump of them."""
    return json.loads(json.dumps(dataclasses.asdict(config), default=str))


def _as_typed(values: Mapping[str, Any]) -> str:
    return " ".join(f"{with_dashes(name)} {value}" for name, value in values.items())


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)  # does not break option names


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message.removeprefix("argument "))


def _read_argv(options: list[Flag], argv: Sequence[str] | None, **texts: Any) -> Values:
    """Return the values in `argv`: strings, bools for --x and --no-x, lists for tuple fields."""
    names = "".join(f" [{option.name}]" for option in options if option.positional)
    style, absent = _HelpFormatter, argparse.SUPPRESS
    parser = _Parser(formatter_class=style, argument_default=absent, allow_abbrev=False, **texts)
    parser.usage = f"%(prog)s{names} [options]"
    group = cache(parser.add_argument_group)
    flags = {"--help": "--help"}  # maps every spelling, with dashes, to the option
    for heading in (FIRST, *GROUPS):  # --help shows the groups in this order, without empty ones
        group(heading)
    for option in options:
        option.add_to(group(option.group) if option.group else parser)
        for key in () if option.positional else option.keys:
            flags[with_dashes(key)] = option.spelling
            if bool in members_of(option.kind):
                flags[with_dashes(f"no-{key}")] = f"--no-{option.spelling[2:]}"

    tokens = [token.partition("=") for token in (sys.argv[1:] if argv is None else argv)]
    for name, *_ in tokens:
        option = f"--{name.lstrip('-' + LONG_DASHES).replace('_', '-')}"
        if name.startswith(tuple(LONG_DASHES)) and option in flags:  # copied from a web page
            raise UsageError(f"{name} begins with a long dash: type {option}")
    dashed = [(name.replace("_", "-"), name, *rest) for name, *rest in tokens]
    known = [(flags.get(dashes, name), *rest) for dashes, name, *rest in dashed]
    for name in ("--config", "--preset", "--reward"):
        if sum(token[0] == name for token in known) > 1:
            many = ": for several rewards, put a list of them into FILE.py" * (name == "--reward")
            raise UsageError(f"{name} is given twice{many}")
    typed, rest = parser.parse_known_args(["".join(token) for token in known])
    if rest:
        token = next((token for token in rest if token.startswith("-")), rest[0])
        name, place = token.partition("=")[0], ["".join(parts) for parts in known].index(token)
        before = known[place - 1][0] if place else ""
        if token.startswith("-"):
            page = "docs/how-to/coming-from.md explains which names of other trainers work"
            said = hint(name, {with_underscores(key): option for key, option in flags.items()})
            said = said or f"; --help lists the options, and {page}"
        elif any(before == o.spelling and bool in members_of(o.kind) for o in options):
            said = f": {before} takes no value"
        elif names:
            said = f": put a{names} of several words in quotes"
        else:
            said = ": type the name of its option before it"
        raise UsageError(f"unknown option {name}{said}")
    return vars(typed)


def _read_yaml(path: str) -> list[Row]:
    """Return the top-level entries of a YAML file, including repeated keys."""
    try:
        loader = yaml.SafeLoader(Path(path).read_bytes())
        root, get = loader.get_single_node(), loader.construct_object
        if not isinstance(root, yaml.MappingNode):
            raise UsageError(f"{path}: expected lines of `option: value`")
        loader.flatten_mapping(root)  # resolves `<<: *anchor`
        return [(f"{path}:{k.start_mark.line + 1}", get(k), get(v, True)) for k, v in root.value]
    except OSError as error:
        raise UsageError(f"--config: cannot read {path!r}: {error.strerror}") from error
    except yaml.MarkedYAMLError as error:
        where = f"{path}:{error.problem_mark.line + 1 if error.problem_mark else 1}"
        raise UsageError(f"{where}: {error.context or 'invalid YAML'}: {error.problem}") from error
    except (yaml.YAMLError, ValueError) as error:  # invalid UTF-8, or an invalid date
        raise UsageError(f"{path}: {error}") from error


def _convert_rows(options: list[Flag], rows: Iterable[Row], typed: bool = False) -> Values:
    """Check and convert the rows of one layer, and report all mistakes in one error.

    In config files of other trainers, -1 or an empty value means "not set". A row with such a value
    is skipped if its key is another trainer's name for an option.

    Args:
        typed: the rows are from the command line.
    """
    values, by_key = {}, {key: option for option in options for key in option.keys}
    where, mistakes = "", []
    for where, key, value in rows:
        option = by_key.get(with_underscores(str(key)))
        if option is None:
            if value == -1 and with_underscores(str(key)) in read_table("synonyms"):
                continue
            said = hint(str(key), {name: option.name for name, option in by_key.items()})
            mistakes.append(f"{where}: unknown key {key!r}{said}")
            continue
        takes_none = NoneType in members_of(option.kind)
        is_unset = not takes_none if value is None else value == -1 and not option.allows(-1)
        if is_unset and with_underscores(str(key)) != option.name:
            continue
        if option.bare is not None and isinstance(value, bool):  # as if given without a value
            value = option.bare if value else option.default
        label = option.spelling if typed else f"{where}: {key}"
        if option.name in values:
            mistakes.append(f"{label} is given twice")
            continue
        try:
            new = values[option.name] = option.converted(_read(option, value, typed))
            items = new if isinstance(new, tuple) else [new]
            if option.choices and not all(i is None or i in option.choices for i in items):
                raise ValueError
        except (ValueError, OverflowError):
            got = ",".join(value) if typed and isinstance(value, list) else value
            expects = option.expects if typed else option.expects.replace(",...", " list")
            mistakes.append(f"{label}: expected {expects}, got {got!r:.80}")
    if mistakes:
        file = where.rpartition(":")[0]  # the file name is printed only once
        others = (mistake.removeprefix(file) for mistake in mistakes[1:])
        raise UsageError(" | ".join([mistakes[0], *others]))
    return values


def _read(option: Flag, value: Any, typed: bool) -> Any:
    """Read the lists and numbers in the text of a value; `Flag.converted` checks its type.

    Only strings from the command line may represent lists and integers. A list of one item may
    represent the item, because config files of other programs use this form.

    Raises:
        ValueError: the text is not a number, or the value is None and the option is never None.
    """
    kind, *others = members_of(option.kind)
    if value in (None, "none", ["none"]) and NoneType in others:
        return None
    if value is None:
        raise ValueError
    is_list = get_origin(kind) is tuple
    if typed and is_list:
        texts = [text for text in map(str.strip, ",".join(value).split(",")) if text]
        return [int(text) for text in texts] if int in get_args(kind) else texts
    if isinstance(value, list) and len(value) == 1 and not is_list:
        value = value[0]
    if isinstance(value, str) and kind is int and typed:
        return int(value)
    # YAML 1.1 reads 1e-4 (no dot) as a string, so files, too, may contain strings for floats.
    if kind is float and isinstance(value, int | str) and not isinstance(value, bool):
        return float(value)
    return value


@cache
def _run_file(name: str, path: Path, modified: int) -> ModuleType:
    """Run a Python file as a module and return the module.

    The result is cached per modification time, because a script loads the file before and after its
    slow imports.
    """
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look up the module
    folder = str(path.parent)
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    finally:
        # Move the folder to the end of sys.path, so that its files do not hide libraries.
        sys.path.remove(folder)
        sys.path.append(folder)
    return module


def load_from_file(option: str, spec: str, kinds: tuple[type, ...] = ()) -> Any:
    """Return the object that FILE.py:NAME denotes.

    The file can import other modules from its folder.

    Args:
        option: the option whose value is `spec`, for error messages.
        spec: FILE.py:NAME.
        kinds: types that are accepted in addition to callables.

    Raises:
        UsageError: the file or name does not exist, or running the file fails.
    """
    file, _, name = spec.rpartition(":")
    path = Path(file).expanduser()
    if not name or path.suffix != ".py":
        raise UsageError(f"{option} {spec}: write FILE.py:NAME, a file and a name that it defines")
    if not path.is_file():
        raise UsageError(f"{option} {spec}: the file {path} does not exist")
    try:
        module = _run_file(f"{option[2:]}_{path.stem}", path.resolve(), path.stat().st_mtime_ns)
        found = getattr(module, name, None)
    except (Exception, SystemExit) as error:  # sys.exit would end the program silently
        raise UsageError(f"{option} {spec}: {type(error).__name__}: {error}") from error
    if not callable(found) and not isinstance(found, kinds):
        own = vars(module).items()
        there = [n for n, v in own if getattr(v, "__module__", "") == module.__name__]
        names = ", ".join(there) or "none"
        raise UsageError(
            f"{option} {spec}: no function or class {name!r}; the file defines {names}"
        )
    return found
