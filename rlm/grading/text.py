"""The kinds of answer, and how a choice (one letter) or a text is read: plain string functions."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Hashable
from typing import Literal, get_args

from rlm.grading.numbers import parse_number

# Answer types. An open answer has no reference; only a reward judges it.
AnswerType = Literal["number", "choice", "text", "open"]
ANSWER_TYPES: tuple[AnswerType, ...] = get_args(AnswerType)
MAX_CHOICE = 1000  # longest text with a choice; the search below is quadratic

_LETTER = re.compile(
    r"[\s(\[\"'*_$]*(?:(?:the\s+)?(?:option|choice|answer)[\s:]+(?:is\s+)?)?[\s(\[\"'*_$]*"
    r"([A-Za-z])(?P<end>[)\].:,\"'*_$\s]*)(?P<rest>.*)",
    re.IGNORECASE | re.DOTALL,
)
# A further letter that reads as a choice: "or C", "C)", "C." or a letter alone on its line.
_ANOTHER = re.compile(
    r"\b(?:or|and|unless|maybe|possibly|also|not|be|else|option|choice|answer)\s+\(?[A-J]\b"
    r"|(?<!\w)\(?[A-J][).:]|,\s*\(?[A-J]\s*$|^\W*[A-J]\s*$",
    re.MULTILINE,
)
_EDGES = " \t\n.,;:!?\"'`*_()[]{}$"


def read_choice(text: str) -> str | None:
    """Return the letter that a text chooses, in upper case: "B", "(b)", "Option B", "B) Paris".

    None without a choice or with several ("B or C").

    >>> read_choice("**(B)**"), read_choice("B) Paris"), read_choice("B or C"), read_choice("Bad")
    ('B', 'B', None, None)
    """
    text = text.strip()
    match = _LETTER.fullmatch(text) if len(text) <= MAX_CHOICE else None
    if match is None:
        return None
    end, rest = match["end"], match["rest"]
    if rest and (not re.match(r"[)\].:]", end.lstrip("*_\"'")) or _ANOTHER.search(rest)):
        return None
    return match[1].upper()


def read_text(text: str) -> str | None:
    """Normalise a short text for comparison: case, spaces and punctuation at its ends.

    >>> read_text(" The  Eiffel Tower. ") == read_text("the eiffel tower")
    True
    """
    plain = " ".join(unicodedata.normalize("NFKC", text[:1000]).casefold().split()).strip(_EDGES)
    return plain or None


# Reader of each answer type: a key that equal answers share, or None.
READERS: dict[AnswerType, Callable[[str], Hashable | None]] = {
    "number": parse_number,
    "choice": read_choice,
    "text": read_text,
    "open": read_text,
}
