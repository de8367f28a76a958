"""The prompts and completions of the model: tags, system prompt, and rendering to token ids.

SFT, GRPO, evaluation, inference and serving all call `render_prompt`, so the model sees the same
token ids everywhere. The model writes `<think>` itself; the prompt does not contain it. The tags
are plain text and not new tokens of the vocabulary, so an adapter stays small and can be loaded on
the unchanged base model.
"""

from __future__ import annotations

import heapq
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
# Some chat templates write the current date. They use either the argument `date_string` or the
# function `strftime_now()` of transformers, which reads the clock. A fixed date makes the prompts
# the same on all days. Only data can be passed to a template, not a function, so `strftime_now` is
# replaced by a macro that looks up the text of each directive in `DATES`.
TODAY = datetime(2024, 7, 26)
DATES = {f"%{c}": TODAY.strftime(f"%{c}") for c in "aAbBcdDeFfHIjmMpSTUwWxXyYzZ"}
DATES |= {"%-d": str(TODAY.day), "%-m": str(TODAY.month)}
STRFTIME_NOW = (
    "{% macro strftime_now(format) %}{% set now = namespace(text=format) %}"
    "{% for directive, text in rlm_dates.items() %}"
    "{% set now.text = now.text.replace(directive, text) %}{% endfor %}{{ now.text }}{% endmacro %}"
)
MAX_FILE_NAME = 255  # characters; a longer --system-prompt is a text, not a file name
IGNORE_INDEX = -100  # label of tokens that PyTorch's cross-entropy leaves out of the loss
# Matches a request for an answer format without answer tags, but not an "Answer:" at the end of a
# question, which only begins the reply.
_OTHER_FORM = re.compile(
    r"\banswer\b[^\n]{0,60}?(?:####|\\boxed\b)|(?:####|\\boxed\{\})[^\n]{0,40}?\banswer\b"
    r"|\b(?:form|format|after|as|with|write)\b[^\n.?!]{0,20}?\banswer: ?\S",
    re.IGNORECASE,
)
# The answer that the system prompt requests, by answer type.
ASKED_FOR: dict[AnswerType, str] = {
    "number": "final number",
    "choice": "letter of your choice",
    "text": "final answer",
    "open": "final answer",
}
# Placeholder for the text of a message while the chat template is rendered. Its private-use
# characters occur in no template.
_PLACE = "\ue000{}\ue001"
_BEFORE = "\ue000"  # a private-use character, which no token merges with the text after it
_NO_TEXT = re.compile("[\ud800-\udfff]")  # Python decodes invalid UTF-8 in argv to surrogates
# transformers stores `split_special_tokens` in the state of the wrapped tokenizer. Without a lock,
# a thread could therefore encode a user's text with the setting of another thread.
_ENCODING = threading.Lock()


@dataclass(frozen=True)
class Format:
    """The format of a completion: the reasoning inside one tag, then the answer inside another."""

    reasoning_tag: str
    answer_tag: str
    own_prompt: str | None = None  # a user's system prompt, which replaces the default
    answer_type: AnswerType = "number"

    def with_prompt(self, text: str | None) -> Format:
        """Return this format with a user's system prompt.

        "" means no system prompt, and None means the default system prompt.
        """
        return replace(self, own_prompt=text)

    def with_answer_type(self, kind: AnswerType) -> Format:
        """Return this format for another answer type.

        The answer type affects the system prompt, the grading and the majority vote.
        """
        return replace(self, answer_type=kind)

    def grade(self, completion: str, gold: str | None, *, strict: bool) -> Verdict:
        """Grade a completion with the tags and the answer type of this format."""
        return grade(completion, gold, strict=strict, kind=self.answer_type, **self.tags)

    @property
    def tags(self) -> dict[str, str]:
        """The two tags as keyword arguments of `rlm.grading.grade`."""
        return {"reasoning_tag": self.reasoning_tag, "answer_tag": self.answer_tag}

    @property
    def answer_tags(self) -> tuple[str, str]:
        """The opening and the closing answer tag."""
        return f"<{self.answer_tag}>", f"</{self.answer_tag}>"

    @property
    def system_prompt(self) -> str:
        """The user's system prompt, or the default, which requests the tags and the answer type."""
        if self.own_prompt is not None:
            return self.own_prompt
        return (
            f"Reason inside <{self.reasoning_tag}></{self.reasoning_tag}>, then give the "
            f"{ASKED_FOR[self.answer_type]} inside <{self.answer_tag}></{self.answer_tag}>."
        )

    def completion(self, reasoning: str, answer: str) -> str:
        """Return a completion in exactly this format.

        Boxes (`\\boxed{}`) in the reasoning are unwrapped, because the answer has its own tag.

        >>> FORMATS["deepseek"].completion("1 + 1 = 2", "2")
        '<think>\\n1 + 1 = 2\\n</think>\\n<answer>2</answer>'
        """
        return (
            f"<{self.reasoning_tag}>\n{without_boxes(reasoning).strip()}\n</{self.reasoning_tag}>\n"
            f"<{self.answer_tag}>{answer.strip()}</{self.answer_tag}>"
        )


def describe_other_forms(problems: Sequence[Problem], format: Format) -> str:
    """Describe how many questions ask for a different answer format than the system prompt.

    Returns:
        The description, with an example and what to do; "" if there are no such questions, or if
        the user's own system prompt does not ask for the answer tag.
    """
    tag, end = format.answer_tags
    if tag not in format.system_prompt:
        return ""
    matches = (_OTHER_FORM.search(p.question) for p in problems if tag not in p.question)
    found = [match[0] for match in matches if match]
    if not found:
        return ""
    return (
        f"{len(found)} of {len(problems)} questions ask for a different answer format than the "
        f"system prompt ({found[0]}): remove this request from the questions, because the answer "
        f"is expected in {tag}{end}; or, if your --reward reads the other format, pass "
        '--system-prompt ""'
    )


class ChatTemplateError(UsageError):
    """The chat template of a model is missing, or it cannot represent the messages of a prompt."""


class Formats(dict[str, Format]):
    """The formats by name; an unknown name raises a UsageError."""

    def __missing__(self, name: str) -> Format:
        known = find_choice(name, list(self))
        if known not in self:
            known = ", ".join(self)
            raise UsageError(f"--reasoning-format: unknown value {name!r}; choose from {known}")
        return self[known]


FORMATS = Formats(
    deepseek=Format("think", "answer"),
    simple=Format("reasoning", "answer"),
)


# Matches an open or an empty reasoning block at the end of a rendered prompt.
_OPENED = re.compile(
    "|".join(rf"<{f.reasoning_tag}>\s*(?:</{f.reasoning_tag}>\s*)?\Z" for f in FORMATS.values())
)


def _render_template(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], add_generation_prompt: bool
) -> str:
    if not tokenizer.chat_template:
        todo = "use an instruct model"
        # Processors of older transformers versions stored the template in this file.
        if (Path(tokenizer.name_or_path) / "chat_template.json").is_file():
            todo = "copy the text in its chat_template.json to a file chat_template.jinja there"
        raise ChatTemplateError(
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
        # A template can reject messages, for example a system message.
        raise ChatTemplateError(
            f"the chat template of {tokenizer.name_or_path!r} rejects the messages ({error}); "
            "use another instruct model"
        ) from error


def read_system_prompt(text: str | None) -> str | None:
    """Return the system prompt for the value of --system-prompt, which is a text or a file name.

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
    """Return the token ids of a text.

    Args:
        special: whether to encode special tokens in the text as such, rather than as plain text.
            Use it only for trusted text, such as the text of the chat template.
    """
    with _ENCODING:
        return tokenizer.encode(text, add_special_tokens=False, split_special_tokens=not special)


def encode_inserted_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the token ids of a text that is inserted after other text.

    SentencePiece tokenizers (Llama 2) add a space before a text that they encode. This space is
    left out.
    """
    ids = encode_text(tokenizer, text)
    if not ids or str(tokenizer.convert_ids_to_tokens(ids[0]))[0] != "▁":
        return ids
    before, joined = (encode_text(tokenizer, part) for part in (_BEFORE, _BEFORE + text))
    return joined[len(before) :]


def backend_tokenizer(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """Return the tokenizers-library tokenizer that a transformers tokenizer wraps.

    Raises:
        UsageError: the transformers tokenizer is not based on the tokenizers library.
    """
    from tokenizers import Tokenizer

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise UsageError(
            f"the tokenizer of {tokenizer.name_or_path!r} is not supported: it is not a tokenizer "
            "of the tokenizers library (tokenizer.json is missing)"
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
    """Render a prompt: the token ids of the chat up to the start of the assistant's reply.

    The token ids equal those of `apply_chat_template`, with these exceptions:

    - The texts are stripped, and otherwise remain unchanged even if the template modifies them,
      because the template is rendered with placeholders.
    - A date that the template writes is `TODAY`.
    - A reasoning tag that the template opens (DeepSeek-R1) is left out, because the model writes
      the tag itself.
    - If a text contains a special token of the template (`<|im_end|>`), the texts are encoded
      separately, so that a user cannot close the turn or open another role.

    Args:
        examples: few-shot examples as (question, completion) pairs, shown as earlier turns.
        system_prompt: the text that replaces the system prompt of the format; "" means no system
            prompt. Like the question, it is encoded as plain text.

    Raises:
        ChatTemplateError: the tokenizer has no chat template, or the template does not write each
            text exactly once.
        UsageError: a text cannot be encoded as plain text.
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
    if opened := _OPENED.search(pieces[-1]):  # the model writes the reasoning tag itself
        pieces[-1] = pieces[-1][: opened.start()]
        print_once(
            f"the chat template of {tokenizer.name_or_path!r} begins the reply with "
            f"{opened[0].split()[0]}, which is left out, because the model writes this tag itself"
        )
    by_template = [encode_text(tokenizer, piece, special=True) for piece in pieces]
    marks = _marks(tokenizer, {*chain(*by_template)})
    tag = f"<{format.reasoning_tag}>"
    if any(mark.special and mark.content == tag for mark in marks.values()):
        print_once(
            f"warning: {tag} is a special token of {tokenizer.name_or_path!r}, which is left out "
            "of the text of completions: unless train_sft.py has taught the model to write the tag "
            "as plain text, pass another --reasoning-format"
        )
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


def opened_reasoning(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the reasoning tag with which the chat template begins the reply, or ""."""
    rendered = _render_template(tokenizer, [{"role": "user", "content": "?"}], True)
    opened = _OPENED.search(rendered)
    return opened[0].split()[0] if opened else ""


def _place_texts(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]
) -> tuple[list[str], list[str]]:
    """Split the rendered chat into the pieces of the template and the texts of the messages.

    If the template has no system role, the system message is prepended to the first user message.

    Returns:
        The n + 1 pieces that the template writes around the texts, and the n texts.

    Raises:
        ChatTemplateError: the template rejects the messages, or does not write each text exactly
            once.
    """
    name = repr(tokenizer.name_or_path)
    places = [message | {"content": _PLACE.format(i)} for i, message in enumerate(messages)]
    try:
        parts = re.split(_PLACE.format(r"(\d+)"), _render_template(tokenizer, places, True))
        order = [int(i) for i in parts[1::2]]
        # The system message may be anywhere (Mistral puts it into the last user turn), but the
        # other messages must stay in order.
        turns = [i for i in order if messages[i]["role"] != "system"]
        if sorted(order) != [*range(len(messages))] or turns != sorted(turns):
            raise ChatTemplateError(
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
            f"the chat template of {name} has no system role: the system prompt is put before the "
            "first user message"
        )
        return placed
    pieces, texts = parts[::2], [messages[i]["content"] for i in order]
    try:
        usual = _render_template(tokenizer, messages, True)
    except UsageError:  # the template rejects these texts
        usual = ""
    if usual != "".join(_alternate(pieces, texts)):
        print_once(
            f"the chat template of {name} changes the texts of messages; the prompt contains them "
            "unchanged"
        )
    return pieces, texts


def _alternate(pieces: Sequence[T], texts: Sequence[T]) -> list[T]:
    """Interleave the pieces of a template and the texts between them, as in the prompt."""
    return [*chain(*zip(pieces, texts, strict=False)), pieces[-1]]


def _marks(tokenizer: PreTrainedTokenizerBase, template: Set[int]) -> dict[int, AddedToken]:
    """Return the added tokens, by id, that the text of a message must not produce.

    These are all special tokens, and the added tokens that the template writes, which some
    tokenizers (DeepSeek) do not mark as special.
    """
    return {
        token: added
        for token, added in tokenizer.added_tokens_decoder.items()
        if added.special or (token in template and not added.content.isspace())
    }


def _encode_without(
    tokenizer: PreTrainedTokenizerBase, text: str, tokens: Sequence[str]
) -> list[int]:
    """Encode a text so that the given tokens in it become plain text.

    The tokenizer has no option to split added tokens that are not special, so the text is cut after
    the first character of each such token and the parts are encoded separately.
    """
    found = re.finditer("|".join(map(re.escape, tokens)), text) if tokens else ()
    cuts = [0, *(match.start() + 1 for match in found), len(text)]
    return [*chain(*(encode_text(tokenizer, text[a:b]) for a, b in pairwise(cuts)))]


def render_problem(
    tokenizer: PreTrainedTokenizerBase, problem: Problem, format: Format, **options: Any
) -> list[int]:
    """Render the prompt of a problem, whose answer type determines the default system prompt."""
    format = format.with_answer_type(problem.answer_type)
    return render_prompt(tokenizer, problem.question, format, **options)


def end_of_turn_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the id of the special token that ends an assistant message, or else the EOS token.

    Instruct models use different tokens: `<|im_end|>`, `<|eot_id|>`, `</s>`.
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
    """Return the token ids of a completion in the given format, ending with the end-of-turn token.

    Raises:
        UsageError: decoding the token ids does not restore the text, because the tokenizer drops
            the tags.
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
    """Return the longest prompts, as token ids, the longest first."""
    return heapq.nlargest(count, map(render, problems), key=len)


def drop_long_prompts(
    problems: Sequence[Problem],
    render: Callable[[Problem], Sequence[int]],
    window: int | None,
    max_new_tokens: int,
    what: str = "problems",
) -> list[Problem]:
    """Return the problems whose prompt and completion fit into the model's context window.

    The number of problems that are left out is printed.

    Args:
        window: the size of the window in tokens; None keeps all problems.
        what: the name of the problems in messages.

    Raises:
        UsageError: no problem fits.
    """
    if window is None:
        return list(problems)
    limit = window - max_new_tokens
    why = f"the context window of {window} minus --max-new-tokens {max_new_tokens}"
    lengths = [len(render(problem)) for problem in problems]
    fitting = [p for p, length in zip(problems, lengths, strict=True) if length <= limit]
    if problems and not fitting:
        raise UsageError(
            f"no prompt of the {what} fits: {why} is {limit} tokens, but the shortest prompt has "
            f"{min(lengths)}"
        )
    if left_out := len(problems) - len(fitting):
        terminal.line(
            f"{left_out} of {len(problems)} {what} left out: prompts over {limit} tokens ({why})"
        )
    return fitting


def stop_token_ids(tokenizer: PreTrainedTokenizerBase, generation_config: object) -> frozenset[int]:
    """Return the ids of all tokens that end a turn.

    They come from the tokenizer, the generation config and the chat template. Some models (Llama 3,
    Phi) have several such tokens; if only one of them stopped the generation, completions that end
    with another would run on and count as truncated.
    """
    configured = getattr(generation_config, "eos_token_id", None)
    listed = configured if isinstance(configured, list | tuple) else [configured]
    return frozenset(
        token
        for token in (tokenizer.eos_token_id, end_of_turn_id(tokenizer), *listed)
        if isinstance(token, int)
    )
