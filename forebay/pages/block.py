"""A page's KV on one rank as it lies in host memory and in the store (L2, L3): one contiguous block.

    numbers   for each layer, each plane (keys, then values), for each head: page_size x head_dim
    scales    the same order, page_size of them for each head; nothing where numbers have none

What a rank owns of a page is its `Part`: a range of layers and a range of key/value heads. Every
place that must know the order of a block asks here, so that a grid of another shape reads what this
one wrote. A plane that is not cut by heads stands once for each layer, in every part.
"""

import struct
from dataclasses import dataclass
from functools import lru_cache

from forebay.pages.spec import Cut, KvSpec, Plane

_NAME = struct.Struct("<4sIIII")


@dataclass(frozen=True, slots=True)
class Part:
    """A rectangle of a page's KV: global layers x global key/value heads."""

    layers: range
    heads: range

    @property
    def name(self) -> bytes:
        """What it adds to a page's key in the store."""
        return _NAME.pack(
            b"part", self.layers.start, self.layers.stop, self.heads.start, self.heads.stop
        )

    def overlaps(self, other: "Part") -> bool:
        return bool(_common(self.layers, other.layers)) and bool(_common(self.heads, other.heads))


@dataclass(frozen=True, slots=True)
class Run:
    """``length`` bytes at ``source`` of one block are the bytes at ``target`` of another."""

    source: int
    target: int
    length: int


@dataclass(frozen=True, slots=True)
class Block:
    """The bytes of one part of one page of ``spec``."""

    part: Part
    spec: KvSpec

    @property
    def numbers_bytes(self) -> int:
        """Where the scales begin."""
        return len(self.part.layers) * self._layer_bytes(self.spec.numbers_bytes)

    @property
    def size(self) -> int:
        scales = len(self.part.layers) * self._layer_bytes(self.spec.scales_bytes)
        return self.numbers_bytes + scales

    def of(self, part: Part) -> "Block":
        """The same page's block of another part."""
        return Block(part, self.spec)

    def runs_into(self, target: Part) -> tuple[Run, ...]:
        """What of this block belongs into the block of ``target``.

        As few runs as there are, in the order of both.
        """
        return _runs(self, target)

    def _layer_bytes(self, units: tuple[int, ...]) -> int:
        """One layer's bytes, where a head's page of each plane takes ``units``."""
        rows = [_rows(plane, self.part) for plane in self.spec.planes]
        return sum([unit * count for unit, count in zip(units, rows, strict=True)])


def _rows(plane: Plane, part: Part) -> int:
    return len(part.heads) if plane.cut is Cut.HEADS else 1


@lru_cache(maxsize=1024)
def _runs(source: Block, part: Part) -> tuple[Run, ...]:
    target, spec = source.of(part), source.spec
    runs: list[Run] = []
    for units, source_base, target_base in (
        (spec.numbers_bytes, 0, 0),
        (spec.scales_bytes, source.numbers_bytes, target.numbers_bytes),
    ):
        for layer in _common(source.part.layers, part.layers):
            begin = source_base + (layer - source.part.layers.start) * source._layer_bytes(units)
            end = target_base + (layer - part.layers.start) * target._layer_bytes(units)
            for plane, unit in zip(spec.planes, units, strict=True):
                rows = _shared_rows(plane, source.part, part)
                if unit and rows:
                    _append(
                        runs,
                        Run(
                            begin + unit * (rows.start - _first_row(plane, source.part)),
                            end + unit * (rows.start - _first_row(plane, part)),
                            unit * len(rows),
                        ),
                    )
                begin += unit * _rows(plane, source.part)
                end += unit * _rows(plane, part)
    return tuple(runs)


def _shared_rows(plane: Plane, source: Part, target: Part) -> range:
    """Heads of ``plane`` that both have; a whole plane comes from who has the target's first head.

    So it comes once, however many parts of a layout overlap the target.
    """
    if plane.cut is Cut.HEADS:
        return _common(source.heads, target.heads)
    return range(int(bool(target.heads) and target.heads.start in source.heads))


def _first_row(plane: Plane, part: Part) -> int:
    return part.heads.start if plane.cut is Cut.HEADS else 0


def _append(runs: list[Run], run: Run) -> None:
    last = runs[-1] if runs else None
    if (
        last is not None
        and last.source + last.length == run.source
        and last.target + last.length == run.target
    ):
        runs[-1] = Run(last.source, last.target, last.length + run.length)
    else:
        runs.append(run)


def _common(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))
