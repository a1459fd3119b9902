"""Frames: a 16-byte prefix, a msgpack body, a raw payload.

    version u8 | flags u8 | zero u16 | body length u32 | payload length u64 | body | payload        (little endian)

The prefix bounds everything before a byte of it is kept: a version this side does not speak, a body or payload over its limit, or a
body that is no message of the channel is a ``FrameError``, and the peer is dropped. Only an OPTIONAL frame may be one the receiver
does not know; it is skipped.
"""

import struct
from collections.abc import Sequence
from typing import Generic, TypeVar

import msgspec
from typing_extensions import Buffer

from forebay.store.wire.messages import (
    MAX_KEY_BYTES,
    MAX_KEYS,
    ClientToHolder,
    ClientToMaster,
    HolderToClient,
    HolderToMaster,
    MasterToClient,
    MasterToHolder,
    MatchPrefix,
    Message,
    Opening,
)

PROTOCOL_VERSION = 1
MAX_BODY_BYTES = 16 << 20
MAX_OPENING_BYTES = 4096
MAX_PAYLOAD_BYTES = 1 << 40
MAX_LOOKUPS = 1 << 18  # keys x parts of one match_prefix
OPTIONAL = 1

PREFIX = struct.Struct("<BBHIQ")
_encoder = msgspec.msgpack.Encoder()
T = TypeVar("T")


class FrameError(ValueError):
    """What came cannot be a frame of this channel. Drop the peer, never the process."""


class Prefix(msgspec.Struct, frozen=True, gc=False):
    body_bytes: int
    payload_bytes: int
    optional: bool


def encode(message: Message, payload_bytes: int = 0, *, optional: bool = False) -> bytes:
    """Prefix and body of one frame; the caller sends the payload right behind it."""
    body = _encoder.encode(message)
    return (
        PREFIX.pack(PROTOCOL_VERSION, OPTIONAL if optional else 0, 0, len(body), payload_bytes)
        + body
    )


def read_prefix(data: Buffer, offset: int = 0, *, max_body: int = MAX_BODY_BYTES) -> Prefix:
    """Raises ``FrameError`` unless the 16 bytes at ``offset`` are a prefix within its limits."""
    version, flags, zero, body_bytes, payload_bytes = PREFIX.unpack_from(data, offset)
    if version != PROTOCOL_VERSION or zero:
        raise FrameError(
            f"frame of protocol version {version}; this side speaks {PROTOCOL_VERSION}"
        )
    if not 0 < body_bytes <= max_body:
        raise FrameError(f"frame body of {body_bytes} bytes; 1 to {max_body} are allowed")
    if payload_bytes > MAX_PAYLOAD_BYTES:
        raise FrameError(
            f"payload of {payload_bytes} bytes; at most {MAX_PAYLOAD_BYTES} are allowed"
        )
    return Prefix(body_bytes, payload_bytes, bool(flags & OPTIONAL))


class BodyDecoder(Generic[T]):
    """Reads the bodies of one channel and direction."""

    def __init__(self, kind: type[T]) -> None:
        self._decode = msgspec.msgpack.Decoder(kind).decode

    def __call__(self, body: Buffer) -> T:
        """Raises ``FrameError`` for anything that is no message of this channel, or beyond its limits."""
        try:
            message = self._decode(body)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise FrameError(f"not a message of this channel: {error}") from error
        _check_limits(message)
        return message


def _check_limits(message: object) -> None:
    keys = getattr(message, "keys", None)
    if isinstance(keys, list):
        check_keys(keys)
    if isinstance(message, MatchPrefix):
        check_keys(message.parts)
        if len(message.keys) * len(message.parts) > MAX_LOOKUPS:
            raise FrameError(
                f"{len(message.keys)} keys of {len(message.parts)} parts; at most {MAX_LOOKUPS} together are allowed"
            )


def check_keys(keys: Sequence[object]) -> None:
    """Raises ``FrameError`` for more than ``MAX_KEYS`` keys or one beyond ``MAX_KEY_BYTES``."""
    if len(keys) > MAX_KEYS:
        raise FrameError(f"{len(keys)} keys in one message; at most {MAX_KEYS} are allowed")
    if keys and isinstance(keys[0], bytes) and max(map(len, keys)) > MAX_KEY_BYTES:  # type: ignore[arg-type]
        raise FrameError(f"a key of more than {MAX_KEY_BYTES} bytes")


# mypy does not take a union where type[T] is asked for (PEP 747), hence the ignores.
decode_opening: BodyDecoder[Opening] = BodyDecoder(Opening)  # type: ignore[arg-type]
decode_client_to_master: BodyDecoder[ClientToMaster] = BodyDecoder(ClientToMaster)  # type: ignore[arg-type]
decode_master_to_client: BodyDecoder[MasterToClient] = BodyDecoder(MasterToClient)  # type: ignore[arg-type]
decode_holder_to_master: BodyDecoder[HolderToMaster] = BodyDecoder(HolderToMaster)  # type: ignore[arg-type]
decode_master_to_holder: BodyDecoder[MasterToHolder] = BodyDecoder(MasterToHolder)  # type: ignore[arg-type]
decode_client_to_holder: BodyDecoder[ClientToHolder] = BodyDecoder(ClientToHolder)  # type: ignore[arg-type]
decode_holder_to_client: BodyDecoder[HolderToClient] = BodyDecoder(HolderToClient)  # type: ignore[arg-type]
