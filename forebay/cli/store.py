"""`forebay store`: run the store's roles, and look into a running one."""

import contextlib
import dataclasses
import json as jsonlib
import ssl
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from forebay.settings import SettingsError, format_size, parse_size
from forebay.store import bench as measuring
from forebay.store import bench_peers, bench_tls
from forebay.store import bench_prefetch as prefetching
from forebay.store import fsck as checker
from forebay.store.address import Address, AddressError, StoreUrl
from forebay.store.backend import Status
from forebay.store.bench_peers import PeerError
from forebay.store.client.store import StoreClient
from forebay.store.holder.node import HolderConfig, HolderError, slices
from forebay.store.holder.segment import SegmentError
from forebay.store.holder.writer import Fsync
from forebay.store.master.records import MasterConfig
from forebay.store.up import Roles, Running, run
from forebay.store.wire import auth
from forebay.store.wire.messages import Tier
from forebay.store.wire.tls import TlsError, client_context, own_context, server_context

app = typer.Typer(help="The store of KV pages (L3): run it, look into it.", no_args_is_help=True)
DEFAULT_PORT = 7001
PREFETCH_WAIT_S = 2.0

Listen = Annotated[
    str, typer.Option(help="address to listen on, HOST:PORT; port 0 takes a free one")
]
Dram = Annotated[str, typer.Option(help="DRAM for pages, such as 512MiB; allocated at once")]
Ssd = Annotated[Path | None, typer.Option(help="directory of the SSD log; none = DRAM only")]
SsdSize = Annotated[str, typer.Option(help="bytes the log may take")]
FsyncOption = Annotated[
    Fsync,
    typer.Option(help="when what is logged is forced to the disk: always, batch (0.2 s) or never"),
]
LeaseS = Annotated[
    float,
    typer.Option(
        min=0.5, max=600, help="seconds for which memory that a reader was told of is not reused"
    ),
]
High = Annotated[
    float, typer.Option(min=0.01, max=1, help="share of DRAM at which eviction starts")
]
Low = Annotated[float, typer.Option(min=0.0, max=1, help="share of DRAM down to which it evicts")]
PutWait = Annotated[float, typer.Option(min=0, max=60, help="seconds that a put waits for room")]
OnHit = Annotated[
    bool,
    typer.Option("--promotion-on-hit", help="bring to DRAM what is read from SSD again and again"),
]
SsdPrefetch = Annotated[
    bool, typer.Option("--ssd-prefetch", help="bring to DRAM what a probe announced")
]
Share = Annotated[
    float, typer.Option(min=0, max=1, help="share of DRAM for pages prefetched and not read yet")
]
Replicas = Annotated[int, typer.Option(min=1, max=8, help="holders that each page is written to")]
SecretFile = Annotated[
    Path | None,
    typer.Option(help="lines of 'TENANT SECRET', or one secret; none = no authentication"),
]
TlsCert = Annotated[
    Path | None, typer.Option(help="certificate (PEM, its chain behind it) for TLS; none = no TLS")
]
TlsKey = Annotated[Path | None, typer.Option(help="the key of --tls-cert, not encrypted")]
MetricsPort = Annotated[
    int | None,
    typer.Option(
        min=0, max=65535, help="port for http://HOST:PORT/metrics (Prometheus); none = off"
    ),
]
MetricsHost = Annotated[
    str, typer.Option(help="address of --metrics-port; whoever reaches it sees tenants' names")
]
Quota = Annotated[
    list[str] | None,
    typer.Option(help="DRAM that a tenant may fill, NAME=SIZE; may be given again"),
]
Json = Annotated[
    bool, typer.Option("--json", help="one JSON document on standard output and nothing else there")
]
Url = Annotated[
    str,
    typer.Argument(
        help="forebay://HOST:PORT[,HOST:PORT...] of the masters; forebay+tls://...[?ca=FILE] for TLS"
    ),
]
Tenant = Annotated[str, typer.Option(help="whose keys")]
Timeout = Annotated[float, typer.Option(min=0.05, help="seconds for each call")]
Key = Annotated[str, typer.Argument(help="a key as text, or hex:...")]
Keys = Annotated[list[str], typer.Argument(help="keys as text, or hex:...")]


@contextlib.contextmanager
def _one_line_errors() -> Iterator[None]:
    """Whatever a user can get wrong ends in one line and exit status 2."""
    try:
        yield
    except (
        AddressError,
        SettingsError,
        HolderError,
        SegmentError,
        auth.SecretFileError,
        TlsError,
        OSError,
    ) as error:
        text = (
            f"{error.strerror}: {error.filename}"
            if isinstance(error, OSError) and error.filename
            else str(error)
        )
        typer.echo(f"forebay store: {text}", err=True)
        raise typer.Exit(2) from None


# ---------------------------------------------------------------------------------------------- roles


@app.command()
def up(
    listen: Listen = f"127.0.0.1:{DEFAULT_PORT}",
    dram: Dram = "512MiB",
    ssd: Ssd = None,
    ssd_size: SsdSize = "8GiB",
    fsync: FsyncOption = Fsync.BATCH,
    lease_s: LeaseS = 5.0,
    high_watermark: High = 0.90,
    low_watermark: Low = 0.85,
    put_wait_s: PutWait = 2.0,
    promotion_on_hit: OnHit = False,
    ssd_prefetch: SsdPrefetch = False,
    prefetch_share: Share = 0.2,
    tenant_quota: Quota = None,
    secret_file: SecretFile = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    metrics_port: MetricsPort = None,
    metrics_host: MetricsHost = "127.0.0.1",
    json: Json = False,
) -> None:
    """Run a master and one holder in this process."""
    with _one_line_errors():
        address = Address.parse(listen, DEFAULT_PORT)
        master = _master_config(
            lease_s,
            high_watermark,
            low_watermark,
            put_wait_s,
            promotion_on_hit,
            ssd_prefetch,
            prefetch_share,
            1,
            tenant_quota,
        )
        tls = _tls(tls_cert, tls_key)
        own = own_context(tls_cert) if tls_cert else None
        holder = HolderConfig(
            address,
            Address(address.host, 0),
            parse_size(dram),
            ssd,
            parse_size(ssd_size),
            fsync,
            tls,
            own,
        )
        _run(
            Roles(
                address,
                master,
                [holder],
                _secrets(secret_file),
                tls,
                _metrics(metrics_host, metrics_port),
            ),
            json,
        )


@app.command()
def master(
    listen: Listen = f"127.0.0.1:{DEFAULT_PORT}",
    lease_s: LeaseS = 5.0,
    high_watermark: High = 0.90,
    low_watermark: Low = 0.85,
    put_wait_s: PutWait = 2.0,
    promotion_on_hit: OnHit = False,
    ssd_prefetch: SsdPrefetch = False,
    prefetch_share: Share = 0.2,
    replicas: Replicas = 1,
    tenant_quota: Quota = None,
    secret_file: SecretFile = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    metrics_port: MetricsPort = None,
    metrics_host: MetricsHost = "127.0.0.1",
    json: Json = False,
) -> None:
    """Run the master: it keeps who has what, and nothing that holders cannot tell it again."""
    with _one_line_errors():
        config = _master_config(
            lease_s,
            high_watermark,
            low_watermark,
            put_wait_s,
            promotion_on_hit,
            ssd_prefetch,
            prefetch_share,
            replicas,
            tenant_quota,
        )
        tls, told = _tls(tls_cert, tls_key), _metrics(metrics_host, metrics_port)
        _run(
            Roles(
                Address.parse(listen, DEFAULT_PORT), config, [], _secrets(secret_file), tls, told
            ),
            json,
        )


@app.command()
def holder(
    master: Annotated[str, typer.Option(help="forebay://HOST:PORT[,HOST:PORT...] of the masters")],
    listen: Listen = "127.0.0.1:0",
    dram: Dram = "512MiB",
    ssd: Ssd = None,
    ssd_size: SsdSize = "8GiB",
    fsync: FsyncOption = Fsync.BATCH,
    secret_file: SecretFile = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    metrics_port: MetricsPort = None,
    metrics_host: MetricsHost = "127.0.0.1",
    json: Json = False,
) -> None:
    """Run a holder: it keeps pages in DRAM and on SSD. Clients reach it at the host given with --listen."""
    with _one_line_errors():
        where = StoreUrl.parse(master if "://" in master else f"forebay://{master}", DEFAULT_PORT)
        whole = HolderConfig(
            where.masters[0],
            Address.parse(listen),
            parse_size(dram),
            ssd,
            parse_size(ssd_size),
            fsync,
            _tls(tls_cert, tls_key),
            client_context(where.ca) if where.tls else None,
        )
        told = _metrics(metrics_host, metrics_port)
        _run(
            Roles(None, None, slices(whole, where.masters), _secrets(secret_file), metrics=told),
            json,
        )


def _master_config(
    lease_s: float,
    high: float,
    low: float,
    put_wait_s: float,
    on_hit: bool,
    prefetch: bool,
    share: float,
    replicas: int,
    quotas: list[str] | None,
) -> MasterConfig:
    if low > high:
        raise SettingsError(
            f"--low-watermark {low} is above --high-watermark {high}; it must not be"
        )
    return MasterConfig(
        lease_s,
        high,
        low,
        put_wait_s,
        replicas,
        on_hit,
        prefetch,
        share,
        quotas=_quotas(quotas or []),
    )


def _quotas(given: list[str]) -> dict[str, int]:
    quotas = {}
    for text in given:
        name, equals, size = text.partition("=")
        if not name or not equals:
            raise SettingsError(
                f"--tenant-quota {text!r} is not allowed; write it as NAME=SIZE, such as team-a=4GiB"
            )
        quotas[name] = parse_size(size)
    return quotas


def _secrets(file: Path | None) -> auth.Secrets:
    return auth.Secrets() if file is None else auth.Secrets.read(file)


def _tls(certificate: Path | None, key: Path | None) -> ssl.SSLContext | None:
    if (certificate is None) != (key is None):
        raise TlsError("--tls-cert and --tls-key belong together; give both or neither")
    return None if certificate is None or key is None else server_context(certificate, key)


def _metrics(host: str, port: int | None) -> Address | None:
    return None if port is None else Address(host, port)


def _run(roles: Roles, json: bool) -> None:
    def started(running: Running) -> None:
        said: dict[str, Any] = {}
        if running.master is not None:
            said["url"] = f"forebay{'+tls' if roles.tls else ''}://{running.master.address}"
        if running.holders:
            first = running.holders[0].config
            said |= {"holder": ",".join(str(holder.address) for holder in running.holders)}
            said |= {
                "dram": sum(holder.config.dram for holder in running.holders),
                "ssd": str(first.ssd) if first.ssd else None,
            }
            said["cut_bytes"] = sum(
                holder.log.cut_bytes for holder in running.holders if holder.log is not None
            )
        if running.metrics is not None and roles.metrics is not None:
            said["metrics"] = f"http://{Address(roles.metrics.host, running.metrics.port)}/metrics"
        if json:
            typer.echo(jsonlib.dumps(said))
        else:
            typer.echo(
                "forebay store: "
                + ", ".join(f"{name} {value}" for name, value in said.items() if value)
            )
        sys.stdout.flush()

    run(roles, started)


# ---------------------------------------------------------------------------------------------- looking into it


@app.command()
def status(
    url: Url,
    tenant: Tenant = "default",
    secret_file: SecretFile = None,
    timeout_s: Timeout = 5.0,
    json: Json = False,
) -> None:
    """Objects, memory and SSD in use, holders, and counters since the master started."""
    with _client(url, tenant, secret_file, timeout_s) as client:
        stats, holders = client.stats(), client.holders().holders
    if json:
        document = msgspec.to_builtins(msgspec.structs.asdict(stats)) | {
            "holder_list": [msgspec.structs.asdict(entry) for entry in holders]
        }
        typer.echo(jsonlib.dumps(document))
        return
    table = Table("holder", "at", "serves", "DRAM", "SSD", "SSD state")
    for entry in holders:
        memory = f"{format_size(entry.memory_used)} of {format_size(entry.memory_bytes)}"
        disk = f"{format_size(entry.ssd_used)} of {format_size(entry.ssd_bytes)}"
        serves = "yes" if entry.usable else "no"
        cells = entry.name[:12], f"{entry.host}:{entry.port}", serves, memory, disk, entry.ssd_state
        table.add_row(
            *(Text(cell) for cell in cells)
        )  # as they are: a holder's words are no markup
    console = Console()
    console.print(
        f"{stats.objects} objects, {stats.waiting_puts} puts waiting, {stats.promotions_in_flight} promotions in flight"
    )
    console.print(table)
    for name, count in sorted(stats.counters.items()):
        console.print(f"{name} {count}")


@app.command()
def ls(
    url: Url,
    prefix: Annotated[str, typer.Option(help="only keys that begin so")] = "",
    tenant: Tenant = "default",
    secret_file: SecretFile = None,
    timeout_s: Timeout = 5.0,
    json: Json = False,
) -> None:
    """Keys and their sizes, in order."""
    with _client(url, tenant, secret_file, timeout_s) as client:
        if json:
            typer.echo(
                jsonlib.dumps(
                    [{"key": _show(key), "bytes": size} for key, size in client.list(_key(prefix))]
                )
            )
            return
        for key, size in client.list(_key(prefix)):
            typer.echo(f"{size:>14} {_show(key)}")


@app.command()
def get(
    url: Url,
    key: Key,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="file to write; standard output if not given"),
    ] = None,
    tenant: Tenant = "default",
    secret_file: SecretFile = None,
    timeout_s: Timeout = 5.0,
) -> None:
    """The bytes of one key."""
    with _client(url, tenant, secret_file, timeout_s) as client:
        value = client.get(_key(key), group=client.groups_of([_key(key)])[0])
        if value is None:
            _fail(f"{key}: not there")
        if output is not None:
            output.write_bytes(value)
        else:
            sys.stdout.buffer.write(value)


@app.command()
def put(
    url: Url,
    key: Key,
    file: Annotated[Path, typer.Argument(help="file to store")],
    tenant: Tenant = "default",
    secret_file: SecretFile = None,
    timeout_s: Timeout = 5.0,
) -> None:
    """Store a file under a key."""
    with _client(url, tenant, secret_file, timeout_s) as client:
        _tell({key: client.put(_key(key), file.read_bytes())})


@app.command()
def rm(
    url: Url,
    keys: Keys,
    tenant: Tenant = "default",
    secret_file: SecretFile = None,
    timeout_s: Timeout = 5.0,
) -> None:
    """Remove keys, for good."""
    with _client(url, tenant, secret_file, timeout_s) as client:
        named = [_key(key) for key in keys]
        _tell(dict(zip(keys, client.remove(named, groups=client.groups_of(named)), strict=True)))


@app.command()
def prefetch(
    url: Url,
    keys: Keys,
    tenant: Tenant = "default",
    secret_file: SecretFile = None,
    timeout_s: Timeout = 5.0,
) -> None:
    """Bring keys from SSD to DRAM (the master must run with --ssd-prefetch), and see for 2 s whether they come."""
    with _client(url, tenant, secret_file, timeout_s) as client:
        named = [_key(key) for key in keys]
        client.prefetch(named, groups=client.groups_of(named))
        deadline = time.monotonic() + PREFETCH_WAIT_S
        counters = client.prefetched
        while (
            counters.sent + counters.resident + counters.missing + counters.failed < len(set(keys))
            and time.monotonic() < deadline
        ):
            time.sleep(0.01)
            counters = client.prefetched
        typer.echo(
            f"{counters.sent} asked for, {counters.resident} in DRAM already, {counters.missing} not there"
        )
        if counters.sent:
            _await_memory(client, named, counters.sent + counters.resident)
        if counters.failed or counters.missing:
            raise typer.Exit(1)


def _await_memory(client: StoreClient, keys: list[bytes], wanted: int) -> None:
    """Say how many of ``keys`` are in DRAM once ``wanted`` are, or time is over. None: exit status 1."""
    deadline, groups = time.monotonic() + PREFETCH_WAIT_S, client.groups_of(keys)
    while True:
        warm = sum(Tier.MEMORY in tiers for tiers in client.tiers(keys, groups=groups))
        if warm >= wanted or time.monotonic() >= deadline:
            break
        time.sleep(0.01)
    typer.echo(f"{warm} in DRAM now")
    if not warm:
        _fail(
            f"nothing came to DRAM within {PREFETCH_WAIT_S:g} s: the master runs without --ssd-prefetch, or DRAM has no room"
        )


@app.command()
def fsck(
    directory: Annotated[
        Path, typer.Argument(help="SSD directory of a holder that is not running")
    ],
    json: Json = False,
) -> None:
    """Check every CRC of an SSD log, offline, and say what a start would cut. Changes nothing; exit status 1 if not clean."""
    with _one_line_errors():
        try:
            report = checker.check(directory)
        except BlockingIOError:
            raise HolderError(f"{directory} is in use by a holder; stop it first") from None
    if json:
        typer.echo(jsonlib.dumps(dataclasses.asdict(report) | {"clean": report.clean}))
    else:
        for file in report.files:
            cut = f", {file.cut_bytes} bytes of torn tail would be cut" if file.cut_bytes else ""
            typer.echo(f"{file.name}: {file.records} records in {format_size(file.bytes)}{cut}")
            for line in file.damaged:
                typer.echo(f"  {line}")
        typer.echo(
            f"{report.live} keys ({format_size(report.live_bytes)}), {report.dead} overruled, {report.tombstones} tombstones"
        )
    raise typer.Exit(0 if report.clean else 1)


@contextlib.contextmanager
def _client(
    url: str, tenant: str, secret_file: Path | None, timeout_s: float
) -> Iterator[StoreClient]:
    with _one_line_errors():
        client = StoreClient.connect(url, tenant, secret_file, timeout_s=timeout_s)
        with client:
            yield client


def _tell(statuses: dict[str, Status]) -> None:
    for key, status in statuses.items():
        typer.echo(f"{key}: {status.name}")
    if any(status not in (Status.OK, Status.EXISTS) for status in statuses.values()):
        raise typer.Exit(1)


def _fail(text: str) -> NoReturn:
    typer.echo(f"forebay store: {text}", err=True)
    raise typer.Exit(1)


def _key(text: str) -> bytes:
    """Raises ``AddressError`` for bad hex."""
    if not text.startswith("hex:"):
        return text.encode()
    try:
        return bytes.fromhex(text[4:])
    except ValueError:
        raise AddressError(
            f"{text!r} is no key; after hex: come pairs of hexadecimal digits"
        ) from None


def _show(key: bytes) -> str:
    """A key as text if that is all it is, else as hex."""
    try:
        text = key.decode()
    except UnicodeDecodeError:
        return "hex:" + key.hex()
    return text if text.isprintable() and not text.startswith("hex:") else "hex:" + key.hex()


def _checked_peers(names: list[str]) -> tuple[str, ...]:
    for name in names:
        if why := bench_peers.missing(name):
            raise SettingsError(why)
    return tuple(names)


def _checked_tiers(tiers: list[str]) -> tuple[str, ...]:
    if unknown := set(tiers) - {"dram", "ssd"}:
        raise SettingsError(f"--tier {', '.join(sorted(unknown))} is not known; allowed: dram, ssd")
    return tuple(tiers)


def _bench_config(sizes: str, footprint: str, rounds: int) -> measuring.BenchConfig:
    return measuring.BenchConfig(
        tuple(parse_size(size) for size in sizes.split(",")),
        footprint=parse_size(footprint),
        rounds=rounds,
    )


def _prefetch_ttft(model: str, route: str, logs: Path) -> list[dict[str, Any]]:
    """Imported only when it is wanted: it brings the engine with it."""
    from forebay.bench import prefetch_ttft
    from forebay.bench.ttft.plan import TtftError
    from forebay.models.errors import ModelError
    from forebay.settings import FetchRoute

    routes = {
        "staged": (FetchRoute.STAGED,),
        "ticket": (FetchRoute.TICKET,),
        "both": (FetchRoute.STAGED, FetchRoute.TICKET),
    }
    if route not in routes:
        raise SettingsError(f"--route {route} is not known; allowed: staged, ticket, both")
    try:
        config = prefetch_ttft.PrefetchTtftBench(model, logs, routes[route])
        return prefetch_ttft.run(config, lambda line: typer.echo(line, err=True))
    except ModelError as error:
        raise SettingsError(str(error)) from error
    except TtftError as error:
        raise measuring.BenchError(str(error)) from error


@app.command()
def bench(
    footprint: Annotated[
        str, typer.Option(help="bytes of keys that every figure rotates over")
    ] = "1GiB",
    rounds: Annotated[
        int, typer.Option(min=1, help="interleaved rounds; the median is reported")
    ] = 7,
    directory: Annotated[
        Path | None, typer.Option(help="where the logs of the SSD arms lie")
    ] = None,
    sizes: Annotated[str, typer.Option(help="sizes of values, comma between")] = "64KiB,1MiB,4MiB",
    tier: Annotated[list[str] | None, typer.Option(help="dram or ssd; both if not given")] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(help="another store in the same run: redis or mooncake; may be given again"),
    ] = None,
    prefetch: Annotated[
        bool,
        typer.Option("--prefetch", help="measure prefetch on exist instead: off and on, same data"),
    ] = False,
    serve: Annotated[
        str | None,
        typer.Option(
            help="with --prefetch: time to first token through servers of this model, not reads"
        ),
    ] = None,
    tls_cert: Annotated[
        Path | None,
        typer.Option(help="measure TLS instead, beside TCP without: a certificate for 127.0.0.1"),
    ] = None,
    tls_key: TlsKey = None,
    route: Annotated[
        str, typer.Option(help="with --serve: the servers' fetch route: staged, ticket or both")
    ] = "both",
    json: Json = False,
) -> None:
    """Measure puts, gets and exists beside memcpy, raw sockets and O_DIRECT in the same run."""
    with _one_line_errors():
        try:
            if serve is not None and not prefetch:
                raise SettingsError("--serve MODEL goes with --prefetch; give both, or neither")
            if _tls(tls_cert, tls_key) is not None and tls_cert is not None and tls_key is not None:
                result: dict[str, Any] = bench_tls.run(
                    _bench_config(sizes, footprint, rounds), tls_cert, tls_key
                )
            elif prefetch:
                with tempfile.TemporaryDirectory(dir=directory) as logs:
                    if serve is None:
                        rows = prefetching.run(prefetching.PrefetchBench(Path(logs)))
                    else:
                        rows = _prefetch_ttft(serve, route, Path(logs))
                result = {"config": {}, "floors": {}, "rows": [], "prefetch": rows}
            else:
                peers, tiers = _checked_peers(peer or []), _checked_tiers(tier or ["dram", "ssd"])
                config = dataclasses.replace(
                    _bench_config(sizes, footprint, rounds),
                    directory=directory,
                    peers=peers,
                    tiers=tiers,
                )
                result = measuring.run(config)
        except (measuring.BenchError, PeerError) as error:
            _fail(f"the measurement is not valid: {error}")
    if json:
        typer.echo(jsonlib.dumps(result))
        return
    names = [*dict.fromkeys(name for row in result["rows"] for name in row["peers"])]
    table = Table(
        "op",
        "bytes",
        "batch",
        "where",
        "tier",
        "forebay",
        "floor",
        "unit",
        "ratio",
        *names,
    )
    for row in result["rows"]:
        ratio = row["forebay"] / row["floor"]
        figures = [f"{row['forebay']:.2f}", f"{row['floor']:.2f}", row["unit"], f"{ratio:.2f}"]
        others = [f"{row['peers'][name]:.2f}" if name in row["peers"] else "" for name in names]
        table.add_row(
            row["op"],
            str(row["size"]),
            str(row["batch"]),
            row["where"],
            row["tier"],
            *figures,
            *others,
        )
    if result["rows"]:
        Console().print(table)
    for row in result["prefetch"]:
        off, on = row["off_ms"], row["on_ms"]
        what = f"TTFT by {row['route']}" if "route" in row else "read"
        typer.echo(
            f"concurrency {row['concurrency']}: {what} p50 {off['p50']:.1f} -> {on['p50']:.1f} ms, "
            f"mean {off['mean']:.1f} -> {on['mean']:.1f}, "
            f"p99 {off['p99']:.1f} -> {on['p99']:.1f}; {row['dram_bytes_pct']:.0f} % of bytes from DRAM; "
            f"saved {row['saved_pct']:.0f} % of at most {row['bound_pct']:.0f} %"
        )
        if "roomy_change_pct" in row:
            typer.echo(
                f"  with DRAM for everything: mean {row['roomy_off_ms']['mean']:.1f} ms, {row['roomy_change_pct']:+.1f} % with prefetch"
            )
