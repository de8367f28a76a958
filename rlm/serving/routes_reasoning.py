"""Routes of `/phase1`: our own protocol, with complete responses or server-sent events."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from rlm.grading import READERS, AnswerType
from rlm.model import public_dataset
from rlm.reasoner import (
    TEMPERATURE_OF_SEVERAL,
    Answer,
    Verification,
    count_tokens,
    length_warnings,
    read_answer,
    read_sample,
    trace,
    verify,
    without_annotations,
)
from rlm.serving.engine import PING_SECONDS, RunningRequest
from rlm.serving.errors import HTTPProblem
from rlm.serving.models import ServedAdapter
from rlm.serving.schema import (
    MAX_SAMPLES,
    PROMPT_CHARS,
    ModelReport,
    ReasoningRequest,
    ReasoningResponse,
    Step,
    Timings,
)
from rlm.serving.service import Service
from rlm.serving.streaming import COMMENT, EventStream, event, event_stream, until_done
from rlm.serving.strict_json import StrictRoute

EVENTS = ("start", "reasoning", "answer", "sample", "done", "error")


def phase1_routes(service: Service, needs_key: bool) -> APIRouter:
    router = APIRouter(prefix="/phase1", tags=["reasoning"], route_class=StrictRoute)

    @router.post(
        "/reasoning",
        summary="Answer a question, with the reasoning",
        response_model=ReasoningResponse,
        responses={200: {"content": event_stream(*EVENTS)}},
    )
    async def reasoning(body: ReasoningRequest, request: Request) -> Response:
        request_id = request.state.request_id
        running = await service.accept(body, "phase1")
        if body.stream:
            return EventStream(service, running, _events(service, running, body, request_id))
        await until_done(service, running, request)
        report = _report(service, running, body, request_id)
        return Response(report.model_dump_json(), media_type="application/json")

    @router.post("/reasoning/{id}/answer", status_code=202, summary="Stop thinking and answer now")
    async def answer_now(id: str) -> dict[str, str]:
        service.answer_now(id)
        return {"id": id, "status": "closing"}

    @router.get("/info", summary="Show the model, the adapters and the limits")
    async def info() -> dict[str, Any]:
        return _info(service, needs_key)

    return router


def _report(
    service: Service, running: RunningRequest, request: ReasoningRequest, request_id: str
) -> ReasoningResponse:
    """Build the response of a finished request."""
    answer, adapter = read_answer(running.stream), running.adapter
    shown, usage = answer.shown, count_tokens(running.stream, len(running.prompt))
    seconds = running.seconds
    expected = str(request.expected_answer or "")  # validation has converted numbers to strings
    format = running.stream.format
    warnings = length_warnings(running.stream, service.limits.new_tokens)
    verifier = None
    if expected and (why := _incomparable(expected, format.answer_type)):
        warnings.append(f"expected_answer was not compared: {why}")
    elif expected:
        verifier = verify(shown, expected, format)
    return ReasoningResponse(
        id=running.id,
        created=running.created,
        request_id=request_id,
        response=shown.response,
        reasoning=shown.reasoning,
        answer=shown.answer,
        final_answer=shown.final_answer,
        answer_type=answer.answer_type,
        trace=[Step(step=i, content=text) for i, text in enumerate(trace(shown))],
        details=_details(answer, verifier, adapter),
        finish_reason=shown.finish_reason,
        thinking=shown.thinking,
        vote=answer.vote_counts,
        confidence=answer.confidence,
        verifier=verifier,
        samples=answer.samples if request.return_samples else None,
        usage=usage,
        timings=Timings(
            first_token_ms=round(1000 * running.first_token_seconds, 1),
            total_ms=round(1000 * seconds, 1),
            tokens_per_second=round(usage.completion_tokens / seconds, 1),
        ),
        seed=request.seed,
        model=_model(service, running),
        experiences=list(running.experiences),
        warnings=(["tie"] if answer.vote.tie else []) + warnings,
    )


def _incomparable(expected: str, kind: AnswerType) -> str:
    """Return the reason why `expected_answer` cannot be compared with an answer of this type.

    The reason is "" if the two can be compared.
    """
    if kind == "open":
        return "the answers are open-ended, and only the training reward could judge them"
    return "" if READERS[kind](expected) is not None else f"it is not a {kind} (answer_type)"


def _details(
    answer: Answer, verifier: Verification | None, adapter: ServedAdapter
) -> dict[str, Any]:
    """Build the `details` of a response.

    Some values appear twice: under our name, and under the name in docs/reference/names.md.
    """
    shown = answer.shown
    ours: dict[str, Any] = {
        "stage": adapter.info.stage,
        "format": shown.format,
        "reasoning_tokens": shown.thinking.tokens,
        "completion_tokens": shown.completion_tokens,
    }
    if adapter.tool:
        ours["tool_calls"] = [asdict(call) for call in answer.tool_calls]
    verdict = verifier and {
        "is_correct": verifier.correct,
        "predicted": shown.final_answer,
        "expected": verifier.expected,
        "detail": verifier.reason,
    }
    return ours | {
        "thinking": shown.reasoning and without_annotations(shown.reasoning),
        "answer": shown.answer,
        "has_valid_format": shown.format == "strict",
        "tokens_generated": shown.completion_tokens,
        "verifier": verdict,
    }


def _model(service: Service, running: RunningRequest) -> ModelReport:
    adapter = running.adapter
    return ModelReport(
        base=service.models.base_model, adapter=adapter.name, adapter_sha256=adapter.sha256
    )


async def _events(
    service: Service, running: RunningRequest, request: ReasoningRequest, request_id: str
) -> AsyncIterator[bytes]:
    """Yield server-sent events. Sample 0 is streamed; other samples are sent when they finish."""
    start = {
        "id": running.id,
        "request_id": request_id,
        "seed": request.seed,
        "n": request.n,
        "model": _model(service, running).model_dump(),
        "thinking": {"budget": request.thinking_budget},
    }
    yield event(start, "start")
    told: set[int] = set()
    sent = time.monotonic()
    try:
        async for texts in running:
            # The text of the other samples is not sent, so the stream may be silent for long.
            if not texts or time.monotonic() - sent >= PING_SECONDS:
                sent = time.monotonic()
                yield COMMENT
            for row, reasoning, answer, by_tool in texts:
                mark = {"tool": True} if by_tool else {}
                if row == 0 and reasoning:
                    yield event({"sample": 0, "delta": reasoning, **mark}, "reasoning")
                if row == 0 and answer:
                    yield event({"sample": 0, "delta": answer, **mark}, "answer")
                sent = time.monotonic() if row == 0 else sent
            for sample in _just_finished(running, told):
                yield sample
        for sample in _just_finished(running, told):
            yield sample
        yield event(_report(service, running, request, request_id).model_dump(), "done")
    except HTTPProblem as problem:
        yield event(problem.body(request_id), "error")


def _just_finished(running: RunningRequest, told: set[int]) -> Iterator[bytes]:
    """Yield an event for each finished sample that is not in `told`; add its index to `told`."""
    for i, state in enumerate(running.stream.completions):
        if running.n > 1 and state.finish_reason and i not in told:
            told.add(i)
            sample = read_sample(running.stream, i)
            summary = {
                "sample": i,
                "final_answer": sample.final_answer,
                "format": sample.format,
                "finish_reason": sample.finish_reason,
                "thinking": asdict(sample.thinking),
            }
            yield event(summary, "sample")


def _info(service: Service, needs_key: bool) -> dict[str, Any]:
    models, limits = service.models, service.limits
    default = models.adapters[models.default]
    return {
        "model": {
            "base": models.base_model,
            "base_hash": models.base_hash,
            "adapter": default.name,
            "adapter_sha256": default.sha256,
            "stage": default.info.stage,
        },
        "adapters": list(models.adapters),
        "default_adapter": models.default,
        "answer_types": {name: one.info.answer_types for name, one in models.adapters.items()},
        "about": {
            name: {
                "stage": one.info.stage,
                "sha256": one.sha256,
                "dataset": one.info.dataset and public_dataset(one.info.dataset),
                "questions": one.info.questions,
            }
            for name, one in models.adapters.items()
        },
        "limits": {
            "prompt_chars": PROMPT_CHARS,
            "prompt_tokens": limits.prompt_tokens,
            "max_new_tokens": limits.new_tokens,
            "tokens_per_request": limits.request_tokens,
            "n": MAX_SAMPLES,
            "stop": 4,
            "requests_in_queue": limits.requests,
            "tokens_in_queue": limits.tokens,
            "deadline_s": limits.seconds,
        },
        "experiences": len(service.experiences),
        "experiences_id": service.experiences_id,
        "defaults": {
            "max_new_tokens": limits.new_tokens,
            "temperature_one": 0.0,
            "temperature_many": TEMPERATURE_OF_SEVERAL,
        },
        "running": {"requests": service.requests, "tokens": service.tokens},
        "public_url": service.public_url,
        "needs_key": needs_key,
    }
