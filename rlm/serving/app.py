"""The HTTP application: routes, and one shape of error.

Nothing loads at import, and nothing before the application starts up: then the engine's thread
loads the model while `/health` answers and `/ready` says 503.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from rlm.serving import docs
from rlm.serving import routes_openai as openai
from rlm.serving import routes_reasoning as phase1
from rlm.serving.errors import Problem, invalid
from rlm.serving.schema import MOST_SAMPLES, PROMPT_CHARS, ReasoningRequest, ReasoningResponse
from rlm.serving.service import TEMPERATURE_OF_SEVERAL, Service
from rlm.serving.streaming import ClientGone, EventStream, until_done
from rlm.serving.strict_json import parse, require_json

WATCH_SECONDS = 0.5  # between looks at the engine
PAGE = files("rlm.serving").joinpath("page")
PAGE_POLICY = (  # the page's own files and this server, nothing else; no markup made by a script
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)


def create_app(service: Service, *, needs_key: bool = False) -> FastAPI:
    """The application without its walls: `rlm.serving.middleware.secure` puts them around it."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.engine.start()
        watch = asyncio.create_task(_watch(service))
        yield
        watch.cancel()
        await asyncio.to_thread(service.engine.stop)

    app = FastAPI(
        title="Reasoning model",
        version="1",
        description="A language model that shows its reasoning before it answers.",
        lifespan=lifespan,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
        responses={"default": docs.REFUSED},
    )
    app.include_router(_state_routes(service))
    app.include_router(_phase1_routes(service, needs_key))
    app.include_router(_openai_routes(service))
    app.include_router(_page_routes(app))
    app.add_exception_handler(Problem, lambda request, error: error.response(_id(request)))
    app.add_exception_handler(
        RequestValidationError,
        lambda request, error: invalid(error.errors()).response(_id(request)),
    )
    app.add_exception_handler(HTTPException, _http_exception)
    app.add_exception_handler(ClientGone, lambda request, error: Response(status_code=499))
    app.add_exception_handler(Exception, _bug)
    docs.complete_schema(app, service, needs_key)
    return app


# --- routes ---------------------------------------------------------------------------------


def _state_routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["state"])

    @router.head("/health", include_in_schema=False)
    @router.get("/health", summary="Whether the process answers")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @router.head("/ready", include_in_schema=False)
    @router.get("/ready", summary="Whether it takes requests now")
    async def ready() -> dict[str, str]:
        if problem := service.not_ready():
            raise problem
        return {"status": "ready"}

    @router.get(
        "/metrics",
        summary="Counters in Prometheus' text format",
        response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    )
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    return router


def _phase1_routes(service: Service, needs_key: bool) -> APIRouter:
    router = APIRouter(prefix="/phase1", tags=["reasoning"], route_class=StrictRoute)

    @router.post(
        "/reasoning",
        summary="Answer a question, with the reasoning",
        response_model=ReasoningResponse,
        responses={200: {"content": docs.event_stream(*phase1.EVENTS)}},
    )
    async def reasoning(body: ReasoningRequest, request: Request) -> Response:
        running = await service.accept(phase1.to_ask(body))
        if body.stream:
            events = phase1.events(service, running, body, _id(request))
            return EventStream(service, "phase1", running, events)
        await until_done(service, "phase1", running, request)
        report = phase1.report(service, running, body, _id(request))
        return Response(report.model_dump_json(), media_type="application/json")

    @router.post("/reasoning/{id}/answer", status_code=202, summary="Stop thinking and answer now")
    async def answer_now(id: str) -> dict[str, str]:
        service.answer_now(id)
        return {"id": id, "status": "closing"}

    @router.get("/info", summary="What is served, and its limits")
    async def info() -> dict[str, Any]:
        return _info(service, needs_key)

    return router


def _openai_routes(service: Service) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["openai"], route_class=StrictRoute)

    @router.post(
        "/chat/completions",
        summary="OpenAI's protocol",
        response_model=dict[str, Any],
        responses={200: {"content": docs.event_stream()}},
    )
    async def chat(body: openai.ChatRequest, request: Request) -> Response:
        try:
            running = await service.accept(openai.to_ask(body))
        except Problem as problem:
            raise openai.in_own_words(problem, body) from None
        if body.stream:
            chunks = openai.chunks(running, body, _id(request))
            return EventStream(service, "openai", running, chunks)
        await until_done(service, "openai", running, request)
        return JSONResponse(openai.completion(running))

    @router.get("/models", summary="Adapters, as OpenAI lists models")
    async def models() -> dict[str, Any]:
        return openai.models(service)

    return router


def _page_routes(app: FastAPI) -> APIRouter:
    router = APIRouter(include_in_schema=False)
    headers = {"Content-Security-Policy": PAGE_POLICY}

    def serve(path: str, name: str, media_type: str) -> None:
        text = PAGE.joinpath(name).read_text(encoding="utf-8")

        @router.head(path)
        @router.get(path)
        async def page_file() -> Response:
            return Response(text, media_type=media_type, headers=headers)

    serve("/", "index.html", "text/html")
    serve("/page.css", "page.css", "text/css")
    serve("/page.js", "page.js", "text/javascript")

    @router.get("/docs")
    async def documentation() -> Response:
        return HTMLResponse(docs.page(app.openapi()), headers=headers)

    return router


def _info(service: Service, needs_key: bool) -> dict[str, Any]:
    catalog, limits = service.catalog, service.limits
    default = catalog.offered[catalog.default]
    return {
        "model": {
            "base": catalog.model,
            "base_hash": catalog.base_hash,
            "adapter": default.name,
            "adapter_sha256": default.sha256,
            "stage": default.stage,
        },
        "adapters": list(catalog.offered),
        "default_adapter": catalog.default,
        "limits": {
            "prompt_chars": PROMPT_CHARS,
            "prompt_tokens": limits.prompt_tokens,
            "max_new_tokens": limits.new_tokens,
            "n": MOST_SAMPLES,
            "stop": 4,
            "requests_in_queue": limits.requests,
            "tokens_in_queue": limits.tokens,
            "deadline_s": limits.seconds,
        },
        "defaults": {
            "max_new_tokens": limits.new_tokens,
            "temperature_one": 0.0,
            "temperature_many": TEMPERATURE_OF_SEVERAL,
        },
        "running": {"requests": service.requests, "tokens": service.tokens},
        "public_url": service.public_url,
        "needs_key": needs_key,
    }


# --- reading --------------------------------------------------------------------------------


class StrictRequest(Request):
    """A request whose JSON was read by our parser."""

    async def json(self) -> Any:
        if not hasattr(self, "_value"):
            require_json(self.scope["headers"])
            self._value = parse(await self.body())
        return self._value


class StrictRoute(APIRoute):
    """Reads the body before FastAPI would, so that its mistakes are answered in our shape."""

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:
        handle = super().get_route_handler()

        async def strict(request: Request) -> Response:
            request = StrictRequest(request.scope, request.receive)
            if self.body_field is not None:
                await request.json()
            return await handle(request)

        return strict


def _id(request: Request) -> str:
    return request.scope.get("state", {}).get("request_id", "")


async def _http_exception(request: Request, error: HTTPException) -> Response:
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "validation")
    response = Problem(error.status_code, code, str(error.detail)).response(_id(request))
    response.headers.update(error.headers or {})  # Allow, of a 405
    return response


async def _bug(request: Request, error: Exception) -> Response:
    """The traceback goes to the log (the server raises it again), not to the client."""
    return Problem(500, "internal", "a fault of the server").response(_id(request))


async def _watch(service: Service) -> None:
    """End the waiting of all when the engine hangs or has died for good."""
    while True:
        await asyncio.sleep(WATCH_SECONDS)
        if service.engine.state != "loading" and not service.engine.alive:
            detail = "the engine does not answer"
            service.fail_all(Problem(503, "engine_down", detail, retry_after=10))
