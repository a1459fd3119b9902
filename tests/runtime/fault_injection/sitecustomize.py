"""Faults inside real processes: a directory of this file on PYTHONPATH makes ranks and planner obey.

The file that TEST_RANK_FAULTS names holds orders to both; JSON, replaced as a whole (rename) at any time:

    fail_fetch       a rank raises ``MemoryError`` in its FETCH handler
    hold_fetch, hold_store, hold_load, hold_backup, hold_plan
                     a rank stays at the beginning of that work
    hold_decode      the same for plans that decode and do nothing else
    hold_once_retracted
                     the same for any plan, as soon as the planner has retracted a request
    hold_query       the planner's query thread stays before it asks the store

each with a list of ranks (the planner is -1). Who holds does so until it is no longer named, or a minute has passed. Each time one line
``what rank pid`` goes to the same path + ".log". The planner writes there ``retracted/REQUEST -1 pid`` when a request is retracted,
and likewise ``ticket/REQUEST``, ``query/GROUP`` (the hash of a prompt's first page) and ``used/``, once for each page that was fetched.

TEST_PLANNER holds what the planner takes as given, JSON too: {"always_fetch": true, "QUERY_S": 60.0, "MAX_RETRIES": 0}, and

    patience_s     the time that any ticket may take under the policy "timeout"
    retract_after  a request whose prompt ends with this token is retracted once, when it has emitted a token
    refuse_after   the first hit of a request whose prompt ends with this token finds no host pages
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ORDERS = os.environ.get("TEST_RANK_FAULTS")
PLANNER = os.environ.get("TEST_PLANNER")
THE_PLANNER = -1
RETRACTED = "retracted/"
TICKET, QUERY, USED = "ticket/", "query/", "used/"


def named(what: str, rank: int) -> bool:
    return rank in json.loads(Path(str(ORDERS)).read_text()).get(what, [])


def log_path() -> Path:
    return Path(str(ORDERS) + ".log")


def log(what: str, rank: int) -> None:
    with log_path().open("a") as lines:
        lines.write(f"{what} {rank} {os.getpid()}\n")


def hold(what: str, rank: int) -> None:
    if named(what, rank):
        log(what, rank)
        deadline = time.monotonic() + 60
        while named(what, rank) and time.monotonic() < deadline:
            time.sleep(0.005)


def before(owner: Any, name: str, act: Callable[..., None]) -> None:
    """``act`` is called with all arguments before ``owner``'s function or method ``name``."""
    call = getattr(owner, name)

    def held(*arguments: Any, **named_arguments: Any) -> Any:
        act(*arguments, **named_arguments)
        return call(*arguments, **named_arguments)

    setattr(owner, name, held)


def obey_as_rank() -> None:
    from forebay.core.messages import Plan
    from forebay.pages.hashing import TOKEN_BYTES
    from forebay.runtime import rank as ranks
    from forebay.runtime.boot import WorkerBoot
    from forebay.runtime.copy_engine import CopyEngine
    from forebay.runtime.execute import Executor
    from forebay.runtime.page_io import PageIo

    rank = -1
    load = ranks.load

    def born(boot: WorkerBoot) -> ranks.LoadedRank:
        nonlocal rank
        rank = boot.rank
        return load(boot)

    def run(executor: Executor, plan: Plan) -> None:
        hold("hold_plan", rank)
        if not plan.openings and all(len(piece.tokens) == TOKEN_BYTES for piece in plan.pieces):
            hold("hold_decode", rank)
        if (
            named("hold_once_retracted", rank)
            and log_path().exists()
            and RETRACTED in log_path().read_text()
        ):
            hold("hold_once_retracted", rank)

    class Reader:
        def __init__(self, reader: object) -> None:
            self._reader = reader

        def __getattr__(self, name: str) -> object:
            return getattr(self._reader, name)

        def read(self, pages: object, timeout_s: float) -> object:
            hold("hold_fetch", rank)
            if named("fail_fetch", rank):
                log("fail_fetch", rank)
                raise MemoryError("injected")
            return self._reader.read(pages, timeout_s)  # type: ignore[attr-defined]

    begin = PageIo.__init__

    def init(self: PageIo, *arguments: object, **named_arguments: object) -> None:
        begin(self, *arguments, **named_arguments)  # type: ignore[arg-type]
        self._reader = Reader(self._reader)  # type: ignore[assignment]

    PageIo.__init__ = init  # type: ignore[method-assign]
    ranks.load = born
    before(Executor, "run", run)
    before(PageIo, "_put_batch", lambda *_: hold("hold_store", rank))
    before(CopyEngine, "_load_layer", lambda *_: hold("hold_load", rank))
    before(CopyEngine, "_save", lambda *_: hold("hold_backup", rank))


def obey_as_planner() -> None:
    from forebay.core import building
    from forebay.core.ledger import FetchLedger
    from forebay.core.messages import unpack_tokens
    from forebay.core.replica import Replica
    from forebay.core.request import Request
    from forebay.core.transfers import lookup, policy
    from forebay.core.transfers.tickets import Tickets
    from forebay.runtime import store_access

    given = json.loads(PLANNER or "{}")
    if given.get("always_fetch"):
        policy.FetchRules.pays = lambda *_: True  # type: ignore[method-assign]
    for module in (lookup, store_access):
        for name in ("QUERY_S", "MAX_RETRIES"):
            if name in given and hasattr(module, name):
                setattr(module, name, given[name])
    if "patience_s" in given:
        policy.FetchRules.patience_s = lambda *_: given["patience_s"]  # type: ignore[method-assign]
    forced: set[tuple[str, str]] = set()
    issue = Tickets._issue

    def is_due(what: str, request: Request) -> bool:
        """Whether ``what`` is still to be done to the request, which its prompt's last token says; once."""
        last = unpack_tokens(bytes(request.packed))[request.prompt_tokens - 1]
        if last != given.get(what) or (what, request.request_id) in forced:
            return False
        forced.add((what, request.request_id))
        return True

    def retract_due(replica: Replica, _: object) -> None:
        assert replica.cache is not None
        for request in tuple(replica.running):
            if (
                request.emitted
                and request.last_plan <= replica.cache.retired
                and is_due("retract_after", request)
            ):
                replica.retract(request)

    def issue_or_refuse(desk: Tickets, request: Request, *rest: Any) -> None:
        share, issued = policy.HOLD_SHARE, desk.outcomes["issued"]
        if is_due("refuse_after", request):
            policy.HOLD_SHARE = 0.0
        issue(desk, request, *rest)
        policy.HOLD_SHARE = share
        if desk.outcomes["issued"] > issued:
            log(TICKET + request.request_id, THE_PLANNER)

    def ask(_: object, hashes: object, group: bytes, *__: object, hint: bool = False) -> None:
        if not hint:
            log(QUERY + group.hex(), THE_PLANNER)
            hold("hold_query", THE_PLANNER)

    if ORDERS:
        before(store_access, "match_prefix", ask)
        before(building, "_add_decodes", retract_due)
        before(FetchLedger, "use", lambda _: log(USED, THE_PLANNER))
        before(
            Replica, "retract", lambda _, request: log(RETRACTED + request.request_id, THE_PLANNER)
        )
        Tickets._issue = issue_or_refuse  # type: ignore[method-assign]


try:
    if ORDERS and "forebay.runtime.worker" in sys.orig_argv:
        obey_as_rank()
    if (ORDERS or PLANNER) and "forebay.runtime.planner_process" in sys.orig_argv:
        obey_as_planner()
except BaseException:  # the interpreter would go on, and the process obey nobody
    traceback.print_exc()
    os._exit(3)
