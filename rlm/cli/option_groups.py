"""Groups of options: the headings of --help, and which options stand under each.

An option has one name in all scripts, so one table serves them all, `option_groups.yaml`. A script
whose list is long has a class attribute `CHANGED_FIRST`: the names of the options that come before
all groups.
"""

from collections.abc import Collection

from rlm.cli.synonyms import read_table

FIRST = "options that people change first"
GROUPS: dict[str, str] = read_table("option_groups")
_GROUP_OF = {name: group for group, names in GROUPS.items() for name in names.split()}
_PLACES = {group: place for place, group in enumerate((FIRST, *GROUPS), 1)}


def group_of(name: str, first: Collection[str]) -> str | None:
    """Return the heading of an option; None in a script with a short list, without `first`."""
    if not first:
        return None
    return FIRST if name in first else _GROUP_OF.get(name)


def place_of(group: str | None) -> int:
    """Return where a group stands in --help: those without a heading first, unknown ones last."""
    return 0 if group is None else _PLACES.get(group, len(_PLACES) + 1)
