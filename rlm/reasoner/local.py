"""Loads a trained model, and answers questions with the model in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from rlm.data import Format, render_prompt
from rlm.grading import AnswerType
from rlm.model import ADAPTER, HOW_TO_TRAIN, AdapterInfo, check_adapter
from rlm.reasoner.answers import Answer, Usage, count_tokens, read_answer
from rlm.reasoner.stream import ReasoningStream
from rlm.tools import Tool, as_tool, load_tool

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlm.reasoner.structured_outputs import GrammarCompiler, StructuredOutputs
    from rlm.sampling import Sampler, SamplingParams

TRAIN_OR_BASE = f"{HOW_TO_TRAIN}, or add --base for the untrained base model"
TEMPERATURE_OF_SEVERAL = 0.7  # default temperature when several answers are sampled
MAX_NUM_SEQS = 16  # maximum number of answers that are sampled at the same time


class ReasoningModel(Protocol):
    """A transformers or PEFT model with the attributes that `load_rlm_model` adds."""

    rlm_format: Format
    rlm_sampler: Sampler
    rlm_grammars: GrammarCompiler  # for structured outputs


def load_rlm_model(
    adapter: str | Path = ADAPTER,
    model: str | None = None,
    base: bool = False,
    quantize: str = "auto",
    tool: str | Tool = "auto",
) -> tuple[ReasoningModel, PreTrainedTokenizerBase]:
    """Load the base model with an adapter, and load the tokenizer.

    Args:
        adapter: the directory of the adapter.
        model: another copy of the base model; required if the adapter does not name its base model.
        base: whether to load the base model without the adapter.
        quantize: "none", "4bit", "8bit", or "auto" (as in training).
        tool: "none", "calculator", FILE.py:NAME, a Tool, or "auto" (as in training).

    Raises:
        UsageError: the adapter is missing or belongs to another base model.
    """
    adapter = Path(adapter)
    if not base:
        check_adapter(adapter, TRAIN_OR_BASE)
    info = AdapterInfo.load(adapter)
    used = load_tool(info.resolve_tool(tool)) if isinstance(tool, str) else as_tool(tool)
    from rlm.model import (  # imported after the paths are checked, because this import loads torch
        EMBEDDED_MODEL,
        base_model_hash,
        check_base,
        load_adapter,
        load_base,
        load_tokenizer,
        pick_device,
        prepare_process,
    )
    from rlm.reasoner.structured_outputs import GrammarCompiler
    from rlm.sampling import Sampler, sampling_dtype

    prepare_process()
    if base and not adapter.exists():
        model = model or EMBEDDED_MODEL
    model, quantize = info.resolve_base(model, quantize)
    loaded = load_base(model, pick_device(), quantize=quantize)
    if not base:
        check_base(adapter, model, base_model_hash(model))
        loaded = load_adapter(loaded, adapter, trainable=False)
    tokenizer, dtype = load_tokenizer(model), sampling_dtype(loaded)[0]
    made = cast("ReasoningModel", loaded)
    made.rlm_format = info.format
    sampler = Sampler(loaded, tokenizer, max_num_seqs=MAX_NUM_SEQS, dtype=dtype, tool=used)
    made.rlm_sampler = sampler
    made.rlm_grammars = GrammarCompiler(tokenizer, sampler.stop_ids, sampler.vocab_size)
    return made, tokenizer


@dataclass(frozen=True)
class Reply:
    """An answer, with its token counts and the time that it took."""

    answer: Answer
    usage: Usage
    seconds: float


def ask(
    question: str,
    model: ReasoningModel,
    tokenizer: PreTrainedTokenizerBase,
    params: SamplingParams,
    *,
    seed: int = 0,
    n: int = 1,
    budget: int | None = None,
    examples: Sequence[tuple[str, str]] = (),
    answer_type: AnswerType | None = None,
    structured: StructuredOutputs | None = None,
    on_text: Callable[[str, bool], None] = lambda text, by_tool: None,
) -> Reply:
    """Sample n answers to a question, and take a majority vote.

    Args:
        model: the model that `load_rlm_model` returned.
        budget: the maximum number of reasoning tokens. With None, the reasoning may use all tokens
            that are not reserved for the answer.
        examples: earlier turns of the conversation, as (question, completion) pairs.
        answer_type: the type of the answer; None uses the type from training.
        structured: a JSON schema, regex or choice that constrains the answer.
        on_text: a function that is called with each new piece of the first answer's text, and with
            True if a tool wrote this piece.

    Raises:
        UsageError: the constraint is invalid, or the prompt and the completion do not fit into the
            model's context window.
    """
    from rlm.model import check_context_window
    from rlm.sampling import Request, prompt_seed

    started, shown = time.monotonic(), 0
    format, sampler = model.rlm_format, model.rlm_sampler
    kind = structured.answer_type if structured else format.answer_type
    format = format.with_answer_type(answer_type or kind)
    grammar = model.rlm_grammars.compile(structured, format) if structured else None
    prompt = render_prompt(tokenizer, question, format, examples=examples)
    check_context_window(sampler.model, len(prompt) + params.max_new_tokens)
    stream = ReasoningStream(
        tokenizer,
        format,
        sampler.stop_ids,
        n=n,
        max_new_tokens=params.max_new_tokens,
        budget=budget,
        tool_tokens=sampler.tool_tokens,
        grammar=grammar,
    )
    request = Request(prompt, params, prompt_seed(seed), n, stream, stream.allowed_tokens)
    for token in sampler.stream([request]):
        stream.add_token(token)
        if token.row == 0:
            state = stream.completions[0]
            on_text(state.text[shown:], state.by_tool)
            shown = len(state.text)
    answer = read_answer(stream)
    return Reply(answer, count_tokens(stream, len(prompt)), time.monotonic() - started)
