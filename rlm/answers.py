"""Final answers: find one in a completion, read it as an exact number, compare it with the gold.

Two gradings share one reader. *Strict* is the training reward: the completion is exactly one
non-empty `<think>` block, then one `<answer>` that holds one number. *Lenient* asks whether the
model knows the answer whatever it wrapped it in, and is only ever reported. In both at most one
value can be claimed, so a text that lists guesses is wrong, and nothing inside the thinking counts.

Reading is lexing. A text becomes a string of token kinds, one character each ("She earns $1,000."
is `W W $N.`), and what surrounds a number is judged by regular expressions over that string.
Nothing is evaluated, every pattern is linear, and sizes are bounded: hostile text costs
milliseconds, in any thread, and no str raises.

What a number may look like: 1000, 1,000, 1 000, 1'000, 1_000, 1{,}000 (groups of exactly three,
one separator); 0.5, .5, 1e3; 3/4 (unspaced: "36 / 2" is arithmetic), \\frac{3}{4}, ½ and mixed
1 1/2; a sign; "1.5 million" is multiplied out. Around it: currency, %, up to four unit words,
quotes, brackets ("(5)" is 5), markdown emphasis, LaTeX delimiters and text commands. A percent
sign is dropped: 20% is 20. Every Unicode decimal digit is a digit; ①, Ⅷ, 万 are not.
"""

import re
import unicodedata
from collections.abc import Hashable
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise

from rlm.text_answers import READERS, read_text

REASONS: tuple[str, ...] = (
    "correct",  # one number, equal to the gold
    "wrong",  # one number, another one
    "gold_unreadable",  # the gold is not one number: never a reward, whatever the completion
    "no_reasoning",  # strict: no opening think tag
    "unclosed_reasoning",  # the thinking never ends: nothing after it can be an answer
    "repeated_reasoning",  # strict: more than one opening or closing think tag
    "empty_reasoning",  # strict: only whitespace between the think tags
    "answer_in_reasoning",  # strict: an answer tag inside the thinking
    "text_outside",  # strict: text before the thinking, after it, or after the answer
    "no_answer",  # strict: no opening answer tag; lenient: no number after the thinking
    "unclosed_answer",  # strict: an answer tag that never closes
    "repeated_answer",  # strict: more than one opening or closing answer tag
    "not_a_number",  # an answer that is no plain number: words, 3 + 4, x > 5, 9^9, 1/0
    "several_numbers",  # an answer that claims more than one number
    "not_a_choice",  # multiple choice: an answer that is not one letter
)

_MAX_NUMBER = 200  # characters of a number with its decoration
_MAX_TEXT = 4000  # characters searched for an answer, counted from the end
_MAX_REGION = 1000  # characters of one answer; a longer region is no number
_MAX_DIGITS = 40  # digits of one number
_MAX_CLAIMS = 64  # numbers, or `[n]`, examined, counted from the end


@dataclass(frozen=True)
class Verdict:
    """`parse_number(answer)` is the value compared wherever the reason is correct or wrong."""

    correct: bool
    reason: str  # one of REASONS
    answer: str | None  # the candidate text as found (trimmed), None where there is none

    @property
    def is_answer(self) -> bool:
        """Whether one answer was given that could be compared, right or not."""
        return self.reason in ("correct", "wrong")


@dataclass(frozen=True)
class _Claim:
    """What a text claims its answer to be: a value, or why there is none."""

    value: Fraction | str | None  # str: of an answer that is no number
    text: str
    reason: str = ""


_CHARACTERS = {"−": "-", "≈": "=", "≃": "=", "≅": "=", "⁄": "/", "∕": "/", "°": " degrees "}
_CHARACTERS |= dict.fromkeys("·π!", "^") | dict.fromkeys("→⇒", ":") | dict.fromkeys("…。", ". ")
_CHARACTERS |= dict.fromkeys("‘’", "'") | dict.fromkeys("“”«»", '"') | {"、": ", ", "•": "*"}
_CATEGORIES = {"Zs": " ", "Zl": "\n", "Zp": "\n", "Pd": "-", "Sc": "$", "Sm": "^", "Cf": "`"}
_FORMS = {"<super>": "^", "<sub>": "_", "<fraction>": " "}  # m² is m^2, 1½ is 1 1/2


def _to_ascii(match: re.Match[str]) -> str:
    char = match[0]
    if char in _CHARACTERS:
        return _CHARACTERS[char]
    if (digit := unicodedata.decimal(char, None)) is not None:
        return str(digit)
    if "\uff01" <= char <= "\uff5e":  # fullwidth punctuation and letters
        return chr(ord(char) - 0xFEE0)
    if (plain := _CATEGORIES.get(unicodedata.category(char))) is not None:
        return plain
    form, *codes = unicodedata.decomposition(char).split() or [""]
    digits = "".join(chr(int(code, 16)) for code in codes) if form in _FORMS else ""
    return _FORMS[form] + digits.replace("⁄", "/") if digits[:1].isdigit() else char


def _fraction(match: re.Match[str]) -> str:
    whole = match[1] and match[1] + " "
    return f"{whole}{match[2] or match[3]}/{match[4] or match[5]} "


# In this order; LaTeX that is left afterwards makes an expression, not a number.
_REWRITES = {
    r"(?<!\w)[—―](?=[\d.$])": "-",
    r"[—―]": ";",
    r"[^\x00-\x7f]": _to_ascii,
    r"\{,\}": ",",
    r"\\!|\\(?:left|right|boxed|fbox|mbox|(?:text|math)[a-z]{0,6})(?![A-Za-z])": "",
    r"\\[,;: ]|~|\\q?quad(?![A-Za-z])": " ",
    r"\\[$()\[\]]": "$",
    r"\\([%{}#&_])": r"\1",
    r"\\\\": "\n",
    r"&|\\(?:begin|end)\{[a-z]{1,12}\*?\}": "$",
    r"\\approx(?![A-Za-z])": "=",
    r"\^ ?(?:\\circ(?![A-Za-z])|\{\\circ\})": " degrees ",
    r"(\d?)\\[dt]?frac ?(?:\{ ?(-?\d{1,40}) ?\}|(\d)) ?(?:\{ ?(\d{1,40}) ?\}|(\d))": _fraction,
    r"(?<=\d)[xX](?=\d)": "*",
    r"\} ?\^": "^",  # \text{cm}^2
}
_PATTERNS = [(re.compile(pattern), new) for pattern, new in _REWRITES.items()]

_NUMBER = re.compile(
    r"(?:(?P<whole>\d++) {1,2}(?=[1-9]\d*+/))?+"
    r"(?P<head>[1-9]\d{0,2}(?P<sep>[ ,'_])\d{3}(?:(?P=sep)\d{3})*(?!\d)|\d++|(?<![\d.])(?=\.\d))"
    r"(?:/(?P<bottom>\d++)(?!\.\d)|(?P<rest>(?:\.\d++)?(?:[eE][-+]?\d{1,2}(?!\w))?))"
    r"(?: ?(?P<scale>(?i:hundred|thousand|million|billion|trillion))s?(?!\w))?",
    re.ASCII,
)
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}

# Token kinds by the letter they are written as. The order matters: the first that fits wins.
_KINDS = {
    "N": _NUMBER.pattern,
    "\n": r"(?<!\$)\n\s*[-*] +|\n\s*",  # with the bullet that may open a line
    " ": r"\s+",
    "d": r"[{}()\[\]\"'`]|(?<!\w)[*_]+(?=\S)|(?<=\S)[*_]+(?!\w)",  # decoration, emphasis
    "$": r"\$|(?:US(?=\$)|USD|EUR|GBP|CAD|AUD|INR|JPY|CNY|Rs\.?)(?![A-Za-z])",
    "%": r"%|(?i:percent)(?!\w)",
    "~": r"(?i:not|never)(?!\w)",
    "|": r"(?i:and(?! a half)|or|nor|but|so|then|thus|hence|because|since|if|where|vs)(?!\w)",
    "o": r"(?<=\d)[.:](?=\d)|[<>!]=|=[<>]|[*^<>!_|&#@]|\\[A-Za-z]*|"
    r"(?i:(?:and a )?half|squared|cubed|factorial|pi)(?!\w)",  # whatever makes an expression
    "-": r"-|(?i:minus|negative)(?!\w)",
    "+": r"\+",
    "=": r"=",
    "/": r"/",
    "c": r"(?<=\d),(?=\d)",  # a comma that groups no thousands: 17,18 and 1,00
    ",": r"[,;]",
    ":": r":",
    ".": r"[.?]",
    "v": r"[xyzXYZkKMB](?!\w)",  # a variable or a factor: 18x and 18k are refused, x = 18 is not
    "W": r"[A-Za-z]+(?:\^\{?-?[123]\}?(?!\w)|(?!\w))",
    "i": r"[A-Za-z]\w*",  # a name with digits: x1, Q2
    "w": r"[^\x00-\x7f]+",  # W in any other script, or i
    "?": r"[\s\S]",
}
_LEXER = re.compile("|".join(f"(?P<k{i}>{p})" for i, p in enumerate(_KINDS.values())), re.ASCII)
_LETTERS = {f"k{i}": kind for i, kind in enumerate(_KINDS)}


def _lex(text: str) -> tuple[str, list[str]]:
    """The token kinds, one character each, and the token texts."""
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    kinds, tokens = [], []
    for match in _LEXER.finditer(text):
        kind, token = _LETTERS[match.lastgroup or ""], match[0]
        if kind == "w":  # 万 multiplies, ① counts
            kind = "i" if any(map(str.isnumeric, token)) or not token.isprintable() else "W"
        kinds.append(kind)
        tokens.append(token)
    return "".join(kinds), tokens


def _value(token: str) -> Fraction | None:
    match = _NUMBER.fullmatch(token)
    if match is None or sum(map(str.isdigit, token)) > _MAX_DIGITS:
        return None
    number = Fraction(re.sub(r"[ ,'_]", "", match["head"]) + (match["rest"] or ""))
    if bottom := int(match["bottom"] or 1):
        number /= bottom
    else:
        return None
    if match["whole"]:
        if number >= 1:
            return None  # 3 7/2
        number += int(match["whole"])
    return number * 10 ** _SCALES.get((match["scale"] or "").lower(), 0)


_ALONE = re.compile(r"[$\n]*([-+]?)[$\n]*N[%$]*(?:/?W\.?){0,4}[$\n]*[.,]?[$\n]*")
_BREAK = re.compile(r"[,c|~\n]")  # begins a new claim
_OPERATOR = re.compile(r"[-=o/+v]")  # joins two numbers into one expression
_SIGN = re.compile(r"(?:^|[ ,|~\n=d$.:])([-+])[d$]*$|=[ d$]*([-+])[ d$]*$")
_RIGHT = re.compile(r" ?i|[ d$%]*(?:[o+v]|/(?![ d]*W)|-(?!W))|[^,c|~\n.]*=")  # spoils
_LISTING = re.compile(r"[-+ d$%,c|~\n.]*")  # between two entries of a list


def parse_number(text: str) -> Fraction | None:
    """The one number that `text` is, exactly; None if it is anything else."""
    text = text.strip()
    if len(text) > _MAX_NUMBER:
        return None
    kinds, tokens = _lex(text)
    match = _ALONE.fullmatch(kinds.replace(" ", "").replace("d", ""))
    value = _value(tokens[kinds.index("N")]) if match else None
    return -value if match and value and match[1] == "-" else value


def ballot(answer: str) -> Hashable | None:
    """What equal answers share: their number, or their text where they are none. For votes.

    >>> ballot("0.5") == ballot("1/2"), ballot("Paris.") == ballot("paris")
    (True, True)
    """
    number = parse_number(answer)
    return read_text(answer) if number is None else number


def _claim(token: str, before: str, after: str) -> _Claim:
    """What a number claims between its neighbours' kinds: nothing, if an operator is next to it."""
    sign = _SIGN.search(before)
    mark = (sign[1] or sign[2]) if sign else ""
    rest = before[: max(sign.start(1), sign.start(2))] if sign else before
    value = _value(token)
    if value is None or rest.rstrip(" d$")[-1:] in {*"o/+-~c"} or _RIGHT.match(after):
        return _Claim(None, token)
    return _Claim(-value, "-" + token) if mark == "-" else _Claim(value, token)


def _claims(text: str) -> tuple[list[_Claim], list[str]]:
    """Every value the text claims, and the token kinds between each and the one before it.

    Numbers joined by operators are one expression. It claims its right-hand side if that is one
    number, and nothing (None) otherwise.
    """
    kinds, tokens = _lex(text)
    where = [-1, *(i for i, kind in enumerate(kinds) if kind == "N")][-_MAX_CLAIMS - 1 :]
    gaps = [kinds[a + 1 : b] for a, b in pairwise([*where, len(kinds)])]
    claims, before, first = [], [], 1
    for last in range(1, len(where)):
        after = gaps[last]
        joined = _OPERATOR.search(after) or not after.strip("d$")
        if joined and not _BREAK.search(after) and last + 1 < len(where):
            continue
        alone = first == last or "=" in gaps[last - 1]
        sides = gaps[last - 1], after
        claims.append(_claim(tokens[where[last]], *sides) if alone else _Claim(None, ""))
        before.append(kinds[where[first - 1] + 1 : where[last]])
        first = last + 1
    return claims, before


def _read(region: str) -> _Claim:
    """The one number a region claims."""
    region = region.strip()
    if (value := parse_number(region)) is not None:
        return _Claim(value, region)
    claims, _ = _claims(region[-_MAX_REGION:])
    values = {claim.value for claim in claims}
    if len(values) > 1 or (None in values and len(claims) > 1):
        return _Claim(None, region, "several_numbers")
    if len(region) > _MAX_REGION or not claims or claims[0].value is None:
        return _Claim(None, region, "not_a_number")
    return claims[0]


_MARKUP = re.compile(r"</?[A-Za-z_]{1,20}>|<\|[a-z_]{1,20}\|>")  # <b>, <|im_end|>, a tag alone
_BRACE = re.compile(r"\\(?:boxed|fbox) ?\{|[{}]")
_BRACKETED = re.compile(r"(?<![\\\w])\[([^\[\]\n]{1,60})\]")
_HASHES = re.compile(r"(?<!#)####(?!#) {0,3}([^\nA-Za-z]{0,20}\d[^\n]*)")
_ANSWER_IS = re.compile(
    r"(?i)\banswer\b[^\n.:=\d]{0,40}?(?:\b(?:is|be|equals)\b|:|=)"
    r"(?:\n *[-*] +|[\s*_:$]|\\[\[(])*+(?=([^\n]{1,300}))"
)
_SENTENCE = re.compile(r"[^\d]*\d.*?(?=[.!?](?:[\s*_$)\\]|$)|$)")  # as far as one with a digit goes


def _boxes(text: str) -> list[str]:
    """The contents of the outermost balanced boxes, in order."""
    stack: list[tuple[int, bool]] = []
    spans: list[tuple[int, int]] = []
    for match in _BRACE.finditer(text):
        if match[0] != "}":
            stack.append((match.end(), match[0] != "{"))
        elif stack:
            start, boxed = stack.pop()
            if boxed:
                while spans and spans[-1][0] > start:
                    spans.pop()
                spans.append((start, match.start()))
    return [text[start:end] for start, end in spans]


def _read_other(region: str, kind: str) -> _Claim:
    """What a region says where the answer is a choice or a text."""
    value = READERS[kind](region)
    reason = "" if value is not None else "not_a_choice" if kind == "choice" else "no_answer"
    return _Claim(value, region.strip(), reason)


def _find_other(text: str, answer_tag: str, kind: str) -> _Claim:
    """As `_find`, for a choice or a text: tag, last box, "answer is", last line."""
    end = text.rfind(f"</{answer_tag}>")
    start = text.rfind(f"<{answer_tag}>", 0, max(end, 0))
    if start >= 0:
        return _read_other(_MARKUP.sub(" ", text[start + len(answer_tag) + 2 : end]), kind)
    text = _MARKUP.sub("\n", text[-_MAX_TEXT:])
    if boxes := _boxes(text):
        return _read_other(re.sub(r"\\(?:text|mathrm)\{([^{}]*)\}", r"\1", boxes[-1]), kind)
    if said := _ANSWER_IS.findall(text):
        return _read_other(said[-1], kind)
    lines = [line for line in text.splitlines() if line.strip()]
    return _read_other(lines[-1] if lines else "", kind)


def _last_number(text: str) -> _Claim:
    """The last number of a text, unless it ends a bare list of numbers."""
    claims, before = _claims(text)
    if not claims:
        return _Claim(None, "", "no_answer")
    last = claims[-1]
    if len(claims) > 1 and claims[-2].value != last.value and _LISTING.fullmatch(before[-1]):
        opening = before[-2].rstrip(" d$-+")
        if "\n" not in before[-1] or opening[-1:] in ("", "\n"):  # a line is an entry on its own
            return _Claim(None, last.text, "several_numbers")
    return last if last.value is not None else _Claim(None, last.text, "not_a_number")


def _find(text: str, answer_tag: str) -> _Claim:
    """What a text claims, from the first kind of region that it has."""
    end = text.rfind(f"</{answer_tag}>")
    start = text.rfind(f"<{answer_tag}>", 0, max(end, 0))
    if start >= 0:
        return _read(_MARKUP.sub("\n", text[start + len(answer_tag) + 2 : end]))
    text = _MARKUP.sub("\n", text[-_MAX_TEXT:])
    inside = _BRACKETED.findall(text)[-_MAX_CLAIMS:]
    regions = _boxes(text) or [entry for entry in inside if parse_number(entry) is not None]
    if regions:  # the last one counts, unless another claims something else
        *others, last = map(_read, regions)
        values = {claim.value for claim in (*others, last)} - {None}
        hedged = len(values) > 1 or any(claim.reason == "several_numbers" for claim in others)
        return replace(last, value=None, reason="several_numbers") if hedged else last
    if hashes := _HASHES.findall(text):
        return _read(hashes[-1])
    for line in reversed(_ANSWER_IS.findall(text)):
        if sentence := _SENTENCE.match(line):
            return _read(sentence[0])
    return _last_number(text.rstrip()[-_MAX_REGION:])


def split_completion(completion: str, reasoning_tag: str = "think") -> tuple[str | None, str]:
    """(reasoning or None, text after the last closing tag), neither stripped.

    A closing tag alone ends a reasoning that began with the text. While the thinking is open,
    also again after an earlier one, there is no answer: the second part is empty.
    """
    opening, closing = f"<{reasoning_tag}>", f"</{reasoning_tag}>"
    first, end = completion.find(opening), completion.rfind(closing)
    if first < 0 and end < 0:
        return None, completion
    if completion.rfind(opening) > end:
        return completion[first + len(opening) :], ""
    start = first + len(opening) if 0 <= first < end else 0
    return completion[start:end], completion[end + len(closing) :]


def _strict(completion: str, reasoning_tag: str, answer_tag: str, kind: str) -> _Claim:
    rest, outside, blocks = completion, "", list[str]()
    for tag, name in (reasoning_tag, "reasoning"), (answer_tag, "answer"):
        opening, closing = f"<{tag}>", f"</{tag}>"
        if any(opening in block or closing in block for block in blocks):
            return _Claim(None, "", "answer_in_reasoning")
        if opening not in rest:
            return _Claim(None, "", f"no_{name}")
        if rest.count(opening) > 1 or rest.count(closing) > 1:
            return _Claim(None, "", f"repeated_{name}")
        before, _, rest = rest.partition(opening)
        inside, closed, rest = rest.partition(closing)
        if not closed:
            return _Claim(None, "", f"unclosed_{name}")
        if not inside.strip() and not blocks:
            return _Claim(None, "", "empty_reasoning")
        outside += before
        blocks.append(inside.strip())
    if outside.strip() or rest.strip():
        return _Claim(None, blocks[1], "text_outside")
    if kind != "number":
        return _read_other(blocks[1], kind)
    if (value := parse_number(blocks[1])) is None:
        return _Claim(None, blocks[1], _read(blocks[1]).reason or "not_a_number")
    return _Claim(value, blocks[1])


def grade(
    completion: str,
    gold: str,
    *,
    strict: bool,
    kind: str = "number",
    reasoning_tag: str = "think",
    answer_tag: str = "answer",
) -> Verdict:
    """Is the final answer of a completion the gold one?

    Args:
        kind: of `rlm.text_answers.ANSWER_TYPES`: a number, a letter, or a short text.
    """
    target = parse_number(gold) if kind == "number" else READERS[kind](gold)
    if target is None:
        return Verdict(False, "gold_unreadable", None)
    if strict:
        claim = _strict(completion, reasoning_tag, answer_tag, kind)
    else:
        opened = completion.rfind(f"<{reasoning_tag}>") > completion.rfind(f"</{reasoning_tag}>")
        text = split_completion(completion, reasoning_tag)[1]
        if opened:
            claim = _Claim(None, "", "unclosed_reasoning")
        elif kind == "number":
            claim = _find(text, answer_tag)
        else:
            claim = _find_other(text, answer_tag, kind)
    correct = claim.value == target
    reason = claim.reason or ("correct" if correct else "wrong")
    return Verdict(correct, reason, claim.text[:_MAX_NUMBER].strip() or None)


def gold_from_gsm8k(answer_field: str) -> tuple[str, str]:
    """(solution without the calculator's <<…>> and the #### line, gold) of a GSM8K answer."""
    solution, hashes, rest = answer_field.rpartition("####")
    gold = rest.strip()
    if not hashes or parse_number(gold) is None:
        raise ValueError(f"no number after #### in {answer_field[-80:]!r}")
    return re.sub(r"<<[^<>]*>>", "", solution).strip(), gold
