"""Numbers in texts: parse a number exactly, or find the number that a text gives as its answer.

A lexer converts a text to a string of token kinds with one character per token ("She earns $1,000."
becomes `W W $N.`). Regular expressions over this string then examine the surroundings of each
number. Nothing is evaluated as code, all patterns run in linear time, and all sizes are bounded, so
hostile text takes only milliseconds, and no text raises an error. (`numbers_in` reads a whole text;
its time grows with the length of the text.)

Supported numbers are 1000, 1,000, 1 000, 1'000, 1_000 and 1{,}000 (groups of exactly three digits
with the same separator); 0.5, .5, 1e3 and 6 × 10^{-3}; 3/4 without spaces ("36 / 2" is arithmetic),
\\frac{3}{4}, ½ and the mixed number 1 1/2. A number may have a sign, and "1.5 million" is
multiplied out. A number may be surrounded by a currency, %, up to four unit words, quotes, brackets
("(5)" is 5), markdown emphasis, LaTeX delimiters and LaTeX text commands. A percent sign is
ignored: 20% is 20. All Unicode decimal digits are digits, but ①, Ⅷ and 万 are not. Number words,
operators in words and verbs are not units, so "5 hundred thousand", "5 times two" and "5 is wrong"
are not numbers; "5 (five)", "5 ten dollar bills" and "12 eggs are left" are.
"""

import re
import unicodedata
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise

MAX_NUMBER = 200  # maximum length of a number including its surroundings, in characters
MAX_CLAIMS = 64  # only this many numbers at the end of a text are examined
_MAX_REGION = 1000  # maximum length of an answer in characters; a longer text is not a number
_MAX_DIGITS = 40  # maximum number of digits of a number


@dataclass(frozen=True)
class Claim:
    """The value that a text gives as its answer, or the reason why the text has no such value."""

    value: Fraction | str | None  # a str if the answer type is not "number"
    text: str
    reason: str = ""  # one of `rlm.grading.answers.REASONS`, or ""
    rounded: str = ""  # the decimals that the text gives for the fraction `value`: 10/3 ≈ 3.33


# Regular expressions of words. The patterns that contain them ignore case.
SCALE_WORD = "(?:hundred|thousand|(?:m|b|tr|quadr|quint)illion)s?"
_NAMES = (
    "zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|thirteen|fourteen|fifteen|"
    "sixteen|seventeen|eighteen|nineteen|twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety"
)
_NAMED_VALUES: dict[str, int] = dict(
    zip(_NAMES.split("|"), [*range(20), *range(20, 100, 10)], strict=True)
)
NUMBER_WORD = rf"(?:{_NAMES}|{SCALE_WORD})(?!\w)"
FRACTION_WORD = (
    "(?:halves|thirds?|(?:four|fif|six|seven|eigh|nin|ten|eleven|twelf|[a-z]{3,5}teen|"
    "[a-z]{3,5}tie|hundred|thousand|[a-z]{1,4}illion)ths?)"
)
OPERATOR_WORD = r"(?:plus|times|mod(?:ulo)?|choose|(?:divided|multiplied)\s+by)"

_CHARACTERS = {"−": "-", "≃": "≈", "≅": "≈", "≈": "≈", "⁄": "/", "∕": "/", "°": " degrees "}
_CHARACTERS |= {"∞": "\\infty ", "٫": ".", "٬": ","}
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
    if not digits[:1].isdigit():
        return char
    is_signed = match.string[match.start() - 1 : match.start()] in ("-", "+", "−", "–")
    joint = "" if form == "<fraction>" and is_signed else _FORMS[form]
    return joint + digits.replace("⁄", "/")


def _fraction(match: re.Match[str]) -> str:
    whole = match[1] and match[1] + " "
    top, bottom = match[2] or match[3], match[4] or match[5]
    if bottom.startswith("-"):
        top, bottom = top[1:] if top.startswith("-") else f"-{top}", bottom[1:]
    return f"{whole}{top}/{bottom} "


def _without_name(match: re.Match[str]) -> str:
    return match[1] if int(match[1]) == _NAMED_VALUES[match[2].lower()] else match[0]


# The rewrites are applied in this order. A text that still contains LaTeX afterwards counts as an
# expression, not as a number.
_REWRITES = {
    # 6.0 × 10^{-3} and 6.0 × 10⁻³ are 6.0e-3
    r"(?<=\d) ?(?:[×*·xX]|\\(?:times|cdot)) ?10"
    r"(?:\^ ?\{?([-−]?\d{1,2})\}?|(⁻?[²³¹⁰⁴-⁹]{1,2}))(?!\d)": (
        lambda power: "e" + unicodedata.normalize("NFKC", power[1] or power[2])
    ),
    # kg·m/s and s⁻¹
    r"(?:(?<=[A-Za-z¹²³])|(?<=\^[23])|(?<=\^-[123])) ?"
    r"(?:[·⋅]|\\cdot(?![A-Za-z])) ?(?=[A-Za-z])": " ",
    r"(?<=[A-Za-z])⁻([¹²³])": lambda power: "^-" + unicodedata.normalize("NFKC", power[1]),
    r"(?<!\w)[—―](?=[\d.$])": "-",
    r"[—―]": ";",
    r"(?<=\d)[\u0300-\u036f]": "^",  # 0.3 with a bar or a dot above repeats
    r"[^\x00-\x7f]": _to_ascii,
    r"\{,\}": ",",
    r"\\!|\\(?:left|right|boxed|fbox|mbox|(?:text|math)[a-z]{0,6})(?![A-Za-z])": "",
    r"\\[,;: ]|~|\\q?quad(?![A-Za-z])": " ",
    r"\\[$()\[\]]": "$",
    r"\\([%{}#&_])": r"\1",
    r"\\\\": "\n",
    r"&|\\(?:begin|end)\{[a-z]{1,12}\*?\}": "$",
    r"\\approx(?![A-Za-z])": "≈",
    r"\^ ?(?:\\circ(?![A-Za-z])|\{\\circ\})|\\degree(?![A-Za-z])": " degrees ",
    r"(\d?)\\[dt]?frac ?(?:\{ ?(-?\d{1,40}) ?\}|(\d)) ?(?:\{ ?(-?\d{1,40}) ?\}|(\d))": _fraction,
    r"(?<=\d)[xX](?=\d)": "*",
    r"\} ?\^": "^",  # \text{cm}^2
    r"\} ?\{": "}/{",  # \frac{a}{2}
    rf"(?<![\d.,/])(\d{{1,2}}) ?\(((?i:{_NAMES}))\)": _without_name,  # 5 (five)
}
_PATTERNS = [(re.compile(pattern), new) for pattern, new in _REWRITES.items()]

_NUMBER = re.compile(
    r"(?:(?P<whole>\d++) {1,2}(?=[1-9]\d*+/))?+"
    r"(?P<head>[1-9]\d{0,2}(?P<sep>[ ,'_])\d{3}(?:(?P=sep)\d{3})*(?!\d)|\d++|(?<![\d.])(?=\.\d))"
    r"(?:/(?P<bottom>\d++)(?!\.\d)|(?P<rest>(?:\.\d++)?(?:[eE][-+]?\d{1,2}(?!\w))?))"
    r"(?: ?(?P<scale>(?i:hundred|thousand|million|billion|trillion))s?(?!\w)"
    rf"(?!\s+(?i:(?:and\s+)?{NUMBER_WORD})))?",  # neither 5 hundred thousand nor 5 hundred and six
    re.ASCII,
)
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}

# The letter of each token kind and its pattern. The order matters: the first matching pattern wins.
_KINDS = {
    "N": _NUMBER.pattern,
    "\n": r"(?<!\$)\n\s*[-*] +|\n\s*",  # including the bullet at the start of a line
    " ": r"\s+",
    "d": r"[{}()\[\]\"'`]|(?<!\w)[*_]+(?=\S)|(?<=\S)[*_]+(?!\w)",  # markup
    "$": r"\$|(?:US(?=\$)|USD|EUR|GBP|CAD|AUD|INR|JPY|CNY|Rs\.?)(?![A-Za-z])",
    "%": r"%|(?i:percent)(?!\w)",
    # A negation, with its verb: the number after "cannot be" is no claim.
    "~": r"(?i:(?:not|never|cannot|no longer|[a-z]{2,6}n't)(?:\s+(?:be|equal)(?:\s+to)?)?)(?!\w)",
    # A number in words that continues a number: 5 or six, 5 times two, 5 hundred thousand.
    "n": r"(?i:(?:or|to|maybe|perhaps|possibly|probably|point|minus|"
    rf"{OPERATOR_WORD})\s+{NUMBER_WORD}(?!\s+(?:decimal|significant))|{SCALE_WORD}(?!\w))",
    "|": r"(?i:and(?! a half)|or|nor|but|so|then|thus|hence|because|since|if|where|vs|"
    r"maybe|perhaps|possibly|probably)(?!\w)",
    # Other parts of an expression. 3.(3) and 3.\overline{3} are repeating decimals.
    "o": r"(?<=\d)[.:](?=\d)|(?<=\d)\.(?=\(\d|\\(?:overline|bar|dot))|[<>!]=|=[<>]|"
    r"[*^<>!_|&#@]|\\[A-Za-z]*|(?i:(?:and a )?half|squared|cubed|factorial|pi)(?!\w)",
    "-": r"-|(?i:minus|negative)(?!\w)",
    "+": r"\+",
    "=": r"[=≈]",
    "/": r"/",
    "c": r"(?<=\d),(?=\d)",  # a comma that is not a thousands separator: 17,18 and 1,00
    ",": r"[,;]",
    ":": r":",
    ".": r"[.?]",
    # A variable or a factor: 18x, 3i, 18k, 5K, 5 lakh and 5 hundredths are rejected, x = 18 is not.
    "v": rf"(?:[xyzXYZkMB]|(?<=\d)[iK]|[bmt]n|(?i:lakhs?|crores?|{FRACTION_WORD}))(?!\w)",
    # Words that are not part of a unit: another number (but not in "5 ten dollar bills"), a verb
    # (but not in "12 eggs are left"), a doubt.
    "h": rf"(?i:{NUMBER_WORD}(?!\s+(?!{NUMBER_WORD})[a-z])|(?:is|are|was|were)(?!\s+(?:left|"
    r"remaining|needed)\b)|be|been|has|have|had|does|did|will|would|could|should|might|must|seems?|"
    r"i|we|he|she|they|plus|approx|approximately|roughly|ish|actually|wait|instead|rather|unless|"
    r"except|otherwise)(?!\w)",
    "W": r"[cdkm]?m[23](?!\w)|[A-Za-z]+(?:\^\{?-?[123]\}?(?!\w)|(?!\w))",
    "i": r"[A-Za-z]\w*",  # a name with digits: x1, Q2
    "w": r"[^\x00-\x7f]+",  # `_lex` replaces this kind by W (a word in another script) or i
    "?": r"[\s\S]",
}
_LEXER = re.compile("|".join(f"(?P<k{i}>{p})" for i, p in enumerate(_KINDS.values())), re.ASCII)
_LETTERS = {f"k{i}": kind for i, kind in enumerate(_KINDS)}


def _rewrite(text: str) -> str:
    """Rewrite LaTeX and Unicode characters in ASCII, as far as a number may contain them."""
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return text


def _lex(text: str) -> tuple[str, list[str]]:
    """Return the token kinds of a rewritten text, one character each, and the token texts."""
    kinds, tokens = [], []
    for match in _LEXER.finditer(text):
        kind, token = _LETTERS[match.lastgroup or ""], match[0]
        if kind == "w":  # numeric characters such as 万 (a multiplier) and ① are not words
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
_BREAK = re.compile(r"[,c|~\n]")  # a token that separates two values
_OPERATOR = re.compile(r"[-=o/+v]")  # a token that joins two numbers into one expression
_SIGN = re.compile(r"(?:^|[ ,|~\n=d$.:])([-+])[d$]*$|=[ d$]*([-+])[ d$]*$")
# Tokens after a number which show that the number is only a part of an expression.
_RIGHT = re.compile(r" ?i|[ d$%]*(?:[o+vn]|/(?![ d]*W)|-(?!W))|[^,c|~\n.]*=")
_LISTING = re.compile(r"[-+ d$%,c|~\n.]*")  # tokens between two entries of a list


def parse_number(text: str) -> Fraction | None:
    """Parse a text that consists of exactly one number; return None for any other text."""
    text = text.strip()
    if len(text) > MAX_NUMBER:
        return None
    kinds, tokens = _lex(_rewrite(text))
    match = _ALONE.fullmatch(kinds.replace(" ", "").replace("d", ""))
    value = _value(tokens[kinds.index("N")]) if match else None
    return -value if match and value and match[1] == "-" else value


def _claim(token: str, before: str, after: str) -> Claim:
    """Return the claim of a number token, given the token kinds before and after it.

    The value of the claim is None if the number is next to an operator.
    """
    sign = _SIGN.search(before)
    mark = (sign[1] or sign[2]) if sign else ""
    rest = before[: max(sign.start(1), sign.start(2))] if sign else before
    value = _value(token)
    if value is None or rest.rstrip(" d$")[-1:] in {*"o/+-~c"} or _RIGHT.match(after):
        return Claim(None, token)
    return Claim(-value, "-" + token) if mark == "-" else Claim(value, token)


# Matches a fraction with its decimal approximation: 10/3 ≈ 3.33 and "10/3, which is about 3.33".
_APPROXIMATED = re.compile(
    r"(-?)((?:\d{1,9} )?\d{1,40}/[1-9]\d{0,39})[ $(,]*"
    r"(?:≈|(?:which is |or )?(?:about|approximately|roughly)(?= ))"
    r"[ $]*\1\$?(\d*\.\d{1,40})(?![\d/])",
    re.ASCII,
)


def _claims(text: str) -> tuple[list[Claim], list[str]]:
    """Return the claims of a text, and for each claim the token kinds since the previous claim.

    Numbers that are joined by operators form one expression, which makes one claim. Its value is
    the number to the right of the last equals sign, or None if there is no such number. A fraction
    and its approximation are one number, the fraction.
    """
    rounded: dict[str, str] = {}

    def exact(match: re.Match[str]) -> str:
        value, decimals = _value(match[2]), len(match[3].partition(".")[2])
        if value is None or abs(value - Fraction(match[3])) * 2 * 10**decimals > 1:
            return match[0]
        rounded[match[1] + match[2]] = match[1] + match[3]
        return match[1] + match[2]

    kinds, tokens = _lex(_APPROXIMATED.sub(exact, _rewrite(text)))
    where = [-1, *(i for i, kind in enumerate(kinds) if kind == "N")][-MAX_CLAIMS - 1 :]
    gaps = [kinds[a + 1 : b] for a, b in pairwise([*where, len(kinds)])]
    claims, before, first = [], [], 1
    for last in range(1, len(where)):
        after = gaps[last]
        joined = _OPERATOR.search(after) or not after.strip("d$")
        if joined and not _BREAK.search(after) and last + 1 < len(where):
            continue
        alone = first == last or "=" in gaps[last - 1]
        sides = gaps[last - 1], after
        claim = _claim(tokens[where[last]], *sides) if alone else Claim(None, "")
        claims.append(replace(claim, rounded=rounded.get(claim.text, "")))
        before.append(kinds[where[first - 1] + 1 : where[last]])
        first = last + 1
    return claims, before


# LaTeX commands of an expression: \frac{a}{2}, (-\infty, 5).
_EXPRESSION = re.compile(r"\\(?:[dt]?frac|sqrt|infty|binom|log|ln|sin|cos|tan)(?![A-Za-z])")


def read_number(region: str) -> Claim:
    """Return the only number in a region of a text, or the reason why there is no such number."""
    region = region.strip()
    if (value := parse_number(region)) is not None:
        return Claim(value, region)
    claims, _ = _claims(region[-_MAX_REGION:])
    result = re.split("[=≈]", _rewrite(region[-_MAX_REGION:]))[-1]
    if _EXPRESSION.search(re.split(r"\b(?:because|since)\b", result)[0]):
        return Claim(None, region, "not_a_number")
    values = {claim.value for claim in claims}
    if len(values) > 1 or (None in values and len(claims) > 1):
        return Claim(None, region, "several_numbers")
    if len(region) > _MAX_REGION or not claims or claims[0].value is None:
        return Claim(None, region, "not_a_number")
    return claims[0]


def last_number(text: str) -> Claim:
    """Return the last number of a text, unless this number is the end of a list of numbers."""
    claims, before = _claims(text.rstrip()[-_MAX_REGION:])
    if not claims:
        return Claim(None, "", "no_answer")
    last = claims[-1]
    if len(claims) > 1 and claims[-2].value != last.value and _LISTING.fullmatch(before[-1]):
        opening = before[-2].rstrip(" d$-+")
        # After a line break, it is a list only if the previous number is alone on its line, too.
        if "\n" not in before[-1] or opening[-1:] in ("", "\n"):
            return Claim(None, last.text, "several_numbers")
    return last if last.value is not None else Claim(None, last.text, "not_a_number")


# Matches 17, 1,080, .5, 1.6e-19, 3/4 and the number in 3.5 km, but not the 2 in step2 or 2nd.
_NAMED = re.compile(
    r"(?<![A-Za-z0-9])(?<!\d\.)"
    r"(?:(?:\d{1,3}(?:,\d{3}){1,12}+(?!\d)|\d++)(?:\.\d++)?|(?<!\.)\.\d++)"
    r"(?:/\d++|[eE][-+]?\d{1,2}(?!\w))?(?!(?:st|nd|rd|th)\b)",
    re.ASCII,
)


def numbers_in(text: str) -> set[Fraction]:
    """Return the numbers in a text without their signs, including the parts of each fraction.

    >>> sorted(map(float, numbers_in("Step2 needs 1,080 g, -3.5 km, 3/4 of it and the 2nd.")))
    [0.75, 3.0, 3.5, 4.0, 1080.0]
    """
    words = {match[0] for match in _NAMED.finditer(text)}
    words |= {part for word in words for part in word.split("/")}
    return {number for word in words if (number := _value(word)) is not None}


def states_number(
    text: str, value: Fraction, question: str, tolerance: Fraction | float = 0.0
) -> bool:
    """Return whether a text contains `value`, with any sign, as a number that is not in `question`.

    Args:
        tolerance: the maximum difference between the number and `value`, relative to `value`.

    >>> states_number("It falls 4.9 m.", Fraction("4.905"), "How far does it fall in 1 s?", 0.01)
    True
    """
    value, margin = abs(value), Fraction(str(tolerance)) * abs(value)
    return any(abs(n - value) <= margin for n in numbers_in(text) - numbers_in(question))
