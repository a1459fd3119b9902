"""Seeds of single sequences: a run of the server with the same requests in the same order gives the same texts."""

import hashlib


def derive_seed(seed: int, index: int) -> int:
    """The 64-bit seed of choice ``index`` of a request: the request's own for the first, unrelated ones for the others."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(
        f"{seed}/{index}".encode(), digest_size=8, person=b"forebay-seed"
    ).digest()
    return int.from_bytes(digest, "little")


class SeedCounter:
    """Seeds for requests that bring none, out of the server's own seed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._count = 0

    def next(self) -> int:
        self._count += 1
        return derive_seed(self._seed, self._count)
