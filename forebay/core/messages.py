"""Every message of the control path, as it stands on the wire.

    frontend  -- Submit, Abort, Flush, CancelFlush ------>  planner
    frontend  <- Outputs, FlushDone, Snapshot ------------  planner
    worker    -- Hello, Loaded, Ready, PlanDone,
                 TransferDone, Heartbeat, Fault,
                 FetchProgress, StagedTaken, StoreDone -->  planner
    worker    <- Allocate, Plan, Stop --------------------  planner     the plan channel
    worker    <- Ticket, Cancel, Store,
                 StagedTicket, StagedReturn --------------  planner     the ticket channel, read by the worker's I/O thread

One frame is one version byte and one msgpack body, at most ``MAX_FRAME_BYTES`` long. Bodies are tagged arrays, so field
*order* is the format: add fields at the end with a default, or raise ``PROTOCOL_VERSION``. `tests/core/test_messages.py`
holds golden bytes. Token ids travel as packed uint32-LE, as the hash chain wants them (`pack_tokens`).

Every message between planner and workers carries the grid epoch; a receiver drops other epochs (rule R1).
"""

import sys
from array import array
from collections.abc import Iterable
from enum import StrEnum
from typing import Generic, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from forebay.core.sampling import SamplingParams

PROTOCOL_VERSION = 2
MAX_FRAME_BYTES = 64 << 20
MAX_REQUEST_ID_CHARS = 128


class MessageError(ValueError):
    """A frame that cannot be a message of its channel. Drop the peer or the frame, never the process."""


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


# ---------------------------------------------------------------------------------------------- frontend -> planner


class Submit(_Message, frozen=True):
    """One sequence to generate (a request with ``n`` > 1 is that many Submits, with their own seeds).

    ``prompt``: packed tokens, at least one. ``params.seed`` and ``params.max_tokens`` are set. ``eos`` ends generation
    unless ``params.ignore_eos``. ``salt`` seeds the hash chain: other salts never share pages. ``no_store``: its pages never
    leave device memory. ``priority``: larger goes first; equal ones in order of arrival.
    """

    request_id: str
    prompt: bytes
    params: SamplingParams
    eos: tuple[int, ...] = ()
    salt: bytes = b""
    no_store: bool = False
    priority: int = 0


class Abort(_Message, frozen=True):
    """Stop a request wherever it is. Unknown ids are ignored: it may just have finished."""

    request_id: str


class CancelFlush(_Message, frozen=True):
    """Nobody waits for flush ``call`` any more; it is not answered."""

    call: int


class Flush(_Message, frozen=True):
    """Forget cached pages in ``tiers`` once nothing in flight uses them, or answer after ``timeout_s`` what still does."""

    call: int
    tiers: tuple[str, ...]
    timeout_s: float


# ---------------------------------------------------------------------------------------------- planner -> frontend


class FinishReason(StrEnum):
    STOP = "stop"  # EOS or a stop token
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"  # after the retry bound: the grid could not be kept alive
    TAINTED = "tainted"  # its numbers came to NaN or infinity, as they would again
    REJECTED_FULL = "rejected_full"  # the waiting queue is full: try later
    REJECTED_TOO_LONG = "rejected_too_long"  # can never fit
    GRAMMAR = (
        "grammar"  # its grammar cannot go on: no token is allowed, or finding one takes too much
    )


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Natural log-probabilities at one output position: of the chosen token, and of the most likely ones in order."""

    chosen: float
    top_ids: tuple[int, ...] = ()
    top: tuple[float, ...] = ()


class Usage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Prompt tokens by where their KV came from at first admission, and what waiting cost. The rest was computed."""

    cached_device: int = 0
    cached_host: int = 0
    cached_store: int = 0
    queue_s: float = 0.0


class Output(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """New tokens of one request since the last Output; ``usage`` comes with its first; ``finish`` ends it.

    ``stop_token`` is the token of ``params.stop_token_ids`` that ended it (also last in ``tokens``), else None. ``scores``: of
    the prompt's tokens at positions ``scored_from`` on; a position may come again after a loss, with the same value.
    """

    request_id: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    usage: Usage | None = None
    finish: FinishReason | None = None
    stop_token: int | None = None
    message: str = ""
    scores: tuple[TokenLogprobs, ...] = ()
    scored_from: int = 0


class Outputs(_Message, frozen=True):
    """All that one planner step has to say to one frontend."""

    outputs: tuple[Output, ...]


class FlushDone(_Message, frozen=True):
    """``busy`` says what still held pages at the deadline (empty: all was flushed)."""

    call: int
    freed_pages: int
    busy: tuple[str, ...] = ()


class GridState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"


class TierUse(msgspec.Struct, frozen=True, array_like=True):
    """Pages of one tier. ``cached`` are node-owned (evictable unless pinned), ``private`` a request's, ``held`` wait for a plan or a
    transfer; free + cached + private + held = capacity."""

    capacity: int = 0
    free: int = 0
    cached: int = 0
    private: int = 0
    held: int = 0


class StoreHealth(msgspec.Struct, frozen=True, array_like=True):
    """What circuit breakers think of the store. ``state``: ``none`` (there is no store), ``closed`` (it is asked), ``open`` or
    ``probing`` (it is not; ``detail`` says why). ``openings`` and ``refused`` calls only rise."""

    state: str = "none"
    detail: str = ""
    openings: int = 0
    refused: int = 0


class Snapshot(_Message, frozen=True):
    """The planner's state, sent at least every 0.5 s (the frontend's proof that it ticks) and on every change of state.

    Counters only rise within one planner process. ``plan_s_buckets`` counts retired plans by duration, one bucket per
    bound of ``PLAN_SECONDS_BOUNDS`` and one above; ``plan_s_sum`` adds the durations up. ``tickets`` counts them by outcome,
    ``unused_tokens`` what was wanted and not fetched or fetched and not used, by reason. ``tainted_requests``
    have ended because their numbers came to NaN or infinity.
    """

    state: GridState
    epoch: int
    running: int
    waiting: int
    device: TierUse
    host: TierUse = TierUse()
    plans_retired: int = 0
    retractions: int = 0
    worker_restarts: int = 0
    prompt_tokens: int = 0
    cached_device_tokens: int = 0
    cached_host_tokens: int = 0
    cached_store_tokens: int = 0
    output_tokens: int = 0
    plan_s_buckets: tuple[int, ...] = ()
    plan_s_sum: float = 0.0
    detail: str = ""
    tickets: dict[str, int] = {}
    unused_tokens: dict[str, int] = {}
    stored_pages: int = 0
    store_failures: int = 0
    store: StoreHealth = StoreHealth()
    tainted_requests: int = 0


class ProtocolError(ValueError):
    """A well-formed message that a rank cannot mean: its grid is not in the state that the planner knows."""


PLAN_SECONDS_BOUNDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


# ---------------------------------------------------------------------------------------------- planner -> workers


class Allocate(_Message, frozen=True):
    """All ranks have loaded: make pools of ``device_pages`` and ``host_pages`` pages (the MIN over ranks) and join the process
    group at ``rendezvous`` (``host:port`` of rank 0's TCP store). ``namespace``: what all pages of the model share in a store,
    whatever grid wrote them (`core.hashing.root_hash` without a salt)."""

    epoch: int
    device_pages: int
    rendezvous: str
    host_pages: int = 0
    namespace: bytes = b""


class Opening(msgspec.Struct, frozen=True, array_like=True):
    """A request takes ``slot`` of the workers' mirror, which is cleared first.

    ``history``: packed tokens before this plan's, prompt first, sent only if the sampler needs them
    (`SamplingParams.needs_outputs`); ``prompt_tokens`` of all its tokens are prompt. ``outputs``:
    tokens it has emitted before (0 unless it re-enters after a retraction).
    """

    slot: int
    request_id: str
    params: SamplingParams
    eos: tuple[int, ...]
    prompt_tokens: int
    outputs: int = 0
    history: bytes = b""


class Piece(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The tokens that one request runs in one plan, at positions ``start`` to ``start + len(tokens)``.

    ``pages`` are appended to the slot's page table first; then the table covers ``start + len(tokens)`` positions. K/V of
    positions before ``write_from`` is not written, since its page is shared and already holds it (rule R7). ``sample``: the last
    position yields a token.
    """

    slot: int
    start: int
    tokens: bytes
    pages: tuple[int, ...]
    write_from: int
    sample: bool


class Remap(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Entry ``index`` of the slot's page table becomes ``page``, which holds equal bytes (rule R8)."""

    slot: int
    index: int
    page: int


class Copy(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One page between the tiers of each rank: a LOAD writes ``device`` from ``host``, a BACKUP the other way."""

    device: int
    host: int


class Backup(msgspec.Struct, frozen=True, array_like=True):
    """Pages to copy to host memory, in this order, once the plan's forward pass has run on the rank. Acknowledged by number."""

    transfer: int
    copies: tuple[Copy, ...]


class Plan(_Message, frozen=True):
    """What every rank runs in one pipeline pass. Applied in this order: openings, remaps, pieces.

    ``digest`` is the chain value after this plan (rule R2, `core.digest`). ``loads`` may begin as soon as the plan is known: the
    pages they write are named by no plan before. No layer of the plan is read before its loads of that layer are done. ``backup``
    starts after the rank's forward pass.
    """

    epoch: int
    number: int
    openings: tuple[Opening, ...]
    remaps: tuple[Remap, ...]
    pieces: tuple[Piece, ...]
    digest: bytes
    loads: tuple[Copy, ...] = ()
    backup: Backup | None = None


class PageKey(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A host page and the page hash that names its content in the store; each rank adds the name of its own part.

    ``group``: the hash of its prefix's first page. A store of several masters keeps a group with one of them.
    """

    host: int
    hash: bytes
    group: bytes = b""


# Orders of the ticket channel. ``ranks``: those that an order goes to, all of them if it is empty.


class Ticket(_Message, frozen=True):
    """FETCH: read these pages from the store into host pages, from the front.

    Say how far it is as batches end.
    """

    epoch: int
    transfer: int
    pages: tuple[PageKey, ...]
    ranks: tuple[int, ...] = ()


class Cancel(_Message, frozen=True):
    """Begin no new read for this ticket; a final `FetchProgress` still follows.

    Unknown numbers have ended already.
    """

    epoch: int
    transfer: int
    ranks: tuple[int, ...] = ()


class Store(_Message, frozen=True):
    """STORE: put these host pages into the store."""

    epoch: int
    transfer: int
    pages: tuple[PageKey, ...]
    ranks: tuple[int, ...] = ()


class StagedTicket(_Message, frozen=True):
    """FETCH on the staged route, to one stage: between two forwards, ask for this rank's parts of
    ``pages`` and start to read what is there; say `StagedTaken` at once."""

    epoch: int
    transfer: int
    pages: tuple[PageKey, ...]
    ranks: tuple[int, ...] = ()


class StagedReturn(_Message, frozen=True):
    """The stages behind have answered: between two forwards, once this rank's reads are done, say
    the final `FetchProgress`. The last stage answers without being asked."""

    epoch: int
    transfer: int
    ranks: tuple[int, ...] = ()


class Stop(_Message, frozen=True):
    """End in good order."""

    epoch: int
    reason: str


# ---------------------------------------------------------------------------------------------- worker -> planner


class Hello(_Message, frozen=True):
    """First word of a rank: its process runs and has the channel."""

    epoch: int
    rank: int
    pid: int


class Loaded(_Message, frozen=True):
    """Weights are in memory; ``device_pages`` and ``host_pages`` are what this rank can afford. ``rendezvous``: of rank 0 alone.
    ``without``: what this rank does without, which nobody asked for; in words, or empty."""

    epoch: int
    rank: int
    device_pages: int
    weight_bytes: int
    rendezvous: str = ""
    host_pages: int = 0
    without: str = ""


class Ready(_Message, frozen=True):
    """Pools are there, the process group stands, a warm-up pass has run; ``s_per_token`` is that pass's cost on this rank."""

    epoch: int
    rank: int
    s_per_token: float


class Sample(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One chosen token. ``slot`` as in the piece that asked for it.

    ``failure``: why its grammar allows none; then ``token`` means nothing.
    """

    slot: int
    token: int
    logprobs: TokenLogprobs | None = None
    failure: str = ""


class Scores(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities of given tokens at positions ``start`` on. ``slot`` as in the piece that ran them."""

    slot: int
    start: int
    logprobs: tuple[TokenLogprobs, ...]


class PlanDone(_Message, frozen=True):
    """This rank has finished plan ``number`` and reads or writes none of its pages any more.

    ``samples``: from TP rank 0 of the last stage alone, one per sampling piece, in the plan's order; ``scores``: likewise, one per
    piece of a request that asks for them. ``forward_s``: time in this rank's forward pass, waiting for activations not counted.
    ``tainted``: pieces, by their place in the plan, whose numbers came to NaN or infinity on this
    rank; what they wrote means nothing.
    """

    epoch: int
    rank: int
    number: int
    samples: tuple[Sample, ...] = ()
    forward_s: float = 0.0
    scores: tuple[Scores, ...] = ()
    tainted: tuple[int, ...] = ()


class TransferDone(_Message, frozen=True):
    """This rank has finished ``transfer`` and touches none of its pages any more; the first ``pages`` of it succeeded."""

    epoch: int
    rank: int
    transfer: int
    pages: int


class FetchProgress(_Message, frozen=True):
    """The first ``pages`` of the ticket are in this rank's host pages. ``final``: it touches none of the ticket's pages any more.

    ``found``: of a staged ticket, how many the store had for this rank; None if it was not asked.
    """

    epoch: int
    rank: int
    transfer: int
    pages: int
    final: bool
    found: int | None = None


class StagedTaken(_Message, frozen=True):
    """This rank's compute loop has come to the `StagedTicket` and has started its reads."""

    epoch: int
    rank: int
    transfer: int


class StoreDone(_Message, frozen=True):
    """This rank has finished the STORE; ``stored``: one byte a page, 1 where its part is in the store."""

    epoch: int
    rank: int
    transfer: int
    stored: bytes


class Heartbeat(_Message, frozen=True):
    """Sent every second by a thread of its own; ``applied`` is the last plan this rank has begun; ``store`` as this rank sees it."""

    epoch: int
    rank: int
    applied: int
    store: StoreHealth = StoreHealth()


class Fault(_Message, frozen=True):
    """This rank cannot go on. ``plan`` is the first one concerned, or -1. ``hopeless``: another try would end the same way.
    ``neighbour``: only because another rank is gone, which has the better reason.
    """

    epoch: int
    rank: int
    plan: int
    text: str
    hopeless: bool = False
    neighbour: bool = False


# ---------------------------------------------------------------------------------------------- frames

ToPlanner = Submit | Abort | Flush | CancelFlush
ToFrontend = Outputs | FlushDone | Snapshot
ToWorker = Allocate | Plan | Stop
ToWorkerIo = Ticket | Cancel | Store | StagedTicket | StagedReturn
FromWorker = (
    Hello
    | Loaded
    | Ready
    | PlanDone
    | TransferDone
    | FetchProgress
    | StagedTaken
    | StoreDone
    | Heartbeat
    | Fault
)

T = TypeVar("T")
_VERSION = bytes([PROTOCOL_VERSION])
_encoder = msgspec.msgpack.Encoder()


def encode(message: _Message) -> bytes:
    """The frame of a message: one version byte, then its msgpack body."""
    return _VERSION + _encoder.encode(message)


class Decoder(Generic[T]):
    """Reads the frames of one channel and direction, and refuses everything else."""

    def __init__(self, kind: type[T]) -> None:
        self._decode = msgspec.msgpack.Decoder(kind).decode

    def __call__(self, frame: bytes | memoryview) -> T:
        """Raises ``MessageError`` if the frame is too long, of another version, or not a message of this channel."""
        if len(frame) > MAX_FRAME_BYTES:
            raise MessageError(
                f"frame of {len(frame)} bytes; at most {MAX_FRAME_BYTES} are allowed"
            )
        if not len(frame) or frame[0] != PROTOCOL_VERSION:
            got = frame[0] if len(frame) else "none"
            raise MessageError(
                f"frame of protocol version {got}; this side speaks {PROTOCOL_VERSION}"
            )
        try:
            return self._decode(memoryview(frame)[1:])
        except (msgspec.DecodeError, ValueError) as error:
            raise MessageError(f"not a message of this channel: {error}") from error


# mypy does not take a union where type[T] is asked for (PEP 747), hence the ignores.
decode_to_planner: Decoder[ToPlanner] = Decoder(ToPlanner)  # type: ignore[arg-type]
decode_to_frontend: Decoder[ToFrontend] = Decoder(ToFrontend)  # type: ignore[arg-type]
decode_to_worker: Decoder[ToWorker] = Decoder(ToWorker)  # type: ignore[arg-type]
decode_to_worker_io: Decoder[ToWorkerIo] = Decoder(ToWorkerIo)  # type: ignore[arg-type]
decode_from_worker: Decoder[FromWorker] = Decoder(FromWorker)  # type: ignore[arg-type]


def pack_tokens(tokens: Iterable[int]) -> bytes:
    """Token ids as consecutive uint32 little-endian. Raises ``OverflowError`` for an id below 0 or above 2^32 - 1."""
    packed = array("I", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(packed: bytes) -> npt.NDArray[np.uint32]:
    """A read-only uint32 view of packed tokens, shape (count,). Raises ``MessageError`` if the length is no multiple of 4."""
    if len(packed) % 4:
        raise MessageError(f"packed tokens of {len(packed)} bytes; a multiple of 4 is needed")
    return np.frombuffer(packed, dtype="<u4")
