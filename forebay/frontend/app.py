"""The HTTP application: which route is answered by what."""

from collections.abc import Awaitable, Callable

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

import forebay
from forebay.frontend import admin, errors, text
from forebay.frontend.auth import RequireKey
from forebay.frontend.chat import chat_completions
from forebay.frontend.completions import completions
from forebay.frontend.service import Service
from forebay.settings import listed

# Pages that this machine itself serves.
LOCAL_ORIGINS = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"

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
        methods = ["GET", "HEAD"] if method == "GET" else [method]
        app.add_api_route(path, _route(service, handler), methods=methods, response_model=None)
    if service.keys.are_set:
        app.add_middleware(RequireKey, keys=service.keys)
    _allow_origins(app, service.settings.cors_origins)
    return app


def _allow_origins(app: FastAPI, origins: str | None) -> None:
    """In front of the keys: a browser's preflight can never carry one."""
    if origins == "none":
        return
    app.add_middleware(
        CORSMiddleware,
        allow_origins=listed(origins or ""),
        allow_origin_regex=None if origins else LOCAL_ORIGINS,
        allow_methods=["GET", "HEAD", "POST"],
        allow_headers=["*"],
        expose_headers=["Retry-After"],
    )


def _route(service: Service, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    async def route(request: Request) -> Response:
        return await handler(service, request)

    return route
