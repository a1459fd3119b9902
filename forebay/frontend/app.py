"""The HTTP application: which route is answered by what."""

from collections.abc import Awaitable, Callable

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

import forebay
from forebay.frontend import admin, errors, text
from forebay.frontend.auth import RequireKey
from forebay.frontend.chat import chat_completions
from forebay.frontend.completions import completions
from forebay.frontend.service import Service

Handler = Callable[[Service, Request], Awaitable[Response]]

ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("POST", "/v1/completions", completions),
    ("POST", "/v1/chat/completions", chat_completions),
    ("GET", "/v1/models", admin.models),
    ("GET", "/v1/models/{name:path}", admin.model),
    ("POST", "/tokenize", text.tokenize),
    ("POST", "/detokenize", text.detokenize),
    ("GET", "/version", admin.version),
    ("GET", "/health", admin.health),
    ("GET", "/ready", admin.ready),
    ("GET", "/metrics", admin.metrics),
    ("GET", "/cache", admin.cache),
    ("GET", "/timeline", admin.timeline),
    ("POST", "/cache/flush", admin.flush),
    ("POST", "/flush_cache", admin.flush),
)


def build_app(service: Service) -> FastAPI:
    # Bodies are read and checked by hand (`protocol`), so a generated schema would say nothing about them.
    app = FastAPI(
        title="Forebay",
        version=forebay.__version__,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
    )
    app.router.redirect_slashes = False
    errors.install(app)
    for method, path, handler in ROUTES:
        app.add_api_route(path, _route(service, handler), methods=[method], response_model=None)
    if service.settings.api_key is not None:
        app.add_middleware(RequireKey, api_key=service.settings.api_key)
    return app


def _route(service: Service, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    async def route(request: Request) -> Response:
        return await handler(service, request)

    return route
