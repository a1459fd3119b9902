"""`forebay store` as its users meet it: a store started by the command line, looked into, and checked offline."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from forebay.cli.store import app
from forebay.store import Status, StoreClient, bench, bench_peers
from forebay.store.holder.log.files import Directory
from forebay.store.holder.log.log import SsdLog
from forebay.store.wire.messages import Tier
from tests.store.store_cluster import CERTIFICATE, KEY, wait_for
from tests.store.store_process import Farm, Process, farm


def run(*args: str) -> Result:
    return CliRunner().invoke(app, list(args))


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Farm]:
    with farm(tmp_path_factory.mktemp("cli")) as one:
        yield one


@pytest.fixture(scope="module")
def up(nodes: Farm) -> Process:
    (nodes.path / "secret").write_text("hush\n")
    secret = ("--secret-file", str(nodes.path / "secret"))
    sizes = ("--dram", "16MiB", "--ssd", str(nodes.path / "ssd"), "--ssd-size", "64MiB")
    process = nodes.run(
        "up",
        "--listen",
        "127.0.0.1:0",
        *sizes,
        "--ssd-prefetch",
        "--tenant-quota",
        "small=1MiB",
        *secret,
    )
    wait_for(
        lambda: (
            json.loads(run("status", process.url, "--json", *secret).stdout or "{}").get(
                "holders_usable"
            )
            == 1
        )
    )
    return process


def test_a_life_of_a_key(nodes: Farm, up: Process, tmp_path: Path) -> None:
    secret = ("--secret-file", str(nodes.path / "secret"))
    file = tmp_path / "value"
    file.write_bytes(bytes(range(256)) * 40)
    assert run("put", up.url, "hello", str(file), *secret).stdout == "hello: OK\n"
    assert run("put", up.url, "hex:00ff", str(file), *secret).stdout == "hex:00ff: OK\n"
    assert run("put", up.url, "hello", str(file), *secret).stdout == "hello: EXISTS\n"
    listed = json.loads(run("ls", up.url, "--json", *secret).stdout)
    assert listed == [{"key": "hex:00ff", "bytes": 10240}, {"key": "hello", "bytes": 10240}]
    assert run("get", up.url, "hello", "-o", str(tmp_path / "copy"), *secret).exit_code == 0
    assert (tmp_path / "copy").read_bytes() == file.read_bytes()
    assert run("get", up.url, "hello", *secret).stdout_bytes == file.read_bytes()
    assert (
        run("prefetch", up.url, "hello", *secret).stdout
        == "0 asked for, 1 in DRAM already, 0 not there\n"
    )
    assert run("prefetch", up.url, "none", *secret).exit_code == 1
    wait_for(
        lambda: run("rm", up.url, "none", *secret).stdout == "none: NOT_FOUND\n",
        what="a new master has heard everyone",
    )
    assert run("rm", up.url, "hello", "none", *secret).stdout == "hello: OK\nnone: NOT_FOUND\n"
    assert run("get", up.url, "hello", *secret).exit_code == 1
    assert "1 objects" in run("status", up.url, *secret).stdout


@pytest.mark.parametrize("allowed", [True, False])
def test_prefetch_says_what_came_of_it(nodes: Farm, tmp_path: Path, allowed: bool) -> None:
    switches = ["--ssd-prefetch"] if allowed else []
    up = nodes.run(
        "up",
        "--listen",
        "127.0.0.1:0",
        "--dram",
        "16MiB",
        "--lease-s",
        "0.5",
        "--ssd",
        str(tmp_path / "log"),
        *switches,
    )
    with StoreClient.connect(up.url) as client:
        keys = [b"key-%02d" % number for number in range(24)]
        for key in keys:
            assert client.put(key, bytes(1 << 20)) is Status.OK
        wait_for(lambda: client.tiers(keys[:1]) == [{Tier.SSD}])
        done = run("prefetch", up.url, "key-00")
        assert done.stdout.startswith("1 asked for, 0 in DRAM already, 0 not there\n")
        assert ("1 in DRAM now" in done.stdout, done.exit_code) == (allowed, 0 if allowed else 1)
        assert ("--ssd-prefetch" in done.stderr) is not allowed
        assert client.tiers(keys[:1]) == [{Tier.SSD, Tier.MEMORY} if allowed else {Tier.SSD}]


def test_without_the_secret_nothing_is_told(up: Process) -> None:
    result = run("ls", up.url, "--timeout-s", "1")
    assert (
        result.exit_code == 2
        and "refused: wrong tenant or secret" in result.stderr
        and not result.stdout
    )


def test_fsck_says_what_is_wrong_and_what_would_be_cut(
    nodes: Farm, up: Process, tmp_path: Path
) -> None:
    secret = ("--secret-file", str(nodes.path / "secret"))
    file = tmp_path / "value"
    file.write_bytes(b"v" * 10_000)
    for key in ("a", "b", "c"):
        run("put", up.url, key, str(file), *secret)
    assert run("fsck", str(nodes.path / "ssd")).exit_code == 2, "in use"
    assert up.end() == ""
    clean = json.loads(run("fsck", str(nodes.path / "ssd"), "--json").stdout)
    assert clean["clean"] and clean["live"] >= 3
    logs = sorted((nodes.path / "ssd").glob("*.log"))
    data = bytearray(logs[0].read_bytes())
    data[data.index(b"v" * 100) + 50] ^= 1
    logs[0].write_bytes(bytes(data) + b"torn" * 100)
    result = run("fsck", str(nodes.path / "ssd"))
    assert result.exit_code == 1
    assert (
        "does not match its CRC32C" in result.stdout
        and "400 bytes of torn tail would be cut" in result.stdout
    )


@pytest.mark.parametrize(
    "args, words",
    [
        (("up", "--dram", "0"), "at least 1 byte"),
        (("up", "--dram", "lots"), "write it as 512MiB"),
        (("up", "--listen", "nowhere:x"), "HOST:PORT"),
        (("up", "--tenant-quota", "team"), "NAME=SIZE"),
        (("up", "--low-watermark", "0.9", "--high-watermark", "0.5"), "must not be"),
        (("up", "--secret-file", "/does/not/exist"), "/does/not/exist"),
        (("up", "--dram", "900TiB"), "smaller --dram"),
        (("status", "forebay://127.0.0.1:1"), "does not answer"),
        (("ls", "redis://x"), "forebay://HOST:PORT"),
        (("get", "forebay://127.0.0.1:1,127.0.0.1:2", "k"), "does not answer"),
        (("get", "forebay://127.0.0.1:1,127.0.0.1:1", "k"), "names a master twice"),
        (("fsck", "/does/not/exist"), "no such directory"),
        (("bench", "--peer", "memcached"), "allowed: redis, mooncake"),
        (("bench", "--tier", "tape"), "allowed: dram, ssd"),
        (("bench", "--serve", "demo"), "goes with --prefetch"),
        (
            ("bench", "--prefetch", "--serve", "demo", "--route", "off"),
            "allowed: staged, ticket, both",
        ),
        (("bench", "--tls-cert", "cert.pem"), "belong together"),
    ],
    ids=lambda one: one if isinstance(one, str) else " ".join(one),
)
def test_what_a_user_gets_wrong_is_one_line_and_status_2(args: tuple[str, ...], words: str) -> None:
    result = run(*args)
    assert result.exit_code == 2, result
    assert (
        words in result.stderr
        and len(result.stderr.strip().splitlines()) == 1
        and result.stdout == ""
    )


def test_fsck_of_what_is_no_log_is_one_line_and_not_a_clean_one(tmp_path: Path) -> None:
    """With several masters the logs are one floor below."""
    result = run("fsck", str(tmp_path))
    assert (
        result.exit_code == 2
        and "no holder's directory" in result.stderr
        and list(tmp_path.iterdir()) == []
    )
    for master in ("a_7001", "b_7001"):
        SsdLog(Directory(tmp_path / master), 1 << 20).close()
        (tmp_path / master / "name").write_text("h\n")
    result = run("fsck", str(tmp_path))
    assert result.exit_code == 2 and "a_7001, b_7001: check each" in result.stderr
    assert run("fsck", str(tmp_path / "a_7001")).exit_code == 0


def test_a_peer_that_is_not_installed_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hiredis", None)  # as an import of it fails
    monkeypatch.setitem(sys.modules, "mooncake", None)
    monkeypatch.setitem(sys.modules, "mooncake.store", None)  # a test before may have imported it
    for name in ("redis", "mooncake"):
        result = run("bench", "--peer", name)
        assert (
            result.exit_code == 2
            and f"--peer {name}" in result.stderr
            and "pip install" in result.stderr
        )
        assert len(result.stderr.strip().splitlines()) == 1


def test_a_port_in_use_is_one_line(nodes: Farm) -> None:
    master = nodes.master()
    result = run("master", "--listen", master.url.removeprefix("forebay://"))
    assert result.exit_code == 2 and "address already in use" in result.stderr


@pytest.mark.slow
def test_the_bench_measures_and_says_so_in_json(tmp_path: Path) -> None:
    result = run(
        "bench", "--footprint", "16MiB", "--rounds", "1", "--directory", str(tmp_path), "--json"
    )
    assert result.exit_code == 0, result.stderr
    rows = json.loads(result.stdout)["rows"]
    assert {row["op"] for row in rows} == {"put_from", "get_into", "get", "exists"}
    assert {(row["where"], row["tier"]) for row in rows} == {
        ("local", "dram"),
        ("tcp", "dram"),
        ("local", "ssd"),
    }
    assert all(row["forebay"] > 0 and row["floor"] > 0 for row in rows)


@pytest.mark.slow
def test_the_bench_measures_tls_beside_tcp_without_it() -> None:
    tls = ("--tls-cert", str(CERTIFICATE), "--tls-key", str(KEY))
    result = run(
        "bench", *tls, "--sizes", "64KiB", "--footprint", "4MiB", "--rounds", "1", "--json"
    )
    rows = json.loads(result.stdout)["rows"]
    assert [(row["op"], row["batch"], row["where"]) for row in rows] == [
        ("put_from", 32, "tcp+tls"),
        ("get_into", 1, "tcp+tls"),
        ("get_into", 32, "tcp+tls"),
    ]
    assert all(row["forebay"] > 0 and row["floor"] > 0 for row in rows)


@pytest.mark.parametrize("name", bench_peers.NAMES)
def test_the_bench_measures_a_peer_beside_us_in_the_same_run(name: str, tmp_path: Path) -> None:
    if why := bench_peers.missing(name):
        pytest.skip(why)
    sizes = ("--sizes", "64KiB", "--footprint", "16MiB", "--rounds", "1", "--tier", "dram")
    result = run("bench", *sizes, "--peer", name, "--json")
    assert result.exit_code == 0, result.stderr
    beside = {
        (row["op"], row["where"]): row["peers"].get(name, 0.0)
        for row in json.loads(result.stdout)["rows"]
        if row["peers"]
    }
    assert {op for op, _ in beside} == {"put_from", "get_into", "get", "exists"} and all(
        figure > 0 for figure in beside.values()
    )


@pytest.mark.slow
def test_mooncake_gives_what_it_was_given() -> None:
    """The bench compares stores that do the same. (Redis' values come as new objects, whose lengths the bench looks at.)"""
    if why := bench_peers.missing("mooncake"):
        pytest.skip(why)
    with bench_peers.opened(["mooncake"], 8 << 20) as peers:
        for peer in peers.values():
            source = np.random.default_rng(0).integers(0, 255, 100_000, dtype=np.uint8)
            buffers = [np.zeros(100_000, np.uint8) for _ in range(2)]
            peer.put([b"a", b"b"], source)
            peer.use(buffers)
            assert peer.exists([b"a", b"b"]) and not peer.exists([b"a", b"none"])
            peer.get([b"a", b"b"], buffers)
            assert all(np.array_equal(source, buffer) for buffer in buffers)


def test_a_store_that_does_not_say_anything_is_not_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench, "_UP", "import time; time.sleep(1000)")
    monkeypatch.setattr(bench, "START_S", 0.2)
    with pytest.raises(bench.BenchError, match="did not start"), bench.store_process():
        pass
