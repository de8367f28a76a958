"""Splits a completion into reasoning and answer while its text is streamed.

A tag consists of several tokens. Therefore the parser works on text, and holds back text that may
begin a tag. Only a block at the very beginning of the text is reasoning. Any later tags are part of
the answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rlm.data import Format


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
        self.opened = self.closed = False
        self._held = ""  # text held back: a possible tag or stop string, or trailing space
        self._begun = False  # whether the current part contains non-space text

    def feed(self, text: str) -> tuple[str, str]:
        """Add a chunk of text, and return the new (reasoning, answer) text that is certain."""
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
        if self.phase == "answer" and self._verbatim:
            answer = self._all_but_the_tags()
        elif self.phase == "answer":
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

    def _all_but_the_tags(self) -> str:
        opening, closing = self._format.answer_tags
        if not self._begun and (rest := self._held.lstrip()).startswith(opening):
            self._held, self._begun = rest[len(opening) :], True
        if not self._begun:
            return ""
        # The closing tag may still turn out to be part of the answer.
        ended = self._held.endswith(closing)
        end = len(self._held) - (len(closing) if ended else _overlap(self._held, closing))
        answer, self._held = self._held[:end], self._held[end:]
        return answer

    def finish(self) -> tuple[str, str]:
        """Return the remaining (reasoning, answer) text, which was held back."""
        if self.phase == "answer" and self._verbatim:
            rest, self._held = self._held.removesuffix(self._format.answer_tags[1]), ""
            return "", rest if self._begun else ""
        rest, self._held = self._stripped(self._held).rstrip(), ""
        return (rest, "") if self.phase == "reasoning" else ("", rest)

    def until_stop(self, text: str) -> str:
        """Return the text, including tags, up to the first stop string in the answer.

        The text is parsed again character by character, because stop strings are matched in the
        text without leading spaces and tags.
        """
        again = ReasoningParser(self._format, self._stop)
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
        # A tag at the end of the text is removed later. Thus a stop string may begin before the tag
        # and continue after the tag.
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
