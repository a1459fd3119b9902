"""One batch of reads: lease, copy, and for what could not be read there, the next replica.

    master --Located--> per key a list of spots, best first: mapped memory, memory by TCP, log
    round 1: every key's best spot, grouped by holder and tier; round 2: the next spots of what failed; ...

Bytes count as good if the copy ended before the lease did, or if the memory still is the same object afterwards (rule ST1).
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from forebay.store.backend import Status
from forebay.store.client.channel import Bytes, Channel, ChannelError, status_of
from forebay.store.client.holders import REGION_BYTES, REGIONS, HolderPeer, Holders, LocalChannel
from forebay.store.holder.log.record import padded
from forebay.store.native.library import Slice as Copied
from forebay.store.wire.frames import decode_holder_to_client, encode
from forebay.store.wire.messages import (
    Check,
    Codes,
    CopyOut,
    Cut,
    Part,
    Place,
    ReadMemory,
    ReadSsd,
    Slice,
    Spot,
    Tier,
)

FAILOVER_S = 0.25
LEASE_MARGIN_S = 0.1


@dataclass(slots=True, eq=False)
class Want:
    """One key of the batch. ``status`` is its answer so far. ``stale``: the master said it was somewhere it was not.
    ``located``: it said that it was somewhere, and is ``length`` bytes of which ``target`` is to hold those from ``offset`` on."""

    key: bytes
    offset: int
    target: Bytes
    status: Status = Status.UNAVAILABLE
    spots: list[Spot] = field(default_factory=list)
    generation: int = 0
    length: int = 0
    stale: bool = False
    located: bool = False
    tier: Tier | None = None


def locate(want: Want, place: Place) -> None:
    """Take over what the master says of a key."""
    want.generation, want.length = place.generation, place.length
    want.spots, want.located = [], False
    if place.code != Status.OK:
        want.status = Status(place.code)
        return
    if not 0 <= want.offset <= place.length - len(want.target):
        want.status = Status.INVALID
        return
    want.status, want.spots, want.located = Status.UNAVAILABLE, list(place.spots), True


@dataclass(slots=True, eq=False)
class Region:
    """A part of the staging memory that the holder is filling."""

    group: list[tuple[Want, Spot]]
    places: list[int]
    begin: int


class Reader:
    """Reads located wants until they are done or out of spots."""

    def __init__(self, holders: Holders, deadline: float, lease_ends: float) -> None:
        self._holders = holders
        self._deadline = deadline
        self._lease_ends = lease_ends - LEASE_MARGIN_S

    def read(self, wants: Sequence[Want]) -> None:
        pending = [want for want in wants if want.spots]
        while pending:
            groups: dict[tuple[int, Tier], list[tuple[Want, Spot]]] = {}
            for want in pending:
                spot = self._best(want)
                groups.setdefault((spot.holder, spot.tier), []).append((want, spot))
            for (number, tier), group in groups.items():
                self._read_group(number, tier, group)
            pending = [
                want
                for want in pending
                if want.status not in (Status.OK, Status.INVALID) and want.spots
            ]

    def _best(self, want: Want) -> Spot:
        """Take the nearest untried spot of a want."""
        best = min(range(len(want.spots)), key=lambda index: self._distance(want.spots[index]))
        return want.spots.pop(best)

    def _distance(self, spot: Spot) -> tuple[int, bool]:
        peer = self._holders.known(spot.holder)
        return spot.tier, peer is None or peer.segment is None

    def _read_group(self, number: int, tier: Tier, group: list[tuple[Want, Spot]]) -> None:
        """One round trip to one holder. What fails keeps its remaining spots."""
        other_ways = all(want.spots for want, _ in group)
        patience_s = FAILOVER_S if other_ways else None
        for want, _ in group:
            want.tier = tier
        try:
            peer = self._holders.get(number, self._deadline)
            if peer is None:
                return
            deadline = (
                min(self._deadline, time.monotonic() + FAILOVER_S) if other_ways else self._deadline
            )
            if tier is Tier.MEMORY and peer.attach(deadline):
                self._copy_mapped(peer, group)
                return
            with peer.pool.lease(deadline) as channel:
                if tier is Tier.MEMORY:
                    self._read_memory(channel, group, patience_s)
                elif isinstance(channel, LocalChannel):
                    self._copy_from_log(channel, group)
                else:
                    self._read_log(channel, group, patience_s)
        except TimeoutError:
            _fail(group, Status.TIMEOUT)
        except ChannelError:
            _fail(group, Status.UNAVAILABLE)

    def _copy_mapped(self, peer: HolderPeer, group: list[tuple[Want, Spot]]) -> None:
        segment = peer.segment
        if segment is None:
            return
        statuses = segment.copy_out(
            [Copied(spot.offset, spot.stamp, want.offset, want.target) for want, spot in group]
        )
        for (want, _), status in zip(group, statuses, strict=True):
            want.status, want.stale = status, status is not Status.OK

    def _read_memory(
        self, channel: Channel, group: list[tuple[Want, Spot]], patience_s: float | None
    ) -> None:
        slices = [
            Slice(spot.offset, spot.stamp, want.offset, len(want.target)) for want, spot in group
        ]
        channel.exchange(
            encode(ReadMemory(channel.new_call(), slices)), self._soon(patience_s), hurry=True
        )
        answer, prefix = channel.receive(decode_holder_to_client, self._soon(patience_s))
        if not isinstance(answer, Codes) or len(answer.codes) != len(group):
            raise ChannelError("codes were due")
        good = [pair for pair, code in zip(group, answer.codes, strict=True) if code == Status.OK]
        if prefix.payload_bytes != sum(len(want.target) for want, _ in good):
            raise ChannelError(
                f"a payload of {prefix.payload_bytes} bytes does not fit what was asked for"
            )
        for (want, _), code in zip(group, answer.codes, strict=True):
            want.status = status_of(code) if code != Status.OK else Status.UNAVAILABLE
            want.stale = code == Status.NOT_FOUND
        for want, _ in good:
            channel.receive_into(want.target, self._deadline, patience_s)
        if time.monotonic() < self._lease_ends:
            for want, _ in good:
                want.status = Status.OK
        elif good:
            self._recheck(channel, good)

    def _recheck(self, channel: Channel, good: list[tuple[Want, Spot]]) -> None:
        """The lease ran out meanwhile: the bytes are good only if the memory is still the same object."""
        check = Check(channel.new_call(), [(spot.offset, spot.stamp) for _, spot in good])
        answer = channel.ask(check, decode_holder_to_client, self._deadline)
        if not isinstance(answer, Codes) or len(answer.codes) != len(good):
            raise ChannelError("codes were due")
        for (want, _), code in zip(good, answer.codes, strict=True):
            want.status = Status.OK if code == Status.OK else Status.LEASE_EXPIRED

    def _read_log(
        self, channel: Channel, group: list[tuple[Want, Spot]], patience_s: float | None
    ) -> None:
        cuts = [Cut(want.key, want.generation, want.offset, len(want.target)) for want, _ in group]
        channel.send(encode(ReadSsd(channel.new_call(), cuts)), (), self._deadline)
        for _ in group:
            answer, prefix = channel.receive(decode_holder_to_client, self._soon(patience_s))
            if not isinstance(answer, Part) or not 0 <= answer.index < len(group):
                raise ChannelError("a part was due")
            want = group[answer.index][0]
            if answer.code == Status.OK:
                if prefix.payload_bytes != len(want.target):
                    raise ChannelError(
                        f"a part of {prefix.payload_bytes} bytes where {len(want.target)} are due"
                    )
                channel.receive_into(want.target, self._deadline, patience_s)
            want.status, want.stale = status_of(answer.code), answer.code == Status.NOT_FOUND

    def _copy_from_log(self, channel: LocalChannel, group: list[tuple[Want, Spot]]) -> None:
        """By way of the staging memory, in regions: while one is copied out, the holder fills the next. What does not fit a region is
        read as over TCP."""
        small = [pair for pair in group if padded(len(pair[0].target)) <= REGION_BYTES]
        under_way: dict[int, Region] = {}
        free = [number * REGION_BYTES for number in range(REGIONS)]
        for some in _batches(small, REGION_BYTES):
            if not free:
                free.append(self._take_region(channel, under_way))
            region = Region(some, [], free.pop())
            cuts, at = [], region.begin
            for want, _ in some:
                cuts.append(Cut(want.key, want.generation, want.offset, len(want.target)))
                region.places.append(at)
                at += padded(len(want.target))
            call = channel.new_call()
            under_way[call] = region
            channel.send(encode(CopyOut(call, cuts, region.places)), (), self._deadline)
        while under_way:
            self._take_region(channel, under_way)
        large = [pair for pair in group if padded(len(pair[0].target)) > REGION_BYTES]
        if large:
            self._read_log(channel, large, None)

    def _take_region(self, channel: LocalChannel, under_way: dict[int, Region]) -> int:
        """Wait for whichever region is filled first, copy it out, and say where it begins: it is free again."""
        answer, _ = channel.receive(decode_holder_to_client, self._deadline)
        region = under_way.pop(answer.call, None) if isinstance(answer, Codes) else None
        if (
            not isinstance(answer, Codes)
            or region is None
            or len(answer.codes) != len(region.group)
        ):
            raise ChannelError("codes were due")
        for (want, _), begin, code in zip(region.group, region.places, answer.codes, strict=True):
            want.status, want.stale = status_of(code), code == Status.NOT_FOUND
            if code == Status.OK:
                want.target[:] = channel.staging[begin : begin + len(want.target)]
        return region.begin

    def _soon(self, patience_s: float | None) -> float:
        return (
            self._deadline
            if patience_s is None
            else min(self._deadline, time.monotonic() + patience_s)
        )


def _batches(group: list[tuple[Want, Spot]], limit: int) -> list[list[tuple[Want, Spot]]]:
    """Consecutive wants of at most ``limit`` bytes of whole blocks together."""
    batches: list[list[tuple[Want, Spot]]] = []
    size = limit
    for pair in group:
        padded_bytes = padded(len(pair[0].target))
        if size + padded_bytes > limit:
            batches.append([])
            size = 0
        batches[-1].append(pair)
        size += padded_bytes
    return batches


def _fail(group: list[tuple[Want, Spot]], status: Status) -> None:
    for want, _ in group:
        if want.status is not Status.OK:
            want.status = status
