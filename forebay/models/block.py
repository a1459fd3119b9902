"""A page's KV on one rank as it lies in host memory and in the store (L2, L3): one contiguous block.

    numbers   for each layer, keys then values, for each head: page_size x head_dim
    scales    the same order, page_size of them for each head; nothing where numbers are not quantised

What a rank owns of a page is its `Part`: a range of layers and a range of key/value heads. Every place that must know the order of a
block asks here, so that a grid of another shape reads what this one wrote. Imports no torch.
"""

import struct
from dataclasses import dataclass
from functools import lru_cache

from forebay.models.config import ModelConfig
from forebay.models.shard import Shard

_NAME = struct.Struct("<4sIIII")
_KEYS_AND_VALUES = 2


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

    @classmethod
    def of(cls, config: ModelConfig, shard: Shard) -> "Part":
        return cls(range(shard.layer_start, shard.layer_stop), shard.kv_heads(config))

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
    """The bytes of one part of one page. ``head_bytes``: one head's keys (or values) of one layer, page_size x head_dim numbers;
    ``scale_bytes``: their scales."""

    part: Part
    head_bytes: int
    scale_bytes: int = 0

    @property
    def numbers_bytes(self) -> int:
        """Where the scales begin."""
        return self._heads * self.head_bytes

    @property
    def size(self) -> int:
        return self._heads * (self.head_bytes + self.scale_bytes)

    def of(self, part: Part) -> "Block":
        """The same page's block of another part."""
        return Block(part, self.head_bytes, self.scale_bytes)

    def runs_into(self, target: Part) -> tuple[Run, ...]:
        """What of this block belongs into the block of ``target``, as few runs as there are, in the order of both."""
        return _runs(self, target)

    @property
    def _heads(self) -> int:
        return len(self.part.layers) * _KEYS_AND_VALUES * len(self.part.heads)


@lru_cache(maxsize=1024)
def _runs(source: Block, part: Part) -> tuple[Run, ...]:
    target = source.of(part)
    runs: list[Run] = []
    for unit, source_base, target_base in (
        (source.head_bytes, 0, 0),
        (source.scale_bytes, source.numbers_bytes, target.numbers_bytes),
    ):
        heads = _common(source.part.heads, part.heads)
        if not unit or not heads:
            continue
        for layer in _common(source.part.layers, part.layers):
            for side in range(_KEYS_AND_VALUES):
                begin = source_base + unit * _row(source.part, layer, side, heads.start)
                _append(
                    runs,
                    Run(
                        begin,
                        target_base + unit * _row(part, layer, side, heads.start),
                        unit * len(heads),
                    ),
                )
    return tuple(runs)


def _row(part: Part, layer: int, side: int, head: int) -> int:
    """The number of a head's keys or values in a block's order."""
    return (
        ((layer - part.layers.start) * _KEYS_AND_VALUES + side) * len(part.heads)
        + head
        - part.heads.start
    )


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
