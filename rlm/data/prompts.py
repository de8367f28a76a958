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
# Templates name the day, by a date that they are given or by a function of transformers that reads
# the clock: else each day's prompt would be another one. Templates are given data only, so the
# function's place is taken by a macro, which looks up what each directive writes.
TODAY = datetime(2024, 7, 26)
DATES = {f"%{c}": TODAY.strftime(f"%{c}") for c in "aAbBcdDeFfHIjmMpSTUwWxXyYzZ"}
DATES |= {"%-d": str(TODAY.day), "%-m": str(TODAY.month)}
STRFTIME_NOW = (
    "{% macro strftime_now(format) %}{% set now = namespace(text=format) %}"
    "{% for directive, text in rlm_dates.items() %}"
    "{% set now.text = now.text.replace(directive, text) %}{% endfor %}{{ now.text }}{% endmacro %}"
)
MAX_FILE_NAME = 255  # characters; a longer --system-prompt is a text
IGNORE_INDEX = -100  # the label of a token that is not learned: that of PyTorch's cross-entropy
# What the system prompt asks for, by the kind of answer.
ASKED_FOR: dict[AnswerType, str] = {
    "number": "final number",
    "choice": "letter of your choice",
    "text": "final answer",
    "open": "final answer",
}
# Stands where a message goes while the chat template is rendered; no template contains it.
_PLACE = "\ue000{}\ue001"
_NO_TEXT = re.compile("[\ud800-\udfff]")  # how Python decodes broken UTF-8 of a command line
# Whether special tokens are split is not an argument of the tokenizer that transformers wraps but
# its state: of two threads, one would encode a user's text with what the other has set.
_ENCODING = threading.Lock()


@dataclass(frozen=True)
class Format:
    """What a completion is asked to be: reasoning in one tag, then an answer of a kind in another.

    own_prompt: a user's system prompt in place of the one that asks for the tags.
    """

    reasoning_tag: str
    answer_tag: str
    own_prompt: str | None = None
    answer_type: AnswerType = "number"

    def with_prompt(self, text: str | None) -> Format:
        """The same tags with a user's system prompt; "" is a chat without one, None the usual."""
        return replace(self, own_prompt=text)

    def with_answer_type(self, kind: AnswerType) -> Format:
        """The same for answers of a kind: another prompt, another grading, other votes."""
        return replace(self, answer_type=kind)

    def grade(self, completion: str, gold: str | None, *, strict: bool) -> Verdict:
        """`rlm.grading.grade` by these tags and this kind of answer."""
        return grade(completion, gold, strict=strict, kind=self.answer_type, **self.tags)

    @property
    def tags(self) -> dict[str, str]:
        """Both tags as keyword arguments of `rlm.grading.grade`."""
        return {"reasoning_tag": self.reasoning_tag, "answer_tag": self.answer_tag}

    @property
    def answer_tags(self) -> tuple[str, str]:
        """The opening and the closing one."""
        return f"<{self.answer_tag}>", f"</{self.answer_tag}>"

    @property
    def system_prompt(self) -> str:
        """A user's own; else the one that asks for the tags and the kind of answer."""
        if self.own_prompt is not None:
            return self.own_prompt
        return (
            f"Reason inside <{self.reasoning_tag}></{self.reasoning_tag}>, then give the "
            f"{ASKED_FOR[self.answer_type]} inside <{self.answer_tag}></{self.answer_tag}>."
        )

    def completion(self, reasoning: str, answer: str) -> str:
        """The text that a perfect completion has. The reasoning loses its boxes (`\\boxed{}`): the
        answer has a place of its own.

        >>> FORMATS["deepseek"].completion("1 + 1 = 2", "2")
        '<think>\\n1 + 1 = 2\\n</think>\\n<answer>2</answer>'
        """
        return (
            f"<{self.reasoning_tag}>\n{without_boxes(reasoning).strip()}\n</{self.reasoning_tag}>\n"
            f"<{self.answer_tag}>{answer.strip()}</{self.answer_tag}>"
        )


class Formats(dict[str, Format]):
    """The formats by name, with one line for a name that is none of them."""

    def __missing__(self, name: str) -> Format:
        known = find_choice(name, list(self))
        if known not in self:
            raise UsageError(f"--reasoning-format: unknown {name!r}; there are {', '.join(self)}")
        return self[known]


FORMATS = Formats(
    deepseek=Format("think", "answer"),
    simple=Format("reasoning", "answer"),
)


# Where a template begins the reply by opening the reasoning (or by an empty one).
_OPENED = re.compile(
    "|".join(rf"<{f.reasoning_tag}>\s*(?:</{f.reasoning_tag}>\s*)?\Z" for f in FORMATS.values())
)


def _render_template(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], add_generation_prompt: bool
) -> str:
    if not tokenizer.chat_template:
        todo = "use an instruct model"
        if (Path(tokenizer.name_or_path) / "chat_template.json").is_file():  # older processors'
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
        return cast("str", rendered)  # what it is follows from tokenize
    except (TemplateError, TypeError, ValueError, ArithmeticError) as error:
        # It can refuse, such as a system role.
        raise UsageError(
            f"the chat template of {tokenizer.name_or_path!r} refuses our messages ({error}); "
            "use another instruct model"
        ) from error


def read_system_prompt(text: str | None) -> str | None:
    """Read the value of --system-prompt: a file's text if it names a file, else itself.

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
    """Ids of a text. Special tokens in it stay plain text, unless we or the template wrote it."""
    with _ENCODING:
        return tokenizer.encode(text, add_special_tokens=False, split_special_tokens=not special)


def backend_tokenizer(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """The tokenizer of the tokenizers library in one of transformers.

    Raises:
        UsageError: there is none.
    """
    from tokenizers import Tokenizer

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise UsageError(
            f"the tokenizer of {tokenizer.name_or_path!r} is none of the tokenizers library (no "
            "tokenizer.json): unsupported"
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
    """Token ids of the chat up to where the assistant begins to write.

    The template is rendered around placeholders, so each text stands whole in its own place,
    whatever the template does to texts. The ids are those that `apply_chat_template` gives, but
    for a reasoning tag that it opens (DeepSeek-R1), which the model writes itself here. Only
    where a text holds a mark of the template (`<|im_end|>`), texts are encoded by themselves, so
    that a user cannot close his turn or open another role.

    Args:
        examples: (question, completion) pairs shown as earlier turns (few-shot).
        system_prompt: replaces the format's own, as plain text like the question; "" leaves it
            out.

    Raises:
        UsageError: the tokenizer has no chat template, a text has no place in the template, or it
            is no text.
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
        raise UsageError("the question or the system prompt has bytes that are no UTF-8 text")
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
            f"a message holds a token that the tokenizer of {tokenizer.name_or_path!r} cannot take "
            f"as text: one of {', '.join(mark.content for mark in marks.values()):.200}"
        )
    return ids


def _place_texts(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]
) -> tuple[list[str], list[str]]:
    """What the template writes around the messages' texts, in n + 1 pieces, and these n texts.

    Without a system role in the template, the system message begins the first user's turn.

    Raises:
        UsageError: the template refuses the messages, or a text does not stand in it exactly once.
    """
    name = repr(tokenizer.name_or_path)
    places = [message | {"content": _PLACE.format(i)} for i, message in enumerate(messages)]
    try:
        parts = re.split(_PLACE.format(r"(\d+)"), _render_template(tokenizer, places, True))
        order = [int(i) for i in parts[1::2]]
        # A system message may stand anywhere (Mistral: in the last user's turn), turns may not.
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
    except UsageError:  # not with these texts
        usual = ""
    if usual != "".join(_alternate(pieces, texts)):
        print_once(f"the chat template of {name} changes texts; here each is written as it is")
    return pieces, texts


def _alternate(pieces: Sequence[T], texts: Sequence[T]) -> list[T]:
    """The pieces of a template and the texts between them, in the order of the prompt."""
    return [*chain(*zip(pieces, texts, strict=False)), pieces[-1]]


def _marks(tokenizer: PreTrainedTokenizerBase, template: Set[int]) -> dict[int, AddedToken]:
    """The added tokens that no text may bring in, by id: all special ones, and those that the
    template writes, which are not always special (DeepSeek)."""
    return {
        token: added
        for token, added in tokenizer.added_tokens_decoder.items()
        if added.special or (token in template and not added.content.isspace())
    }


def _encode_without(
    tokenizer: PreTrainedTokenizerBase, text: str, tokens: Sequence[str]
) -> list[int]:
    """Encode a text in which these tokens stay plain text.

    The tokenizer has no option for tokens that are not special, so the text is cut behind the
    first character of each.
    """
    found = re.finditer("|".join(map(re.escape, tokens)), text) if tokens else ()
    cuts = [0, *(match.start() + 1 for match in found), len(text)]
    return [*chain(*(encode_text(tokenizer, text[a:b]) for a, b in pairwise(cuts)))]


def render_problem(
    tokenizer: PreTrainedTokenizerBase, problem: Problem, format: Format, **options: Any
) -> list[int]:
    """`render_prompt` of a problem: the system prompt asks for the kind of answer that it has."""
    format = format.with_answer_type(problem.answer_type)
    return render_prompt(tokenizer, problem.question, format, **options)


def end_of_turn_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that the template writes after an assistant message; the tokenizer's EOS else.

    Instruct models do not agree on it: `<|im_end|>`, `<|eot_id|>`, `</s>`.
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
    """Token ids of a perfect completion, with the end-of-turn token exactly once, at the end.

    Raises:
        UsageError: decoding the ids does not give the text back (a tokenizer that eats the tags).
    """
    text = format.completion(reasoning, answer)
    ids = encode_text(tokenizer, text)
    if str(tokenizer.decode(ids)).strip() != text:
        raise UsageError(
            f"the tokenizer of {tokenizer.name_or_path!r} does not give {text[:40]!r}… back"
        )
    return [*ids, end_of_turn_id(tokenizer)]


def longest_prompts(
    render: Callable[[Problem], list[int]], problems: Sequence[Problem], count: int = 8
) -> list[list[int]]:
    """The prompts of the problems with the longest questions, as token ids."""
    longest = sorted(problems, key=lambda problem: -len(problem.question))[:count]
    return [render(problem) for problem in longest]


def drop_long_prompts(
    problems: Sequence[Problem],
    render: Callable[[Problem], Sequence[int]],
    limit: int,
    why: str,
    what: str = "problems",
) -> list[Problem]:
    """Keep the problems whose prompts have at most `limit` tokens, and say how many have not.

    Args:
        why: where the limit comes from, and which option changes it.
        what: the problems are for.

    Raises:
        UsageError: none has.
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
    """Every token that ends a turn: the tokenizer's, the generation config's, the template's.

    A model that knows several (Llama 3, Phi) looks truncated for ever if only one is honoured.
    """
    configured = getattr(generation_config, "eos_token_id", None)
    listed = configured if isinstance(configured, list | tuple) else [configured]
    return frozenset(
        token
        for token in (tokenizer.eos_token_id, end_of_turn_id(tokenizer), *listed)
        if isinstance(token, int)
    )
