"""Faults inside real ranks: a directory of this file on PYTHONPATH makes every rank obey the orders in the file TEST_RANK_FAULTS names.

    {"fail_fetch": [ranks], "hold_fetch": [ranks], "hold_store": [ranks]}      JSON; replaced as a whole (rename) at any time

A failing rank raises ``MemoryError`` in its FETCH handler; a holding one stays in its read or write until it is no longer named, or a
minute has passed. Each time one line ``what rank pid`` goes to the same path + ".log".
"""

import json
import os
import sys
import time
from pathlib import Path

ORDERS = os.environ.get("TEST_RANK_FAULTS")


def obey() -> None:
    from forebay.runtime.page_io import PageIo

    orders = Path(str(ORDERS))
    begin, put = PageIo.__init__, PageIo._put_batch

    def named(what: str, rank: int) -> bool:
        return rank in json.loads(orders.read_text()).get(what, [])

    def log(what: str, rank: int) -> None:
        with orders.with_name(orders.name + ".log").open("a") as lines:
            lines.write(f"{what} {rank} {os.getpid()}\n")

    def hold(what: str, rank: int) -> None:
        if named(what, rank):
            log(what, rank)
            deadline = time.monotonic() + 60
            while named(what, rank) and time.monotonic() < deadline:
                time.sleep(0.005)

    class Reader:
        def __init__(self, reader: object, rank: int) -> None:
            self._reader, self._rank = reader, rank

        def __getattr__(self, name: str) -> object:
            return getattr(self._reader, name)

        def read(self, pages: object, timeout_s: float) -> object:
            hold("hold_fetch", self._rank)
            if named("fail_fetch", self._rank):
                log("fail_fetch", self._rank)
                raise MemoryError("injected")
            return self._reader.read(pages, timeout_s)  # type: ignore[attr-defined]

    def init(self: PageIo, *arguments: object, **named_arguments: object) -> None:
        begin(self, *arguments, **named_arguments)  # type: ignore[arg-type]
        self._reader = Reader(self._reader, self._rank)  # type: ignore[assignment]

    def held_put(self: PageIo, pages: object) -> object:
        hold("hold_store", self._rank)
        return put(self, pages)  # type: ignore[arg-type]

    PageIo.__init__ = init  # type: ignore[assignment, method-assign]
    PageIo._put_batch = held_put  # type: ignore[assignment, method-assign]


if ORDERS and "forebay.runtime.worker" in sys.orig_argv:
    obey()
