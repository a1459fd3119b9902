"""Which of several masters a group of keys is with: rendezvous (highest random weight) hashing, Thaler and Ravishankar 1998."""

import hashlib
from collections.abc import Sequence


def place_of(names: Sequence[bytes], group: bytes) -> int:
    """The index of the name with the highest weight for ``group``: the order of names does not matter, and a new name takes groups
    from the others without moving any between them."""
    if len(names) == 1:
        return 0
    weights = [hashlib.blake2b(group, key=name[:64], digest_size=8).digest() for name in names]
    return weights.index(max(weights))
