"""What a rank's piece of a page is called in the store."""

import struct

from forebay.models.config import ModelConfig
from forebay.models.shard import Shard

_PART = struct.Struct("<4sIIII")


def part_name(config: ModelConfig, shard: Shard) -> bytes:
    """The piece of a page's KV that a rank owns: its layer range and its range of key/value heads."""
    heads = shard.kv_heads(config)
    return _PART.pack(b"part", shard.layer_start, shard.layer_stop, heads.start, heads.stop)
