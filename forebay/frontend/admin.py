"""What an operator asks of a server: is it alive, is it ready, what it has cached, and to forget that."""

import asyncio
import time

from starlette.requests import Request
from starlette.responses import Response

import forebay
from forebay.core.messages import GridState, StoreHealth, TierUse
from forebay.frontend.disconnect import run_while_connected
from forebay.frontend.errors import ApiError
from forebay.frontend.limits import read_body
from forebay.frontend.protocol import FlushRequest, decode_body
from forebay.frontend.responses import json_body
from forebay.frontend.service import Service
from forebay.observe.events import NS
from forebay.observe.figures import StoreState
from forebay.observe.timeline import chrome_trace

MAX_FLUSH_TIMEOUT_S = 600.0
TIMELINE_S = 30
MAX_TIMELINE_S = 3600
_TIERS = ("device", "host", "store")


async def health(service: Service, _: Request) -> Response:
    """Alive: the planner ticks. 503 says why not. A store that is not well is said, and no reason not to be alive."""
    engine = service.engine
    if engine.death.done():
        return _state(503, "failed", engine.death.result())
    if engine.snapshot is None:
        return _state(503, GridState.STARTING, "the planner is starting")
    if not engine.is_ticking:
        return _state(503, "silent", "the planner has not been heard for a while")
    snapshot = engine.snapshot
    return _json(
        {
            "state": snapshot.state,
            "detail": snapshot.detail,
            "store": {**_store(snapshot.store), "lost": engine.report.store.lost},
            "without": engine.report.without,
        }
    )


async def ready(service: Service, _: Request) -> Response:
    """Ready: requests are taken and run now."""
    engine = service.engine
    if engine.death.done():
        return _state(503, "failed", engine.death.result())
    if engine.snapshot is None:
        return _state(503, GridState.STARTING, "the planner is starting")
    is_ready = engine.snapshot.state is GridState.READY and engine.is_ticking
    return _state(200 if is_ready else 503, engine.snapshot.state, engine.snapshot.detail)


async def version(service: Service, _: Request) -> Response:
    return _json({"version": forebay.__version__})


async def models(service: Service, _: Request) -> Response:
    return _json({"object": "list", "data": [_card(service, name) for name in service.names]})


async def model(service: Service, request: Request) -> Response:
    name = request.path_params["name"]
    service.check_model(name)
    return _json(_card(service, name))


async def metrics(service: Service, _: Request) -> Response:
    body, media_type = service.metrics.render()
    return Response(body, headers={"Content-Type": media_type})


async def cache(service: Service, _: Request) -> Response:
    """Capacity and use by tier (pages of each rank; the store's in bytes), hits in tokens. Raises ``EngineDown`` before there is a
    cache."""
    snapshot = service.require_ready()
    cached = {
        "device": snapshot.cached_device_tokens,
        "host": snapshot.cached_host_tokens,
        "store": snapshot.cached_store_tokens,
    }
    hits = {"prompt_tokens": snapshot.prompt_tokens, "cached_tokens": cached}
    tiers = {
        "device": _use(snapshot.device),
        "host": _use(snapshot.host),
        "store": _store_use(service.engine.report.store),
    }
    return _json(
        {
            "page_size": service.settings.page_size,
            "tiers": tiers,
            "hits": hits,
            "store": _store(snapshot.store),
        }
    )


async def timeline(service: Service, request: Request) -> Response:
    """The spans of all processes in the last ``seconds``, as a Chrome trace. Raises ``ApiError`` (400)."""
    text = request.query_params.get("seconds", str(TIMELINE_S))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MAX_TIMELINE_S:
        message = f"seconds is {text!r}; it must be a number above 0 and at most {MAX_TIMELINE_S}"
        raise ApiError(400, message, "seconds", "invalid_value")
    # Drawing takes long enough to be felt by streams, so a thread does it.
    return Response(
        await asyncio.to_thread(_draw_timeline, service, seconds), media_type="application/json"
    )


async def flush(service: Service, request: Request) -> Response:
    """Drains what is in flight, then forgets what the tiers hold; of the store: the pages of this server's model and grid.

    Raises ``ApiError``: 400 for a tier that is not there, 409 with what was still in use at the deadline.
    """
    body = await read_body(request, service.body_bytes_max)
    asked = decode_body(body or b"{}", FlushRequest)
    there = [tier for tier in _TIERS if tier != "store" or has_store(service)]
    for tier in asked.tiers:
        if tier not in there:
            why = "; this server has no --store" if tier in _TIERS else ""
            raise ApiError(
                400,
                f"there is no tier {tier!r}{why}; allowed: {', '.join(there)}",
                "tiers",
                "invalid_value",
            )
    if not asked.tiers:
        raise ApiError(
            400, f"tiers is empty; allowed: {', '.join(there)}", "tiers", "invalid_value"
        )
    if not 0 <= asked.timeout_s <= MAX_FLUSH_TIMEOUT_S:
        message = (
            f"timeout_s is {asked.timeout_s}; it must be between 0 and {MAX_FLUSH_TIMEOUT_S:.0f}"
        )
        raise ApiError(400, message, "timeout_s", "invalid_value")
    done = await run_while_connected(
        request.receive, service.engine.flush(asked.tiers, asked.timeout_s)
    )
    if done.busy:
        raise ApiError(
            409,
            f"still in use after {asked.timeout_s} s: {', '.join(done.busy)}; try again later",
            code="busy",
        )
    return _json({"tiers": asked.tiers, "freed_pages": done.freed_pages})


def _draw_timeline(service: Service, seconds: float) -> bytes:
    since_ns = time.monotonic_ns() - int(seconds * NS)
    return json_body(
        chrome_trace([service.engine.rings.flight_record("asked for over HTTP", since_ns)])
    )


def _card(service: Service, name: str) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "forebay",
        "max_model_len": service.model.max_context,
    }


def _use(tier: TierUse) -> dict[str, int]:
    return {name: getattr(tier, name) for name in TierUse.__struct_fields__}


def _store(health: StoreHealth) -> dict[str, object]:
    return {name: getattr(health, name) for name in StoreHealth.__struct_fields__}


def has_store(service: Service) -> bool:
    """Also one that the server was to have may have turned out to be nowhere (`Report.without`)."""
    snapshot = service.engine.snapshot
    there = snapshot is None or snapshot.store.state != "none"
    return service.settings.store != "none" and there


def _store_use(store: StoreState) -> dict[str, object]:
    return {"url": store.url, "writing": store.writing, **store.use}


def _state(status: int, state: str, detail: str) -> Response:
    return Response(
        json_body({"state": state, "detail": detail}), status, media_type="application/json"
    )


def _json(value: object) -> Response:
    return Response(json_body(value), media_type="application/json")
