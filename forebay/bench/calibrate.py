"""`forebay simulate --calibrate`: a short real run on this machine, fitted into a cluster file for the simulator.

The engine runs prompts one at a time with nothing cached, decodes, prompts at the same time, and the first prompts again out of the
store, with two stages of one thread. Spans of all processes say how long each forward, copy, fetch and query took; what a plan took
beyond its forwards is shared out over its messages; what two stages cost each other is how much longer their forwards took, over the
time for which they overlapped; what a client waits for beside its plan is the frontend's. The file's SSD is measured with writes and
reads of a scratch file past the page cache.

    t(piece of x tokens after L) = a x (x + 2 L) + b x + c      a decode at context L: c + d + e L      least squares, relative
"""

import mmap
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from forebay import machine
from forebay.bench.scratch import scratch_directory
from forebay.bench.token_ids import first_token_id
from forebay.bench.ttft.load import Client
from forebay.bench.ttft.plan import Ask
from forebay.bench.ttft.server import MODEL_NAME, running
from forebay.core.sampling import SamplingParams
from forebay.core.spans import SpanKind
from forebay.frontend.llm import LLM
from forebay.models.config import ModelConfig, load_config
from forebay.models.resolve import resolve_model
from forebay.observe.events import Span, read_flight_record, spans_of
from forebay.settings import Settings

PP, CHUNK, PAGE = 2, 512, 64
PROMPTS = (512, 1024, 2048, 512, 1024, 2048)
DECODE_CONTEXTS = (256, 1536)
DECODES = 16
BATCH = 4
TOGETHER = 12
HTTP_TOKENS, HTTP_ASKS = 1024, 12
DISK_BYTES, DISK_BLOCK = 128 << 20, 4 << 20


class CalibrationError(Exception):
    """The run did not give what a fit needs. One line."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """One plan of the run: its piece's first position, tokens, and decodes (0: a prefill piece); seconds on each stage; in all."""

    start: int
    tokens: int
    decodes: int
    stages_s: tuple[float, ...]
    total_s: float


def calibrate(model: str, say: Callable[[str], None]) -> str:
    """The cluster file's text. Raises ``CalibrationError``, and what a start of the engine raises."""
    resolved = resolve_model(model)
    config = load_config(resolved.path)
    with scratch_directory("calibrate") as directory:
        say("running prompts, decodes and fetches")
        expected = _run(model, config, directory)
        (record,) = (directory / "timeline").glob("*.flight")
        spans = {name: list(found) for name, found in spans_of(read_flight_record(record)).items()}
        say("asking over HTTP")
        frontend_s = _frontend_s(model, config, directory / "http")
        say("measuring the disk")
        read_gb_s, write_gb_s = _disk(directory)
    plans = _plans(spans, expected)
    dials = (
        _fit(plans)
        | _links(spans, config, plans)
        | {"store.ssd_read_gb_s": read_gb_s, "store.ssd_write_gb_s": write_gb_s}
    )
    dials["forward.contention"] = _contention(spans, plans, len(expected))
    dials["network.frontend_s"] = frontend_s
    return _file(config, dials)


def _run(model: str, config: ModelConfig, directory: Path) -> list[tuple[int, int, int]]:
    """Runs everything; the pieces (start, tokens, decodes) of its plans in order."""
    dice = random.Random(0)
    one = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    expected: list[tuple[int, int, int]] = []

    def prompt(tokens: int) -> list[int]:
        return [
            dice.randrange(first_token_id(config.vocab_size), config.vocab_size)
            for _ in range(tokens)
        ]

    def chunks(tokens: int) -> list[tuple[int, int, int]]:
        return [(start, min(CHUNK, tokens - start), 0) for start in range(0, tokens, CHUNK)]

    settings = {
        "pp": PP, "threads_per_rank": 1, "chunk_size": CHUNK, "page_size": PAGE, "store": f"embedded:{directory / 'store'}",
        "timeline": str(directory / "timeline"), "fetch_policy": "wait", "fetch_threshold": PAGE,
    }  # fmt: skip
    with LLM(model, **settings) as llm:
        prompts = [prompt(tokens) for tokens in PROMPTS]
        for each in prompts:
            llm.generate([each], one)
            expected += chunks(len(each))
        many = SamplingParams(max_tokens=DECODES, temperature=0.0, ignore_eos=True)
        for context in DECODE_CONTEXTS:
            llm.generate([prompt(context)], many)
            expected += [
                *chunks(context),
                *((context + index, 1, 1) for index in range(DECODES - 1)),
            ]
        llm.generate([prompt(PAGE) for _ in range(BATCH)], many)
        llm.generate([prompt(CHUNK) for _ in range(TOGETHER)], one)
        llm.flush_cache()
        for each in prompts:
            llm.generate([each], one)
    return expected


def _plans(spans: dict[str, list[Span]], expected: Sequence[tuple[int, int, int]]) -> list[_Plan]:
    """Plans of single requests as expected, then decodes of several. Raises ``CalibrationError`` if the run went another way."""
    forwards: dict[int, list[float]] = {}
    for rank in range(PP):
        for span in spans[f"rank {rank}"]:
            if span.kind in (SpanKind.FORWARD, SpanKind.SAMPLE):
                forwards.setdefault(span.id, [0.0] * PP)[rank] += span.duration_ns / 1e9
    built = sorted(
        (span for span in spans["planner"] if span.kind == SpanKind.PLAN), key=lambda span: span.id
    )
    plans = []
    for span, (start, tokens, decodes) in zip(built, expected, strict=False):
        if span.value != tokens:
            raise CalibrationError(
                f"plan {span.id} ran {span.value} tokens, not {tokens}: this machine was too busy; try again"
            )
        plans.append(
            _Plan(start, tokens, decodes, tuple(forwards[span.id]), span.duration_ns / 1e9)
        )
    for span in built[len(expected) :]:
        if 1 < span.value <= BATCH and span.id in forwards:
            plans.append(
                _Plan(
                    PAGE, span.value, span.value, tuple(forwards[span.id]), span.duration_ns / 1e9
                )
            )
    return plans


def _frontend_s(model: str, config: ModelConfig, directory: Path) -> float:
    """What a client waits for beside the planner: HTTP, its JSON, and the answer's way back. One prompt again and again, which the
    device has from the second time on, so that little else is waited for."""
    dice = random.Random(1)
    prompt = [
        dice.randrange(first_token_id(config.vocab_size), config.vocab_size)
        for _ in range(HTTP_TOKENS)
    ]
    settings = Settings(
        pp=PP, threads_per_rank=1, chunk_size=CHUNK, page_size=PAGE, store="none", host="127.0.0.1", port=0,
        served_model_name=MODEL_NAME, timeline=directory,
    )  # fmt: skip
    directory.mkdir()
    with running(model, settings) as server:
        answers = Client(server.url, MODEL_NAME, 1).closed_load(
            [Ask(index, prompt, False) for index in range(HTTP_ASKS)], 1, "calibrate"
        )
    (record,) = directory.glob("*.flight")
    planned = [
        span.duration_ns / 1e9
        for span in spans_of(read_flight_record(record))["planner"]
        if span.kind == SpanKind.PLAN and span.value == 1
    ]
    if len(planned) < HTTP_ASKS - 1:
        raise CalibrationError("a prompt that was just computed was computed again; try again")
    return max(
        statistics.median(answer.ttft_s for answer in answers[1:]) - statistics.median(planned), 0.0
    )


def _fit(plans: Sequence[_Plan]) -> dict[str, float]:
    """The forward model. The pass's constant is that of decodes: prefill chunks are long enough not to tell."""
    rows, seconds = [], []
    for plan in plans:
        n = plan.decodes
        prefill = 0 if n else plan.tokens
        rows.append([prefill * (prefill + 2 * plan.start), prefill, 1.0, n, n * plan.start])
        seconds.append(sum(plan.stages_s))
    values = _non_negative(np.array(rows, dtype=np.float64), np.array(seconds))
    names = ("quadratic_s", "linear_s", "fixed_s", "decode_s", "decode_context_s")
    dials = {f"forward.{name}": float(value) for name, value in zip(names, values, strict=True)}
    spread = [plan.stages_s[-1] - plan.stages_s[0] for plan in plans if plan.decodes == 1]
    last_s = max(statistics.median(spread), 0.0)
    dials["forward.fixed_s"] = max(dials["forward.fixed_s"] - last_s, 0.0)
    dials["forward.last_stage_s"] = last_s
    relative = np.abs(np.array(rows) @ values / np.array(seconds) - 1)
    dials["forward.jitter"] = min(float(np.median(relative)), 0.5)
    return dials


def _contention(spans: dict[str, list[Span]], plans: Sequence[_Plan], alone: int) -> float:
    """How much slower a stage goes while the other computes too: the median over passes of the prompts that ran together, each of one
    chunk. ``alone``: plans before those."""
    built = sorted(
        (span for span in spans["planner"] if span.kind == SpanKind.PLAN), key=lambda span: span.id
    )
    together = {
        span.id for span in [span for span in built[alone:] if span.value == CHUNK][:TOGETHER]
    }
    passes = [
        [
            (span.start_ns / 1e9, (span.start_ns + span.duration_ns) / 1e9)
            for span in spans[f"rank {rank}"]
            if span.kind == SpanKind.FORWARD and span.id in together
        ]
        for rank in range(PP)
    ]
    found = []
    for rank, other in ((0, 1), (1, 0)):
        alone_s = statistics.median(
            plan.stages_s[rank] for plan in plans if (plan.start, plan.tokens) == (0, CHUNK)
        )
        for begin, end in passes[rank]:
            shared_s = sum(
                max(min(end, stop) - max(begin, start), 0.0) for start, stop in passes[other]
            )
            shared_work_s = alone_s - (end - begin - shared_s)
            if shared_s > 0.5 * (end - begin) and shared_work_s > 0:
                found.append(shared_s / shared_work_s - 1.0)
    if len(found) < TOGETHER:
        raise CalibrationError("the stages hardly ran at the same time; try again")
    return max(statistics.median(found), 0.0)


def _non_negative(
    rows: npt.NDArray[np.float64], seconds: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Least squares on relative errors; what would become negative is 0 instead, the most negative first."""
    weighted, ones = rows / seconds[:, None], np.ones(len(seconds))
    scale = np.abs(weighted).max(axis=0)
    kept = list(range(rows.shape[1]))
    values = np.zeros(rows.shape[1])
    while kept:
        found = np.linalg.lstsq(weighted[:, kept] / scale[kept], ones, rcond=None)[0]
        if found.min() >= 0:
            values[kept] = found / scale[kept]
            break
        del kept[int(found.argmin())]
    return values


def _links(
    spans: dict[str, list[Span]], config: ModelConfig, plans: Sequence[_Plan]
) -> dict[str, float]:
    """Copy engines, the way to the store, and messages: a plan's messages are its way to the stages, between them and back."""
    page = _kv_bytes(config) * PAGE // PP
    layers = config.layers // PP
    ranks = [span for rank in range(PP) for span in spans[f"rank {rank}"]]

    def gb_s(kind: SpanKind, unit: int) -> float:
        found = [
            span.value * unit / max(span.duration_ns, 1)
            for span in ranks
            if span.kind == kind and span.value
        ]
        if not found:
            raise CalibrationError(f"the run has no {kind}; try again")
        return statistics.median(found)

    queries = [span.duration_ns / 1e9 for span in spans["planner"] if span.kind == SpanKind.QUERY]
    beyond = statistics.median(
        plan.total_s - sum(plan.stages_s) for plan in plans if plan.decodes == 1
    )
    message_s = max(beyond, 0.0) / (PP + 1)
    return {
        "copy.to_device_gb_s": gb_s(SpanKind.LOAD, page // layers),
        "copy.to_host_gb_s": gb_s(SpanKind.BACKUP, page),
        "network.nic_gb_s": gb_s(SpanKind.FETCH, page),
        "network.control_s": message_s,
        "network.hop_s": message_s,
        "store.query_s": statistics.median(queries) if queries else 1e-3,
    }


def _disk(directory: Path) -> tuple[float, float]:
    """GB/s of reads and writes of one thread past the page cache (O_DIRECT; with it where the file system has none)."""
    path, block = directory / "disk", mmap.mmap(-1, DISK_BLOCK)
    block[:] = random.Random(0).randbytes(DISK_BLOCK)

    def timed(flags: int, move: Callable[[int], int]) -> float:
        try:
            fd = os.open(path, flags | os.O_DIRECT, 0o600)
        except OSError:
            fd = os.open(path, flags, 0o600)
        try:
            began = time.perf_counter()
            for _ in range(DISK_BYTES // DISK_BLOCK):
                move(fd)
            os.fsync(fd)
            return DISK_BYTES / (time.perf_counter() - began) / 1e9
        finally:
            os.close(fd)

    write = timed(os.O_RDWR | os.O_CREAT, lambda fd: os.write(fd, block))
    return timed(os.O_RDWR, lambda fd: os.readv(fd, [block])), write


def _item_bytes(config: ModelConfig) -> int:
    return 4 if config.dtype == "float32" else 2


def _kv_bytes(config: ModelConfig) -> int:
    return 2 * config.layers * config.kv_heads * config.head_dim * _item_bytes(config)


def _file(config: ModelConfig, dials: dict[str, float]) -> str:
    """TOML text, with what was measured and what is only the run's set-up."""
    fixed = {
        "model.kv_bytes_per_token": _kv_bytes(config), "model.layers": config.layers,
        "model.activation_bytes_per_token": config.hidden_size * _item_bytes(config),
        "engine.pp": PP, "engine.tp": 1, "engine.page_size": PAGE, "engine.chunk_size": CHUNK, "engine.max_context": config.max_context,
        "engine.device_memory": '"512MiB"', "engine.host_memory": '"1GiB"', "engine.staged_look": '"forward"',
        "forward.cores": machine.cores().usable,
        "store.holders": 1, "store.dram": '"1GiB"', "store.ssd": '"8GiB"', "store.nic_gb_s": dials["network.nic_gb_s"] * PP,
    }  # fmt: skip
    lines = [
        "# Fitted by `forebay simulate --calibrate`: SmolLM2-135M over two stages of one thread each."
    ]
    together = fixed | dials
    for section in ("model", "engine", "forward", "copy", "network", "store"):
        lines += ["", f"[{section}]"]
        for name, value in together.items():
            if name.startswith(section + "."):
                lines.append(
                    f"{name.partition('.')[2]} = {f'{value:.4g}' if isinstance(value, float) else value}"
                )
    return "\n".join(lines) + "\n"
