"""Routes of `/v1`: the part of OpenAI's protocol that a reasoning model needs.

Unsupported fields are rejected, unless their value has no effect. Message histories are accepted in
the forms that clients and frameworks send: with names, with empty lists of tool calls, and with
several consecutive messages of one role.
"""

from __future__ import annotations

import itertools
import json
import secrets
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema, core_schema
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rlm.grading import AnswerType
from rlm.reasoner import TEMPERATURE_OF_SEVERAL, count_tokens, read_answer
from rlm.serving.engine import RunningRequest
from rlm.serving.errors import HTTPProblem
from rlm.serving.schema import (
    MAX_SAMPLES,
    PROMPT_CHARS,
    ReasoningRequest,
    ResponseFormat,
    Stop,
    Strict,
    StructuredOutputsFields,
    is_empty,
)
from rlm.serving.service import Service
from rlm.serving.streaming import COMMENT, EventStream, event, event_stream, until_done
from rlm.serving.strict_json import StrictRoute

NOT_OFFERED = {  # maps the type of a message part to its name in error messages
    "image_url": "images",
    "input_image": "images",
    "input_audio": "audio",
    "file": "files",
}
NO_MODEL = "no model has this name; see /v1/models"


class Only:
    """A field validator that accepts null and values without an effect, and rejects all others."""

    def __init__(self, *values: object, what: str = "this", instead: str = "") -> None:
        """
        Args:
            what: the name of the unsupported feature in the message.
            instead: a field with the same purpose, which is supported.
        """
        self.values, self.what, self.instead = (*values, None), what, instead

    def check(self, value: object) -> None:
        is_neutral = any(
            value == allowed and isinstance(value, bool) == isinstance(allowed, bool)
            for allowed in self.values
        )
        if not is_neutral:
            allowed = " or ".join(map(json.dumps, self.values))
            advice = f"use {self.instead}" if self.instead else f"send {allowed}"
            raise ValueError(f"{self.what} is not supported: {advice}")

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.check)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"enum": [*self.values]}


class TextPart(Strict):
    type: Literal["text"]
    text: str = Field(max_length=PROMPT_CHARS)
    cache_control: dict[str, Any] | None = None  # Anthropic's field, sent by proxies; ignored


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: (
        Annotated[str, Field(max_length=PROMPT_CHARS)]
        | Annotated[list[TextPart], Field(max_length=64)]
        | None
    ) = None
    name: Annotated[str, Field(max_length=256)] | None = None  # ignored
    # The reasoning of an earlier answer.
    reasoning: str | None = None
    reasoning_content: str | None = None
    # Other fields of earlier answers. They are ignored, or accepted only if they are empty.
    refusal: None = None
    reasoning_details: Any = None
    id: str | None = None
    annotations: Annotated[Any, Only([], what="an annotation")] = None
    audio: Annotated[Any, Only(what="audio")] = None
    function_call: Annotated[Any, Only(what="a function call")] = None
    tool_calls: Annotated[Any, Only([], what="a tool call")] = None

    @model_validator(mode="before")
    @classmethod
    def _is_offered(cls, message: Any) -> Any:
        """Reject unsupported content with one specific error.

        pydantic would report an error for every type of content.
        """
        if not isinstance(message, dict):
            return message
        if message.get("role") in ("tool", "function"):
            raise ValueError("tool messages are not supported")
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        for kind in (part.get("type") for part in parts if isinstance(part, dict)):
            if isinstance(kind, str) and kind in NOT_OFFERED:
                raise ValueError(f"content: {NOT_OFFERED[kind]} are not supported, only text")
            if kind != "text":
                raise ValueError("content: the type of every part must be text")
        if content is None and message.get("role") != "assistant":
            raise ValueError("content is missing")
        if content is not None and not isinstance(content, str | list):
            raise ValueError("content must be a string or a list of text parts")
        return message

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class StreamOptions(Strict):
    include_usage: bool = False
    include_obfuscation: bool | None = None  # padding against eavesdroppers; ignored
    continuous_usage_stats: Annotated[Any, Only(False)] = None  # a field of vLLM


class ChatRequest(Strict):
    """`POST /v1/chat/completions`. `model` is an adapter's name, or base."""

    model: str = Field(min_length=1, max_length=128)
    messages: list[Message] = Field(
        min_length=1, max_length=64, examples=[[{"role": "user", "content": "What is 2 + 3?"}]]
    )
    max_tokens: int | None = Field(None, ge=1, le=1_000_000)
    max_completion_tokens: int | None = Field(None, ge=1, le=1_000_000)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    n: int | None = Field(None, ge=1, le=MAX_SAMPLES)
    seed: int | None = Field(None, ge=-1, lt=2**63)  # -1: no seed, as in vLLM
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    thinking_budget: int | None = Field(None, ge=0, le=1_000_000)  # our field, sent in `extra_body`
    answer_type: AnswerType | None = None  # our field
    structured_outputs: StructuredOutputsFields | None = None  # vLLM's field
    # Metadata about the client, which is ignored.
    user: Annotated[str, Field(max_length=256)] | None = None
    safety_identifier: Annotated[str, Field(max_length=256)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=256)] | None = None
    prompt_cache_retention: Annotated[str, Field(max_length=256)] | None = None
    metadata: Annotated[dict[str, Any], Field(max_length=16)] | None = None
    # OpenAI's other fields. Only values without an effect are accepted, except where noted:
    frequency_penalty: Annotated[Any, Only(0, what="a penalty")] = None
    presence_penalty: Annotated[Any, Only(0, what="a penalty")] = None
    logit_bias: Annotated[Any, Only({}, what="a bias")] = None
    logprobs: Annotated[Any, Only(False, what="a log-probability")] = None
    top_logprobs: Annotated[Any, Only(0, what="a log-probability")] = None
    response_format: ResponseFormat | None = None  # supported
    tools: Annotated[Any, Only([], what="a tool")] = None
    tool_choice: Annotated[Any, Only("none", "auto", what="a tool")] = None
    parallel_tool_calls: bool | None = None  # ignored
    functions: Annotated[Any, Only([], what="a function")] = None
    function_call: Annotated[Any, Only("none", "auto", what="a function")] = None
    modalities: Annotated[Any, Only(["text"], what="another modality")] = None
    audio: Annotated[Any, Only(what="audio")] = None
    prediction: Annotated[Any, Only(what="a prediction")] = None
    reasoning: Annotated[Any, Only({}, instead="thinking_budget")] = None  # OpenRouter
    reasoning_effort: Annotated[Any, Only(instead="thinking_budget")] = None
    service_tier: Annotated[Any, Only("auto", "default", what="a tier")] = None
    store: Annotated[Any, Only(False, what="storing")] = None
    verbosity: Annotated[Any, Only("medium", what="another verbosity")] = None
    web_search_options: Annotated[Any, Only(what="a search")] = None
    # vLLM's fields, accepted only with values that have no effect:
    chat_template_kwargs: Annotated[Any, Only({}, what="an option of the template")] = None
    add_generation_prompt: Annotated[Any, Only(True)] = None
    continue_final_message: Annotated[Any, Only(False)] = None
    echo: Annotated[Any, Only(False, what="an echo")] = None
    include_stop_str_in_output: Annotated[Any, Only(False)] = None
    priority: Annotated[Any, Only(0, what="a priority")] = None
    prompt_logprobs: Annotated[Any, Only(what="a log-probability")] = None
    skip_special_tokens: Annotated[Any, Only(True)] = None
    spaces_between_special_tokens: Annotated[Any, Only(True)] = None
    stop_token_ids: Annotated[Any, Only([], instead="stop")] = None
    truncate_prompt_tokens: Annotated[Any, Only()] = None
    ignore_eos: Annotated[Any, Only(False)] = None
    length_penalty: Annotated[Any, Only(1, what="a penalty")] = None
    min_tokens: Annotated[Any, Only(0)] = None
    best_of: Annotated[Any, Only(1)] = None
    use_beam_search: Annotated[Any, Only(False)] = None
    top_k: Annotated[Any, Only(-1, 0)] = None
    min_p: Annotated[Any, Only(0)] = None
    repetition_penalty: Annotated[Any, Only(1, what="a penalty")] = None

    @model_validator(mode="after")
    def _turns(self) -> ChatRequest:
        roles = [m.role for m in self.messages if m.role not in ("system", "developer")]
        if not roles or roles[-1] != "user":
            raise ValueError("the last message must have the role user")
        if roles[0] != "user":
            raise ValueError("the first message after the system messages must have the role user")
        if is_empty(self.turns[-1][0]):  # the joined user messages at the end
            raise ValueError("the last message is empty")
        if self.max_tokens and self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens mean the same: send only one")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options requires stream: true")
        return self

    @property
    def turns(self) -> list[tuple[str, str]]:
        """The text and reasoning of each turn; consecutive messages of the same role are joined."""
        spoken = [m for m in self.messages if m.role in ("user", "assistant")]
        turns = [list(group) for _, group in itertools.groupby(spoken, key=lambda m: m.role)]
        return [
            (
                "\n\n".join(m.text for m in turn if m.text),
                "\n".join(m.reasoning_content or m.reasoning or "" for m in turn),
            )
            for turn in turns
        ]


def openai_routes(service: Service) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["openai"], route_class=StrictRoute)

    @router.post(
        "/chat/completions",
        summary="Answer a conversation in OpenAI's protocol",
        response_model=dict[str, Any],
        responses={200: {"content": event_stream()}},
    )
    async def chat(body: ChatRequest, request: Request) -> Response:
        try:
            running = await service.accept(reasoning_request(body), "openai", *_context(body))
        except HTTPProblem as problem:
            raise _in_openai_names(problem, body) from None
        if body.stream:
            return EventStream(service, running, _chunks(running, body, request.state.request_id))
        await until_done(service, running, request)
        return JSONResponse(_completion(running))

    @router.get("/models", summary="List the adapters in OpenAI's format")
    async def models() -> dict[str, Any]:
        default = service.models.default  # listed first, because many clients use the first one
        names = sorted(service.models.adapters, key=lambda name: name != default)
        return {"object": "list", "data": [_model(name) for name in names]}

    @router.get("/models/{name:path}", summary="Describe an adapter in OpenAI's format")
    async def model(name: str) -> dict[str, Any]:
        if name not in service.models.adapters:
            raise HTTPProblem(404, "not_found", NO_MODEL)
        return _model(name)

    return router


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "rlm"}


def reasoning_request(request: ChatRequest) -> ReasoningRequest:
    """Convert a request to one for /phase1/reasoning; the last turn becomes the prompt."""
    # The fields are not validated again: joined messages may exceed the limit of a single prompt.
    return ReasoningRequest.model_construct(
        prompt=request.turns[-1][0],
        n=request.n or 1,
        max_new_tokens=request.max_completion_tokens or request.max_tokens,
        thinking_budget=request.thinking_budget,
        # As in OpenAI's API, the default is to sample with a random seed, so that k calls do not
        # return k equal answers. A call with n = 1 has the same temperature as one with n = k.
        temperature=TEMPERATURE_OF_SEVERAL if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        seed=secrets.randbits(62) if request.seed in (None, -1) else request.seed,
        stop=[request.stop] if isinstance(request.stop, str) else request.stop or [],
        adapter=request.model,
        answer_type=request.answer_type,
        response_format=request.response_format,
        structured_outputs=request.structured_outputs,
    )


def _context(request: ChatRequest) -> tuple[list[tuple[str, str, str]], str]:
    """Return the earlier turns as (question, reasoning, answer), and the system messages' text."""
    system = [m.text for m in request.messages if m.role in ("system", "developer")]
    pairs = zip(request.turns[:-1:2], request.turns[1:-1:2], strict=True)
    return [(asked, thought, said) for (asked, _), (said, thought) in pairs], "\n".join(system)


def _in_openai_names(problem: HTTPProblem, request: ChatRequest) -> HTTPProblem:
    """Replace the field's name in an error with its name in OpenAI's protocol.

    In the message, the name is replaced only at the beginning, because elsewhere the same word may
    have another meaning.
    """
    if problem.code == "adapter_not_found":
        return HTTPProblem(problem.status, problem.code, NO_MODEL, param="model")
    length = "max_completion_tokens" if request.max_completion_tokens else "max_tokens"
    names = {"adapter": "model", "prompt": "messages", "max_new_tokens": length}
    if problem.param and (name := names.get(problem.param)):
        if problem.detail.startswith(f"{problem.param}:"):
            problem.detail = name + problem.detail.removeprefix(problem.param)
        problem.param = name
    return problem


def _completion(running: RunningRequest) -> dict[str, Any]:
    answer = read_answer(running.stream)
    choices = [
        {
            "index": i,
            "message": {
                "role": "assistant",
                "content": sample.answer,
                "reasoning_content": sample.reasoning,
                "reasoning": sample.reasoning,
                "refusal": None,
            },
            "logprobs": None,
            "finish_reason": sample.finish_reason,
        }
        for i, sample in enumerate(answer.samples)
    ]
    lessons = {"experiences": running.experiences} if running.experiences else {}
    head = _head(running, "chat.completion") | lessons
    return head | {"choices": choices, "usage": _usage(running)}


async def _chunks(
    running: RunningRequest, request: ChatRequest, request_id: str
) -> AsyncIterator[bytes]:
    """Yield the chunks of a streamed response, followed by `[DONE]`."""
    with_usage = request.stream_options is not None and request.stream_options.include_usage
    head = _head(running, "chat.completion.chunk")
    no_usage = {"usage": None} if with_usage else {}

    def chunk(row: int, delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
        choice = {"index": row, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return event(head | {"choices": [choice]} | no_usage)

    for row in range(running.n):
        yield chunk(row, {"role": "assistant", "content": ""})
    try:
        async for texts in running:
            if not texts:
                yield COMMENT
            for row, reasoning, answer, _ in texts:
                if reasoning:
                    yield chunk(row, {"reasoning_content": reasoning, "reasoning": reasoning})
                if answer:
                    yield chunk(row, {"content": answer})
    except HTTPProblem as problem:
        yield event(problem.body(request_id))
        return
    for row, completion in enumerate(running.stream.completions):
        yield chunk(row, {}, completion.finish_reason)
    if with_usage:
        yield event(head | {"choices": [], "usage": _usage(running)})
    yield b"data: [DONE]\n\n"


def _head(running: RunningRequest, kind: str) -> dict[str, Any]:
    adapter = running.adapter
    return {
        "id": f"chatcmpl-{running.id.removeprefix('rsn_')}",
        "object": kind,
        "created": running.created,
        "model": adapter.name,
        "system_fingerprint": adapter.sha256 and adapter.sha256[:16],
    }


def _usage(running: RunningRequest) -> dict[str, Any]:
    usage = count_tokens(running.stream, len(running.prompt))
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }
