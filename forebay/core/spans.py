"""What is worth seeing in time: the kinds of spans of all processes, and those that the planner's core itself can tell.

`forebay.observe` keeps them; the core only says them, as one more effect of a step.
"""

import hashlib
from enum import StrEnum

from msgspec import Struct


class SpanKind(StrEnum):
    """What a span shows, and what its ``id``, ``value``, ``part`` and ``request`` are there; others are 0 (``part``: -1).

    Files name the kinds they use, so members may be added anywhere.
    """

    REQUEST = "request"  # frontend: submitted to finished; value = tokens out, request
    TTFT = "ttft"  # frontend: submitted to first token; request
    QUEUE = "queue"  # planner: arrival to first admission; value = cached prompt tokens, request
    QUERY = (
        "query"  # planner: the store asked and answered; id = query, value = pages found, request
    )
    TICKET = "ticket"  # planner: issued to every rank's final word; id = transfer, value = safe pages, request = who asked first
    PREFILL = "prefill"  # planner: first admission to first token; id = the plan that yields it, value = computed tokens, request
    PLAN = "plan"  # planner: built to retired; id = plan, value = tokens
    ACK = "ack"  # planner: a plan built to one rank's acknowledgement; id = plan, part = rank
    APPLY = "apply"  # rank: a plan applied to the mirror, its batch made; id = plan, value = pieces
    RECEIVE = (
        "receive"  # rank: waiting for hidden states of the stage before; id = plan, value = tokens
    )
    FORWARD = "forward"  # rank: its layers; id = plan, value = tokens, part = stage
    LOAD_WAIT = "load-wait"  # rank: the forward pass waiting for a layer's load; id = plan, part = layer of the stage
    SAMPLE = "sample"  # rank: choosing tokens; id = plan, value = tokens
    LOAD = "load"  # rank: one layer of a plan's loads; id = plan, value = pages, part = layer of the stage
    BACKUP = "backup"  # rank: id = transfer, value = pages
    STAGED = "staged"  # rank: a staged ticket waiting for the compute loop to look; id = transfer, value = pages
    FETCH = "fetch"  # rank: its part of a ticket; id = transfer, value = pages
    STORE = "store"  # rank: id = transfer, value = pages stored


class TimedSpan(Struct, frozen=True, gc=False):
    """``start``, ``end``: seconds of the monotonic clock that `Planner.step` is given."""

    kind: SpanKind
    start: float
    end: float
    id: int = 0
    value: int = 0
    part: int = -1
    request: int = 0


def request_number(request_id: str) -> int:
    """A number for a request that frontend and planner find alike: 63 bits of its id's BLAKE2b."""
    return (
        int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=8).digest(), "little") >> 1
    )
