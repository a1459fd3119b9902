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

from forebay import machine
from forebay.cache import NoCache, cache_directory, why_not_writable
from forebay.models.config import ModelConfig, load_config
from forebay.models.errors import ModelError
from forebay.models.fingerprint import model_marks
from forebay.models.resolve import ResolvedModel
from forebay.models.shard import check_tp, split_layers
from forebay.models.tensors import check_checkpoint
from forebay.observe.events import Rings
from forebay.runtime.boot import PlannerBoot, frame_boot, new_endpoint, new_identity, ring_names
from forebay.runtime.compute_dtype import compute_dtype
from forebay.runtime.sizing import choose_sizes, needs_of, threads_per_rank, warn_of_shared_memory
from forebay.runtime.spawn import is_stopped
from forebay.runtime.start_error import StartError
from forebay.settings import KvDType, Settings

# Beside the user's other cached files; --timeline names another place.
FLIGHT_DIRECTORY = "flight"


@dataclass(frozen=True)
class PlannerHandle:
    """A running planner process. ``endpoint`` and ``identity``: for the frontend's DEALER socket."""

    endpoint: str
    identity: bytes
    process: subprocess.Popen[bytes]
    max_context: int
    rings: Rings
    flight_dir: Path | None

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
        Path(boot.flight_dir) if boot.flight_dir else None,
    )


def _boot(model: ResolvedModel, settings: Settings) -> PlannerBoot:
    try:
        config = load_config(model.path)
        split_layers(config.layers, settings.pp)
        check_tp(config, settings.tp)
        marks = model_marks(model.path)
        check_checkpoint(model.path, config)
    except ModelError as error:
        raise StartError(str(error)) from error
    _make_timeline_directory(settings)
    flight_directory, without = _flight_directory(settings)
    dtype = compute_dtype(config, settings)
    kv_dtype = dtype if settings.kv_dtype is KvDType.AUTO else settings.kv_dtype.value
    needs = needs_of(config, settings, dtype, kv_dtype)
    sizes = choose_sizes(settings, needs, machine.memory())
    warn_of_shared_memory(settings)
    return PlannerBoot(
        model_path=str(model.path),
        marks=marks,
        dtype=dtype,
        kv_dtype=kv_dtype,
        max_context=_max_context(config, settings),
        threads=threads_per_rank(settings),
        device_memory=sizes.device_memory,
        host_memory=sizes.host_memory,
        settings=settings,
        frontend_endpoint=new_endpoint("frontend"),
        frontend_identity=new_identity(),
        parent_pid=os.getpid(),
        flight_dir=flight_directory,
        without=without,
    )


def _flight_directory(settings: Settings) -> tuple[str, tuple[str, ...]]:
    """Where flight records go, and what is done without if they can go nowhere: empty then."""
    if settings.timeline is not None:
        return str(settings.timeline), ()
    try:
        directory = cache_directory() / FLIGHT_DIRECTORY
        why_not = why_not_writable(directory)
    except NoCache as error:
        why_not = str(error)
    if not why_not:
        return str(directory), ()
    what = f"flight records: {why_not}"
    print(f"forebay: no {what}; --timeline names another place", file=sys.stderr)
    return "", (what,)


def _max_context(config: ModelConfig, settings: Settings) -> int:
    if settings.max_context is None:
        return config.max_context
    if settings.max_context > config.max_context:
        raise StartError(
            f"--max-context is {settings.max_context}; the model was made for {config.max_context} tokens; give at most that"
        )
    return settings.max_context


def _make_timeline_directory(settings: Settings) -> None:
    if settings.timeline is not None:
        try:
            settings.timeline.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StartError(
                f"--timeline {settings.timeline}: {error.strerror}; give a directory that can be made"
            ) from error
        if why_not := why_not_writable(settings.timeline):
            raise StartError(
                f"--timeline {settings.timeline}: {why_not}; give one that can be written"
            )
