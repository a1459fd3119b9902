"""Hidden states from one pipeline stage to the next: one message per plan, checked against the plan before it is used.

    | header 64 bytes: epoch, plan, tokens, digest, zeros | hidden (tokens, hidden_size) in the compute dtype |

Rank (stage, t) sends to rank (stage + 1, t): inside a stage all TP ranks hold equal hidden states, so nothing is gathered. Sends
do not block: the bytes are copied into one of a few buffers, which is taken again only after its last send is through. The
planner keeps at most ``pp`` plans in flight and as many of hits that go ahead, so with more buffers than that a send practically never
waits.
"""

import struct
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from forebay.core.digest import DIGEST_BYTES

_HEADER = struct.Struct(f"<qqq{DIGEST_BYTES}s")
# A multiple of every itemsize and of a cache line, so that the hidden states behind it are aligned.
HEADER_BYTES = 64
_TAG = 0


class LinkError(Exception):
    """A neighbour is gone, or its hidden states belong to another plan than the one to run. One line."""


class NeighbourGone(LinkError):
    """A neighbour cannot be reached any more."""


@dataclass(frozen=True, slots=True)
class Activation:
    """Which plan some hidden states belong to (rule R2)."""

    epoch: int
    plan: int
    tokens: int
    digest: bytes

    def pack(self) -> bytes:
        return _HEADER.pack(self.epoch, self.plan, self.tokens, self.digest).ljust(
            HEADER_BYTES, b"\0"
        )

    @classmethod
    def unpack(cls, header: bytes) -> "Activation":
        return cls(*_HEADER.unpack_from(header))

    def __str__(self) -> str:
        return f"epoch {self.epoch}, plan {self.plan}, {self.tokens} tokens, digest {self.digest.hex()}"


class Transport:
    """Byte tensors between ranks of the default process group, on ``device``.

    ``staged``: the group's backend cannot read device memory (gloo, between ranks that share one GPU), so bytes go through
    the host.
    """

    def __init__(self, device: torch.device, staged: bool) -> None:
        self.device = device
        self.buffer_device = torch.device("cpu") if staged else device

    def buffer(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.buffer_device)


class StageSender:
    """Sends to rank ``target``. ``depth``: sends that may be under way at once."""

    def __init__(self, transport: Transport, target: int, depth: int) -> None:
        assert depth >= 1
        self._transport = transport
        self._target = target
        self._buffers = [transport.buffer(HEADER_BYTES) for _ in range(depth)]
        self._works: list[dist.Work | None] = [None] * depth
        self._turn = 0

    def send(self, activation: Activation, hidden: Tensor) -> None:
        """Copy ``hidden`` (tokens, hidden_size) and start sending it; the caller may overwrite it afterwards.

        Raises ``LinkError`` if the next stage is gone.
        """
        turn = self._turn = (self._turn + 1) % len(self._buffers)
        self._settle(turn)
        payload = hidden.reshape(-1).view(torch.uint8)
        size = HEADER_BYTES + payload.numel()
        if self._buffers[turn].numel() < size:
            self._buffers[turn] = self._transport.buffer(size)
        message = self._buffers[turn][:size]
        message[:HEADER_BYTES] = torch.frombuffer(bytearray(activation.pack()), dtype=torch.uint8)
        message[HEADER_BYTES:] = payload
        try:
            self._works[turn] = _world().send([message], self._target, _TAG)
        except RuntimeError as error:
            raise _gone("next", self._target, error) from error

    def settle(self) -> None:
        """Wait until everything sent has left its buffer."""
        for turn in range(len(self._works)):
            self._settle(turn)

    def _settle(self, turn: int) -> None:
        work = self._works[turn]
        if work is not None:
            self._works[turn] = None
            try:
                work.wait()
            except RuntimeError as error:
                raise _gone("next", self._target, error) from error


class StageReceiver:
    """Receives from rank ``source`` into one buffer of its own."""

    def __init__(
        self, transport: Transport, source: int, hidden_size: int, dtype: torch.dtype
    ) -> None:
        self._transport = transport
        self._source = source
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._buffer = transport.buffer(HEADER_BYTES)

    def receive(self, expected: Activation) -> Tensor:
        """Wait for the hidden states of a plan, (tokens, hidden_size), good until the next call.

        Raises ``LinkError`` if those that come are another plan's, or the previous stage is gone.
        """
        size = HEADER_BYTES + expected.tokens * self._hidden_size * self._dtype.itemsize
        if self._buffer.numel() < size:
            self._buffer = self._transport.buffer(size)
        message = self._buffer[:size]
        try:
            _world().recv([message], self._source, _TAG).wait()
        except RuntimeError as error:
            raise _gone("previous", self._source, error) from error
        got = Activation.unpack(message[:HEADER_BYTES].cpu().numpy().tobytes())
        if got != expected:
            raise LinkError(
                f"hidden states of {got} came from rank {self._source}; {expected} was to run"
            )
        hidden = message[HEADER_BYTES:].view(self._dtype).view(expected.tokens, self._hidden_size)
        return hidden.to(self._transport.device)


def _gone(which: str, rank: int, error: RuntimeError) -> NeighbourGone:
    return NeighbourGone(
        f"the {which} stage, rank {rank}, cannot be reached: {str(error).splitlines()[0]}"
    )


def _world() -> dist.ProcessGroup:
    """The group itself: `dist.isend` and `irecv` wrap it in checks that cost as much as a small message."""
    world = dist.group.WORLD
    assert world is not None
    return world
