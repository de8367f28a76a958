"""What the model reads and writes: tags, system prompt, the one renderer from text to token ids.

SFT, GRPO, evaluation, inference and serving all call `render_prompt`, so they see the same ids.
The model writes `<think>` itself: nothing is prefilled. The tags are plain text, not new
vocabulary rows, so an adapter stays small and loads on the unchanged base.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import chain, cycle, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from rlm.cli import UsageError, find_choice, print_once, terminal
from rlm.grading import AnswerType, Verdict, grade, without_boxes

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import AddedToken, PreTrainedTokenizerBase

    from rlm.data.problem import Problem

T = TypeVar("T")
# Some templates write the date: a `date_string` that they get, or transformers' `strftime_now()`,
# which reads the clock. A fixed date keeps prompts the same on all days. Templates get only data,
# so a macro replaces `strftime_now`; it looks up the text of each directive.
TODAY = datetime(2024, 7, 26)
DATES = {f"%{c}": TODAY.strftime(f"%{c}") for c in "aAbBcdDeFfHIjmMpSTUwWxXyYzZ"}
DATES |= {"%-d": str(TODAY.day), "%-m": str(TODAY.month)}
STRFTIME_NOW = (
    "{% macro strftime_now(format) %}{% set now = namespace(text=format) %}"
    "{% for directive, text in rlm_dates.items() %}"
    "{% set now.text = now.text.replace(directive, text) %}{% endfor %}{{ now.text }}{% endmacro %}"
)
MAX_FILE_NAME = 255  # characters; a longer --system-prompt is text, not a file name
IGNORE_INDEX = -100  # label of a token without a loss, as in PyTorch's cross-entropy
# What the system prompt asks for, by the kind of answer.
ASKED_FOR: dict[AnswerType, str] = {
    "number": "final number",
    "choice": "letter of your choice",
    "text": "final answer",
    "open": "final answer",
}
# Placeholder for a message while the chat template is rendered; no template contains it.
_PLACE = "\ue000{}\ue001"
_NO_TEXT = re.compile("[\ud800-\udfff]")  # Python's decoding of invalid UTF-8 in argv
# `split_special_tokens` is not an argument but state of the tokenizer that transformers wraps:
# without a lock, a thread could encode a user's text with the setting of another thread.
_ENCODING = threading.Lock()


@dataclass(frozen=True)
class Format:
    """The form of a completion: reasoning in one tag, then an answer of a given type in another.

    own_prompt: a user's system prompt, which replaces the one that asks for the tags.
    """

    reasoning_tag: str
    answer_tag: str
    own_prompt: str | None = None
    answer_type: AnswerType = "number"

    def with_prompt(self, text: str | None) -> Format:
        """Return this format with a user's system prompt; "" is no prompt, None the default."""
        return replace(self, own_prompt=text)

    def with_answer_type(self, kind: AnswerType) -> Format:
        """Return this format for another answer type, which changes prompt, grading and vote."""
        return replace(self, answer_type=kind)

    def grade(self, completion: str, gold: str | None, *, strict: bool) -> Verdict:
        """Call `rlm.grading.grade` with these tags and this answer type."""
        return grade(completion, gold, strict=strict, kind=self.answer_type, **self.tags)

    @property
    def tags(self) -> dict[str, str]:
        """Both tags as keyword arguments of `rlm.grading.grade`."""
        return {"reasoning_tag": self.reasoning_tag, "answer_tag": self.answer_tag}

    @property
    def answer_tags(self) -> tuple[str, str]:
        """The opening and the closing answer tag."""
        return f"<{self.answer_tag}>", f"</{self.answer_tag}>"

    @property
    def system_prompt(self) -> str:
        """The user's own prompt, else one that asks for the tags and the answer type."""
        if self.own_prompt is not None:
            return self.own_prompt
        return (
            f"Reason inside <{self.reasoning_tag}></{self.reasoning_tag}>, then give the "
            f"{ASKED_FOR[self.answer_type]} inside <{self.answer_tag}></{self.answer_tag}>."
        )

    def completion(self, reasoning: str, answer: str) -> str:
        """Return the text of a perfect completion. Boxes (`\\boxed{}`) in the reasoning are
        unwrapped, because the answer has its own tag.

        >>> FORMATS["deepseek"].completion("1 + 1 = 2", "2")
        '<think>\\n1 + 1 = 2\\n</think>\\n<answer>2</answer>'
        """
        return (
            f"<{self.reasoning_tag}>\n{without_boxes(reasoning).strip()}\n</{self.reasoning_tag}>\n"
            f"<{self.answer_tag}>{answer.strip()}</{self.answer_tag}>"
        )


class Formats(dict[str, Format]):
    """The formats by name; an unknown name raises a UsageError."""

    def __missing__(self, name: str) -> Format:
        known = find_choice(name, list(self))
        if known not in self:
            raise UsageError(f"--reasoning-format: unknown {name!r}; there are {', '.join(self)}")
        return self[known]


FORMATS = Formats(
    deepseek=Format("think", "answer"),
    simple=Format("reasoning", "answer"),
)


# The end of a template that begins the reply with an opened, or an empty, reasoning block.
_OPENED = re.compile(
    "|".join(rf"<{f.reasoning_tag}>\s*(?:</{f.reasoning_tag}>\s*)?\Z" for f in FORMATS.values())
)


def _render_template(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], add_generation_prompt: bool
) -> str:
    if not tokenizer.chat_template:
        todo = "use an instruct model"
        if (Path(tokenizer.name_or_path) / "chat_template.json").is_file():  # from older processors
            todo = "copy the text in its chat_template.json to chat_template.jinja there"
        raise UsageError(
            f"the tokenizer of {tokenizer.name_or_path!r} has no chat template; {todo}"
        )
    from jinja2 import TemplateError

    try:
        rendered = tokenizer.apply_chat_template(
            messages,
            chat_template=STRFTIME_NOW + tokenizer.get_chat_template(),
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            date_string=TODAY.strftime("%d %b %Y"),
            rlm_dates=DATES,
        )
        return cast("str", rendered)  # a str, because of tokenize=False
    except (TemplateError, TypeError, ValueError, ArithmeticError) as error:
        # A template can refuse messages, such as those of a system role.
        raise UsageError(
            f"the chat template of {tokenizer.name_or_path!r} refuses our messages ({error}); "
            "use another instruct model"
        ) from error


def read_system_prompt(text: str | None) -> str | None:
    """Read the value of --system-prompt: a file's text if it names a file, else the text itself.

    Raises:
        UsageError: the named file does not exist or cannot be read as text.
    """
    if text is None or len(text) > MAX_FILE_NAME or "\n" in text:
        return text
    path = Path(text).expanduser()
    if not path.is_file():
        if path.suffix in (".txt", ".md"):
            raise UsageError(f"--system-prompt {text}: no such file")
        return text
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--system-prompt {text} cannot be read: {error}") from error


def encode_text(
    tokenizer: PreTrainedTokenizerBase, text: str, *, special: bool = False
) -> list[int]:
    """Return a text's token ids. `special` is for text of ours or of the template: without it,
    special tokens stay plain text."""
    with _ENCODING:
        return tokenizer.encode(text, add_special_tokens=False, split_special_tokens=not special)


def backend_tokenizer(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """Return the tokenizers-library tokenizer that a transformers tokenizer wraps.

    Raises:
        UsageError: it wraps none.
    """
    from tokenizers import Tokenizer

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise UsageError(
            f"the tokenizer of {tokenizer.name_or_path!r} is not supported: it is not of the "
            "tokenizers library (no tokenizer.json)"
        )
    return backend


def render_prompt(
    tokenizer: PreTrainedTokenizerBase,
    question: str,
    format: Format,
    *,
    examples: Sequence[tuple[str, str]] = (),
    system_prompt: str | None = None,
) -> list[int]:
    """Return the token ids of the chat up to where the assistant begins to write.

    The template is rendered around placeholders, so that each text stays whole, whatever the
    template does to texts. The ids equal those of `apply_chat_template`, with two exceptions. A
    reasoning tag that the template opens (DeepSeek-R1) is left out, because the model writes it
    here. If a text contains a mark of the template (`<|im_end|>`), the texts are encoded
    separately, so that a user cannot close the turn or open another role.

    Args:
        examples: (question, completion) pairs shown as earlier turns (few-shot).
        system_prompt: replaces the format's own, as plain text like the question; "" leaves it
            out.

    Raises:
        UsageError: the tokenizer has no chat template, the template does not place each text, or a
            text cannot be encoded as plain text.
    """
    if system_prompt is None:
        system_prompt = format.system_prompt
    turns = zip(cycle(("user", "assistant")), [*chain(*examples), question])
    messages = [
        {"role": role, "content": text.strip()}
        for role, text in (("system", system_prompt), *turns)
        if role != "system" or text.strip()
    ]
    if any(_NO_TEXT.search(message["content"]) for message in messages):
        raise UsageError("the question or the system prompt is not valid UTF-8 text")
    pieces, texts = _place_texts(tokenizer, messages)
    if opened := _OPENED.search(pieces[-1]):  # the model writes its tags itself
        pieces[-1] = pieces[-1][: opened.start()]
        print_once(
            f"the chat template of {tokenizer.name_or_path!r} begins the reply with "
            f"{opened[0].split()[0]}: left out, because the model writes it here"
        )
    by_template = [encode_text(tokenizer, piece, special=True) for piece in pieces]
    marks = _marks(tokenizer, {*chain(*by_template)})
    wanted = [token for token in chain(*by_template) if token in marks]
    ids = encode_text(tokenizer, "".join(_alternate(pieces, texts)), special=True)
    if [token for token in ids if token in marks] != wanted:
        own = [mark.content for mark in marks.values() if not mark.special]
        by_user = [_encode_without(tokenizer, text, own) for text in texts]
        ids = [*chain(*_alternate(by_template, by_user))]
    if [token for token in ids if token in marks] != wanted:
        raise UsageError(
            f"a message contains a token that the tokenizer of {tokenizer.name_or_path!r} cannot "
            f"encode as text: one of {', '.join(mark.content for mark in marks.values()):.200}"
        )
    return ids


def _place_texts(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]
) -> tuple[list[str], list[str]]:
    """Return the n + 1 pieces that the template writes around the messages' texts, and the n texts.

    If the template has no system role, the system message begins the first user's turn.

    Raises:
        UsageError: the template refuses the messages, or does not write each text exactly once.
    """
    name = repr(tokenizer.name_or_path)
    places = [message | {"content": _PLACE.format(i)} for i, message in enumerate(messages)]
    try:
        parts = re.split(_PLACE.format(r"(\d+)"), _render_template(tokenizer, places, True))
        order = [int(i) for i in parts[1::2]]
        # A system message may be anywhere (Mistral: in the last user's turn); turns stay in order.
        turns = [i for i in order if messages[i]["role"] != "system"]
        if sorted(order) != [*range(len(messages))] or turns != sorted(turns):
            raise UsageError(
                f"the chat template of {name} drops, repeats or moves messages: {len(messages)} "
                f"went in, {len(order)} came out; use another instruct model"
            )
    except UsageError:
        if messages[0]["role"] != "system":
            raise
        system, first, *rest = messages
        first = first | {"content": f"{system['content']}\n\n{first['content']}"}
        placed = _place_texts(tokenizer, [first, *rest])
        print_once(
            f"the chat template of {name} has no system role: the system prompt begins the first "
            "user's turn"
        )
        return placed
    pieces, texts = parts[::2], [messages[i]["content"] for i in order]
    try:
        usual = _render_template(tokenizer, messages, True)
    except UsageError:  # the template refuses these texts
        usual = ""
    if usual != "".join(_alternate(pieces, texts)):
        print_once(f"the chat template of {name} changes texts; here each is written as it is")
    return pieces, texts


def _alternate(pieces: Sequence[T], texts: Sequence[T]) -> list[T]:
    """Interleave the pieces of a template and the texts between them, as in the prompt."""
    return [*chain(*zip(pieces, texts, strict=False)), pieces[-1]]


def _marks(tokenizer: PreTrainedTokenizerBase, template: Set[int]) -> dict[int, AddedToken]:
    """Return the added tokens that no text may bring in, by id: all special tokens, and those that
    the template writes, which are not always special (DeepSeek)."""
    return {
        token: added
        for token, added in tokenizer.added_tokens_decoder.items()
        if added.special or (token in template and not added.content.isspace())
    }


def _encode_without(
    tokenizer: PreTrainedTokenizerBase, text: str, tokens: Sequence[str]
) -> list[int]:
    """Encode a text in which these tokens stay plain text.

    The tokenizer has no option for tokens that are not special, so the text is cut after the
    first character of each.
    """
    found = re.finditer("|".join(map(re.escape, tokens)), text) if tokens else ()
    cuts = [0, *(match.start() + 1 for match in found), len(text)]
    return [*chain(*(encode_text(tokenizer, text[a:b]) for a, b in pairwise(cuts)))]


def render_problem(
    tokenizer: PreTrainedTokenizerBase, problem: Problem, format: Format, **options: Any
) -> list[int]:
    """Render a problem's prompt; the system prompt asks for the problem's answer type."""
    format = format.with_answer_type(problem.answer_type)
    return render_prompt(tokenizer, problem.question, format, **options)


def end_of_turn_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the token that the template writes after an assistant message, else the EOS token.

    Instruct models use different ones: `<|im_end|>`, `<|eot_id|>`, `</s>`.
    """
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _PLACE}]
    rendered = _render_template(tokenizer, messages, add_generation_prompt=False)
    for token in encode_text(tokenizer, rendered.rpartition(_PLACE)[2], special=True):
        if token in tokenizer.all_special_ids:
            return token
    if not isinstance(tokenizer.eos_token_id, int):
        raise UsageError(f"the tokenizer of {tokenizer.name_or_path!r} has no end token")
    return tokenizer.eos_token_id


def render_completion(
    tokenizer: PreTrainedTokenizerBase, reasoning: str, answer: str, format: Format
) -> list[int]:
    """Return token ids of a perfect completion, with the end-of-turn token once, at the end.

    Raises:
        UsageError: the text does not round-trip (the tokenizer drops the tags).
    """
    text = format.completion(reasoning, answer)
    ids = encode_text(tokenizer, text)
    if str(tokenizer.decode(ids)).strip() != text:
        raise UsageError(
            f"the tokenizer of {tokenizer.name_or_path!r} does not round-trip {text[:40]!r}…"
        )
    return [*ids, end_of_turn_id(tokenizer)]


def longest_prompts(
    render: Callable[[Problem], list[int]], problems: Sequence[Problem], count: int = 8
) -> list[list[int]]:
    """Return the prompts of the problems with the longest questions, as token ids."""
    longest = sorted(problems, key=lambda problem: -len(problem.question))[:count]
    return [render(problem) for problem in longest]


def drop_long_prompts(
    problems: Sequence[Problem],
    render: Callable[[Problem], Sequence[int]],
    limit: int,
    why: str,
    what: str = "problems",
) -> list[Problem]:
    """Keep the problems whose prompts have at most `limit` tokens; print how many are left out.

    Args:
        why: where the limit comes from, and which option changes it.
        what: name of the problems in messages.

    Raises:
        UsageError: no prompt fits.
    """
    fitting = [problem for problem in problems if len(render(problem)) <= limit]
    if problems and not fitting:
        raise UsageError(f"every prompt of the {what} is over {limit} tokens ({why})")
    if left_out := len(problems) - len(fitting):
        terminal.line(
            f"{left_out} of {len(problems)} {what} left out: prompts over {limit} tokens ({why})"
        )
    return fitting


def stop_token_ids(tokenizer: PreTrainedTokenizerBase, generation_config: object) -> frozenset[int]:
    """Return all tokens that end a turn: of the tokenizer, the generation config, the template.

    If only one is honoured, a model with several (Llama 3, Phi) always seems truncated.
    """
    configured = getattr(generation_config, "eos_token_id", None)
    listed = configured if isinstance(configured, list | tuple) else [configured]
    return frozenset(
        token
        for token in (tokenizer.eos_token_id, end_of_turn_id(tokenizer), *listed)
        if isinstance(token, int)
    )
