"""Which model's keys and values a page holds: all that they depend on beside the tokens.

    weights, configuration, tokenizer, versions --> fingerprint --'
    numbers: how computed, how kept -------------> kv_namespace --+--> root_hash (`pages.hashing`)
    page size, salt, adapter, tenant -----------------------------'

Equal keys mean equal weights, tokenizer and KV format. They do not mean equal rounding: another
processor or other kernels give the last digits of the same numbers differently.
"""

import hashlib
import struct
from dataclasses import dataclass

# How a page's block is laid out in host memory and in the store (`pages.block`). Raise it when
# that changes: pages of another layout are then other pages, and are passed over.
KV_LAYOUT_VERSION = 1
# What goes into a fingerprint, and how. Version 1 covered the edges of weight files only.
IDENTITY_VERSION = 2


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """``config``: canonical; ``tokenizer`` and ``weights``: hashes of whole contents, the latter
    in the order of the files' names."""

    config: bytes
    tokenizer: bytes
    weights: tuple[bytes, ...]
    kv_layout: int = KV_LAYOUT_VERSION
    version: int = IDENTITY_VERSION

    def fingerprint(self) -> bytes:
        """32 bytes: SHA-256 over all parts, each framed by its length."""
        parts = (
            b"forebay-model",
            struct.pack("<II", self.version, self.kv_layout),
            self.config,
            self.tokenizer,
            b"".join(self.weights),
        )
        return hashlib.sha256(
            b"".join(struct.pack("<Q", len(part)) + part for part in parts)
        ).digest()


def kv_namespace(kv_dtype: str, dtype: str) -> str:
    """KV that was computed in another precision is other KV, however it is kept."""
    return kv_dtype if kv_dtype == dtype else f"{kv_dtype} of {dtype}"
