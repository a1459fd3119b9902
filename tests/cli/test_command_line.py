"""The `forebay` command without a model: help, config, and mistakes, which are one line and exit status 2."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import forebay
from forebay.cli.main import app, run
from forebay.settings import fields
from tests.pace import paced
from tests.sim.traffic import conversations, write_trace


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a mistaken command prints."""
    assert run(list(arguments)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("forebay: ")
    return line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve", "demo", "--pagesize", "3"], "--page-size"),
        (["srve", "demo"], "Did you mean 'serve'"),
        (["serve"], "model"),
        (["serve", "demo", "--page-size", "0"], "--page-size is 0; allowed: 1 to 4096 tokens"),
        (
            ["serve", "demo", "--page-size", "many"],
            "--page-size is 'many'; allowed: a whole number",
        ),
        (["serve", "demo", "--device-memory", "0"], "at least 1 byte"),
        (["serve", "demo", "--device-memory", "2 lots"], "write it as 512MiB"),
        (["serve", "demo", "--dtype", "int3"], "allowed: auto, float32, bfloat16"),
        (["serve", "demo", "--port", "70000"], "allowed: 0 to 65535"),
        (["serve", "/no/such/model", "--port", "0"], "/no/such/model: no such file or directory"),
        (["serve", "demo", "--port", "0", "--host", "host.invalid"], "--host is 'host.invalid'"),
        (["serve", "demo", "--config", "/no/such/file"], "/no/such/file"),
        (["serve", "demo", "--port", "0", "--api-key", ""], "--api-key is empty"),
        (
            ["generate", "demo", "hi", "--temperature", "hot"],
            "--temperature is 'hot'; allowed: a number",
        ),
        (["generate", "demo", "hi", "--top-p", "2"], "top_p is 2.0"),
        (["generate", "/no/such/model", "hi"], "/no/such/model"),
        (["serve", "demo", "--store", "none", "--host-mode", "staging"], "needs a store"),
        (
            ["bench", "ttft", "/no/such/model", "--store", "embedded"],
            "/no/such/model: no such file or directory",
        ),
        (
            ["bench", "ttft", "demo", "--routes", "fast"],
            "--routes names 'fast'; allowed: ticket, staged, off",
        ),
        (
            ["bench", "ttft", "demo", "--groups", "some"],
            "--groups names 'some'; allowed: miss, mixed, hit",
        ),
        (["bench", "ttft", "demo", "--store", "none"], "--store is none"),
        (["bench", "ttft", "demo", "--port", "8000"], "--port is not for this bench"),
        (["bench", "ttft", "demo", "--fetch-route", "off"], "use --routes"),
        (["bench", "ttft", "demo", "--requests", "many"], "should be a valid integer"),
        (["bench", "ttft", "demo", "--store", "embedded", "--resume"], "--resume needs --output"),
        (
            ["bench", "ttft", "demo", "--store", "embedded", "--html", "/no/such/dir/report.html"],
            "there is no directory /no/such/dir",
        ),
        (["bench", "ttft", "demo", "--store", "embedded", "--output", "/"], "is a directory"),
    ],
)
def test_a_mistake_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert said in fails(capsys, *arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "demo", "--dp", "2"],
        ["serve", "demo", "--nnodes", "2"],
        ["serve", "demo", "--dynamic-chunking"],
        ["generate", "demo", "hi", "--dp", "2"],
        ["doctor", "file"],
    ],
)
def test_what_is_not_there_yet_says_so(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert "not available yet: " in fails(capsys, *arguments)


def test_what_asks_for_nothing_that_is_missing_is_let_through(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = fails(capsys, "serve", "/no/such/model", "--port", "0", "--dp", "1", "--store", "none")
    assert "no such file" in line


def test_a_port_in_use_is_found_before_the_model_is_looked_at(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        line = fails(capsys, "serve", "/no/such/model", "--port", port)
    assert port in line and "in use" in line and "--port" in line


def test_every_setting_is_an_option_with_its_aliases() -> None:
    page = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "240"}).output
    for field in fields():
        for flag in (field.flag, *field.setting.aliases):
            assert flag in page


def test_config_lists_every_setting_for_programs_and_for_people(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["config", "--json"]) == 0
    table = json.loads(capsys.readouterr().out)["settings"]
    assert [row["name"] for row in table] == [field.name for field in fields()]
    page_size = next(row for row in table if row["name"] == "page_size")
    assert (page_size["default"], page_size["unit"], page_size["range"]) == (
        64,
        "tokens",
        "1 to 4096",
    )
    assert all(row["why"] for row in table)
    assert run(["config"]) == 0
    text = capsys.readouterr().out
    for field in fields():
        for flag in (field.flag, *field.setting.aliases):
            assert re.search(rf"{flag}\s", text), f"{flag} is cut"


def test_config_warns_of_variables_that_set_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREBAY_PAGESIZE", "32")
    monkeypatch.setenv("FOREBAY_PAGE_SIZE", "32")
    assert run(["config", "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["settings"]
    assert "FOREBAY_PAGESIZE" in said.err and "did you mean FOREBAY_PAGE_SIZE?" in said.err
    assert len(said.err.splitlines()) == 1


@pytest.mark.parametrize("arguments", [["version", "caf\udce9"], ["generate", "\udcff", "x"]])
def test_an_argument_that_is_no_utf_8_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert "is no UTF-8" in fails(capsys, *arguments)


@pytest.mark.parametrize("arguments", [["config"], ["config", "--json"], ["serve", "--help"]])
def test_a_reader_that_has_gone_ends_a_command_quietly(arguments: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "forebay.cli", *arguments],
            stdout=closed,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("arguments", [["version"], ["--version"]])
def test_version(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert run(arguments) == 0
    assert capsys.readouterr().out == f"forebay {forebay.__version__}\n"


def test_settings_of_a_file_are_checked_like_flags(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "forebay.toml"
    file.write_text("pagesize = 3\n")
    assert "did you mean 'page_size'?" in fails(capsys, "serve", "demo", "--config", str(file))
    file.write_text("page_size = 0\n")
    assert f"page_size in {file} is 0" in fails(capsys, "serve", "demo", "--config", str(file))


def test_import_and_help_load_nothing_heavy() -> None:
    heavy = ("torch", "zmq", "fastapi", "uvicorn", "tokenizers", "prometheus_client")
    script = f"""
import sys, forebay
assert "msgspec" not in sys.modules, "import forebay is to be cheap"
from forebay.cli.main import run
assert run(["serve", "--help"]) == 0
loaded = [name for name in {heavy!r} if name in sys.modules]
assert not loaded, loaded
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=paced(60),
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_help_loads_nothing_heavy() -> None:
    """What makes `forebay --help` quick, rather than how quick it is on a machine of the day."""
    script = (
        "import sys; from forebay.cli.main import run; status = run(['--help']); "
        "heavy = {'torch', 'fastapi', 'uvicorn', 'tokenizers', 'zmq', 'transformers'} & set(sys.modules); "
        "sys.exit(f'loaded {sorted(heavy)}' if heavy or status else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=paced(60)
    )
    assert done.returncode == 0, done.stderr


def test_what_starts_the_planner_does_not_wait_for_the_http_application() -> None:
    script = (
        "import sys, forebay.frontend.server; "
        "sys.exit(' '.join({'torch', 'fastapi', 'pydantic'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=paced(60)
    )
    assert done.returncode == 0, done.stderr


def test_simulate_runs_histories_and_prints_one_document(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["simulate", "--fuzz", "2", "--seed", "5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["histories"] == 2


def test_simulate_replays_a_trace_over_routes_and_a_sweep(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, report = (
        write_trace(tmp_path / "trace.jsonl", conversations(12)),
        tmp_path / "report.html",
    )
    arguments = [
        "simulate",
        str(trace),
        "--cluster",
        "h20-pp4tp4",
        "--routes",
        "ticket,off",
        "--sweep",
        "engine.max_running=4,8",
    ]
    assert (
        run(
            [
                *arguments,
                "--speed",
                "2",
                "--limit",
                "10",
                "--replicas",
                "2",
                "--html",
                str(report),
                "--json",
            ]
        )
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert [(one["route"], one["dials"]["engine.max_running"]) for one in found["runs"]] == [
        ("ticket", "4"), ("off", "4"), ("ticket", "8"), ("off", "8"),
    ]  # fmt: skip
    for one in found["runs"]:
        assert one["requests"] == 10 and len(one["utilisation"]) == 2 and one["ttft_ms"]["p50"] > 0
        assert sum(one["hit_tokens"].values()) == one["prompt_tokens"]
    page = report.read_text()
    assert (
        page.count("<svg") >= 5 and "stage 3" in page and "http" not in page and "src=" not in page
    )


def test_simulate_refuses_what_cannot_be_simulated_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = str(write_trace(tmp_path / "trace.jsonl", conversations(3)))
    cluster = ["--cluster", "h20-pp4tp4"]
    (tmp_path / "bad.jsonl").write_text('{"timestamp": 1}\n')
    (tmp_path / "empty.jsonl").write_text("")
    assert "--fuzz" in fails(capsys, "simulate")
    assert "--cluster" in fails(capsys, "simulate", trace)
    assert "No such file" in fails(capsys, "simulate", str(tmp_path / "none.jsonl"), *cluster)
    assert "line 1" in fails(capsys, "simulate", str(tmp_path / "bad.jsonl"), *cluster)
    assert "empty" in fails(capsys, "simulate", str(tmp_path / "empty.jsonl"), *cluster)
    assert "h20-pp4tp4.toml" in fails(capsys, "simulate", trace, "--cluster", "no.toml")
    assert "allowed" in fails(capsys, "simulate", trace, *cluster, "--set", "network.nic_gb_s=-1")
    assert "did you mean" in fails(capsys, "simulate", trace, *cluster, "--sweep", "store.drm=1GiB")
    assert "DIAL=VALUE" in fails(capsys, "simulate", trace, *cluster, "--sweep", "store.dram")
    assert "at most 2" in fails(
        capsys,
        "simulate",
        trace,
        *cluster,
        *(f"--sweep=engine.{dial}=1" for dial in ("pp", "tp", "page_size")),
    )
    assert "ticket, staged, off" in fails(capsys, "simulate", trace, *cluster, "--routes", "quick")
    assert "above 0" in fails(capsys, "simulate", trace, *cluster, "--speed", "0")
    assert "FROM:TO" in fails(capsys, "simulate", trace, *cluster, "--window", "5")
    assert "directory" in fails(
        capsys, "simulate", trace, *cluster, "--html", str(tmp_path / "no" / "x.html")
    )
    assert "No such file" in fails(
        capsys, "simulate", "--validate", "--bench", str(tmp_path / "none.json")
    )


def test_simulate_takes_a_preset_and_a_grid_and_refuses_others_in_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["simulate", "--fuzz", "1", "--preset", "storm", "--grid", "4x2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["totals"]["messages"] > 100
    assert "4x2" in fails(capsys, "simulate", "--fuzz", "1", "--grid", "9x9")
    assert "storm" in fails(capsys, "simulate", "--fuzz", "1", "--preset", "hurricane")
