"""One batch of writes: ask for room, write to every replica's holder, end. All on one connection to the master, which owns the puts:
if this process dies anywhere on the way, they are revoked."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from forebay.store.backend import Status
from forebay.store.client.channel import Bytes, Channel, ChannelError, status_of
from forebay.store.client.holders import REGION_BYTES, REGIONS, Holders, LocalChannel
from forebay.store.crc import crc32c
from forebay.store.wire.frames import decode_holder_to_client, decode_master_to_client, encode
from forebay.store.wire.messages import (
    AGAIN,
    Codes,
    CopyIn,
    Grant,
    Granted,
    Piece,
    PutEnd,
    PutRevoke,
    PutStart,
    Room,
    Write,
)

BATCH_BYTES = 32 << 20
WRITE_TRIES = 20
WRITE_PAUSE_S = 0.05  # a holder that has just registered serves a moment after its master says so


@dataclass(slots=True, eq=False)
class Gift:
    """One key of the batch. ``status`` None: not settled yet."""

    key: bytes
    source: Bytes
    status: Status | None = None
    crc: int | None = None
    tries: int = 0

    def checksum(self) -> int:
        if self.crc is None:
            self.crc = crc32c(self.source.data)
        return self.crc


class Putter:
    """Puts on one leased master channel."""

    def __init__(self, master: Channel, holders: Holders, deadline: float) -> None:
        self._master = master
        self._holders = holders
        self._deadline = deadline

    def put(self, gifts: Sequence[Gift]) -> None:
        """Settles every gift's status. Raises ``ChannelError`` or ``TimeoutError`` if the master fails; the rest stays None."""
        for some in _batches(gifts):
            pending = list(some)
            while pending:
                self._round(pending)
                pending = [gift for gift in pending if gift.status is None]

    def _round(self, pending: list[Gift]) -> None:
        """Settle those that find room now; at least one, since the master waits while none does."""
        message = PutStart(
            self._master.new_call(),
            [gift.key for gift in pending],
            [len(gift.source) for gift in pending],
        )
        answer = self._master.ask(message, decode_master_to_client, self._deadline)
        if not isinstance(answer, Granted) or len(answer.grants) != len(pending):
            raise ChannelError("grants were due")
        granted: list[tuple[Gift, Grant]] = []
        for gift, grant in zip(pending, answer.grants, strict=True):
            if grant.code == Status.OK:
                granted.append((gift, grant))
            elif grant.code != AGAIN:
                gift.status = Status(grant.code)
        if granted:
            self._end(granted, self._write_all(granted))

    def _write_all(self, granted: list[tuple[Gift, Grant]]) -> dict[int, dict[int, Status]]:
        """Index in ``granted`` -> holder -> what became of the bytes there."""
        by_holder: dict[int, list[tuple[int, Room]]] = {}
        for index, (_, grant) in enumerate(granted):
            for room in grant.rooms:
                by_holder.setdefault(room.holder, []).append((index, room))
        results: dict[int, dict[int, Status]] = {index: {} for index in range(len(granted))}
        for number, rooms in by_holder.items():
            pieces = [
                Piece(
                    gift.key,
                    grant.generation,
                    room.offset,
                    len(gift.source),
                    gift.checksum(),
                    room.token,
                )
                for index, room in rooms
                for gift, grant in [granted[index]]
            ]
            codes = self._write_to(number, pieces, [granted[index][0].source for index, _ in rooms])
            for (index, _), code in zip(rooms, codes, strict=True):
                results[index][number] = code
        return results

    def _write_to(self, number: int, pieces: list[Piece], sources: list[Bytes]) -> list[Status]:
        try:
            peer = self._holders.get(number, self._deadline)
            if peer is None:
                return [Status.UNAVAILABLE] * len(pieces)
            with peer.pool.lease(self._deadline) as channel:
                if isinstance(channel, LocalChannel):
                    if (places := _places(channel, sources)) is not None:
                        return self._point_out(channel, pieces, places)
                    if all(piece.length <= REGION_BYTES for piece in pieces):
                        return self._hand_over(channel, pieces, sources)
                total = sum(piece.length for piece in pieces)
                channel.send(
                    encode(Write(channel.new_call(), pieces), total), sources, self._deadline
                )
                return self._codes(channel, len(pieces))
        except TimeoutError:
            return [Status.TIMEOUT] * len(pieces)
        except ChannelError:
            return [Status.UNAVAILABLE] * len(pieces)

    def _point_out(
        self, channel: LocalChannel, pieces: list[Piece], places: list[int]
    ) -> list[Status]:
        """All of it lies in memory that this process lends, at ``places``: the holder copies from there."""
        codes = [Status.UNAVAILABLE] * len(pieces)
        under_way: dict[int, tuple[int, int, int]] = {}
        start = 0
        while start < len(pieces):
            stop, size = start, 0
            while stop < len(pieces) and (
                stop == start or size + pieces[stop].length <= REGION_BYTES
            ):
                size += pieces[stop].length
                stop += 1
            if len(under_way) == REGIONS:
                self._take_codes(channel, under_way, codes)
            call = channel.new_call()
            under_way[call] = (0, start, stop)
            message = CopyIn(call, pieces[start:stop], places[start:stop], lent=True)
            channel.send(encode(message), (), self._deadline)
            start = stop
        while under_way:
            self._take_codes(channel, under_way, codes)
        return codes

    def _hand_over(
        self, channel: LocalChannel, pieces: list[Piece], sources: list[Bytes]
    ) -> list[Status]:
        """Through the staging memory that the holder has mapped, in regions: it copies out of one while we fill the next."""
        codes = [Status.UNAVAILABLE] * len(pieces)
        free = [number * REGION_BYTES for number in range(REGIONS)]
        under_way: dict[
            int, tuple[int, int, int]
        ] = {}  # call -> begin of its region, first piece, one behind its last
        start = 0
        while start < len(pieces):
            if not free:
                free.append(self._take_codes(channel, under_way, codes))
            begin = free.pop()
            at, stop, places = begin, start, []
            while stop < len(pieces) and at + pieces[stop].length <= begin + REGION_BYTES:
                places.append(at)
                channel.staging[at : at + pieces[stop].length] = sources[stop]
                at += pieces[stop].length
                stop += 1
            call = channel.new_call()
            under_way[call] = (begin, start, stop)
            channel.send(encode(CopyIn(call, pieces[start:stop], places)), (), self._deadline)
            start = stop
        while under_way:
            self._take_codes(channel, under_way, codes)
        return codes

    def _take_codes(
        self, channel: LocalChannel, under_way: dict[int, tuple[int, int, int]], codes: list[Status]
    ) -> int:
        """The answer to whichever CopyIn is done first; where its region begins, which is free again."""
        answer, _ = channel.receive(decode_holder_to_client, self._deadline)
        if not isinstance(answer, Codes) or answer.call not in under_way:
            raise ChannelError("codes were due")
        begin, start, stop = under_way.pop(answer.call)
        if len(answer.codes) != stop - start:
            raise ChannelError("codes were due")
        codes[start:stop] = [status_of(code) for code in answer.codes]
        return begin

    def _codes(self, channel: Channel, count: int) -> list[Status]:
        answer, _ = channel.receive(decode_holder_to_client, self._deadline)
        if not isinstance(answer, Codes) or len(answer.codes) != count:
            raise ChannelError("codes were due")
        return [status_of(code) for code in answer.codes]

    def _end(
        self, granted: list[tuple[Gift, Grant]], results: dict[int, dict[int, Status]]
    ) -> None:
        """End what at least one holder has, revoke the rest (which is tried again)."""
        done, lost = [], []
        for index, (gift, grant) in enumerate(granted):
            written = tuple(number for number, code in results[index].items() if code is Status.OK)
            if written:
                done.append((gift, grant, written))
            else:
                gift.tries += 1
                if gift.tries >= WRITE_TRIES or time.monotonic() >= self._deadline:
                    gift.status = next(iter(results[index].values()), Status.UNAVAILABLE)
                lost.append((gift, grant))
        if lost:
            keys, generations = (
                [gift.key for gift, _ in lost],
                [grant.generation for _, grant in lost],
            )
            self._master.ask(
                PutRevoke(self._master.new_call(), keys, generations),
                decode_master_to_client,
                self._deadline,
            )
            self._holders.refresh(self._deadline)
            time.sleep(WRITE_PAUSE_S)
        if done:
            message = PutEnd(
                self._master.new_call(),
                [gift.key for gift, _, _ in done],
                [grant.generation for _, grant, _ in done],
                [written for _, _, written in done],
            )
            answer = self._master.ask(message, decode_master_to_client, self._deadline)
            if not isinstance(answer, Codes) or len(answer.codes) != len(done):
                raise ChannelError("codes were due")
            for (gift, _, _), code in zip(done, answer.codes, strict=True):
                gift.status = Status.UNAVAILABLE if code == Status.NOT_FOUND else Status(code)


def _places(channel: LocalChannel, sources: Sequence[Bytes]) -> list[int] | None:
    """Where in the lent memory all of ``sources`` lie; None if not all do."""
    if channel.lent is None:
        return None
    places = [channel.lent.place(source) for source in sources]
    return [at for at in places if at is not None] if None not in places else None


def _batches(gifts: Sequence[Gift]) -> list[list[Gift]]:
    """Consecutive gifts of at most ``BATCH_BYTES`` together (at least one each), so that no batch outlives what it waits for."""
    batches: list[list[Gift]] = []
    size = BATCH_BYTES
    for gift in gifts:
        if size + len(gift.source) > BATCH_BYTES or len(batches[-1]) >= 1024:
            batches.append([])
            size = 0
        batches[-1].append(gift)
        size += len(gift.source)
    return batches
