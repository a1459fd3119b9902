"""What the planner knows of its replica, and the moves of a request between waiting and running.

`Planner` decides when; `admission` and `building` decide who and what; this file keeps the books.
"""

from collections import deque
from dataclasses import dataclass, field

from forebay.core.digest import ZERO
from forebay.core.ledger import FetchLedger
from forebay.core.lifecycle import Cause, Phase, move
from forebay.core.pace import Pace
from forebay.core.page_cache import PageCache
from forebay.core.request import Request
from forebay.core.residency import CACHE, Residency
from forebay.core.spans import TimedSpan
from forebay.core.transfers.backup import BackupQueue, WritePolicy
from forebay.core.transfers.load import LoadQueue
from forebay.core.transfers.policy import FetchPolicy, FetchRules
from forebay.core.transfers.routes import StagedRoute, TicketRoute
from forebay.core.transfers.store import StoreQueue
from forebay.core.transfers.tickets import Tickets
from forebay.core.waiting import WaitingQueue


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerConfig:
    """``ranks`` = pp * tp; ``sampling_rank``: TP rank 0 of the last stage. Tokens, seconds.

    Rule R3: a rank silent for ``silence_s``, or a plan later than ``late_base_s`` + ``late_factor`` x its prediction, ends the
    epoch; after ``max_restarts`` epochs in a row that brought no request a token the grid has failed.
    ``check_every``: all invariants are checked every so many steps, not only the cheap ones; 0 = never.
    ``load_back_threshold``: fewer tokens in host memory are computed again rather than loaded. ``staged``: stored prefixes are fetched
    stage by stage, the baseline, instead of by ticket. ``residency``: what host pages are for. ``hits_ahead``: hits
    have a plan of their own before the next chunk's (other engines let them ride with it).
    """

    pp: int
    tp: int = 1
    page_size: int
    chunk_size: int
    max_context: int
    max_running: int
    max_waiting: int
    prefix_first: bool = False
    fingerprint: bytes = b""
    kv_dtype: str = "float32"
    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH
    load_back_threshold: int = 10
    has_store: bool = False
    fetch_policy: FetchPolicy = FetchPolicy.TIMEOUT
    fetch_threshold: int = 256
    staged: bool = False
    residency: Residency = CACHE
    hits_ahead: bool = True
    silence_s: float = 5.0
    late_base_s: float = 10.0
    late_factor: float = 5.0
    max_restarts: int = 3
    check_every: int = 0

    @property
    def ranks(self) -> int:
        return self.pp * self.tp

    @property
    def sampling_rank(self) -> int:
        return (self.pp - 1) * self.tp

    @property
    def chunk_tokens(self) -> int:
        """Prefill tokens of one plan: ``chunk_size`` in whole pages, at least one, since chunks end on page borders."""
        return max(self.chunk_size // self.page_size, 1) * self.page_size

    @property
    def max_plan_tokens(self) -> int:
        """No plan has more: one chunk, and one decode or hit of at most a page for every running request."""
        return self.chunk_tokens + self.max_running * self.page_size


@dataclass(slots=True)
class InFlight:
    """A plan that not all ranks have acknowledged. ``slots`` and ``sampling``: of each piece that yields a token, and its request;
    ``requests``: of all pieces; ``scoring``: slots and ids of those whose prompt is scored; ``is_ahead``: of hits that went ahead
    of chunks, whose plan may be built too; ``first_stage_s``: the forward pass of the first stage, once it has said so."""

    number: int
    built_at: float
    work: float
    waits_for: set[int]
    slots: list[int]
    sampling: list[Request]
    requests: list[Request]
    tokens: int = 0
    is_ahead: bool = False
    first_stage_s: float = 0.0
    scoring: list[tuple[int, str]] = field(default_factory=list)


@dataclass
class Replica:
    """Requests, pages and plans of one replica. ``cache`` is None while there is no grid."""

    config: PlannerConfig
    cache: PageCache | None = None
    requests: dict[str, Request] = field(default_factory=dict)
    waiting: WaitingQueue = field(default_factory=WaitingQueue)
    unasked: list[Request] = field(
        default_factory=list
    )  # came to wait, and have not asked the store for what they miss
    running: list[Request] = field(default_factory=list)  # in order of admission
    decodes: deque[Request] = field(
        default_factory=deque
    )  # their next token may be computed, longest waiting first
    computing: dict[bytes, Request] = field(
        default_factory=dict
    )  # full pages that a running request has yet to compute
    in_flight: deque[InFlight] = field(default_factory=deque)
    loads: LoadQueue = field(default_factory=LoadQueue)
    backups: BackupQueue = field(init=False)
    stores: StoreQueue = field(init=False)
    ledger: FetchLedger = field(default_factory=FetchLedger)  # of all epochs
    tickets: Tickets = field(init=False)
    pace: Pace = field(default_factory=Pace)
    first_stage: Pace = field(default_factory=Pace)  # of its forward passes alone
    built: int = 0
    digest: bytes = ZERO
    last_retired_at: float = 0.0
    gives_way_until: float | None = (
        None  # when a waiting request will let those that fetch go first no longer
    )
    retractions: int = 0
    spans: list[TimedSpan] = field(default_factory=list)  # since the last step
    cached_device_tokens: int = 0
    cached_host_tokens: int = 0
    cached_store_tokens: int = 0
    _arrivals: int = 0
    _slots: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        config = self.config
        self.backups = BackupQueue(config.residency)
        self.stores = StoreQueue(config.residency)
        self.tickets = Tickets(
            FetchRules(config.fetch_policy, config.page_size, config.fetch_threshold),
            (config.pp, config.tp),
            StagedRoute if config.staged else TicketRoute,
            self.ledger,
        )

    @property
    def free_slots(self) -> int:
        return len(self._slots)

    def next_arrival(self) -> int:
        self._arrivals += 1
        return self._arrivals

    def take_spans(self) -> list[TimedSpan]:
        taken = self.spans + self.tickets.spans
        self.spans, self.tickets.spans = [], []
        return taken

    @property
    def is_idle(self) -> bool:
        """Nothing runs, nothing is in flight: no page will come free by itself."""
        moving = self.in_flight or self.backups.in_flight or self.stores.is_busy
        return not (self.running or moving) and self.tickets.is_idle

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.config.page_size)

    def pages_at_most(self, request: Request) -> int:
        """Pages at the request's end: its last token is never an input."""
        assert request.params.max_tokens is not None
        return self.pages_for(request.prompt_tokens + request.params.max_tokens - 1)

    def start_epoch(
        self, epoch: int, device_pages: int, host_pages: int, s_per_token: float, now: float
    ) -> None:
        self.tickets.start_epoch(epoch)
        self.cache = PageCache(
            device_pages, host_pages, self.built, self.config.residency, self.ledger
        )
        self.digest = ZERO
        self.pace = Pace(s_per_token)
        self.first_stage = Pace(s_per_token / self.config.pp)
        self.last_retired_at = now
        self._slots = list(range(self.config.max_running - 1, -1, -1))

    def at_work(self) -> list[Request]:
        """Requests for which a rank computes or fetches right now."""
        planned = {id(request) for record in self.in_flight for request in record.requests}
        return [
            request
            for request in self.requests.values()
            if request.phase is Phase.FETCHING or id(request) in planned
        ]

    def lose_grid(self) -> None:
        """Pages and plans in flight are gone; running requests wait again, with the tokens they have emitted.

        What may have been lost by fetching is computed: after a rank's fault, and from the second loss on.
        """
        self.cache = None
        self.in_flight.clear()
        self.decodes.clear()
        self.loads.clear()
        self.backups.clear()
        self.stores.clear()
        self.tickets.clear()
        for request in self.requests.values():
            move(request, Cause.LOSE_GRID)
            request.fetched = request.suspect or request.losses > 1
            request.asked_again = False
            request.ready.clear()
        self.computing.clear()
        running, self.running = self.running, []
        for request in running:
            self._wait_again(request)
        self.unasked = list(self.waiting)

    def start_running(self, request: Request) -> None:
        """Take a slot; the caller has set the request's pages."""
        self.waiting.remove(request)
        move(request, Cause.ADMIT)
        request.slot = self._slots.pop()
        self.running.append(request)
        for index in range(len(request.nodes), request.length // self.config.page_size):
            self.computing.setdefault(request.hashes[index], request)

    def stop_running(self, request: Request) -> None:
        """Give up slot, pins and pages; pages in use by plans in flight are freed when those retire.

        The slot is free at once: plans are applied in order, so a later plan's opening meets the mirror after the last use.
        """
        assert self.cache is not None
        self.running.remove(request)
        if request in self.decodes:
            self.decodes.remove(request)
        for index in range(len(request.nodes), len(request.hashes)):
            if self.computing.get(request.hashes[index]) is request:
                del self.computing[request.hashes[index]]
        self._slots.append(request.slot)
        self.cache.release(request.nodes, request.own_pages, request.last_plan)
        self.loads.cancel_unused(self.cache)

    def retract(self, request: Request) -> None:
        """Back to waiting, at its old place. Its full pages stay cached until they are evicted."""
        self.stop_running(request)
        self.retractions += 1
        move(request, Cause.RETRACT)
        self._wait_again(request)

    def _wait_again(self, request: Request) -> None:
        request.reset()
        self.waiting.add(request)
