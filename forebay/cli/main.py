"""The `forebay` command: what it can do, and how it fails.

A user's mistake is one line on stderr and exit status 2. `--help` must be quick, so nothing heavy is imported up here.
"""

import os
import select
import sys
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

import forebay
from forebay.cli.errors import UserError
from forebay.cli.options import ConfigFile, takes_settings
from forebay.settings import SettingsError
from forebay.sim.preset import Preset

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_CLOSED_PIPE = 141  # as a shell reports a command that SIGPIPE ended
_LATER_COMMANDS = ("doctor",)

app = typer.Typer(
    name="forebay",
    help="Serves language models over pipeline stages with a tiered KV cache.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

Model = Annotated[
    str, typer.Argument(help="a Hugging Face directory, a .gguf file, or demo", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="print one JSON document")]


@app.callback(invoke_without_command=True)
def _top(
    show_version: Annotated[
        bool, typer.Option("--version", help="print the version", is_eager=True)
    ] = False,
) -> None:
    if show_version:
        print(f"forebay {forebay.__version__}")
        raise typer.Exit


@app.command()
def version() -> None:
    """Print the version."""
    print(f"forebay {forebay.__version__}")


@app.command()
@takes_settings
def serve(settings: dict[str, Any], model: Model, config: ConfigFile = None) -> None:
    """Serve a model over the OpenAI API."""
    from forebay.cli.serve import run_server

    raise typer.Exit(run_server(model, settings, config))


@app.command()
@takes_settings
def generate(
    settings: dict[str, Any],
    model: Model,
    prompts: Annotated[
        list[str], typer.Argument(metavar="PROMPT...", help="text to continue", show_default=False)
    ],
    config: ConfigFile = None,
    json: Json = False,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat", help="each prompt is a user's message, put through the chat template"
        ),
    ] = False,
    max_tokens: Annotated[
        str | None,
        typer.Option(metavar="TOKENS", help="at most this much output [dim]\\[256][/dim]"),
    ] = None,
    min_tokens: Annotated[
        str | None, typer.Option(metavar="TOKENS", help="no end before this much output")
    ] = None,
    temperature: Annotated[str | None, typer.Option(help="0 is greedy [dim]\\[0][/dim]")] = None,
    top_p: Annotated[str | None, typer.Option(help="nucleus sampling")] = None,
    top_k: Annotated[str | None, typer.Option(help="only the k most likely tokens")] = None,
    min_p: Annotated[
        str | None, typer.Option(help="only tokens this likely relative to the best")
    ] = None,
    repetition_penalty: Annotated[
        str | None, typer.Option(help="above 1 discourages what was there")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="text that ends the output; may be repeated")
    ] = None,
) -> None:
    """Continue each prompt and print the text as it comes."""
    from forebay.cli.generate import Asked, run_generate

    sampling = {
        "max_tokens": max_tokens,
        "min_tokens": min_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
    }
    given = {name: value for name, value in sampling.items() if value is not None}
    run_generate(
        Asked(
            model,
            tuple(prompts),
            given,
            tuple(stop or ()),
            settings,
            config,
            as_json=json,
            as_chat=chat,
        )
    )


@app.command("config")
def show_config(json: Json = False) -> None:
    """List every setting with unit, default, range and why."""
    from forebay.cli.config import print_config

    print_config(as_json=json)


@app.command()
def simulate(
    trace: Annotated[
        Path | None,
        typer.Argument(
            help="requests to replay, one JSON object a line (docs/SIMULATOR.md)",
            show_default=False,
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster", metavar="FILE", help="TOML file of the cluster, or laptop or h20-pp4tp4"
        ),
    ] = None,
    routes: Annotated[
        str, typer.Option("--routes", help="one run each: ticket,staged,off")
    ] = "ticket",
    speed: Annotated[
        float, typer.Option("--speed", help="2 = requests arrive twice as fast as in the trace")
    ] = 1.0,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="only the first requests of the trace")
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            "--sweep", metavar="DIAL=A,B", help="one run for each value; one or two dials"
        ),
    ] = None,
    turned: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="DIAL=VALUE", help="change the cluster file's value"),
    ] = None,
    replicas: Annotated[
        int, typer.Option("--replicas", min=1, max=1024, help="grids that share the store")
    ] = 1,
    exact: Annotated[
        bool,
        typer.Option(
            "--exact", help="every TP rank speaks for itself: slower, and the same result"
        ),
    ] = False,
    window: Annotated[
        str | None,
        typer.Option(
            "--window", metavar="FROM:TO", help="seconds that --html shows stage by stage"
        ),
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="also write a report with plots")
    ] = None,
    fuzz: Annotated[
        int | None,
        typer.Option("--fuzz", min=1, help="number of histories to run, each from its own seed"),
    ] = None,
    validate: Annotated[
        bool,
        typer.Option("--validate", help="put the simulator beside published and measured figures"),
    ] = False,
    measured: Annotated[
        Path | None,
        typer.Option(
            "--bench",
            metavar="FILE",
            help="with --validate: a result of `forebay bench ttft --json`",
        ),
    ] = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="measure this machine and print its cluster file")
    ] = False,
    seed: Annotated[int, typer.Option("--seed", min=0, help="first seed")] = 0,
    preset: Annotated[
        Preset | None,
        typer.Option("--preset", help="how much goes wrong; drawn from each seed if not given"),
    ] = None,
    grid: Annotated[
        str | None,
        typer.Option("--grid", metavar="PPxTP", help="stages x TP ranks; drawn if not given"),
    ] = None,
    store: Annotated[
        bool, typer.Option("--store", help="with --fuzz: histories of the store alone")
    ] = False,
    json: Json = False,
) -> None:
    """Replay a trace on a described cluster, or run the real planner through faulty histories (--fuzz)."""
    if (trace is not None) + (fuzz is not None) + validate + calibrate != 1:
        raise UserError(
            "give a trace with --cluster FILE, or one of --fuzz N, --validate, --calibrate; see `forebay simulate --help`"
        )
    if store and fuzz is None:
        raise UserError("--store goes with --fuzz N: histories of the store alone")
    if measured is not None and not validate:
        raise UserError("--bench goes with --validate: the simulator beside that measurement")
    if validate:
        from forebay.cli.validate import run_validation

        run_validation(measured, cluster or "laptop", json)
        return
    if calibrate:
        from forebay.cli.calibrate import run_calibration

        run_calibration(json)
        return
    if fuzz is not None:
        from forebay.cli.simulate import run_simulation

        run_simulation(fuzz, seed, json, preset, grid, store)
        return
    assert trace is not None
    if cluster is None:
        raise UserError("a trace needs a cluster; give --cluster FILE.toml, laptop or h20-pp4tp4")
    from forebay.cli.replay import Asked, run_replay

    asked = Asked(
        trace=trace, cluster=cluster, routes=routes, speed=speed, limit=limit, sweep=sweep or (), turned=turned or (),
        replicas=replicas, exact=exact, seed=seed, window=window, html=html, as_json=json,
    )  # fmt: skip
    run_replay(asked)


@app.command()
def timeline(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...", help="flight records, or directories of them", show_default=False
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="the trace to write")] = Path(
        "trace.json"
    ),
    json: Json = False,
) -> None:
    """Merge the spans of all processes into one trace for https://ui.perfetto.dev or chrome://tracing."""
    from forebay.cli.timeline import merge_timeline

    merge_timeline(files, output, json)


@app.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],
    }
)
def store(context: typer.Context) -> None:
    """Run the store's roles, and look into a running one: up, master, holder, status, ls, get, put, rm, prefetch, fsck."""
    from forebay.cli.store import app as store_app  # heavy, and needed by nothing else

    status = store_app(context.args, prog_name="forebay store", standalone_mode=False)
    raise typer.Exit(status if isinstance(status, int) else 0)


bench = typer.Typer(
    help="Measure beside peers and the machine's floors in the same run.", no_args_is_help=True
)
app.add_typer(bench, name="bench")


@bench.command("engine")
@takes_settings
def bench_engine(
    settings: dict[str, Any],
    model: Model,
    config: ConfigFile = None,
    peer: Annotated[
        str | None,
        typer.Option(
            help="also measure this on the same weights: transformers, llama.cpp, or forebay:NAME=VALUE,... for a second engine"
        ),
    ] = None,
    only: Annotated[
        str,
        typer.Option(help="figures to take, as in cold_ttft/4096x1,throughput/1024x8; else all"),
    ] = "",
    repeat: Annotated[
        int, typer.Option(min=1, help="interleaved rounds; the median is reported")
    ] = 3,
    json: Json = False,
) -> None:
    """Measure time to first token, decode and throughput of the whole engine."""
    from forebay.cli.bench import run_bench_engine

    run_bench_engine(model, settings, config, peer, only, repeat, json)


@bench.command("ttft")
@takes_settings
def bench_ttft(
    settings: dict[str, Any],
    model: Model,
    config: ConfigFile = None,
    routes: Annotated[
        str,
        typer.Option(help="ticket, staged, off; each maybe with a host mode, as in ticket:staging"),
    ] = "ticket,staged",
    groups: Annotated[
        str, typer.Option(help="requests whose prefix is stored: none, every other one, all")
    ] = "miss,mixed,hit",
    input_len: Annotated[int, typer.Option(help="tokens of a prompt")] = 1024,
    output_len: Annotated[int, typer.Option(help="tokens of an answer")] = 1,
    requests: Annotated[int, typer.Option(help="of each group and route, over all rounds")] = 64,
    concurrency: Annotated[int, typer.Option(help="requests in flight at a time")] = 2,
    repeat: Annotated[int, typer.Option(help="rounds in which routes and groups take turns")] = 4,
    rate: Annotated[
        float | None, typer.Option(help="open load: requests a second, at random times")
    ] = None,
    utilisation: Annotated[
        float | None, typer.Option(help="open load: this share of the measured capacity")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="JSON file, written after every round")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="go on from the rounds that --output has")
    ] = False,
    html: Annotated[
        Path | None, typer.Option(help="report with plots, one self-contained file")
    ] = None,
    json: Json = False,
) -> None:
    """Measure time to first token by ticket beside the usual stage-by-stage route, in one interleaved run.

    Settings of `serve` are taken too; the defaults here: --pp 2, --chunk-size as --input-len, --fetch-policy wait.
    """
    from forebay.cli.bench_ttft import Asked, run_bench_ttft

    asked = Asked(
        model,
        routes,
        groups,
        input_len,
        output_len,
        requests,
        concurrency,
        repeat,
        rate,
        utilisation,
        output,
        resume,
        html,
        json,
    )
    raise typer.Exit(run_bench_ttft(asked, settings, config))


@bench.command("tiers")
@takes_settings
def bench_tiers(
    settings: dict[str, Any],
    model: Model,
    config: ConfigFile = None,
    parts: Annotated[
        str, typer.Option(help="what to measure: hits from every tier, cost without hits, copies")
    ] = "hits,cost,copies",
    tokens: Annotated[
        int, typer.Option(min=1, help="of the prompt that is hit, in full pages")
    ] = 2048,
    repeat: Annotated[
        int, typer.Option(min=1, help="rounds in which tiers and copies take turns")
    ] = 30,
    json: Json = False,
) -> None:
    """Measure hits from every tier, what the tiers cost when they do not help, and the rate of copies beside memcpy.

    Settings of `serve` are taken too; the defaults here: --pp 2, --threads-per-rank 1, --fetch-policy wait.
    """
    from forebay.cli.bench_tiers import run_bench_tiers

    run_bench_tiers(model, settings, config, parts, tokens, repeat, json)


@bench.command("planner")
def bench_planner(json: Json = False) -> None:
    """CPU time of a planner step at 1K to 16K of context, and of matching a long prompt."""
    from forebay.cli.bench_planner import run_bench_planner

    run_bench_planner(json)


@bench.command("kv")
def bench_kv(
    model: Model,
    dtype: Annotated[
        str, typer.Option(help="of the computation: auto, float32 or bfloat16")
    ] = "auto",
    tokens: Annotated[int, typer.Option(help="length of each text")] = 512,
    page_size: Annotated[int, typer.Option("--page-size", help="tokens of a page")] = 64,
    json: Json = False,
) -> None:
    """What each format of the KV cache costs in quality: divergence from the unquantised run, and greedy agreement."""
    from forebay.cli.bench_kv import run_bench_kv

    run_bench_kv(model, dtype, tokens, page_size, json)


@bench.command("endurance")
@takes_settings
def bench_endurance(
    settings: dict[str, Any],
    model: Model,
    config: ConfigFile = None,
    load_minutes: Annotated[
        float, typer.Option(min=0.1, help="minutes of mixed load, after a fifth as much of warm-up")
    ] = 10,
    idle_minutes: Annotated[float, typer.Option(min=0.1, help="minutes of nothing, after it")] = 10,
    json: Json = False,
) -> None:
    """Run a server under mixed load with aborts, then idle, and look for what grows or is not given back."""
    from forebay.cli.bench_endurance import run_bench_endurance

    run_bench_endurance(model, settings, config, load_minutes, idle_minutes, json)


@bench.command(
    "store",
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],
    },
)
def bench_store(context: typer.Context) -> None:
    """Measure the store: puts, gets, exists, and prefetch on exist."""
    from forebay.cli.store import app as store_app

    status = store_app(["bench", *context.args], prog_name="forebay", standalone_mode=False)
    raise typer.Exit(status if isinstance(status, int) else 0)


def _refuse_bench(what: str) -> None:
    @bench.command(
        what,
        hidden=True,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )
    def refused(_: typer.Context) -> None:
        raise UserError(
            f"not available yet: forebay bench {what}; `forebay bench --help` lists what is"
        )


_refuse_bench("tree")


def _refuse_command(name: str) -> None:
    @app.command(
        name,
        hidden=True,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )
    def refused(_: typer.Context) -> None:
        raise UserError(f"not available yet: forebay {name}; `forebay --help` lists what is")


for _name in _LATER_COMMANDS:
    _refuse_command(_name)


def main() -> None:
    """Entry point of the console script: runs the command and exits with its status."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """The exit status of one command. A reader of its output that has gone ends it quietly."""
    for number, argument in enumerate(arguments, start=1):
        if not _is_utf8(argument):
            return _fail(f"argument {number} is {argument!r}, which is no UTF-8; write it in UTF-8")
    had_stdout = not _goes_nowhere(sys.stdout)
    try:
        status = app(arguments or ["--help"], prog_name="forebay", standalone_mode=False)
    except (typer.TyperException, UserError, SettingsError) as error:
        return _fail(
            error.format_message() if isinstance(error, typer.TyperException) else str(error)
        )
    except (typer.Abort, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    except (BrokenPipeError, SystemExit):  # typer and rich make an exit of it
        if not (_is_closed(sys.stdout) or (had_stdout and _goes_nowhere(sys.stdout))):
            raise  # another pipe or socket, or an exit that was meant
        _let_go(sys.stdout)
        return EXIT_CLOSED_PIPE
    return status if isinstance(status, int) else 0


def _is_utf8(argument: str) -> bool:
    try:
        argument.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_closed(stream: TextIO) -> bool:
    """Whether the reader at the other end of a pipe has gone."""
    look = select.poll()
    try:
        look.register(stream.fileno(), select.POLLOUT)
    except (OSError, ValueError):  # no file at all
        return False
    return any(events & select.POLLERR for _, events in look.poll(0))


def _goes_nowhere(stream: TextIO) -> bool:
    try:
        return os.fstat(stream.fileno()).st_rdev == os.stat(os.devnull).st_rdev
    except (OSError, ValueError):  # no file at all
        return True


def _let_go(stream: TextIO) -> None:
    """What is still buffered goes nowhere, also when the interpreter ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _fail(text: str) -> int:
    print(f"forebay: {' '.join(text.split())}", file=sys.stderr)
    return EXIT_USAGE
