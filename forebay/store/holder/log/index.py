"""Which records count (rule ST3): of a key, the highest generation that no tombstone covers; an older one stays in its shadow until it
is buried, since a replacement that is given up must leave it as it was."""

from collections.abc import Iterator

from forebay.store.wire.messages import Grave

Place = tuple[str, bytes]


class Record:
    """Where one object lies: at ``position`` (of its head) in file ``file``. ``tick``: last read, 0 if never."""

    __slots__ = ("crc", "file", "generation", "length", "position", "tick")

    def __init__(self, file: int, position: int, generation: int, length: int, crc: int) -> None:
        self.file = file
        self.position = position
        self.generation = generation
        self.length = length
        self.crc = crc
        self.tick = 0


class Index:
    """(tenant, key) -> its records, oldest generation first; nearly always one."""

    def __init__(self) -> None:
        self._records: dict[Place, tuple[Record, ...]] = {}

    def __len__(self) -> int:
        return len(self._records)

    def items(self) -> Iterator[tuple[Place, Record]]:
        """All records; of one key the oldest first."""
        for place, records in list(self._records.items()):
            for record in records:
                yield place, record

    def get(self, place: Place, generation: int) -> Record | None:
        return next(
            (record for record in self._records.get(place, ()) if record.generation == generation),
            None,
        )

    def newest(self, place: Place) -> Record | None:
        records = self._records.get(place)
        return records[-1] if records else None

    def add(self, place: Place, record: Record) -> None:
        """A record of the same generation (the same bytes) is replaced."""
        others = [
            known for known in self._records.get(place, ()) if known.generation != record.generation
        ]
        self._records[place] = tuple(sorted([*others, record], key=lambda one: one.generation))

    def remove(self, place: Place, record: Record) -> None:
        rest = tuple(known for known in self._records.get(place, ()) if known is not record)
        if rest:
            self._records[place] = rest
        else:
            self._records.pop(place, None)

    def has_under(self, grave: Grave) -> bool:
        """Whether there is anything that the grave covers."""
        return any(
            [
                covers(grave, record.generation)
                for record in self._records.get((grave.tenant, grave.key), ())
            ]
        )

    def bury(self, grave: Grave) -> None:
        """Drop what the grave covers."""
        place = (grave.tenant, grave.key)
        rest = tuple(
            record
            for record in self._records.get(place, ())
            if not covers(grave, record.generation)
        )
        if rest:
            self._records[place] = rest
        else:
            self._records.pop(place, None)


def covers(grave: Grave, generation: int) -> bool:
    return generation == grave.generation if grave.exact else generation <= grave.generation
