"""Parses the streamed completions of a request, and limits the length of their reasoning.

A tag consists of several tokens. Therefore the parser works on text, and holds back text that may
begin a tag. Only a block at the very beginning of the text is reasoning. Later reasoning tags are
part of the answer. Answer tags are removed; in a structured answer, only the outer ones are.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from tokenizers.decoders import DecodeStream

from rlm.data import Format, backend_tokenizer, encode_inserted_text

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from rlm.reasoner.structured_outputs import GrammarMatcher
    from rlm.sampling import FinishReason, ForceTokens, Token

# Number of tokens reserved for the answer (at most a quarter of max_new_tokens).
ANSWER_RESERVE = 32
STRUCTURED_RESERVE = 0.5  # share of max_new_tokens reserved for a structured answer
# In this last share of the budget, the reasoning is closed at the end of a line or sentence.
SOFT_SHARE = 0.25

Status = Literal["closed", "forced", "unclosed", "absent"]


class ReasoningParser:
    """Parses streamed text into reasoning and answer, without tags and surrounding whitespace.

    The concatenated results do not depend on how the text is split into chunks.

    >>> parser = ReasoningParser(Format("think", "answer"))
    >>> parser.feed("<think>\\n1 + 1 = 2\\n</th"), parser.feed("ink>\\n<answer>2</answer>")
    (('1 + 1 = 2', ''), ('', '2'))
    """

    def __init__(self, format: Format, stop: Sequence[str] = (), *, verbatim: bool = False) -> None:
        """
        Args:
            stop: stop strings, which end the answer and are not part of the answer.
            verbatim: whether to return the answer unchanged: the text between the opening tag and
                the end of the text, without a closing tag at the end.
        """
        self._format = format
        self._opening = f"<{format.reasoning_tag}>"
        self.closing = f"</{format.reasoning_tag}>"
        self._drop = re.compile("|".join(format.answer_tags))
        self._stop, self._verbatim = tuple(stop), verbatim
        self.phase = "start"  # then "reasoning", "answer", or "done" after a stop string
        self.opened = False  # whether the text begins with reasoning
        self._held = ""  # text held back: a possible tag or stop string, or trailing space
        self.text = ""  # the whole text, including tags, up to the stop string that ends the answer
        self._begun = False  # whether the current part contains non-space text

    def feed(self, text: str) -> tuple[str, str]:
        """Add a chunk, and return the new (reasoning, answer) text that is not held back."""
        self._held += text
        self.text += "" if self.phase == "done" else text
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
                self.phase, self._held, self._begun = "answer", after, False
            else:
                reasoning = self._certain((self.closing,))
        if self.phase == "answer" and self._verbatim:
            answer = self._all_but_the_tags()
        elif self.phase == "answer":
            self._held = self._stripped(self._drop.sub("", self._held))
            unsure = max(_overlap(self._held, tag) for tag in self._format.answer_tags)
            answer = self._up_to_stop(len(self._held) - unsure)
            if answer is None:
                answer = self._certain(self._format.answer_tags, self._stop)
        if self.phase == "done":
            self._held = ""
        return reasoning, answer

    def _up_to_stop(self, end: int) -> str | None:
        """End the answer at the stop string that is complete first.

        Only the first `end` held characters are searched: those after them may belong to a tag.

        Returns:
            The text before the stop string, or None if there is no stop string.
        """
        ends = [(at + len(s), at) for s in self._stop if (at := self._held.find(s, 0, end)) >= 0]
        if not ends:
            return None
        _, start = min(ends)  # the result must not depend on the length of the chunks
        answer, rest = self._held[:start], self._held[start:]
        # The held text has lost its tags, so find its place by the characters outside the tags.
        outside = re.finditer(f"{self._drop.pattern}|(.)", self.text, re.DOTALL)
        places = [found.start() for found in outside if found[1]]
        self.text = self.text[: places[-len(rest)]]
        self.phase = "done"
        return self._stripped(answer).rstrip()

    def _all_but_the_tags(self) -> str:
        opening, closing = self._format.answer_tags
        if not self._begun:
            rest = self._held.lstrip()
            if not rest.startswith(opening):
                return ""
            self._held, self._begun = rest[len(opening) :], True
        # The closing tag may still turn out to be part of the answer.
        ended = self._held.endswith(closing)
        end = len(self._held) - (len(closing) if ended else _overlap(self._held, closing))
        answer, self._held = self._held[:end], self._held[end:]
        return answer

    def finish(self, cut: bool = False) -> tuple[str, str]:
        """Return the remaining (reasoning, answer) text, which was held back.

        Args:
            cut: whether the text was cut off, so that the beginning of a tag at its end is dropped.
        """
        if cut:
            tags = {"start": (self._opening,), "reasoning": (self.closing,)}
            begun = tags.get(self.phase, self._format.answer_tags)
            self._held = self._held[: len(self._held) - max(_overlap(self._held, t) for t in begun)]
        if self.phase == "answer" and self._verbatim:
            return "", self._held.removesuffix(self._format.answer_tags[1]) if self._begun else ""
        if self.phase == "answer" and (stopped := self._up_to_stop(len(self._held))) is not None:
            return "", stopped
        rest = self._stripped(self._held).rstrip()
        return (rest, "") if self.phase == "reasoning" else ("", rest)

    @property
    def closing_begun(self) -> bool:
        """Whether the text may end inside the closing tag, after at least two characters of it."""
        return self.phase == "reasoning" and _overlap(self._held, self.closing) > 1

    def _stripped(self, text: str) -> str:
        return text if self._begun else text.lstrip()

    def _certain(self, tags: Sequence[str], stops: Sequence[str] = ()) -> str:
        """Remove and return the held text that cannot belong to a tag or stop string.

        Trailing spaces stay in the held text.
        """
        self._held = self._stripped(self._held)
        end = len(self._held) - max(_overlap(self._held, tag) for tag in tags)
        # If the text ends with the beginning of a tag, the tag is removed when it is complete.
        # Therefore a stop string may begin before the tag and continue after it.
        begun = (end - _overlap(self._held[:end], stop) for stop in stops)
        whole = (len(self._held) - _overlap(self._held, stop) for stop in stops)
        certain = self._held[: min((end, *begun, *whole))].rstrip()
        self._begun = self._begun or bool(certain)
        self._held = self._held[len(certain) :]
        return certain


def _overlap(text: str, tag: str) -> int:
    """Return the length of the longest end of the text that is a proper prefix of the tag.

    >>> _overlap("a </th", "</think>"), _overlap("a", "</think>")
    (4, 0)
    """
    longest = min(len(tag) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(tag[:n])), 0)


@dataclass(frozen=True)
class ToolCall:
    """The text that a tool wrote in a completion, with its position in characters."""

    text: str
    start: int
    end: int


@dataclass
class CompletionState:
    """The state of a completion that is being streamed."""

    detokenizer: DecodeStream
    parser: ReasoningParser
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # of sampled tokens only
    reasoning: str = ""
    answer: str = ""
    opened_at: int = 0  # number of tokens up to the end of the opening tag
    reasoning_tokens: int = 0  # number of tokens between the tags
    forced: bool = False  # whether the reasoning was closed by force
    out_of_room: bool = False  # forced because only an answer still fits into max_new_tokens
    finish_reason: FinishReason | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)
    tool_tokens_to_come: int = 0
    by_tool: bool = False  # whether a tool wrote the last token

    @property
    def text(self) -> str:
        """The whole text, including tags, up to a stop string."""
        return self.parser.text

    @property
    def status(self) -> Status:
        """How the reasoning ended."""
        if not self.parser.opened:
            return "absent"
        if self.parser.phase == "reasoning":
            return "unclosed"
        return "forced" if self.forced else "closed"


class ReasoningStream:
    """Parses the streamed completions of one request, and enforces the reasoning budget.

    The sampler calls this object after each token, as the request's `force_tokens`. The reasoning
    never exceeds the budget, except to complete a closing tag. In the last quarter of the budget,
    the end of a line or sentence closes the reasoning. Without a budget, the reasoning is closed
    early enough to leave room for an answer. An end token in the reasoning closes the reasoning
    instead of ending the completion. Stop strings apply only to the answer. A tool's text takes
    priority; if this text does not fit, the reasoning is closed at once.
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
        tool_tokens: ForceTokens | None = None,
        grammar: GrammarMatcher | None = None,
    ) -> None:
        """
        Args:
            grammar: the grammar that constrains the answer. Such an answer uses no tool and no stop
                strings.
        """
        self.tokenizer, self.format = tokenizer, format
        self._decoder, self._stop_ids = backend_tokenizer(tokenizer), stop_ids
        after = f"</{format.reasoning_tag}>\n<{format.answer_tag}>"
        self._close_line = encode_inserted_text(tokenizer, after)
        self._close_text = encode_inserted_text(tokenizer, "\n" + after)
        self._tag_tokens = len(encode_inserted_text(tokenizer, f"</{format.reasoning_tag}>"))
        reserve = min(ANSWER_RESERVE, max_new_tokens // 4)
        if grammar:
            reserve = int(STRUCTURED_RESERVE * max_new_tokens)
        self._last_moment = max_new_tokens - reserve - len(self._close_text)
        self.max_new_tokens, self.budget = max_new_tokens, budget
        self._tool_tokens = tool_tokens
        self._matchers = [grammar.copy() for _ in range(n)] if grammar else []
        self.answer_now = False  # set to True to close the reasoning at the next token
        self.completions = [
            CompletionState(
                DecodeStream(skip_special_tokens=True),
                ReasoningParser(format, stop, verbatim=grammar is not None),
            )
            for _ in range(n)
        ]

    def __call__(self, row: int, ids: Sequence[int], token: int) -> Sequence[int] | None:
        """Return the tokens that replace the sampled token, or None (see `ForceTokens`)."""
        state = self.completions[row]
        if state.parser.phase == "done":
            return [min(self._stop_ids)]
        thinking = state.parser.phase == "reasoning"
        tool = self._tool_tokens if thinking or not self._matchers else None
        inserted = tool(row, ids, token) if tool else None
        if inserted and not (thinking and self._is_too_long(state, len(inserted))):
            state.tool_tokens_to_come = len(inserted)
            return inserted
        if not thinking or not (inserted or self._must_close(state, token)):
            return None
        state.forced = True
        ended = token in self._stop_ids and not inserted
        length = len(state.ids) + len(inserted or ())
        state.out_of_room = not ended and length >= self._last_moment
        state.reasoning_tokens = len(ids) - state.opened_at
        line_ended = self._last_piece(state).endswith("\n")
        return self._close_line if line_ended else self._close_text

    def allowed_tokens(self, row: int, ids: Sequence[int]) -> torch.Tensor | None:
        """Return a mask of the tokens that the grammar allows next; None without a grammar."""
        if not self._matchers:
            return None
        allowed = self._matchers[row].allowed(ids)
        if self.completions[row].parser.phase == "reasoning":
            allowed[[*self._stop_ids]] = True  # an end token closes the reasoning
        return allowed

    def _must_close(self, state: CompletionState, token: int) -> bool:
        used = len(state.ids) - state.opened_at
        last_moment = self._last_moment + self._tag_tokens * state.parser.closing_begun
        if token in self._stop_ids or len(state.ids) >= last_moment:
            return True
        if state.parser.closing_begun:
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

    def _is_too_long(self, state: CompletionState, more: int) -> bool:
        """Return whether `more` additional tokens would exceed a limit of the reasoning."""
        total = len(state.ids) + more
        over = self.budget is not None and total - state.opened_at > self.budget
        return over or total > self._last_moment or self.answer_now

    def _last_piece(self, state: CompletionState) -> str:
        return self._decoder.decode(state.ids[-2:], skip_special_tokens=True)

    def add_token(self, token: Token) -> tuple[str, str]:
        """Append a token, and return the new (reasoning, answer) text."""
        state = self.completions[token.row]
        state.ids.append(token.id)
        if token.logprob == token.logprob:  # false for NaN, the logprob of a forced token
            state.logprobs.append(token.logprob)
        before = state.parser.phase
        # An end token is no text, even if the tokenizer does not mark it as special.
        piece = "" if token.id in self._stop_ids else self._next_piece(state)
        self._note_tool(state, piece)
        parts = state.parser.feed(piece)
        phase = state.parser.phase
        if before == "start" and phase == "reasoning":
            state.opened_at = len(state.ids)
        if "reasoning" in (before, phase) and not state.forced:
            tag = 0 if phase == "reasoning" else self._tag_tokens
            state.reasoning_tokens = max(0, len(state.ids) - state.opened_at - tag)
        if token.finish_reason:
            state.finish_reason = "stop" if phase == "done" else token.finish_reason
            rest = state.parser.finish(cut=state.finish_reason == "length")
            parts = parts[0] + rest[0], parts[1] + rest[1]
        state.reasoning += parts[0]
        state.answer += parts[1]
        return parts

    def decode(self, state: CompletionState) -> str:
        """Decode a finished completion without special tokens and without its end token."""
        ids = [token for token in state.ids if token not in self._stop_ids]
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def _next_piece(self, state: CompletionState) -> str:
        """Return the text that the last token adds; "" if the text may still change.

        With byte fallback (Llama 2), bytes that are not valid UTF-8 can change text that was
        already returned, such as the line break before them. DecodeStream then raises an error, and
        a new one continues after these bytes.
        """
        try:
            piece = state.detokenizer.step(self._decoder, state.ids[-1])
        except Exception as error:  # DecodeStream raises no narrower class
            if "Invalid prefix" not in str(error):
                raise
            state.detokenizer = DecodeStream(ids=state.ids[-2:-1], skip_special_tokens=True)
            piece = state.detokenizer.step(self._decoder, state.ids[-1])
        return piece or ""

    def _note_tool(self, state: CompletionState, piece: str) -> None:
        """Record whether a tool wrote `piece`, the text that is appended next."""
        continued = state.by_tool
        state.by_tool = state.tool_tokens_to_come > 0
        if not state.by_tool:
            return
        state.tool_tokens_to_come -= 1
        begun = state.tool_calls.pop() if continued else ToolCall("", len(state.text), 0)
        text = begun.text + piece
        state.tool_calls.append(ToolCall(text, begun.start, begun.start + len(text)))
