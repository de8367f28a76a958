"""Reasoning apart from the answer while text streams in, and a budget for the reasoning.

A tag is several tokens, so both work on text: nothing is shown that may still turn out to be a
tag. Only the block at the very beginning is reasoning; a tag later is plain text of the answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tokenizers.decoders import DecodeStream

from rlm.data.prompts import Format, encode_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlm.sampling.params import Token

# Tokens kept for the answer (a quarter of the limit, if that is less).
ANSWER_RESERVE = 32
# In this last part of a budget the end of a line or sentence already closes the reasoning.
SOFT_SHARE = 0.25


class Splitter:
    """Cuts a text that arrives in pieces into reasoning and answer, stripped and without tags.

    However the text is cut into pieces, the joined parts are the same.

    >>> splitter = Splitter(Format("think", "answer"))
    >>> splitter.feed("<think>\\n1 + 1 = 2\\n</th"), splitter.feed("ink>\\n<answer>2</answer>")
    (('1 + 1 = 2', ''), ('', '2'))
    """

    def __init__(self, format: Format, stop: Sequence[str] = ()) -> None:
        """
        Args:
            stop: texts that end the answer, themselves not part of it.
        """
        self._format = format
        self._opening = f"<{format.reasoning_tag}>"
        self.closing = f"</{format.reasoning_tag}>"
        self._drop = re.compile("|".join(format.answer_tags))
        self._stop = tuple(stop)
        self.phase = "start"  # then reasoning, answer, done (a stop text was met)
        self.opened = self.closed = False
        self._held = ""  # may begin a tag or a stop text, or is space that may end a part
        self._begun = False  # whether the part has anything but space

    def feed(self, text: str) -> tuple[str, str]:
        """The (reasoning, answer) that are certain after another piece of text."""
        self._held += text
        reasoning = answer = ""
        if self.phase == "start":
            rest = self._held.lstrip()
            if rest.startswith(self._opening):
                self.phase, self.opened = "reasoning", True
                self._held = rest[len(self._opening) :]
            elif not self._opening.startswith(rest):
                self.phase = "answer"
        if self.phase == "reasoning":
            before, closed, after = self._held.partition(self.closing)
            if closed:
                reasoning = self._stripped(before).rstrip()
                self.phase, self.closed = "answer", True
                self._held, self._begun = after, False
            else:
                reasoning = self._certain((self.closing,))
        if self.phase == "answer":
            self._held = self._stripped(self._drop.sub("", self._held))
            found = [at for stop in self._stop if (at := self._held.find(stop)) >= 0]
            if found:
                answer = self._stripped(self._held[: min(found)]).rstrip()
                self.phase = "done"
            else:
                answer = self._certain(self._format.answer_tags, self._stop)
        if self.phase == "done":
            self._held = ""
        return reasoning, answer

    def finish(self) -> tuple[str, str]:
        """What was held back and is no tag after all."""
        rest, self._held = self._stripped(self._held).rstrip(), ""
        return (rest, "") if self.phase == "reasoning" else ("", rest)

    def cut(self, text: str) -> str:
        """The whole text, tags included, up to where its answer met a stop text.

        Once more letter by letter: spaces before the answer and tags in it count for no stop.
        """
        again = Splitter(self._format, self._stop)
        for end, letter in enumerate(text, 1):
            again.feed(letter)
            if again.phase == "done":
                starts = range(end - 1, -1, -1)
                return text[
                    : next(s for s in starts if self._drop.sub("", text[s:end]) in self._stop)
                ]
        return text

    @property
    def closing_begun(self) -> bool:
        """Whether the text may be in the middle of the closing tag (not at its first letter)."""
        return self.phase == "reasoning" and _overlap(self._held, self.closing) > 1

    def _stripped(self, text: str) -> str:
        return text if self._begun else text.lstrip()

    def _certain(self, tags: Sequence[str], stops: Sequence[str] = ()) -> str:
        """Take from what is held all that begins no tag or stop, and is no space at its end."""
        self._held = self._stripped(self._held)
        end = len(self._held) - max(_overlap(self._held, tag) for tag in tags)
        # What may begin a tag may vanish, and a stop text then go on behind it.
        begun = (end - _overlap(self._held[:end], stop) for stop in stops)
        whole = (len(self._held) - _overlap(self._held, stop) for stop in stops)
        certain = self._held[: min((end, *begun, *whole))].rstrip()
        self._begun = self._begun or bool(certain)
        self._held = self._held[len(certain) :]
        return certain


def _overlap(text: str, tag: str) -> int:
    """How many last characters of the text begin the tag (not all of it).

    >>> _overlap("a </th", "</think>"), _overlap("a", "</think>")
    (4, 0)
    """
    longest = min(len(tag) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(tag[:n])), 0)


@dataclass
class Row:
    """One completion as far as it has come."""

    stream: DecodeStream
    splitter: Splitter
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # of the tokens that were drawn
    text: str = ""  # all of it, tags included
    reasoning: str = ""
    answer: str = ""
    opened_at: int = 0  # tokens up to the end of the opening tag
    reasoning_tokens: int = 0  # between the tags
    forced: bool = False
    finish_reason: str | None = None

    @property
    def status(self) -> str:
        """closed | forced | unclosed | absent"""
        if not self.splitter.opened:
            return "absent"
        if not self.splitter.closed:
            return "unclosed"
        return "forced" if self.forced else "closed"


class Thinking:
    """Follows the completions of one request, and closes their reasoning when it must end.

    Given to the sampler as the request's `force_tokens`. The reasoning never exceeds the budget
    (but for half a closing tag); in its last quarter the end of a line or sentence closes it.
    Without a budget it is still closed in time for an answer, and an end token inside the
    reasoning closes it instead of ending the text. Stop texts count in the answer only.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        format: Format,
        stop_ids: frozenset[int],
        *,
        n: int = 1,
        max_new_tokens: int,
        budget: int | None = None,
        stop: Sequence[str] = (),
    ) -> None:
        self.tokenizer, self.format = tokenizer, format
        self._decoder, self._stop_ids = tokenizer.backend_tokenizer, stop_ids
        after = f"</{format.reasoning_tag}>\n<{format.answer_tag}>"
        self._close_line = encode_text(tokenizer, after)
        self._close_text = encode_text(tokenizer, "\n" + after)
        self._tag_tokens = len(encode_text(tokenizer, f"</{format.reasoning_tag}>"))
        reserve = min(ANSWER_RESERVE, max_new_tokens // 4) + len(self._close_text)
        self._last_moment = max_new_tokens - reserve
        self.budget = budget
        self.answer_now = False  # set by whoever does not want to wait; heeded at the next token
        self.rows = [
            Row(DecodeStream(skip_special_tokens=True), Splitter(format, stop)) for _ in range(n)
        ]

    def __call__(self, row: int, ids: Sequence[int], token: int) -> list[int] | None:
        """Tokens that take the place of the one just drawn, or None (see `ForceTokens`)."""
        state = self.rows[row]
        if state.splitter.phase == "done":
            return [min(self._stop_ids)]
        if state.splitter.phase != "reasoning" or not self._must_close(state, token):
            return None
        state.forced = True
        state.reasoning_tokens = len(ids) - state.opened_at
        line_ended = not state.reasoning or self._last_piece(state).endswith("\n")
        return self._close_line if line_ended else self._close_text

    def _must_close(self, state: Row, token: int) -> bool:
        used = len(state.ids) - state.opened_at
        if token in self._stop_ids or len(state.ids) >= self._last_moment:
            return True
        if state.splitter.closing_begun:
            return False
        if self.answer_now:
            return True
        if self.budget is None or used < (1 - SOFT_SHARE) * self.budget:
            return False
        if used >= self.budget:
            return True
        piece = self._last_piece(state)
        if piece.endswith(".") and self._decoder.decode([token])[:1].isdigit():
            return False  # inside a number, such as 3.50
        return piece.rstrip(" ").endswith(("\n", ".", "!", "?"))

    def _last_piece(self, state: Row) -> str:
        return self._decoder.decode(state.ids[-2:], skip_special_tokens=True)

    def take(self, token: Token) -> tuple[str, str]:
        """Add a token that the sampler gave; the new (reasoning, answer) text."""
        state = self.rows[token.row]
        state.ids.append(token.id)
        if token.logprob == token.logprob:  # NaN: not drawn
            state.logprobs.append(token.logprob)
        before = state.splitter.phase
        piece = state.stream.step(self._decoder, token.id) or ""
        state.text += piece
        parts = state.splitter.feed(piece)
        phase = state.splitter.phase
        if before == "start" and phase == "reasoning":
            state.opened_at = len(state.ids)
        if phase == "reasoning" and not state.forced:
            state.reasoning_tokens = len(state.ids) - state.opened_at
        elif before == "reasoning" and not state.forced:
            used = len(state.ids) - state.opened_at - self._tag_tokens
            state.reasoning_tokens = max(0, used)
        if token.finish_reason:
            state.finish_reason = "stop" if phase == "done" else token.finish_reason
            parts = tuple(map("".join, zip(parts, state.splitter.finish(), strict=True)))
        state.reasoning += parts[0]
        state.answer += parts[1]
        return parts
