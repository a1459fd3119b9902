"""How the ranks of one grid find each other, and the groups they talk in.

    rank = stage * tp + tp_rank        world: neighbours in the pipeline        one group per stage: tensor parallelism

Every rank makes every group, in the order of the stages, also those that it is not in: `new_group` is collective over the whole
world, and different orders on different ranks would wait for each other for ever (field report S7).
"""

import socket
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from forebay.runtime.stage_link import StageReceiver, StageSender, Transport

LOOPBACK = "127.0.0.1"
# Longer than any plan: the planner ends a rank that is late, so this only bounds a grid that nobody watches.
_OPERATION_TIMEOUT = timedelta(minutes=30)
_JOIN_TIMEOUT = timedelta(minutes=5)


class DeviceError(Exception):
    """The device that was asked for is not there. One line."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank stands in its grid."""

    rank: int
    pp: int
    tp: int

    @property
    def world(self) -> int:
        return self.pp * self.tp

    @property
    def stage(self) -> int:
        return self.rank // self.tp

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.pp - 1

    @property
    def samples(self) -> bool:
        """The one rank that chooses tokens."""
        return self.is_last and self.tp_rank == 0


class Rendezvous:
    """Rank 0's side of the meeting point: a key-value server on a free port, alive as long as this object."""

    def __init__(self, place: Place) -> None:
        # Given no socket, the store would listen on every address of the machine.
        listener = socket.create_server((LOOPBACK, 0))
        port = listener.getsockname()[1]
        self.store = TCPStore(
            LOOPBACK,
            port,
            place.world,
            is_master=True,
            timeout=_JOIN_TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )

    @property
    def address(self) -> str:
        return f"{LOOPBACK}:{self.store.port}"


@dataclass(frozen=True, slots=True)
class Grid:
    """The groups as one rank sees them."""

    place: Place
    tp_group: dist.ProcessGroup | None
    transport: Transport

    def sender(self) -> StageSender | None:
        """To the same TP rank of the next stage; None on the last."""
        if self.place.is_last:
            return None
        return StageSender(
            self.transport, self.place.rank + self.place.tp, depth=2 * self.place.pp + 1
        )

    def receiver(self, hidden_size: int, dtype: torch.dtype) -> StageReceiver | None:
        """From the same TP rank of the stage before; None on the first."""
        if self.place.is_first:
            return None
        return StageReceiver(self.transport, self.place.rank - self.place.tp, hidden_size, dtype)

    def leave(self) -> None:
        """End the groups. Call when nothing is under way."""
        if dist.is_initialized():
            dist.destroy_process_group()


def device_of(kind: str, rank: int) -> torch.device:
    """``cpu``, or the GPU of this rank; ranks share GPUs in turn when there are fewer. Raises ``DeviceError`` without one."""
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if not count:
        raise DeviceError(
            f"device {kind} was asked for and this machine has none; use --device cpu"
        )
    return torch.device(kind, rank % count)


def join(place: Place, device: torch.device, rendezvous: Rendezvous | None, address: str) -> Grid:
    """Meet the other ranks at ``address`` and make all groups. A grid of one rank needs neither.

    Blocks until all ranks are there. Raises ``dist.DistError`` (a ``RuntimeError``) if they do not come.
    """
    staged = device.type != "cpu" and place.world > torch.cuda.device_count()
    transport = Transport(device, staged)
    if place.world == 1:
        return Grid(place, None, transport)
    store = rendezvous.store if rendezvous is not None else _connect(place, address)
    # NCCL refuses two ranks on one GPU.
    backend = "gloo" if device.type == "cpu" or staged else "nccl"
    dist.init_process_group(
        backend, store=store, rank=place.rank, world_size=place.world, timeout=_OPERATION_TIMEOUT
    )
    mine: dist.ProcessGroup | None = None
    if place.tp > 1:
        for stage in range(place.pp):
            group = dist.new_group(list(range(stage * place.tp, (stage + 1) * place.tp)))
            if stage == place.stage:
                mine = group
    return Grid(place, mine, transport)


def _connect(place: Place, address: str) -> TCPStore:
    host, _, port = address.rpartition(":")
    return TCPStore(host, int(port), place.world, is_master=False, timeout=_JOIN_TIMEOUT)
