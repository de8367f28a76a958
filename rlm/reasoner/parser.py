"""Split a completion into reasoning and answer while its text streams in.

A tag is several tokens, so the parser works on text and holds back text that may become a tag. Only
the block at the very beginning is reasoning; later tags are plain text of the answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rlm.data import Format


class ReasoningParser:
    """Parses streamed text into reasoning and answer, stripped and without tags.

    The joined results do not depend on how the text is split into chunks.

    >>> parser = ReasoningParser(Format("think", "answer"))
    >>> parser.feed("<think>\\n1 + 1 = 2\\n</th"), parser.feed("ink>\\n<answer>2</answer>")
    (('1 + 1 = 2', ''), ('', '2'))
    """

    def __init__(self, format: Format, stop: Sequence[str] = (), *, verbatim: bool = False) -> None:
        """
        Args:
            stop: stop strings, which end the answer and are not part of it.
            verbatim: the answer is everything between its opening tag and the end, without a
                closing tag there.
        """
        self._format = format
        self._opening = f"<{format.reasoning_tag}>"
        self.closing = f"</{format.reasoning_tag}>"
        self._drop = re.compile("|".join(format.answer_tags))
        self._stop, self._verbatim = tuple(stop), verbatim
        self.phase = "start"  # then reasoning, answer, done (a stop string was found)
        self.opened = self.closed = False
        self._held = ""  # held back: may begin a tag or stop string, or is trailing space
        self._begun = False  # whether the current part has non-space text

    def feed(self, text: str) -> tuple[str, str]:
        """Add a chunk of text; return the (reasoning, answer) text that is now certain."""
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
        ended = self._held.endswith(closing)  # not certain: the answer may contain the tag, too
        end = len(self._held) - (len(closing) if ended else _overlap(self._held, closing))
        answer, self._held = self._held[:end], self._held[end:]
        return answer

    def finish(self) -> tuple[str, str]:
        """Return the text that was held back."""
        if self.phase == "answer" and self._verbatim:
            rest, self._held = self._held.removesuffix(self._format.answer_tags[1]), ""
            return "", rest if self._begun else ""
        rest, self._held = self._stripped(self._held).rstrip(), ""
        return (rest, "") if self.phase == "reasoning" else ("", rest)

    def until_stop(self, text: str) -> str:
        """Return the text with its tags, up to a stop string in the answer.

        The text is parsed again by character, because stop strings are matched without leading
        spaces and tags.
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
        """Whether the text may be inside the closing tag, past its first character."""
        return self.phase == "reasoning" and _overlap(self._held, self.closing) > 1

    def _stripped(self, text: str) -> str:
        return text if self._begun else text.lstrip()

    def _certain(self, tags: Sequence[str], stops: Sequence[str] = ()) -> str:
        """Take the held text that cannot be part of a tag or stop string, without end spaces."""
        self._held = self._stripped(self._held)
        end = len(self._held) - max(_overlap(self._held, tag) for tag in tags)
        # Text that may begin a tag may be removed; a stop string may then continue after it.
        begun = (end - _overlap(self._held[:end], stop) for stop in stops)
        whole = (len(self._held) - _overlap(self._held, stop) for stop in stops)
        certain = self._held[: min((end, *begun, *whole))].rstrip()
        self._begun = self._begun or bool(certain)
        self._held = self._held[len(certain) :]
        return certain


def _overlap(text: str, tag: str) -> int:
    """Return how many trailing characters of the text are a proper prefix of the tag.

    >>> _overlap("a </th", "</think>"), _overlap("a", "</think>")
    (4, 0)
    """
    longest = min(len(tag) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(tag[:n])), 0)
