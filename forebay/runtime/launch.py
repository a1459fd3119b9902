"""Starts a planner for a model: checks what can be checked before any process exists, derives what was not given.

The planner's process starts the ranks; all of them end when the caller's process does.
"""

import contextlib
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from forebay.models.config import ModelConfig, load_config
from forebay.models.errors import ModelError
from forebay.models.fingerprint import fingerprint
from forebay.models.gguf import cache_dir
from forebay.models.resolve import ResolvedModel
from forebay.models.shard import check_tp, split_layers
from forebay.observe.events import Rings
from forebay.runtime.boot import PlannerBoot, frame_boot, new_endpoint, new_identity, ring_names
from forebay.runtime.spawn import is_stopped
from forebay.settings import Device, DType, KvDType, Settings, format_size

# Of the memory that is free at the start, for the device pages of all ranks of this machine when the device is the CPU. Host pages
# take twice as much; weights and everything else share the rest.
KV_SHARE = 0.15
HOST_FACTOR = 2
# Beside the user's other cached files; --timeline names another place.
FLIGHT_DIRECTORY = "flight"


class StartError(Exception):
    """The engine cannot start: one line with what was given, what is allowed, what to do."""


@dataclass(frozen=True)
class PlannerHandle:
    """A running planner process. ``endpoint`` and ``identity``: for the frontend's DEALER socket."""

    endpoint: str
    identity: bytes
    process: subprocess.Popen[bytes]
    max_context: int
    rings: Rings
    flight_dir: Path

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the planner and its ranks: in good order within ``timeout_s``, else by force. Safe to call twice."""
        self.process.terminate()
        try:
            self.process.wait(0 if is_stopped(self.process.pid) else timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()


def start_planner(model: ResolvedModel, settings: Settings) -> PlannerHandle:
    """Start the planner's process; the grid's state then arrives in Snapshots.

    Call from the thread that lives as long as the process (the kernel ends children with the thread that made them).
    Raises ``StartError``.
    """
    boot = _boot(model, settings)
    rings = Rings.create(ring_names(settings.pp * settings.tp))
    boot = msgspec.structs.replace(boot, ring_fds=rings.fds)
    command = [sys.executable, "-P", "-m", "forebay.runtime.planner_process"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, process_group=0, pass_fds=rings.fds)
    rings.close()  # the maps stay
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(frame_boot(boot))
        process.stdin.flush()
    return PlannerHandle(
        boot.frontend_endpoint,
        boot.frontend_identity,
        process,
        boot.max_context,
        rings,
        Path(boot.flight_dir),
    )


def _boot(model: ResolvedModel, settings: Settings) -> PlannerBoot:
    try:
        config = load_config(model.path)
        split_layers(config.layers, settings.pp)
        check_tp(config, settings.tp)
        identity = fingerprint(model.path)
    except ModelError as error:
        raise StartError(str(error)) from error
    ranks = settings.pp * settings.tp
    _make_timeline_directory(settings)
    device_memory = settings.device_memory or derive_device_memory(settings.device, ranks)
    host_memory = settings.host_memory or derive_host_memory(device_memory, ranks)
    _check_memory(settings.device, ranks, device_memory, host_memory)
    dtype = config.dtype if settings.dtype is DType.AUTO else settings.dtype.value
    return PlannerBoot(
        model_path=str(model.path),
        fingerprint=identity,
        dtype=dtype,
        kv_dtype=dtype if settings.kv_dtype is KvDType.AUTO else settings.kv_dtype.value,
        max_context=_max_context(config, settings),
        threads=threads_per_rank(settings),
        device_memory=device_memory,
        host_memory=host_memory,
        settings=settings,
        frontend_endpoint=new_endpoint("frontend"),
        frontend_identity=new_identity(),
        parent_pid=os.getpid(),
        flight_dir=str(settings.timeline or cache_dir() / FLIGHT_DIRECTORY),
    )


def threads_per_rank(settings: Settings) -> int:
    """Compute threads of each rank: as asked, else the cores shared out."""
    return settings.threads_per_rank or max(
        len(os.sched_getaffinity(0)) // (settings.pp * settings.tp), 1
    )


def _max_context(config: ModelConfig, settings: Settings) -> int:
    if settings.max_context is None:
        return config.max_context
    if settings.max_context > config.max_context:
        raise StartError(
            f"--max-context is {settings.max_context}; the model was made for {config.max_context} tokens; give at most that"
        )
    return settings.max_context


def _check_memory(device: Device, ranks: int, device_memory: int, host_memory: int) -> None:
    """Pages are committed as they are used, so what does not fit would only show under load, and then as a killed process."""
    wanted = ranks * (host_memory + (device_memory if device is Device.CPU else 0))
    there = psutil.virtual_memory().total
    if wanted > there:
        raise StartError(
            f"--device-memory and --host-memory come to {format_size(wanted)} over {ranks} rank(s); "
            f"this machine has {format_size(there)}; give less"
        )


def _make_timeline_directory(settings: Settings) -> None:
    if settings.timeline is not None:
        try:
            settings.timeline.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StartError(
                f"--timeline {settings.timeline}: {error.strerror}; give a directory that can be made"
            ) from error


def derive_device_memory(device: Device, ranks: int) -> int:
    """Bytes of KV pages for each of ``ranks`` on this machine: a share of what is free, counted once for all of them."""
    if device is not Device.CPU:
        return 0
    each = int(psutil.virtual_memory().available * KV_SHARE) // ranks
    print(
        f"forebay: --device-memory is not given; {format_size(each)} for each rank ({ranks})",
        file=sys.stderr,
    )
    return each


def derive_host_memory(device_memory: int, ranks: int) -> int:
    """Bytes of host pages for each of ``ranks``: twice the device's, or on a GPU whose memory is not known yet twice the share that
    a CPU would get."""
    each = HOST_FACTOR * (
        device_memory or int(psutil.virtual_memory().available * KV_SHARE) // ranks
    )
    print(
        f"forebay: --host-memory is not given; {format_size(each)} for each rank ({ranks})",
        file=sys.stderr,
    )
    return each
