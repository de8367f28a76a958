"""`POST /phase1/reasoning`: our own protocol, whole or as server-sent events."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator

from rlm.serving import answering
from rlm.serving.errors import Problem
from rlm.serving.schema import ModelReport, ReasoningRequest, ReasoningResponse, Timings
from rlm.serving.service import Ask, Running, Service

EVENTS = ("start", "reasoning", "answer", "sample", "done", "error")


def to_ask(request: ReasoningRequest) -> Ask:
    of_the_report = {"prompt", "return_samples", "expected_answer"}
    return Ask(request.prompt, **request.model_dump(exclude=of_the_report))


def report(
    service: Service, running: Running, request: ReasoningRequest, request_id: str
) -> ReasoningResponse:
    """What a finished request is answered with."""
    job, offered = running.job, running.offered
    samples = answering.finished_samples(job.thinking)
    votes = answering.count_votes(samples)
    shown = answering.shown_sample(samples, votes)
    used = answering.usage(len(job.prompt), samples)
    seconds = time.monotonic() - job.created
    several = request.n > 1
    expected = request.expected_answer
    return ReasoningResponse(
        id=running.id,
        created=running.created,
        request_id=request_id,
        response=shown.response,
        reasoning=shown.reasoning,
        answer=shown.answer,
        final_answer=shown.final_answer,
        trace=answering.trace(shown),
        details={
            "stage": offered.stage,
            "format": shown.format,
            "reasoning_tokens": shown.thinking.tokens,
            "completion_tokens": shown.completion_tokens,
        },
        finish_reason=shown.finish_reason,
        thinking=shown.thinking,
        vote=answering.vote_report(votes) if several else None,
        confidence=answering.confidence(samples, votes),
        verifier=answering.verify(shown, expected, offered.format) if expected else None,
        samples=samples if request.return_samples else None,
        usage=used,
        timings=Timings(
            first_token_ms=round(1000 * (job.first_token - job.created), 1),
            total_ms=round(1000 * seconds, 1),
            tokens_per_second=round(used.completion_tokens / seconds, 1),
        ),
        seed=request.seed,
        model=_model(service, running),
        warnings=["tie"] if several and votes.tie else [],
    )


def _model(service: Service, running: Running) -> ModelReport:
    offered = running.offered
    return ModelReport(
        base=service.catalog.model, adapter=offered.name, adapter_sha256=offered.sha256
    )


async def events(
    service: Service, running: Running, request: ReasoningRequest, request_id: str
) -> AsyncIterator[bytes]:
    """The same as server-sent events. Sample 0 streams; the others are told when they end."""
    start = {
        "id": running.id,
        "request_id": request_id,
        "seed": request.seed,
        "n": request.n,
        "model": _model(service, running).model_dump(),
        "thinking": {"budget": request.thinking_budget},
    }
    yield event("start", start)
    told: set[int] = set()
    try:
        async for news in running:
            for row, reasoning, answer in news:
                if row == 0 and reasoning:
                    yield event("reasoning", {"sample": 0, "delta": reasoning})
                if row == 0 and answer:
                    yield event("answer", {"sample": 0, "delta": answer})
            if request.n > 1:
                for sample in _just_finished(running, told):
                    yield event("sample", sample)
        for sample in _just_finished(running, told) if request.n > 1 else ():
            yield event("sample", sample)
        yield event("done", report(service, running, request, request_id).model_dump())
    except Problem as problem:
        yield event("error", problem.body(request_id))


def _just_finished(running: Running, told: set[int]) -> list[dict]:
    rows = running.job.thinking.rows
    new = [i for i, row in enumerate(rows) if row.finish_reason and i not in told]
    if not new:
        return []
    told.update(new)
    samples = answering.finished_samples(running.job.thinking, only=new)
    return [
        {
            "sample": i,
            "final_answer": sample.final_answer,
            "format": sample.format,
            "finish_reason": sample.finish_reason,
            "thinking": sample.thinking.model_dump(),
        }
        for i, sample in zip(new, samples, strict=True)
    ]


def event(name: str, data: dict) -> bytes:
    """One server-sent event. JSON holds no raw line ends, so one data line is enough."""
    return f"event: {name}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n".encode()
