"""What the items of a call may be, for every backend that handles bytes itself."""

from forebay.store.backend import GetItem, PutItem
from forebay.store.client.channel import Bytes
from forebay.store.holder.segment import as_bytes
from forebay.store.wire.messages import MAX_KEY_BYTES


def target_of(item: GetItem) -> Bytes | None:
    """Where the bytes go; None if they cannot."""
    try:
        target = as_bytes(item.buffer)[: item.length]
    except (TypeError, ValueError):
        return None
    fits = len(target) == item.length and item.length >= 1 and item.offset >= 0
    return target if fits and target.flags.writeable else None


def value_of(item: PutItem) -> Bytes | None:
    """The bytes to be stored; None if they cannot be."""
    try:
        value = as_bytes(item.buffer)
    except (TypeError, ValueError):
        return None
    return value if 0 < len(item.key) <= MAX_KEY_BYTES and len(value) else None
