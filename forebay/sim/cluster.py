"""A cluster as a TOML file: what its ranks, links and store can do, and how the engine on it is set up.

Every entry is a *dial* with a unit, a range and a reason; `forebay simulate --sweep store.dram=64GiB,128GiB` turns one. Unknown names,
negative bandwidths and clusters that cannot exist are refused in one line. Shipped files lie in `clusters/` and go by their name.
"""

import difflib
import math
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import msgspec

from forebay.core.replica import PlannerConfig
from forebay.core.residency import CACHE, STAGING
from forebay.core.transfers.backup import WritePolicy
from forebay.core.transfers.policy import FetchPolicy
from forebay.settings import HostMode, SettingsError, parse_size

GB = 1e9


class ClusterError(ValueError):
    """One line: which dial, what was given, what is allowed."""


@dataclass(frozen=True)
class Dial:
    """``low`` and ``high`` are inclusive; a size is given in bytes or as ``64GiB``."""

    why: str
    unit: str = ""
    low: float | None = None
    high: float | None = None

    @property
    def range(self) -> str:
        if self.low is None and self.high is None:
            return "any"
        low = "" if self.low is None else f"{self.low:g}"
        return f"{low} to {'any' if self.high is None else f'{self.high:g}'}"


class StagedLook(StrEnum):
    """When a stage's compute loop gets to what the staged route has brought."""

    FORWARD = "forward"  # between its forwards; while it waits for hidden states it looks at once (Forebay's ranks)
    PLAN = "plan"  # between its plans: not from taking one until it has run, waiting for hidden states included
    LOCKSTEP = "lockstep"  # once for each plan that leaves the last stage: loops that wait for one another's iterations


class Model(msgspec.Struct, frozen=True, kw_only=True):
    kv_bytes_per_token: Annotated[
        int, Dial("K, V and scales of one token, all layers and heads", "bytes", 1)
    ]
    layers: Annotated[int, Dial("layers, over all stages", "layers", 1, 10_000)]
    latent: Annotated[
        bool, Dial("latent attention: KV is equal on all TP ranks, and stored by one of them")
    ] = False
    activation_bytes_per_token: Annotated[
        int, Dial("hidden states of one token between stages", "bytes", 0)
    ] = 0


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    pp: Annotated[int, Dial("pipeline stages", "stages", 1, 256)] = 1
    tp: Annotated[int, Dial("ranks that share each layer", "ranks", 1, 256)] = 1
    page_size: Annotated[int, Dial("tokens of a page", "tokens", 1, 4096)] = 64
    chunk_size: Annotated[
        int, Dial("prefill tokens that one plan may run", "tokens", 1, 1 << 20)
    ] = 512
    max_running: Annotated[
        int, Dial("requests that may hold device pages at once", "requests", 1, 65536)
    ] = 64
    max_waiting: Annotated[
        int, Dial("requests that may queue; more are rejected", "requests", 0, 1_000_000)
    ] = 1000
    max_context: Annotated[int, Dial("longest prompt + output", "tokens", 2, 1 << 30)] = 131072
    device_memory: Annotated[int, Dial("device pages of one rank (L1)", "bytes", 1)]
    host_memory: Annotated[int, Dial("host pages of one rank (L2)", "bytes", 0)]
    host_mode: Annotated[
        HostMode,
        Dial("host pages are a tier of their own, or there only on the way to and from the store"),
    ] = HostMode.CACHE
    write_policy: Annotated[WritePolicy, Dial("when a full page is copied to host memory")] = (
        WritePolicy.WRITE_THROUGH
    )
    load_back_threshold: Annotated[
        int, Dial("fewer tokens in host memory are computed again", "tokens", 0)
    ] = 10
    fetch_policy: Annotated[FetchPolicy, Dial("how long a request waits for its ticket")] = (
        FetchPolicy.TIMEOUT
    )
    fetch_threshold: Annotated[
        int, Dial("stored prefixes shorter than this are computed", "tokens", 0)
    ] = 256
    staged_look: Annotated[StagedLook, Dial("on the staged route: when a stage looks")] = (
        StagedLook.FORWARD
    )
    prefix_first: Annotated[bool, Dial("admit the longest cached prefix first")] = False
    hits_ahead: Annotated[
        bool,
        Dial("hits have a plan of their own before the next chunk's, instead of riding with it"),
    ] = True


class Forward(msgspec.Struct, frozen=True, kw_only=True):
    """Of the whole model at this ``tp``; a stage takes a pp-th of it, and its own fixed cost."""

    quadratic_s: Annotated[
        float,
        Dial("a of t(l) = a l^2 + b l + c: attention over a prompt of l tokens", "s/token^2", 0),
    ] = 0.0
    linear_s: Annotated[float, Dial("b: one more prefill token", "s/token", 0)]
    fixed_s: Annotated[
        float, Dial("c: what a pass costs whatever it runs (weights are read)", "s", 0)
    ] = 0.0
    decode_s: Annotated[float, Dial("one decode more in a pass", "s", 0)] = 0.0
    decode_context_s: Annotated[
        float, Dial("one token of context more of a decode", "s/token", 0)
    ] = 0.0
    stage_s: Annotated[
        float, Dial("what each stage costs beyond its share of the model", "s", 0)
    ] = 0.0
    last_stage_s: Annotated[
        float, Dial("what the last stage costs beyond the others: head and sampling", "s", 0)
    ] = 0.0
    jitter: Annotated[float, Dial("a pass takes up to this share more or less", "", 0, 0.9)] = 0.0
    cores: Annotated[
        int,
        Dial(
            "that all stages and the frontend of a replica share; 0: nobody waits for one",
            "cores",
            0,
            4096,
        ),
    ] = 0
    contention: Annotated[
        float, Dial("how much slower a busy core goes for each other busy one", "", 0, 10)
    ] = 0.0


class CopyEngine(msgspec.Struct, frozen=True, kw_only=True):
    to_device_gb_s: Annotated[float, Dial("host to device, one rank", "GB/s", 1e-6)] = 20.0
    to_host_gb_s: Annotated[float, Dial("device to host, one rank", "GB/s", 1e-6)] = 20.0
    latency_s: Annotated[float, Dial("of one transfer", "s", 0)] = 20e-6
    jitter: Annotated[float, Dial("a copy takes up to this share more or less", "", 0, 0.9)] = 0.0


class Network(msgspec.Struct, frozen=True, kw_only=True):
    nic_gb_s: Annotated[float, Dial("one rank's share of a NIC, each way", "GB/s", 1e-6)] = 10.0
    latency_s: Annotated[float, Dial("of one read or write", "s", 0)] = 50e-6
    jitter: Annotated[float, Dial("a transfer takes up to this share more or less", "", 0, 0.9)] = (
        0.0
    )
    control_s: Annotated[
        float, Dial("a plan, a ticket or an acknowledgement on its way", "s", 0)
    ] = 200e-6
    control_jitter: Annotated[
        float, Dial("a message takes up to this share more or less", "", 0, 0.9)
    ] = 0.0
    stage_gb_s: Annotated[float, Dial("hidden states from one stage to the next", "GB/s", 1e-6)] = (
        10.0
    )
    hop_s: Annotated[
        float, Dial("hidden states from one stage to the next, beside their bytes", "s", 0)
    ] = 200e-6
    frontend_s: Annotated[
        float, Dial("a request on its way to the planner: HTTP, template, tokenizer", "s", 0)
    ] = 0.0


class Store(msgspec.Struct, frozen=True, kw_only=True):
    holders: Annotated[int, Dial("machines that hold pages; 0: no store", "holders", 0, 4096)] = 0
    dram: Annotated[int, Dial("of one holder", "bytes", 0)] = 0
    ssd: Annotated[int, Dial("of one holder", "bytes", 0)] = 0
    nic_gb_s: Annotated[float, Dial("of one holder, each way", "GB/s", 1e-6)] = 10.0
    ssd_read_gb_s: Annotated[float, Dial("of one holder", "GB/s", 1e-6)] = 3.0
    ssd_write_gb_s: Annotated[float, Dial("of one holder", "GB/s", 1e-6)] = 2.0
    ssd_latency_s: Annotated[float, Dial("of one read", "s", 0)] = 100e-6
    query_s: Annotated[float, Dial("which leading pages are there", "s", 0)] = 1e-3
    lease_s: Annotated[float, Dial("how long what a get was told stays where it is", "s", 0.1)] = (
        5.0
    )
    put_wait_s: Annotated[
        float, Dial("how long a put waits for room before it is refused", "s", 0)
    ] = 2.0
    promotion_on_hit: Annotated[
        bool, Dial("what is read from SSD again and again is copied to DRAM, if that has room")
    ] = False
    hit_threshold: Annotated[int, Dial("reads that make again and again", "reads", 1, 1000)] = 2
    ssd_prefetch: Annotated[
        bool, Dial("what a query with the hint found on SSD is copied to DRAM (prefetch on exist)")
    ] = False
    prefetch_share: Annotated[
        float, Dial("of DRAM for what was prefetched and not read yet", "", 0, 1)
    ] = 0.2
    high_watermark: Annotated[
        float, Dial("eviction from DRAM begins at this share", "", 0.01, 1)
    ] = 0.90
    low_watermark: Annotated[float, Dial("and ends at this one", "", 0, 1)] = 0.85


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    model: Model
    engine: Engine
    forward: Forward
    copy: CopyEngine = CopyEngine()
    network: Network = Network()
    store: Store = Store()

    @property
    def rank_token_bytes(self) -> float:
        """KV of one token on one rank."""
        shares = self.engine.pp * (1 if self.model.latent else self.engine.tp)
        return self.model.kv_bytes_per_token / shares

    @property
    def block_bytes(self) -> int:
        """One page of one rank."""
        return math.ceil(self.rank_token_bytes * self.engine.page_size)

    @property
    def device_pages(self) -> int:
        return self.engine.device_memory // self.block_bytes

    @property
    def host_pages(self) -> int:
        return self.engine.host_memory // self.block_bytes

    @property
    def writers(self) -> int:
        """TP ranks of a stage that store its pages."""
        return 1 if self.model.latent else self.engine.tp

    def planner_config(self) -> PlannerConfig:
        """No rank dies here, so nothing is ever late."""
        engine = self.engine
        return PlannerConfig(
            pp=engine.pp,
            tp=engine.tp,
            page_size=engine.page_size,
            chunk_size=engine.chunk_size,
            max_context=engine.max_context,
            max_running=engine.max_running,
            max_waiting=engine.max_waiting,
            prefix_first=engine.prefix_first,
            write_policy=engine.write_policy,
            load_back_threshold=engine.load_back_threshold,
            has_store=self.store.holders > 0,
            fetch_policy=engine.fetch_policy,
            fetch_threshold=engine.fetch_threshold,
            residency=STAGING if engine.host_mode is HostMode.STAGING else CACHE,
            hits_ahead=engine.hits_ahead,
            silence_s=math.inf,
            late_base_s=math.inf,
        )


SECTIONS: dict[str, type[msgspec.Struct]] = {
    "model": Model, "engine": Engine, "forward": Forward, "copy": CopyEngine, "network": Network, "store": Store,
}  # fmt: skip


def shipped() -> list[str]:
    """Names of the cluster files that come with the package."""
    return sorted(entry.name for entry in _directory().iterdir() if entry.name.endswith(".toml"))


def read_cluster(name: str, turned: Mapping[str, str] | None = None) -> Cluster:
    """The cluster of a file, or of a shipped one by its name, with dials turned. Raises ``ClusterError``."""
    return make_cluster(read_table(name), turned or {}, name)


def read_table(name: str) -> dict[str, Any]:
    """The file's tables as they stand there. Raises ``ClusterError``."""
    try:
        return tomllib.loads(_text(name))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ClusterError(f"cluster file {name} is not TOML: {error}") from error


def make_cluster(table: Mapping[str, Any], turned: Mapping[str, str], name: str) -> Cluster:
    """A cluster of tables and turned dials, checked as a whole. Raises ``ClusterError``."""
    for key in table:
        if key not in SECTIONS:
            raise ClusterError(
                f"cluster file {name} has {key!r}, which is no section{_nearest(key, SECTIONS)}"
            )
        if not isinstance(table[key], Mapping):
            raise ClusterError(
                f"cluster file {name} has {key} = {table[key]!r}, which is no table; write [{key}] and its dials below it"
            )
    sections = {section: dict(table.get(section, {})) for section in SECTIONS}
    for dial, value in turned.items():
        section, _, key = dial.partition(".")
        if section not in SECTIONS or key not in dict(_dials(SECTIONS[section])):
            raise ClusterError(f"there is no dial {dial!r}{_nearest(dial, _all_dials())}")
        sections[section][key] = value
    made = {
        section: _section(kind, sections[section], section, name)
        for section, kind in SECTIONS.items()
    }
    cluster = msgspec.convert(made, Cluster)
    _check(cluster, name)
    return cluster


def _section(
    kind: type[msgspec.Struct], given: Mapping[str, Any], section: str, name: str
) -> msgspec.Struct:
    dials = dict(_dials(kind))
    for key in given:
        if key not in dials:
            raise ClusterError(
                f"cluster file {name} sets {section}.{key}, which is no dial{_nearest(key, dials)}"
            )
    values = {
        key: _convert(dials[key], value, f"{section}.{key}", name) for key, value in given.items()
    }
    missing = [
        field.name
        for field in msgspec.structs.fields(kind)
        if field.required and field.name not in values
    ]
    if missing:
        dial = dials[missing[0]][1]
        raise ClusterError(
            f"cluster file {name} lacks {section}.{missing[0]}: {dial.why}"
            + (f" ({dial.unit})" if dial.unit else "")
        )
    return kind(**values)


def _convert(spec: tuple[Any, Dial], value: Any, what: str, name: str) -> Any:
    kind, dial = spec
    refused = ClusterError(f"cluster {name}: {what} is {value!r}; allowed: {_allowed(kind, dial)}")
    if kind is bool:
        if value in (True, False, "true", "false"):
            return value in (True, "true")
        raise refused
    if issubclass(kind, StrEnum):
        if value not in list(kind):
            raise refused
        return kind(value)
    try:
        number = _number(kind, dial, value)
    except (ValueError, TypeError, OverflowError):
        raise refused from None
    if (
        not math.isfinite(number)
        or (dial.low is not None and number < dial.low)
        or (dial.high is not None and number > dial.high)
    ):
        raise refused
    return number


def _number(kind: Any, dial: Dial, value: Any) -> int | float:
    if isinstance(value, bool):
        raise TypeError("a switch is no number")
    if dial.unit == "bytes":
        try:
            return 0 if str(value).strip() == "0" else parse_size(value)
        except SettingsError as error:
            raise ValueError(str(error)) from error
    if kind is int and isinstance(value, float):
        raise TypeError("not a whole number")
    return int(value) if kind is int else float(value)


def _allowed(kind: Any, dial: Dial) -> str:
    if kind is bool:
        return "true or false"
    if issubclass(kind, StrEnum):
        return ", ".join(kind)
    if dial.unit == "bytes":
        return "a size such as 64GiB" + ("" if dial.low else ", or 0")
    return f"{'a whole number, ' if kind is int else ''}{dial.range} {dial.unit}".rstrip()


def _check(cluster: Cluster, name: str) -> None:
    """What no single dial can show. Raises ``ClusterError``."""
    engine, store = cluster.engine, cluster.store
    page = f"a page of {engine.page_size} tokens takes {cluster.block_bytes} bytes on each rank"
    if cluster.forward.cores and engine.staged_look is StagedLook.LOCKSTEP:
        raise ClusterError(
            f"cluster {name}: engine.staged_look is lockstep, which forward.cores cannot do; give forward or plan"
        )
    if engine.pp > cluster.model.layers:
        raise ClusterError(
            f"cluster {name}: engine.pp is {engine.pp}, but the model has {cluster.model.layers} layers; give fewer stages"
        )
    if not cluster.device_pages:
        raise ClusterError(
            f"cluster {name}: engine.device_memory is {engine.device_memory} bytes, but {page}; give more"
        )
    if engine.host_memory and not cluster.host_pages:
        raise ClusterError(
            f"cluster {name}: engine.host_memory is {engine.host_memory} bytes, but {page}; give more, or 0"
        )
    if store.holders and not engine.host_memory:
        raise ClusterError(
            f"cluster {name}: a store needs host pages to fetch into; engine.host_memory is 0; give some, or no holders"
        )
    if engine.host_mode is HostMode.STAGING and not store.holders:
        raise ClusterError(
            f"cluster {name}: engine.host_mode is staging, but there is no store to stage pages for; give store.holders"
        )
    if store.holders and not store.dram:
        raise ClusterError(
            f"cluster {name}: store.holders is {store.holders}, but store.dram is 0; give some, or no holders"
        )
    if store.low_watermark > store.high_watermark:
        raise ClusterError(
            f"cluster {name}: store.low_watermark is {store.low_watermark:g}, above store.high_watermark ({store.high_watermark:g})"
        )
    if not (cluster.forward.linear_s or cluster.forward.fixed_s or cluster.forward.stage_s):
        raise ClusterError(
            f"cluster {name}: a forward pass takes no time; give forward.linear_s and forward.fixed_s"
        )


def _dials(kind: type[msgspec.Struct]) -> Iterator[tuple[str, tuple[Any, Dial]]]:
    hints = typing.get_type_hints(kind, include_extras=True)
    for field in msgspec.structs.fields(kind):
        base, dial = typing.get_args(hints[field.name])
        assert not isinstance(base, types.UnionType)
        yield field.name, (base, dial)


def _all_dials() -> list[str]:
    return [f"{section}.{key}" for section, kind in SECTIONS.items() for key, _ in _dials(kind)]


def _nearest(name: str, known: typing.Iterable[str]) -> str:
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(names)}"


def _directory() -> Any:
    return resources.files("forebay.sim") / "clusters"


def _text(name: str) -> str:
    path = Path(name)
    packaged = [entry for entry in shipped() if name in (entry, entry.removesuffix(".toml"))]
    try:
        if path.is_file() or not packaged:
            return path.read_text()
        return str((_directory() / packaged[0]).read_text())
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise ClusterError(
            f"cluster file {name}: {reason}; give a TOML file, or one of {', '.join(shipped())}"
        ) from error
