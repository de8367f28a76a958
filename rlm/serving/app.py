"""Builds the HTTP application: routes, lifespan, and one shape of error.

Nothing loads at import, and nothing before the application starts up: then the engine's thread
loads the model while `/health` answers and `/ready` says 503.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.resources import files

from fastapi import APIRouter, FastAPI, Security
from fastapi.exceptions import RequestValidationError
from fastapi.security import APIKeyHeader, HTTPBearer
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from rlm.serving.errors import REFUSED, Problem, invalid
from rlm.serving.routes_openai import openai_routes
from rlm.serving.routes_reasoning import phase1_routes
from rlm.serving.service import Service

# For /openapi.json alone: SecurityMiddleware has checked the key.
SEND_KEY = [
    Security(HTTPBearer(auto_error=False)),
    Security(APIKeyHeader(name="X-API-Key", auto_error=False)),
]
WATCH_SECONDS = 0.5  # between looks at the engine
PAGE = files("rlm.serving").joinpath("page")
PAGE_POLICY = (  # the page's own files and this server, nothing else; no markup made by a script
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)


def create_app(service: Service, *, needs_key: bool = False) -> FastAPI:
    """Create the application; `rlm.serving.middleware.SecurityMiddleware` goes around it."""

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
        responses={"default": REFUSED},
    )
    key = SEND_KEY if needs_key else []
    app.include_router(_state_routes(service))
    app.include_router(_metrics_route(service), dependencies=key)
    app.include_router(phase1_routes(service, needs_key), dependencies=key)
    app.include_router(openai_routes(service), dependencies=key)
    app.include_router(_page_routes())
    _handle_errors(app)
    return app


async def _watch(service: Service) -> None:
    """End the waiting of all when the engine hangs or has died."""
    while True:
        await asyncio.sleep(WATCH_SECONDS)
        if service.engine.state != "loading" and not service.engine.alive:
            detail = "the engine does not answer"
            service.fail_all(Problem(503, "engine_down", detail, retry_after=10))


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

    return router


def _metrics_route(service: Service) -> APIRouter:
    router = APIRouter(tags=["state"])

    @router.get(
        "/metrics",
        summary="Counters in Prometheus' text format",
        response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    )
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    return router


def _page_routes() -> APIRouter:
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
    return router


def _handle_errors(app: FastAPI) -> None:
    """Answer every error in the shape of Problem."""

    @app.exception_handler(Problem)
    async def problem(request: Request, error: Problem) -> Response:
        return error.response(request.state.request_id)

    @app.exception_handler(RequestValidationError)
    async def validation(request: Request, error: RequestValidationError) -> Response:
        return invalid(error.errors()).response(request.state.request_id)

    @app.exception_handler(HTTPException)
    async def http_exception(request: Request, error: HTTPException) -> Response:
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "validation")
        refusal = Problem(error.status_code, code, str(error.detail))
        response = refusal.response(request.state.request_id)
        response.headers.update(error.headers or {})  # Allow, of a 405
        return response

    @app.exception_handler(ClientDisconnect)
    async def disconnect(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=499)

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        """The traceback goes to the log (the server raises it again), not to the client."""
        refusal = Problem(500, "internal", "a fault of the server")
        return refusal.response(request.state.request_id)
