"""Structured outputs: constrain answers to a JSON schema, a regex or a list of choices.

A grammar describes the whole completion, including the tags. After each token, llguidance computes
which tokens may follow. All other tokens get the probability 0: tokens are sampled from the
remaining distribution, and log-probabilities are computed under this distribution. The reasoning is
not constrained.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark
from llguidance.hf import from_tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rlm.cli import UsageError
from rlm.data import Format
from rlm.grading import AnswerType

MAX_CHARS = 16_000  # maximum length of a schema, regex or list of choices
# A mask usually takes microseconds; with these limits, even the slowest mask takes less than 0.1 s.
LIMITS = LLParserLimits(initial_lexer_fuel=100_000, max_lexer_states=20_000, verbose_errors=False)
ASCII_ONLY = "d"  # restrict \d to ASCII digits, as users expect; \w and \s stay Unicode
# Use Python's default separators. If arbitrary whitespace is allowed, a model sometimes
# writes only whitespace.
JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_BEFORE_REASON = re.compile(
    r'^(at \d+\(\d+\)|failed to [^:]*|invalid regex ".*?" \(in regex\)|lexer error|Parser Error): '
)
_TOO_COMPLEX = ("too many expressions", "too complex", "items; max is", "Too many items")
# The reasoning may be cut in the middle of a character, so its bytes may be invalid UTF-8.
GRAMMAR = """%llguidance {{"allow_invalid_utf8": true}}
start: (reasoning "\\n")? {opening} {answer}
reasoning[suffix={closes}]: {opens} /(?s-u:.*)/
"""


@dataclass(frozen=True)
class StructuredOutputs:
    """The constraint on answers, with the field names of vLLM's `structured_outputs`.

    Raises:
        UsageError: not exactly one field is set, or the field is invalid or too long.
    """

    json: str | dict[str, Any] | None = None  # a JSON schema
    json_object: bool = False
    regex: str | None = None  # must match the whole answer
    choice: Sequence[str] | None = None

    def __post_init__(self) -> None:
        given = [value for value in vars(self).values() if value is not None and value is not False]
        if len(given) != 1:
            raise UsageError("give exactly one of json, json_object, regex and choice")
        if self.choice is not None and not self.choice:
            raise UsageError("choice is empty")
        if self.choice is not None and "" in self.choice:
            raise UsageError("choice contains an empty string")
        if self.regex == "":
            raise UsageError("regex is empty")
        try:
            length = len(given[0] if isinstance(given[0], str) else json.dumps(given[0]))
        except RecursionError:
            raise UsageError("the JSON schema is nested too deeply") from None
        if length > MAX_CHARS:
            raise UsageError(
                f"the constraint has {length} characters; the limit is {MAX_CHARS} characters"
            )

    @property
    def answer_type(self) -> AnswerType:
        """The default answer type: "open" for JSON, which cannot be compared with a reference."""
        return "text" if self.regex is not None or self.choice else "open"

    @cached_property
    def schema(self) -> dict[str, Any] | None:
        """The JSON schema; None for a regex or a choice.

        Raises:
            UsageError: the schema is not a JSON object.
        """
        if self.regex is not None or self.choice:
            return None
        schema = {"type": "object"} if self.json_object else self.json
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise UsageError(f"the JSON schema is not valid JSON: {error}") from None
        if not isinstance(schema, dict):
            raise UsageError("a JSON schema must be a JSON object")
        return schema | {"x-guidance": JSON_OPTIONS}

    def grammar(self, format: Format) -> str:
        """Return the grammar of a whole completion, in llguidance's variant of Lark."""
        opening, closing = map(_quote, format.answer_tags)
        opens, closes = (_quote(f"<{slash}{format.reasoning_tag}>") for slash in ("", "/"))
        rules = ""
        if self.choice:
            answer = f"({' | '.join(map(_quote, self.choice))}) {closing}"
        elif self.regex is not None:
            # The rule includes the closing tag, because a greedy regex would not end before it.
            answer = "ANSWER"
            # The whole answer is matched, so anchors are dropped. An escaped dollar is no anchor.
            pattern = re.sub(r"(?<!\\)((?:\\\\)*)\$\Z", r"\1", self.regex.removeprefix("^"))
            regex = regex_to_lark(pattern, ASCII_ONLY)
            rules = f"ANSWER: /(?u:{regex})/ {closing}\n"
        else:
            answer, rules = f"value {closing}", f"value: %json {json.dumps(self.schema)}\n"
        return GRAMMAR.format(opens=opens, closes=closes, opening=opening, answer=answer) + rules


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


class GrammarMatcher:
    """Tracks one completion, and computes which tokens may follow."""

    def __init__(self, matcher: LLMatcher, vocabulary: int) -> None:
        self._matcher, self._vocabulary, self._consumed = matcher, vocabulary, 0

    def copy(self) -> GrammarMatcher:
        return GrammarMatcher(self._matcher.deep_copy(), self._vocabulary)

    def allowed(self, ids: Sequence[int]) -> torch.Tensor:
        """Return a mask of the tokens that may follow `ids`, (V,) bool.

        Args:
            ids: the tokens so far, which must begin with the ids of the previous call.

        Raises:
            UsageError: the grammar is too complex.
        """
        self._matcher.consume_tokens(list(ids[self._consumed :]))
        self._consumed = len(ids)
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise UsageError(f"structured outputs: {reason(self._matcher.get_error())}")
        mask = np.unpackbits(bits, bitorder="little")[: self._vocabulary]
        return torch.from_numpy(mask.astype(bool))


class GrammarCompiler:
    """Compiles grammars for one tokenizer.

    The vocabulary is processed only once, which takes about a second.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stop_ids: frozenset[int], vocabulary: int
    ) -> None:
        """
        Args:
            vocabulary: the vocabulary size of the model, which may exceed that of the tokenizer.
        """
        self._tokenizer, self._stop_ids = tokenizer, sorted(stop_ids)
        self._vocabulary = vocabulary

    @cached_property
    def _vocabulary_trie(self) -> LLTokenizer:
        # `from_tokenizer` raises a ValueError for a tokenizer of any other class.
        tokenizer = cast("PreTrainedTokenizerFast", self._tokenizer)
        try:
            size = max(self._vocabulary, len(tokenizer))
            return from_tokenizer(tokenizer, size, self._stop_ids)
        except ValueError as error:
            raise UsageError(
                f"structured outputs do not support this model's tokenizer ({error})"
            ) from error

    def compile(self, structured: StructuredOutputs, format: Format) -> GrammarMatcher:
        """Compile the grammar of completions in the given format.

        Raises:
            UsageError: the schema or regex is invalid, too complex, or not supported by llguidance,
                or no text matches the schema or regex.
        """
        grammar = structured.grammar(format)
        matcher = LLMatcher(self._vocabulary_trie, grammar, log_level=0, limits=LIMITS)
        trial = matcher.deep_copy()
        # llguidance does part of the work when it computes the first masks. Compute two masks here,
        # so that this work does not delay the batch of a request.
        opening = format.answer_tags[0].encode()
        trial.consume_tokens(self._vocabulary_trie.tokenize_bytes(opening))
        bits = np.unpackbits(np.frombuffer(trial.compute_bitmask(), np.uint8), bitorder="little")
        if not trial.is_error():
            trial.consume_token(int(bits.argmax()))
            trial.compute_bitmask()
        if trial.is_error():
            what = "regex" if structured.regex is not None else "JSON schema"
            what = "choice" if structured.choice else what
            raise UsageError(f"{what}: {reason(trial.get_error())}")
        return GrammarMatcher(matcher, self._vocabulary)


def reason(error: str) -> str:
    """Return the reason for an error of llguidance in one line, without the grammar.

    >>> reason('at 3(9): failed to compile JSON schema: Invalid type: nope\\n   1 | start: "a"\\n')
    'Invalid type: nope'
    """
    if any(part in error for part in _TOO_COMPLEX):
        return "it is too complex"
    if "NoExtensionBias" in error:  # a reference that leads back to itself
        return "no value fits it"
    if "coerce_one_of" in error:  # an option of llguidance that a request cannot set
        return "a oneOf whose alternatives may overlap is not supported: use anyOf instead"
    if found := re.search(r"^error: (.*)$", error, re.MULTILINE):  # an error of the regex parser
        return found[1]
    line, before = error.split("\n", 1)[0], ""
    while line != before:  # remove the prefixes that give context, outermost first
        before, line = line, _BEFORE_REASON.sub("", line)
    return line.strip()[:300]
