"""`forebay bench ttft MODEL`: the measurement from beginning to end.

    start both servers -> warm up -> for each round, group and arm:
        prime (compute the hits) -> drain (all of it in the store) -> flush device and host memory -> measure -> judge -> flush all

Prompts are random token ids and every block has a cache salt of its own, so that nothing is cached by chance. A round that is done is
in the document that ``save`` gets, so a run that was cut off can be taken up again.
"""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec
import torch

from forebay.bench.scratch import scratch_directory
from forebay.bench.token_ids import first_token_id
from forebay.bench.ttft import summary
from forebay.bench.ttft.judge import Rules, judge
from forebay.bench.ttft.load import Answer
from forebay.bench.ttft.plan import (
    Arm,
    Ask,
    Block,
    Experiment,
    Group,
    TtftError,
    arrivals,
    blocks,
    check,
    draw,
)
from forebay.bench.ttft.server import ArmServer, servers
from forebay.bench.ttft.summary import Sample
from forebay.bench.ttft.timeline import median_hits
from forebay.models.config import ModelConfig, load_config
from forebay.models.kv import page_block
from forebay.models.kv_format import kv_format
from forebay.models.resolve import resolve_model
from forebay.models.shard import check_tp, shards, split_layers
from forebay.runtime.compute_dtype import compute_dtype
from forebay.settings import KvDType, Settings
from forebay.store.address import shown

WARM_REQUESTS = 4
CAPACITY_REQUESTS = 8  # for each request that keeps the stages busy
SPARE = 1.5

Progress = Callable[[str, int], None]
"""Is told what happens now, and how many requests have been answered since the last call."""


@dataclass
class Record:
    """What has been measured so far. ``rates``: requests a second offered to each group in an open load."""

    rounds_done: int = 0
    samples: list[Sample] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    rates: dict[str, float] = field(default_factory=dict)
    timeline: list[dict[str, Any]] = field(default_factory=list)


def run(
    experiment: Experiment,
    progress: Progress,
    save: Callable[[dict[str, Any]], None],
    before: Any = None,
) -> dict[str, Any]:
    """The result document of INTERFACES, with samples and the timeline of one hit beside it.

    ``before``: a document of the same experiment to go on from. Raises ``TtftError``, and what reading a model raises.
    """
    resolved = resolve_model(experiment.model)
    config = load_config(resolved.path)
    settings = experiment.settings
    check(experiment, min(settings.max_context or config.max_context, config.max_context))
    split_layers(config.layers, settings.pp)
    check_tp(config, settings.tp)
    dtype = compute_dtype(config, settings)
    strict = dtype == _kv_dtype(settings, dtype) == "float32"
    about = describe(experiment, resolved.name, dtype)
    record = _resumed(before, about)
    bench = _Bench(experiment, config, Rules(settings.page_size, strict), record, progress)
    if record.rounds_done < experiment.shape.rounds:
        with scratch_directory("ttft") as directory:
            with servers(experiment, directory, _memory(experiment, config, dtype)) as started:
                bench.measure(started, lambda: save(document(about, experiment, record)))
            record.timeline = median_hits(started, record.samples) or record.timeline
    return document(about, experiment, record)


def describe(experiment: Experiment, model: str, dtype: str) -> dict[str, Any]:
    """The document's ``config``."""
    settings: dict[str, Any] = msgspec.to_builtins(experiment.settings, enc_hook=str)
    for name in (
        "admin_key",
        "api_key",
        "dtype",
        "given",
        "host",
        "port",
        "served_model_name",
        "fetch_route",
        "timeline",
    ):
        settings.pop(name)
    settings["store"] = shown(settings["store"])
    return {
        "model": model,
        "dtype": dtype,
        "routes": [arm.name for arm in experiment.arms],
        "groups": [group.value for group in experiment.groups],
        **asdict(experiment.shape),
        "client": "HTTP, streamed completions",
        **settings,
    }


def document(about: dict[str, Any], experiment: Experiment, record: Record) -> dict[str, Any]:
    routes = [arm.name for arm in experiment.arms]
    return {
        "config": about,
        "groups": summary.groups(record.samples, routes),
        "change": summary.changes(record.samples, routes, experiment.seed),
        "valid": not record.problems,
        "problems": record.problems,
        "rounds_done": record.rounds_done,
        "rates_per_s": record.rates,
        "samples": [asdict(sample) for sample in record.samples],
        "timeline": record.timeline,
    }


def _resumed(before: Any, about: dict[str, Any]) -> Record:
    if before is None:
        return Record()
    try:
        there = {name: before["config"].get(name) for name in about}
        if there != about:
            other = next(name for name in about if there[name] != about[name])
            raise TtftError(
                f"--resume: that file was measured with {other} = {there[other]!r}, not {about[other]!r}; give another --output"
            )
        samples = [Sample(**sample) for sample in before["samples"]]
        return Record(
            before["rounds_done"],
            samples,
            list(before["problems"]),
            dict(before["rates_per_s"]),
            list(before["timeline"]),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise TtftError(
            f"--resume: that file is no result of bench ttft ({error!r}); give another --output"
        ) from error


def _memory(experiment: Experiment, config: ModelConfig, dtype: str) -> dict[str, int]:
    """Pages for a whole block on each rank, so that primed pages stay until they are stored. Bytes."""
    settings, shape = experiment.settings, experiment.shape
    prompt_pages = -(-(shape.input_len + shape.output_len) // settings.page_size) + 1
    requests = (
        max(shape.requests // shape.rounds, WARM_REQUESTS, _capacity_requests(experiment))
        + shape.concurrency
    )
    ranks = [shard for stage in shards(config, settings.pp, settings.tp) for shard in stage]
    form = kv_format(_kv_dtype(settings, dtype), getattr(torch, dtype))
    page = max(page_block(config, shard, settings.page_size, form).size for shard in ranks)
    size = int(SPARE * prompt_pages * requests) * page
    return {"device_memory": size, "host_memory": size}


def _kv_dtype(settings: Settings, dtype: str) -> str:
    return dtype if settings.kv_dtype is KvDType.AUTO else settings.kv_dtype.value


def _capacity_requests(experiment: Experiment) -> int:
    return 0 if experiment.shape.utilisation is None else CAPACITY_REQUESTS * experiment.settings.pp


class _Bench:
    """Runs blocks on started servers and keeps the record."""

    def __init__(
        self,
        experiment: Experiment,
        config: ModelConfig,
        rules: Rules,
        record: Record,
        progress: Progress,
    ) -> None:
        self._experiment = experiment
        self._shape = experiment.shape
        self._vocab = config.vocab_size
        self._first = first_token_id(config.vocab_size)
        self._rules = rules
        self._record = record
        self._progress = progress
        self._run_id = secrets.token_hex(8)  # a store that outlives this run shares nothing with it

    def measure(self, started: Sequence[ArmServer], save: Callable[[], None]) -> None:
        by_arm = {server.arm: server for server in started}
        for server in started:
            self._progress(f"warm-up: {server.arm.name}", 0)
            self._run(
                server,
                self._extra("warm-up", Group.MIXED, server.arm, WARM_REQUESTS),
                f"{self._run_id}/warm-up/{server.arm.name}",
            )
        self._set_rates(started)
        for blocks_of_round in blocks(
            self._experiment, self._first, self._vocab, self._record.rounds_done
        ):
            samples: list[Sample] = []
            for block in blocks_of_round:
                self._progress(
                    f"round {block.round + 1} of {self._shape.rounds}: {block.group}, {block.arm.name}",
                    0,
                )
                samples += self._measure_block(by_arm[block.arm], block)
            self._record.samples += samples
            self._record.rounds_done += 1
            save()

    def _measure_block(self, server: ArmServer, block: Block) -> list[Sample]:
        salt = f"{self._run_id}/{block.round}/{block.group}/{block.arm.name}"
        answers = self._run(server, block, salt)
        return [
            Sample(
                block.round,
                block.group.value,
                block.arm.name,
                ask.index,
                ask.is_hit,
                answer.cached_store,
                1000 * answer.ttft_s,
                1000 * answer.total_s,
                answer.sent_ns,
                answer.request_id,
            )
            for ask, answer in zip(block.asks, answers, strict=True)
        ]

    def _run(self, server: ArmServer, block: Block, salt: str) -> list[Answer]:
        """Prime, drain, flush, measure, judge; the answers in order. What is wrong goes to the record."""
        hits = [ask for ask in block.asks if ask.is_hit]
        computed = server.client.closed_load(hits, self._shape.concurrency, salt) if hits else []
        self._progress("", len(hits))
        server.drain()
        server.flush(("device", "host"))
        answers = self._load(server, block, salt)
        self._progress("", len(answers))
        if block.round >= 0:
            self._record.problems += judge(block, computed, answers, self._rules)
        server.drain()
        server.flush(("device", "host", "store") if self._store_is_ours else ("device", "host"))
        return answers

    def _load(self, server: ArmServer, block: Block, salt: str) -> list[Answer]:
        rate = self._record.rates.get(block.group.value)
        if rate is None or block.round < 0:
            return server.client.closed_load(block.asks, self._concurrency(block), salt)
        timed = arrivals(block.asks, rate, f"{self._experiment.seed}/{block.round}/{block.group}")
        return server.client.open_load(timed, salt)

    def _concurrency(self, block: Block) -> int:
        """Blocks that find out the capacity keep all stages busy."""
        return (
            max(self._shape.concurrency, 2 * self._experiment.settings.pp)
            if block.round < 0
            else self._shape.concurrency
        )

    @property
    def _store_is_ours(self) -> bool:
        return self._experiment.settings.store.partition("?")[0] == "embedded"

    def _set_rates(self, started: Sequence[ArmServer]) -> None:
        """What is offered in an open load: the same to all arms, a share of what the slowest of them can do."""
        shape, record = self._shape, self._record
        if record.rates or not shape.is_open:
            return
        for group in self._experiment.groups:
            if shape.rate is not None:
                record.rates[group.value] = shape.rate
            elif shape.utilisation is not None:
                capacities = [self._capacity(server, group) for server in started]
                record.rates[group.value] = shape.utilisation * min(capacities)

    def _capacity(self, server: ArmServer, group: Group) -> float:
        """Requests a second when the stages never want for work."""
        self._progress(f"capacity: {group}, {server.arm.name}", 0)
        block = self._extra("capacity", group, server.arm, _capacity_requests(self._experiment))
        answers = self._run(server, block, f"{self._run_id}/capacity/{group}/{server.arm.name}")
        began = min(answer.sent_ns for answer in answers)
        ended = max(answer.sent_ns + 1e9 * answer.total_s for answer in answers)
        return 1e9 * len(answers) / (ended - began)

    def _extra(self, purpose: str, group: Group, arm: Arm, count: int) -> Block:
        """A block that is no part of the result (round -1)."""
        seed = f"{self._experiment.seed}/{purpose}/{group}"
        asks: tuple[Ask, ...] = draw(
            seed, group, count, self._shape.input_len, self._first, self._vocab
        )
        return Block(-1, group, arm, asks)
