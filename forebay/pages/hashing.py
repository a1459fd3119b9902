"""Page hashes: what makes two pages the same page, on every rank, in every process, in the store.

    h[i]  = SHA-256(h[i-1] || the page's tokens as uint32-LE)
    h[-1] = SHA-256(length-framed model fingerprint, KV dtype, page size, adapter, cache salt, tenant)

Each field of the root is framed by its length, so no two different namespaces encode alike ("ab"+"c" against "a"+"bc"), and what
should not be shared (another salt, another KV dtype) never matches.
"""

import hashlib
import struct

TOKEN_BYTES = 4


def root_hash(
    fingerprint: bytes,
    kv_dtype: str,
    page_size: int,
    adapter: str = "",
    salt: bytes = b"",
    tenant: str = "",
) -> bytes:
    """The chain's start for one namespace. ``page_size`` in tokens."""
    fields = (
        fingerprint,
        kv_dtype.encode(),
        struct.pack("<I", page_size),
        adapter.encode(),
        salt,
        tenant.encode(),
    )
    framed = b"".join(struct.pack("<I", len(field)) + field for field in fields)
    return hashlib.sha256(b"forebay/1" + framed).digest()


def page_hash(parent: bytes, tokens: bytes | bytearray) -> bytes:
    """The hash of one full page after ``parent``; ``tokens`` packed as uint32-LE."""
    return hashlib.sha256(parent + tokens).digest()


def hash_chain(root: bytes, tokens: bytes, page_size: int) -> list[bytes]:
    """Hashes of all *full* pages of packed ``tokens``, in order; a partial last page has none."""
    step = page_size * TOKEN_BYTES
    sha256 = hashlib.sha256
    hashes: list[bytes] = []
    parent = root
    for end in range(step, len(tokens) + 1, step):
        parent = sha256(parent + tokens[end - step : end]).digest()
        hashes.append(parent)
    return hashes
