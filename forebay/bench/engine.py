"""`forebay bench engine MODEL`: the whole engine, from prompt to token, beside a peer and the machine's floors in the same run.

Rounds are interleaved: in each, every figure is taken once from Forebay and once from the peer on
the same weights, the peer first in every other round; the median over rounds is reported. A peer is
a library, with as many threads and the same dtype, or another Forebay with settings of its own,
which lives beside (an idle one sleeps). llama.cpp is measured with weights of its own formats too
(`BESIDE`); they are not the same weights any more, so those figures are told and compared with
nothing. Prompts are random token ids, fresh for each cold figure, so nothing is cached by chance.

    cold_ttft    one prompt that nothing has seen: until its first token, ms
    hit_ttft     the same prompt again; transformers' figure is its *cold* one, since it keeps nothing between calls
    decode       ms a token for ``batch`` sequences at a context of 512, prefill not counted
    throughput   ``batch`` prompts at once, ``tokens`` in (and 64 out where batch is 4): tokens in (or out) a second

At the end the memory of each rank's process is set beside its weights and pages (`rank_memory`).
"""

import contextlib
import random
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch

from forebay.bench.gguf_file import CannotWrite, write_gguf
from forebay.bench.llama_cpp import LlamaCpp, LlamaCppError
from forebay.bench.rank_memory import memory_rows
from forebay.bench.scratch import scratch_directory
from forebay.bench.token_ids import first_token_id
from forebay.core.sampling import SamplingParams
from forebay.frontend.llm import LLM
from forebay.models.config import ModelConfig, load_config
from forebay.models.resolve import ResolvedModel, resolve_model
from forebay.runtime.compute_dtype import compute_dtype
from forebay.runtime.sizing import threads_per_rank
from forebay.settings import Device, Settings

COLD_TOKENS = (512, 2048, 4096)
HIT_TOKENS = 2048
DECODE_CONTEXT = 512
DECODE_STEPS = 32
DECODE_BATCHES = (1, 4)
PREFILL_BATCH, PREFILL_TOKENS = 8, 1024
MIXED_BATCH, MIXED_TOKENS, MIXED_OUT = 4, 512, 64
MATMUL_SIZE = 1536
COPY_BYTES = 256 << 20

LLAMA_CPP = "llama.cpp"
BESIDE = ("q8_0", "q4_1")  # its formats
PEERS = ("transformers", LLAMA_CPP)

Prompts = list[list[int]]


class BenchError(Exception):
    """The measurement cannot be made or is not valid. One line."""


class Engine(Protocol):
    """What is measured: greedy tokens for prompts that run at the same time."""

    def generate(self, prompts: Prompts, tokens: int) -> object: ...


@dataclass(frozen=True, slots=True)
class Peer:
    """``settings``: of another Forebay; None: the library of that name."""

    name: str
    settings: Settings | None = None

    @property
    def keeps_pages(self) -> bool:
        return self.settings is not None or self.name == LLAMA_CPP


@dataclass(frozen=True, slots=True)
class Case:
    """One figure. ``peer_case``: whose figure of a peer that keeps nothing is set beside this one."""

    what: str
    tokens: int
    batch: int
    unit: str
    measure: Callable[[Engine, random.Random], float]
    peer_case: str = ""

    @property
    def name(self) -> str:
        return f"{self.what}/{self.tokens}x{self.batch}"


@dataclass(slots=True)
class _Samples:
    forebay: list[float] = field(default_factory=list)
    peer: list[float] = field(default_factory=list)
    beside: dict[str, list[float]] = field(default_factory=dict)


def run(
    model: str,
    settings: Settings,
    peer: Peer | None,
    rounds: int,
    say: Callable[[str], None],
    only: Collection[str] = (),
) -> dict[str, Any]:
    """The result document of INTERFACES. ``only``: names of cases (``cold_ttft/4096x1``); empty = all.

    Raises ``BenchError``, and what a start of the engine raises.
    """
    resolved = resolve_model(model)
    config = load_config(resolved.path)
    cases = _chosen(
        [
            case
            for case in _cases(config.vocab_size)
            if case.tokens + MIXED_OUT < _context(config, settings, peer)
        ],
        only,
    )
    samples = {case.name: _Samples() for case in cases}
    with (
        _engine_of(peer, model, settings) as other,
        _engines_beside(peer, resolved, config, settings) as beside,
        LLM.from_settings(model, settings) as llm,
    ):
        ours = _Forebay(llm)
        _warm_up([ours, other, *beside.values()], config.vocab_size)
        for number in range(rounds):
            for case in cases:
                say(f"round {number + 1} of {rounds}: {case.name}")
                _take(
                    case,
                    number,
                    ours,
                    None if peer and case.peer_case and not peer.keeps_pages else other,
                    samples[case.name],
                )
                for name, engine in beside.items():
                    taken = case.measure(engine, random.Random(f"{number}/{case.name}"))
                    samples[case.name].beside.setdefault(name, []).append(taken)
        memory = _memory(llm, resolved, config, settings)
    rows = [_row(case, samples) for case in cases]
    threads = _threads(settings)
    about = {
        "model": resolved.name,
        "pp": settings.pp,
        "tp": settings.tp,
        "threads": threads,
        "rounds": rounds,
    }
    about |= {"peer": None if peer is None else peer.name, "dtype": _dtype(config, settings)}
    return {"config": about, "floors": _floors(threads), "rows": rows, "memory": memory}


def _take(case: Case, number: int, ours: Engine, other: Engine | None, into: _Samples) -> None:
    """One sample of each; whoever is second finds the machine as the first has left it, so they take turns."""
    asked = [(ours, into.forebay)] if other is None else [(ours, into.forebay), (other, into.peer)]
    for engine, samples in asked if number % 2 == 0 else reversed(asked):
        samples.append(case.measure(engine, random.Random(f"{number}/{case.name}")))


def _chosen(cases: Sequence[Case], only: Collection[str]) -> list[Case]:
    if unknown := set(only) - {case.name for case in cases}:
        raise BenchError(
            f"there is no figure {sorted(unknown)[0]!r} here; allowed: {', '.join(case.name for case in cases)}"
        )
    return [case for case in cases if not only or case.name in only]


def _context(config: ModelConfig, settings: Settings, peer: Peer | None) -> int:
    """Tokens that both engines take."""
    limits = [settings.max_context] + (
        [peer.settings.max_context] if peer is not None and peer.settings is not None else []
    )
    return min([config.max_context, *(limit for limit in limits if limit is not None)])


def _threads(settings: Settings) -> int:
    return settings.pp * settings.tp * threads_per_rank(settings)


def _memory(
    llm: LLM, model: ResolvedModel, config: ModelConfig, settings: Settings
) -> list[dict[str, Any]]:
    """After all that was asked; of ranks on GPUs there is nothing to say here."""
    if settings.device is not Device.CPU:
        return []
    return memory_rows(
        llm.planner_pid,
        llm.snapshot,
        model.path,
        getattr(torch, _dtype(config, settings)),
        settings,
    )


def _dtype(config: ModelConfig, settings: Settings) -> str:
    return compute_dtype(config, settings)


def _cases(vocab_size: int) -> list[Case]:
    def fresh(dice: random.Random, count: int, tokens: int) -> Prompts:
        first = first_token_id(vocab_size)
        return [[dice.randrange(first, vocab_size) for _ in range(tokens)] for _ in range(count)]

    def cold(tokens: int) -> Callable[[Engine, random.Random], float]:
        return lambda engine, dice: (
            1000 * _seconds(lambda prompts: engine.generate(prompts, 1), fresh(dice, 1, tokens))
        )

    def hit(engine: Engine, dice: random.Random) -> float:
        prompts = fresh(dice, 1, HIT_TOKENS)
        engine.generate(prompts, 1)
        return 1000 * _seconds(lambda prompts: engine.generate(prompts, 1), prompts)

    def decode(batch: int) -> Callable[[Engine, random.Random], float]:
        def measure(engine: Engine, dice: random.Random) -> float:
            prompts = fresh(dice, batch, DECODE_CONTEXT)
            engine.generate(prompts, 1)  # where there is a cache, prefill is over in both
            short = _seconds(lambda prompts: engine.generate(prompts, 1), prompts)
            long = _seconds(lambda prompts: engine.generate(prompts, 1 + DECODE_STEPS), prompts)
            return 1000 * (long - short) / DECODE_STEPS

        return measure

    def throughput(batch: int, tokens: int, out: int) -> Callable[[Engine, random.Random], float]:
        counted = batch * (tokens if out == 1 else out)
        return lambda engine, dice: (
            counted
            / _seconds(lambda prompts: engine.generate(prompts, out), fresh(dice, batch, tokens))
        )

    return [
        *(Case("cold_ttft", tokens, 1, "ms", cold(tokens)) for tokens in COLD_TOKENS),
        Case("hit_ttft", HIT_TOKENS, 1, "ms", hit, peer_case=f"cold_ttft/{HIT_TOKENS}x1"),
        *(Case("decode", DECODE_CONTEXT, batch, "ms", decode(batch)) for batch in DECODE_BATCHES),
        Case(
            "throughput",
            PREFILL_TOKENS,
            PREFILL_BATCH,
            "tok/s",
            throughput(PREFILL_BATCH, PREFILL_TOKENS, 1),
        ),
        Case(
            "throughput",
            MIXED_TOKENS,
            MIXED_BATCH,
            "tok/s",
            throughput(MIXED_BATCH, MIXED_TOKENS, MIXED_OUT),
        ),
    ]


def _row(case: Case, samples: dict[str, _Samples]) -> dict[str, Any]:
    own = statistics.median(samples[case.name].forebay)
    others = samples[case.name].peer
    if not others and case.peer_case in samples:
        others = samples[case.peer_case].peer
    peer = statistics.median(others) if others else None
    ratio = own / peer if peer else None
    row = {
        "what": case.what,
        "tokens": case.tokens,
        "batch": case.batch,
        "forebay": own,
        "peer": peer,
        "ratio": ratio,
    }
    beside = {name: statistics.median(taken) for name, taken in samples[case.name].beside.items()}
    return {**row, "unit": case.unit, "beside": beside, "samples": asdict(samples[case.name])}


def _seconds(work: Callable[[Prompts], object], prompts: Prompts) -> float:
    began = time.perf_counter()
    work(prompts)
    return time.perf_counter() - began


class _Forebay:
    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def generate(self, prompts: Prompts, tokens: int) -> None:
        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        outputs = self._llm.generate(prompts, params)
        short = [
            len(output.outputs[0].token_ids)
            for output in outputs
            if len(output.outputs[0].token_ids) != tokens
        ]
        if short:
            raise BenchError(f"asked for {tokens} tokens and got {short[0]}")


class _Transformers:
    """The usual way without an engine: one static batch, key/value cache of the library, greedy."""

    def __init__(self, model: ResolvedModel, dtype: torch.dtype, threads: int) -> None:
        try:
            from transformers import AutoModelForCausalLM
        except ImportError as error:
            raise BenchError(
                "--peer transformers: not installed; pip install 'forebay[dev]'"
            ) from error
        torch.set_num_threads(threads)
        loader: Any = AutoModelForCausalLM  # the library is not typed here
        self._model = loader.from_pretrained(
            model.path, dtype=dtype, attn_implementation="sdpa"
        ).eval()

    @torch.inference_mode()
    def generate(self, prompts: Prompts, tokens: int) -> None:
        inputs = torch.tensor(prompts)
        cache = None
        for _ in range(tokens):
            output = self._model(inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = output.past_key_values
            inputs = output.logits[:, -1:].argmax(-1)


@contextlib.contextmanager
def _engine_of(peer: Peer | None, model: str, settings: Settings) -> Iterator[Engine | None]:
    """``settings``: those of the engine that it is set beside."""
    if peer is None:
        yield None
    elif peer.settings is not None:
        with LLM.from_settings(model, peer.settings) as llm:
            yield _Forebay(llm)
    elif peer.name == "transformers":
        resolved = resolve_model(model)
        yield _Transformers(
            resolved,
            getattr(torch, _dtype(load_config(resolved.path), settings)),
            _threads(settings),
        )
    elif peer.name == LLAMA_CPP:
        resolved = resolve_model(model)
        config = load_config(resolved.path)
        with _llama_cpp(resolved, config, _dtype(config, settings), settings) as engine:
            yield engine
    else:
        raise BenchError(
            f"--peer is {peer.name!r}; allowed: {', '.join(PEERS)}, or forebay:NAME=VALUE,... with settings of a second engine"
        )


@contextlib.contextmanager
def _engines_beside(
    peer: Peer | None, model: ResolvedModel, config: ModelConfig, settings: Settings
) -> Iterator[dict[str, Engine]]:
    """Of llama.cpp, one for each of `BESIDE`; of all others, none."""
    with contextlib.ExitStack() as stack:
        forms = BESIDE if peer is not None and peer.name == LLAMA_CPP else ()
        yield {
            form: stack.enter_context(_llama_cpp(model, config, form, settings)) for form in forms
        }


@contextlib.contextmanager
def _llama_cpp(
    model: ResolvedModel, config: ModelConfig, form: str, settings: Settings
) -> Iterator[Engine]:
    """``form``: of its weights (`gguf_file.FORMATS`)."""
    with scratch_directory("llama-cpp") as directory:
        file = directory / f"{form}.gguf"
        try:
            write_gguf(model.path, config, form, file)
            engine = LlamaCpp(file, _threads(settings), PREFILL_BATCH * (PREFILL_TOKENS + 64))
        except (CannotWrite, LlamaCppError) as error:
            raise BenchError(f"--peer {LLAMA_CPP}: {error}") from error
        try:
            yield engine
        finally:
            engine.close()


def _warm_up(engines: Sequence[Engine | None], vocab_size: int) -> None:
    """First calls are slow (kernels, allocators), and are no measure."""
    for engine in engines:
        if engine is not None:
            engine.generate([[vocab_size - 1] * 64], 2)


def _floors(threads: int) -> dict[str, float]:
    """What the machine gives at best: bfloat16 matrix products and copies, with as many threads."""
    torch.set_num_threads(threads)
    square = torch.randn(MATMUL_SIZE, MATMUL_SIZE, dtype=torch.bfloat16)
    source, target = (
        torch.ones(COPY_BYTES, dtype=torch.uint8),
        torch.zeros(COPY_BYTES, dtype=torch.uint8),
    )
    product = min(_times(lambda: torch.mm(square, square)))
    copy = min(_times(lambda: target.copy_(source)))
    return {
        "matmul_gflops": 2 * MATMUL_SIZE**3 / product / 1e9,
        "memcpy_gib_s": COPY_BYTES / copy / 2**30,
    }


def _times(work: Callable[[], object], count: int = 5) -> Sequence[float]:
    return [_seconds(lambda _: work(), []) for _ in range(count)]
