"""Build the HTTP application: routes, lifespan, and error responses.

The engine thread loads the model after the application has started. In the meantime `/health`
returns 200 and `/ready` returns 503.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.resources import files

from fastapi import APIRouter, FastAPI, Security, params
from fastapi.exceptions import RequestValidationError
from fastapi.security import APIKeyHeader, HTTPBearer
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp

from rlm.serving.errors import REFUSED, HTTPProblem, as_problem
from rlm.serving.middleware import SecurityMiddleware, SecuritySettings, add_cors
from rlm.serving.routes_openai import openai_routes
from rlm.serving.routes_reasoning import phase1_routes
from rlm.serving.service import Service

# These describe the API key in /openapi.json. The key is checked by SecurityMiddleware.
SEND_KEY = [
    Security(HTTPBearer(auto_error=False)),
    Security(APIKeyHeader(name="X-API-Key", auto_error=False)),
]
PAGE = files("rlm.serving").joinpath("page")
PAGE_POLICY = (  # allows only the page's own files and this server, and no HTML created by a script
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)


def create_app(service: Service, settings: SecuritySettings) -> ASGIApp:
    """Create the application with the SecurityMiddleware, and with CORS for allowed origins."""
    routes = create_routes(service, needs_key=settings.keys.required)
    app = SecurityMiddleware(routes, settings, service.metrics.count_response)
    return add_cors(app, settings.allowed_origins) if settings.allowed_origins else app


def create_routes(service: Service, *, needs_key: bool = False) -> FastAPI:
    """Create the application without the SecurityMiddleware.

    Args:
        needs_key: whether /openapi.json and /phase1/info say that requests need an API key.
    """

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
    app.include_router(_state_routes(service, key))
    app.include_router(phase1_routes(service, needs_key), dependencies=key)
    app.include_router(openai_routes(service), dependencies=key)
    app.include_router(_page_routes())
    for kind in (HTTPProblem, RequestValidationError, HTTPException, ClientDisconnect, Exception):
        app.add_exception_handler(kind, _refuse)
    return app


async def _watch(service: Service) -> None:
    """Fail all accepted requests when the engine hangs or is dead."""
    while True:
        await asyncio.sleep(0.5)
        if problem := service.engine_problem():  # no requests are accepted while the model loads
            service.fail_all(problem)


def _state_routes(service: Service, key: Sequence[params.Depends]) -> APIRouter:
    router = APIRouter(tags=["state"])

    @router.head("/health", include_in_schema=False)
    @router.get("/health", summary="Check that the process responds")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @router.head("/ready", include_in_schema=False)
    @router.get("/ready", summary="Check that the server accepts requests")
    async def ready() -> dict[str, str]:
        if problem := service.not_ready():
            raise problem
        return {"status": "ready"}

    @router.get(
        "/metrics",
        summary="Metrics in Prometheus' text format",
        response_class=PlainTextResponse,
        dependencies=key,
    )
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    return router


def _page_routes() -> APIRouter:
    router = APIRouter(include_in_schema=False)
    headers = {"Content-Security-Policy": PAGE_POLICY}

    def serve(path: str, name: str, media_type: str) -> None:
        text = PAGE.joinpath(name).read_text(encoding="utf-8")

        @router.api_route(path, methods=["GET", "HEAD"])
        async def page_file() -> Response:
            return Response(text, media_type=media_type, headers=headers)

    serve("/", "index.html", "text/html")
    serve("/page.css", "page.css", "text/css")
    serve("/page.js", "page.js", "text/javascript")
    return router


async def _refuse(request: Request, error: Exception) -> Response:
    """Return the response for an exception.

    Starlette raises unexpected exceptions again after this response, so that they are logged.
    """
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)
    response = as_problem(error).response(request.state.request_id)
    if isinstance(error, HTTPException):
        response.headers.update(error.headers or {})  # such as Allow for a 405
    return response
