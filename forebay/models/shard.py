"""Which part of a model one rank of the `pp x tp` grid holds.

layers      0 ........ k | k ........ n        pipeline stages: contiguous, as even as possible
heads     tp 0 | tp 1    | tp 0 | tp 1         tensor parallelism: equal contiguous head ranges
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from forebay.models.config import ModelConfig
from forebay.models.errors import ModelError
from forebay.pages.block import Part


@dataclass(frozen=True, slots=True)
class Shard:
    """Layers `[layer_start, layer_stop)` of `layers`, and slice `tp_rank` of `tp_size` of each of them."""

    layer_start: int
    layer_stop: int
    layers: int
    tp_rank: int = 0
    tp_size: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.layer_start < self.layer_stop <= self.layers, self
        assert 0 <= self.tp_rank < self.tp_size, self

    @property
    def is_first(self) -> bool:
        """Holds the embeddings."""
        return self.layer_start == 0

    @property
    def is_last(self) -> bool:
        """Holds the final norm and the output head."""
        return self.layer_stop == self.layers

    @property
    def layer_count(self) -> int:
        return self.layer_stop - self.layer_start

    def heads(self, config: ModelConfig) -> range:
        """Query heads of this rank. Raises ModelError when `tp_size` does not divide them."""
        return self._part(config.heads, config)

    def kv_heads(self, config: ModelConfig) -> range:
        """Key/value heads of this rank. Raises ModelError when `tp_size` does not divide them."""
        return self._part(config.kv_heads, config)

    def intermediate(self, config: ModelConfig) -> range:
        """Rows of the gate and up projections of this rank. Raises ModelError when `tp_size` does not divide them."""
        return self._part(config.intermediate_size, config)

    def _part(self, size: int, config: ModelConfig) -> range:
        check_tp(config, self.tp_size)
        share = size // self.tp_size
        return range(self.tp_rank * share, (self.tp_rank + 1) * share)


def whole(config: ModelConfig) -> Shard:
    """The shard that is the whole model."""
    return Shard(0, config.layers, config.layers)


def split_layers(layers: int, pp: int) -> list[range]:
    """Cut `layers` into `pp` contiguous ranges whose sizes differ by at most one, the longer ones first.

    Raises ModelError when a stage would be empty.
    """
    if not 1 <= pp <= layers:
        raise ModelError(
            f"pp {pp} does not fit a model of {layers} layers; allowed: 1 to {layers}; choose --pp there"
        )
    size, longer = divmod(layers, pp)
    bounds = [stage * size + min(stage, longer) for stage in range(pp + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(bounds)]


def part_of(config: ModelConfig, shard: Shard) -> Part:
    """What of a page's KV the rank of ``shard`` has."""
    return Part(range(shard.layer_start, shard.layer_stop), shard.kv_heads(config))


def check_tp(config: ModelConfig, tp_size: int) -> None:
    """Raise ModelError unless every head and intermediate row has exactly one of `tp_size` ranks."""
    sizes = (config.heads, config.kv_heads, config.intermediate_size)
    if tp_size >= 1 and not any(size % tp_size for size in sizes):
        return
    allowed = [
        str(tp) for tp in range(1, config.kv_heads + 1) if not any(size % tp for size in sizes)
    ]
    raise ModelError(
        f"tp {tp_size} does not divide {config.heads} heads, {config.kv_heads} key/value heads and "
        f"{config.intermediate_size} intermediate rows; allowed: {', '.join(allowed)}; choose --tp from these"
    )


def shards(config: ModelConfig, pp: int, tp: int) -> list[list[Shard]]:
    """All shards of a grid, `[stage][tp rank]`. Raises ModelError when the grid does not fit the model."""
    check_tp(config, tp)
    return [
        [Shard(part.start, part.stop, config.layers, rank, tp) for rank in range(tp)]
        for part in split_layers(config.layers, pp)
    ]


def shard_parameters(config: ModelConfig, shard: Shard) -> int:
    """Numbers in a shard's weight matrices; norms and biases are too few to count."""
    heads, kv_heads = len(shard.heads(config)), len(shard.kv_heads(config))
    attention = config.hidden_size * config.head_dim * (2 * heads + 2 * kv_heads)
    mlp = 3 * config.hidden_size * len(shard.intermediate(config))
    table = config.vocab_size * config.hidden_size
    tables = int(shard.is_first) + int(shard.is_last)
    if config.tied_embeddings and shard.is_first and shard.is_last:
        tables = 1
    return shard.layer_count * (attention + mlp) + tables * table
