"""Pages that servers of other models have left in the same store, for the prompts that will come.

Each of these models differs from the one under test in one part of its identity, or keeps or computes
its numbers otherwise. Were that part not in the key, their pages would be found, and read as wrong.
"""

from collections.abc import Iterator
from dataclasses import replace

from forebay.core.identity import ModelIdentity, kv_namespace
from forebay.pages.hashing import hash_chain, root_hash

FOREIGN = -3  # no position's stamp
OURS = ModelIdentity(b"config", b"tokenizer", (b"w" * 32,))


def page_hashes(tokens: bytes, page_size: int, salt: bytes) -> Iterator[list[bytes]]:
    """Of the pages of packed ``tokens``, as each of the other models names them."""
    others = (
        replace(OURS, config=b"other"),
        replace(OURS, tokenizer=b"other"),
        replace(OURS, weights=(b"v" * 32,)),
        replace(OURS, kv_layout=OURS.kv_layout - 1),
        replace(OURS, version=OURS.version - 1),
    )
    roots = [(other.fingerprint(), kv_namespace("float32", "float32")) for other in others]
    ours = OURS.fingerprint()
    roots += [
        (ours, kv_namespace(*kept)) for kept in (("int8", "float32"), ("float32", "bfloat16"))
    ]
    for fingerprint, numbers in roots:
        yield hash_chain(root_hash(fingerprint, numbers, page_size, salt=salt), tokens, page_size)
