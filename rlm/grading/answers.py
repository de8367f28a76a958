"""Final answers: find them in completions, compare them with reference answers, count votes.

There are two gradings. The *strict* grading determines the default training reward: a completion
must consist of exactly one non-empty `<think>` block followed by one `<answer>` block that contains
only the answer. The *lenient* grading accepts the right answer in any common form and is only
reported. In both, `rlm.grading.numbers` reads numbers, `read_choice` reads letters, and `read_text`
reads words. Neither reads an answer from the reasoning block. Both accept at most one value, so a
text that lists guesses is wrong.

In the lenient grading, the last statement "the answer is …" (or "#### …" for a number) counts,
because it corrects the earlier ones. Answer tags or boxes with different values are wrong, but
10/3 ≈ 3.33 is right for 10/3 and for 3.33.

Patterns run in linear time or on texts of bounded length, so hostile text takes only milliseconds,
and no text raises an error.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal, get_args

from rlm.grading.numbers import (
    MAX_CLAIMS,
    MAX_NUMBER,
    Claim,
    last_number,
    parse_number,
    read_number,
)

# The answer types. An open answer has no reference answer; only a reward can judge it.
AnswerType = Literal["number", "choice", "text", "open"]
ANSWER_TYPES: tuple[AnswerType, ...] = get_args(AnswerType)
MAX_CHOICE = 1000  # maximum length of a text with a choice; the patterns below may be quadratic
MAX_TEXT = 1000  # a longer text is only case-folded and stripped, and never read as a number

_LETTER = re.compile(
    r"[\s(\[\"'*_$]*(?:(?:the\s+)?(?:option|choice|answer)[\s:]+(?:is\s+)?)?[\s(\[\"'*_$]*"
    r"([A-Za-z])(?P<end>(?:[)\].:,\"'*_$\s]|(?<=\s)[-–—](?=\s))*)(?P<rest>.*)",
    re.IGNORECASE | re.DOTALL,
)
# Matches another letter that looks like a choice: "or C" (but not "but I think"), "answer is C",
# "C)", "C.", "C - " or a letter on its own line.
_ANOTHER = re.compile(
    r"\b(?i:or|and|but|unless|maybe|perhaps|possibly|probably|also|not|be|else|option|choice|answer"
    r"|actually|rather|choose|pick|select|it)"
    r"(?i:\s+is)?\W{1,4}[A-J]\b(?!(?<=[AI])\s+(?!is\b|or\b|and\b)[a-z])"
    r"|(?<!\w)(?:\(?[A-J](?:[).:]|\s[-–—]\s)|\[[A-J]\])|,\s*\(?[A-J]\s*$|^\W*[A-J]\s*$",
    re.MULTILINE,
)
_EDGES = " .,;:!?\"'`*_()[]{}$"
_SYMBOL_EDGES = " .\"'`$"  # stripped from an answer without words and digits, such as "≥"
_TYPOGRAPHIC = str.maketrans("‘’“”‐‒–—―−", "''\"\"------", "\u200b\ufeff")
_TEXT_COMMAND = re.compile(r"\\(?:text|math)[a-z]{0,6}\{([^{}]*)\}")  # \text{Paris}, \textbf{(B)}
# LaTeX that does not change the meaning: \left( and \dfrac, \(…\), and the backslash of \{ and \%.
_NO_MEANING = re.compile(
    r"\\(?:left|right)(?![A-Za-z])|(?<=\\)[dt](?=frac)|\\[()\[\]]|\\(?=[{}%$&#_])"
)
_COMMAND = re.compile(r"\\[A-Za-z]+")
# LaTeX commands and the characters that mean the same.
_SYMBOLS = {
    **{"infty": "∞", "pm": "±", "times": "×", "cdot": "·", "div": "÷"},
    **{"le": "≤", "leq": "≤", "ge": "≥", "geq": "≥", "ne": "≠", "neq": "≠"},
    **{"in": "∈", "cup": "∪", "cap": "∩", "emptyset": "∅", "varnothing": "∅"},
    **{"alpha": "α", "beta": "β", "gamma": "γ", "delta": "δ", "epsilon": "ε", "theta": "θ"},
    **{"lambda": "λ", "mu": "μ", "pi": "π", "rho": "ρ", "sigma": "σ", "phi": "φ", "omega": "ω"},
}
_SYMBOL = re.compile(  # \pi r is πr; \Delta is δ, because letters are compared without case
    rf"\\({'|'.join(_SYMBOLS)})(?![A-Za-z])(?: +(?=[A-Za-z]\b))?", re.IGNORECASE
)
_DEGREES = re.compile(r"\^ ?(?:\\circ(?![A-Za-z])|\{\\circ\})|\\degree(?![A-Za-z])")
# \sqrt{2} is √2, but \sqrt{2x} and \sqrt{2}x are not √2x, which may mean either of them.
_ROOT = re.compile(r"\\sqrt ?(?:\{(\d+|[A-Za-z])\}|(\d))(?!\w)")
# Superscripts, and subscripts after a digit: neither 10² nor 10₂ is 102, but H₂O is H2O.
_SCRIPTS = re.compile("(?P<up>[²³¹⁰⁴-ⁿ]++)(?!⁄)|(?<=[0-9])[₀-₎]+")
_BRACED = re.compile(r"(?<=[\^_])\{(-?\w+)\}")  # x^{2} is x^2
_SPACED = re.compile(r" ?([^\w ]) ?")
# Matches intervals and the text between them, if a square bracket is one of their ends.
_END = r"(?:[^()\[\],]|\([^()\[\],]*\))*+"
_INTERVALS = re.compile(rf"(?=.*[\[\]])[^()\[\]]*(?:[(\[]{_END},{_END}[)\]][^()\[\]]*)+")


def read_choice(text: str) -> str | None:
    """Return the letter that a text chooses, in upper case.

    Recognized forms are "B", "(b)", "Option B" and "B) Paris". The result is None if the text
    contains no choice or several choices ("B or C").

    >>> read_choice("**(B)**"), read_choice("B) Paris"), read_choice("B or C"), read_choice("Bad")
    ('B', 'B', None, None)
    """
    text = unicodedata.normalize("NFKC", text[: MAX_CHOICE + 1]).strip()  # a fullwidth Ｂ is B
    match = _LETTER.fullmatch(text) if len(text) <= MAX_CHOICE else None
    if match is None:
        return None
    end, rest = match["end"], match["rest"]
    letter = match[1].upper()
    if rest and not re.match(r"[)\].:]|\s[-–—]", end.lstrip("*_\"'")):
        return None
    for other in _ANOTHER.finditer(rest):  # "B. B is right" is B, but "B. Not B" is no choice
        if re.findall("[A-J]", other[0])[-1] != letter or other[0].lower().startswith("not"):
            return None
    return letter


def read_text(text: str) -> str | None:
    r"""Normalise the case, the spaces and the outer punctuation of a short text for comparison.

    Spaces beside punctuation are removed. Typographic quotes and dashes become plain ones.

    A number without words is compared by its value, because some mathematical answers are numbers
    and some are texts. A number with a leading zero and a pair in brackets remain texts. The
    brackets of an interval such as [0, 1) and the ! of a factorial are part of the answer.

    >>> read_text(" The  Eiffel Tower. ") == read_text("the eiffel tower")
    True
    >>> read_text("1,000") == read_text("1000.0"), read_text("5 cats") == read_text("5 dogs")
    (True, False)
    >>> read_text("007") == read_text("7"), read_text("(100,200)") == read_text("100200")
    (False, False)
    >>> read_text("[0, 1)") == read_text("(0, 1]"), read_text("10²") == read_text("102")
    (False, False)
    >>> read_text("red, blue"), read_text("10–20"), read_text("x² + 1") == read_text("x^{2}+1")
    ('red,blue', '10-20', True)
    >>> read_text(r"2\pi\sqrt{3}"), read_text(r"x \leq 5"), read_text(r"90^\circ")
    ('2π√3', 'x≤5', '90')
    """
    if len(text) > MAX_TEXT:  # normalisation may take quadratic time
        return " ".join(text.casefold().split()).strip(_EDGES) or None
    text = _NO_MEANING.sub("", text)
    if "\\boxed" not in text:  # an answer tag must not contain a box
        text = _TEXT_COMMAND.sub(r"\1", text)
    text = _SYMBOL.sub(lambda found: _SYMBOLS[found[1].lower()], text)
    text = _DEGREES.sub("°", text)
    text = _ROOT.sub(lambda found: f"√{found[1] or found[2]}", text)
    text = _SCRIPTS.sub(lambda found: ("^" if found["up"] else "_") + found[0], text)
    folded = unicodedata.normalize("NFKC", text).translate(_TYPOGRAPHIC).casefold()
    plain = _BRACED.sub(r"\1", " ".join(folded.split()))
    if intervals := _INTERVALS.fullmatch(plain.strip(" .,;:!?\"'`*_$")):
        return _SPACED.sub(r"\1", intervals[0])
    # In a longer text or after a large number, ! ends the sentence.
    mark = "!" if re.fullmatch(r"[\s($*_]*\d{1,2}![\s.$*_)]*", plain) else ""
    plain = plain.strip(_EDGES if re.search(r"\w", plain) else _SYMBOL_EDGES) + mark
    is_text = mark or re.match(r"0\d", plain) or re.search(r"[(\[][^)\]]*,", text)
    if not is_text and not any(map(str.isalpha, _COMMAND.sub("", plain))):
        for number in (parse_number(text), parse_number(plain)):
            if number is not None:
                return str(number)
    return _SPACED.sub(r"\1", plain) or None


def _without_spaces(text: str) -> str:
    """Remove the spaces beside punctuation, and fold the case."""
    return _SPACED.sub(r"\1", " ".join(text.casefold().split()))


# The function that reads each answer type. It returns a key that is the same for equal answers, or
# None if the text is not an answer of this type.
READERS: dict[AnswerType, Callable[[str], Fraction | str | None]] = {
    "number": parse_number,
    "choice": read_choice,
    "text": read_text,
    "open": read_text,
}


REASONS: tuple[str, ...] = (
    "correct",  # the answer equals the reference answer
    "wrong",  # the answer is valid but differs from the reference answer
    "ungraded",  # the answer is valid, but there is no reference answer
    "gold_unreadable",  # the reference answer does not fit its answer type; the reward is always 0
    "no_reasoning",  # strict: the opening think tag is missing
    "unclosed_reasoning",  # the reasoning block is not closed, so no answer can follow it
    "repeated_reasoning",  # strict: there is more than one opening or closing think tag
    "empty_reasoning",  # strict: there is only whitespace between the think tags
    "answer_in_reasoning",  # strict: an answer tag is inside the reasoning block
    "text_outside",  # strict: there is text outside the two blocks
    "no_answer",  # strict: the opening answer tag is missing; lenient: no answer was found
    "unclosed_answer",  # strict: the answer tag is not closed
    "repeated_answer",  # strict: there is more than one opening or closing answer tag;
    # lenient: tags or boxes contain different answers that are not numbers
    "not_a_number",  # the answer is not a plain number: words, 3 + 4, x > 5, 9^9, 1/0
    "several_numbers",  # the answer contains more than one number
    "not_a_choice",  # multiple choice: the answer is not one letter
)

_MAX_SEARCHED = 4000  # maximum number of characters, at the end of a text, searched for an answer


@dataclass(frozen=True)
class Verdict:
    """The result of grading a completion."""

    correct: bool
    reason: str  # one of REASONS
    answer: str | None  # the trimmed text of the candidate answer; None if none was found
    value: Fraction | str | None = None  # the number, letter or words of the answer

    @property
    def is_answer(self) -> bool:
        """Whether the completion contains exactly one valid answer, right or wrong."""
        return self.reason in ("correct", "wrong", "ungraded")


def normalize_answer(answer: str) -> Fraction | str | None:
    """Return a key that is the same for equal answers, whatever their answer type.

    The key is a number if the answer is a number, else the normalised text.

    >>> normalize_answer("0.5") == normalize_answer("1/2")
    True
    """
    number = parse_number(answer)
    return read_text(answer) if number is None else number


# Matches opening and closing tags such as <b>, special tokens such as <|im_end|>, and a closing tag
# that the end of the text cuts off.
_MARKUP = re.compile(r"<[A-Za-z_]{1,20}>|</[A-Za-z_]{0,20}(?:>|\Z)|<\|[a-z_]{1,20}\|>")
_BRACE = re.compile(r"\\(?:boxed|fbox) ?\{|[{}]")
_DIGIT = "\\d¼-¾⅐-⅞"
_HASHES = re.compile(rf"(?<!#)####(?!#) {{0,3}}([^\nA-Za-z]{{0,20}}[{_DIGIT}][^\n]*)")
# Matches the verb, colon or equals sign before an answer, but not the verb of "cannot be".
_IS = r"(?:(?<!not )(?<!n't )(?<!n’t )(?<!never )\b(?:is|be|equals)\b|:|=)"
_REST_OF_LINE = r"(?:\n *[-*] +|[\s*_:$]|\\[\[(])*+(?=([^\n]{1,300}))"
_ANSWER_IS = re.compile(rf"(?i)\banswer\b[^\n.:=\d]{{0,40}}?{_IS}{_REST_OF_LINE}")
# Matches from the start of a line to the end of the first sentence that contains a digit. The
# period of the repeating decimal 3.\overline{3} does not end a sentence.
_SENTENCE = re.compile(
    rf"[^{_DIGIT}]*[{_DIGIT}].*?(?=[.!?](?:[\s*_$)]|\\(?!overline|bar|dot)|$)|$)"
)
# Matches the words before a chosen letter: "the correct option is B", "I choose B".
_CHOICE_IS = re.compile(
    r"(?i)(?:\b(?:answer|(?:correct|right|best|final|my) (?:option|choice))\b[^\n.:=]{0,40}?"
    rf"{_IS}|\bI(?: would| will)? (?:choose|pick|select)\b){_REST_OF_LINE}"
)
# Matches "option B is correct" in a sentence that does not deny, doubt or quote it.
_OPTION_IS = re.compile(
    r"(?i)(?<![^.!?\n])(?:(?!\b(?:(?:can)?not|never|if|whether|some\w*)\b|n['’]t\b)[^.!?\n])*?"
    r"\b(?:option|choice|answer)(?=\W{1,4}[A-J]\W{1,4}is (?:the )?(?:correct|right|best)\b)"
    rf"{_REST_OF_LINE}"
)
# Matches what may follow a chosen letter: "is correct", and a reason up to the end of its sentence.
_CHOICE_REASON = re.compile(
    r"(?i)\s?\bis (?:the )?(?:correct|right|best)\b(?: (?:one|answer|option|choice)\b)?"
    r"|,?\s?\b(?:because|since)\b[^.!?\n]*"
)


def _brace_pairs(text: str) -> list[tuple[re.Match[str], re.Match[str]]]:
    """Return the opening and closing brace of each balanced box; inner boxes come first."""
    stack, pairs = list[re.Match[str]](), []
    for match in _BRACE.finditer(text):
        if match[0] != "}":
            stack.append(match)
        elif stack and (opening := stack.pop())[0] != "{":
            pairs.append((opening, match))
    return pairs


def _boxes(text: str) -> list[str]:
    """Return the contents of the outermost balanced boxes, in the order of the text."""
    spans: list[tuple[int, int]] = []
    for opening, closing in _brace_pairs(text):
        while spans and spans[-1][0] > opening.end():
            spans.pop()
        spans.append((opening.end(), closing.start()))
    return [text[start:end] for start, end in spans]


def without_boxes(text: str) -> str:
    r"""Replace each `\boxed{…}` with its contents; unclosed boxes remain unchanged.

    >>> without_boxes(r"so \boxed{\frac{1}{2}}.")
    'so \\frac{1}{2}.'
    """
    drop = [brace.span() for pair in _brace_pairs(text) for brace in pair]
    for start, end in sorted(drop, reverse=True):
        text = text[:start] + text[end:]
    return text


def _tagged(text: str, tag: str) -> list[str]:
    """Return the contents of each closed pair of tags, in the order of the text.

    If there are more than MAX_CLAIMS pairs, only the last MAX_CLAIMS are returned.
    """
    parts = text.split(f"</{tag}>")[:-1]
    return [part.rsplit(f"<{tag}>", 1)[1] for part in parts if f"<{tag}>" in part][-MAX_CLAIMS:]


def _only_claim(claims: Sequence[Claim], reason: str) -> Claim:
    """Return the last claim, with `reason` instead of its value if there are several values."""
    *others, last = claims
    values = {claim.value for claim in claims} - {None}
    is_list = len(values) > 1 or any(claim.reason == "several_numbers" for claim in others)
    return replace(last, value=None, reason=reason) if is_list else last


def _read_other(region: str, kind: AnswerType) -> Claim:
    """Read an answer that is not a number from a region of the text."""
    value = READERS[kind](region)
    reason = "" if value is not None else "not_a_choice" if kind == "choice" else "no_answer"
    return Claim(value, region.strip(), reason)


def _find_other(text: str, answer_tag: str, kind: AnswerType) -> Claim:
    """Find an answer that is not a number.

    The answer is read from the first of the following that the text contains: answer tags, boxes,
    the text after "answer is", or the last line. An open answer without a tag is the whole text.
    """
    regions = [_MARKUP.sub(" ", inside) for inside in _tagged(text, answer_tag)]
    if kind == "open":
        return _read_other(regions[-1] if regions else text, kind)
    if not regions:
        text = _MARKUP.sub("\n", text[-_MAX_SEARCHED:])
        regions = _boxes(text)
        for pattern in (_CHOICE_IS, _OPTION_IS) if kind == "choice" else (_ANSWER_IS,):
            regions = regions or pattern.findall(text)[-1:]
        regions = regions or [line for line in text.splitlines() if line.strip()][-1:] or [""]
    regions = [_TEXT_COMMAND.sub(r"\1", region) for region in regions]
    if kind == "choice":
        regions = [_CHOICE_REASON.sub("", region) for region in regions]
    return _only_claim([_read_other(region, kind) for region in regions], "repeated_answer")


def explicit_answers(text: str, answer_tag: str) -> list[str]:
    """Return the contents of answer tags, else of boxes, else the number after the last ####."""
    tagged = [_MARKUP.sub("\n", inside) for inside in _tagged(text, answer_tag)]
    text = _MARKUP.sub("\n", text[-_MAX_SEARCHED:])
    return tagged or _boxes(text) or _HASHES.findall(text)[-1:]


def _find(text: str, answer_tag: str) -> Claim:
    """Find the number that a text gives as its answer.

    The number is read from the first of the following that the text contains: answer tags, boxes,
    the text after ####, the text after "answer is", or the last number of the text.
    """
    if regions := explicit_answers(text, answer_tag):
        return _only_claim([read_number(region) for region in regions], "several_numbers")
    text = _MARKUP.sub("\n", text[-_MAX_SEARCHED:])
    for line in reversed(_ANSWER_IS.findall(text)):
        if sentence := _SENTENCE.match(line):
            return read_number(sentence[0])
    return last_number(text)


def split_completion(completion: str, reasoning_tag: str = "think") -> tuple[str | None, str]:
    """Split a completion into the reasoning and the text after the last closing tag.

    If the opening tag is missing, the reasoning begins at the start of the completion. If the last
    opening tag is not closed, the second part is empty. Neither part is stripped.

    Returns:
        The reasoning, or None if the completion contains no reasoning tag, and the remaining text.
    """
    opening, closing = f"<{reasoning_tag}>", f"</{reasoning_tag}>"
    first, end = completion.find(opening), completion.rfind(closing)
    if first < 0 and end < 0:
        return None, completion
    if completion.rfind(opening) > end:
        return completion[first + len(opening) :], ""
    start = first + len(opening) if 0 <= first < end else 0
    return completion[start:end], completion[end + len(closing) :]


def _strict(completion: str, reasoning_tag: str, answer_tag: str, kind: AnswerType) -> Claim:
    rest, outside, blocks = completion, "", list[str]()
    for tag, name in (reasoning_tag, "reasoning"), (answer_tag, "answer"):
        opening, closing = f"<{tag}>", f"</{tag}>"
        if any(opening in block or closing in block for block in blocks):
            return Claim(None, "", "answer_in_reasoning")
        if opening not in rest:
            return Claim(None, "", f"no_{name}")
        if rest.count(opening) > 1 or rest.count(closing) > 1:
            return Claim(None, "", f"repeated_{name}")
        before, _, rest = rest.partition(opening)
        inside, closed, rest = rest.partition(closing)
        if not closed:
            return Claim(None, "", f"unclosed_{name}")
        if not inside.strip() and not blocks:
            return Claim(None, "", "empty_reasoning")
        outside += before
        blocks.append(inside.strip())
    if outside.strip() or rest.strip():
        return Claim(None, blocks[1], "text_outside")
    if kind != "number":
        return _read_other(blocks[1], kind)
    if (value := parse_number(blocks[1])) is None:
        return Claim(None, blocks[1], read_number(blocks[1]).reason or "not_a_number")
    return Claim(value, blocks[1])


def grade(
    completion: str,
    gold: str | None,
    *,
    strict: bool,
    kind: AnswerType = "number",
    reasoning_tag: str = "think",
    answer_tag: str = "answer",
) -> Verdict:
    """Compare the final answer of a completion with the reference answer.

    Args:
        gold: the reference answer, or a GSM8K answer that ends with "#### 24". If it is None, the
            verdict only reports the answer found. It is ignored if the question is open.
        strict: whether to grade strictly; otherwise, the grading is lenient.
        kind: the answer type.
    """
    if kind == "number" and gold is not None:
        gold = after_hashes(gold)
    compares = gold is not None and kind != "open"
    target = READERS[kind](gold) if gold is not None and compares else None
    if compares and target is None:
        return Verdict(False, "gold_unreadable", None)
    if strict:
        claim = _strict(completion, reasoning_tag, answer_tag, kind)
    else:
        opened = completion.rfind(f"<{reasoning_tag}>") > completion.rfind(f"</{reasoning_tag}>")
        text = split_completion(completion, reasoning_tag)[1].rstrip()
        if opened:
            claim = Claim(None, "", "unclosed_reasoning")
        elif kind == "number":
            claim = _find(text, answer_tag)
            if claim.value is not None and target == parse_number(claim.rounded) is not None:
                claim = Claim(target, claim.rounded)
        else:
            claim = _find_other(text, answer_tag, kind)
    correct = compares and claim.value == target
    if gold is not None and kind == "text" and claim.value is not None:
        # "100,200" is read as a number, but it is also the list "100, 200".
        correct |= _without_spaces(claim.text) == _without_spaces(gold)
    reason = claim.reason or ("correct" if correct else "wrong" if compares else "ungraded")
    longest = MAX_NUMBER if kind == "number" else _MAX_SEARCHED
    return Verdict(correct, reason, claim.text[:longest].strip() or None, claim.value)


def after_hashes(text: str) -> str:
    """Return the reference answer after #### in a GSM8K answer, or a text without #### unchanged.

    >>> after_hashes("4 * 6 = 24\\n#### 24"), after_hashes("24")
    ('24', '24')
    """
    _, hashes, rest = text.rpartition("####")
    # MetaMathQA adds another line after the answer.
    return (rest.strip().splitlines() or [""])[0].strip() if hashes else text


def gold_from_gsm8k(answer_field: str, calculator_annotations: bool = False) -> tuple[str, str]:
    """Split the answer field of a GSM8K row into the solution and the reference answer.

    Args:
        calculator_annotations: whether the solution keeps annotations such as `<<3+5=8>>`.
    """
    solution, hashes, _ = answer_field.rpartition("####")
    gold = after_hashes(answer_field)
    if not hashes or parse_number(gold) is None:
        raise ValueError(f"no number after #### in {answer_field[-80:]!r}")
    if calculator_annotations:
        return _RESULT.sub(_as_calculated, solution).strip(), gold
    return re.sub(r"<<[^<>]*>>", "", solution).strip(), gold


_RESULT = re.compile(r"=(\d*)(?:\.(\d*?)0*)?>>(?=(\.\d)?)", re.ASCII)


def _as_calculated(result: re.Match[str]) -> str:
    """Write the result of a calculator annotation in the calculator's format: .50 becomes 0.5."""
    whole, rest = result[1] or "0", result[2]
    return f"={whole}{'.' if rest else ''}{rest or ''}>>{'0' if result[3] else ''}"


@dataclass(frozen=True)
class Vote:
    """The result of a vote, with the distinct answers ranked by their number of votes.

    Of two answers with equally many votes, the answer that was given first ranks higher.
    """

    answers: tuple[str | None, ...]  # the given answers; None is an abstention
    ranked: tuple[tuple[int, ...], ...]  # the indices of the votes for each distinct answer

    @property
    def n(self) -> int:
        return len(self.answers)

    @property
    def valid(self) -> int:
        """The number of votes, not counting abstentions."""
        return sum(map(len, self.ranked))

    @property
    def members(self) -> tuple[int, ...]:
        """The indices of the votes for the winner."""
        return self.ranked[0] if self.ranked else ()

    @property
    def winner(self) -> str | None:
        """The winning answer as it was first written; None if all votes are abstentions."""
        return self.answers[self.members[0]] if self.members else None

    @property
    def agreement(self) -> float:
        """The winner's share of all n votes; abstentions lower it."""
        return len(self.members) / self.n

    @property
    def tied(self) -> tuple[tuple[int, ...], ...]:
        """The indices of the votes for each answer that has as many votes as the winner."""
        return tuple(voters for voters in self.ranked if len(voters) == len(self.members))

    @property
    def tie(self) -> bool:
        return len(self.tied) > 1

    @property
    def counts(self) -> dict[str, int]:
        """The number of votes for each answer; the key is the answer as it was first written."""
        return {str(self.answers[voters[0]]): len(voters) for voters in self.ranked}


def majority_vote(answers: Sequence[str | None], kind: AnswerType) -> Vote:
    """Find the most frequent answer.

    Args:
        answers: the votes; None is an abstention.
        kind: the answer type, which determines which answers are equal.

    >>> vote = majority_vote(["8", "7", "8.0", None], "number")
    >>> vote.winner, vote.counts, vote.agreement, vote.members
    ('8', {'8': 2, '7': 1}, 0.5, (0, 2))
    """
    # Keys are wrapped in tuples, because a key may be None, and None would count as an abstention.
    read = READERS[kind]
    return _count([None if answer is None else (read(answer),) for answer in answers], answers)


def _count(keys: Sequence[Hashable | None], answers: Sequence[str | None]) -> Vote:
    """Count the votes for each key; None is an abstention."""
    voters: dict[Hashable, list[int]] = {}
    for i, key in enumerate(keys):
        if key is not None:
            voters.setdefault(key, []).append(i)
    ranked = sorted(map(tuple, voters.values()), key=lambda who: (-len(who), who[0]))
    return Vote(tuple(answers), tuple(ranked))


def majority_score(verdicts: Sequence[Verdict]) -> float:
    """Return the probability that the majority answer is right if ties are broken at random.

    This expected value does not depend on the order of the samples. Its mean over problems is
    maj@k.
    """
    values = [verdict.value if verdict.is_answer else None for verdict in verdicts]
    tied = _count(values, [verdict.answer for verdict in verdicts]).tied
    return sum(verdicts[who[0]].correct for who in tied) / len(tied) if tied else 0.0
