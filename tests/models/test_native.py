"""The compiled kernels against PyTorch's, on models and batches of every shape; and how the library comes about."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from forebay.compiled import cpu_flags
from forebay.models.batch import SequenceWork, build_batch
from forebay.models.config import ModelConfig
from forebay.models.errors import ModelError
from forebay.models.kv import KVPool
from forebay.models.kv_format import KV_FORMATS, kv_format
from forebay.models.layers import Head, LayerWeights, Matrix, TorchLayers
from forebay.models.llama import Kernels
from forebay.models.native.build import BUILDS, NoKernels, _best, library
from forebay.models.native.engine import NativeLayers, refuse_unknown
from forebay.models.rope import RopeTable
from forebay.models.shard import Shard, whole
from tests.pace import paced

# Every build that this CPU can execute, not only the one that it would take.
HERE = [build.name for build in BUILDS if build.runs_here()]
CPU = torch.device("cpu")
PAGES = 24
VOCAB = 77


def make_config(
    heads: int, groups: int, head_dim: int, hidden: int, inner: int, flags: bool
) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        layers=2,
        hidden_size=hidden,
        intermediate_size=inner,
        heads=heads * groups,
        kv_heads=heads,
        head_dim=head_dim,
        vocab_size=VOCAB,
        max_context=512,
        norm_eps=1e-5,
        rope_theta=10000.0,
        rope_scaling=None,
        tied_embeddings=False,
        qkv_bias=flags,
        o_bias=flags,
        mlp_bias=flags,
        qk_norm=flags,
        dtype="float32",
        eos_ids=(2,),
        bos_id=1,
    )


def make_weights(config: ModelConfig, dtype: torch.dtype) -> tuple[list[LayerWeights], Head]:
    dice = torch.Generator().manual_seed(3)

    def vector(size: int, around: float = 0.0) -> Tensor:
        return (around + 0.3 * torch.randn(size, generator=dice)).to(dtype)

    def matrix(outputs: int, inputs: int, bias: bool = False) -> Matrix:
        weight = (torch.randn(outputs, inputs, generator=dice) / inputs**0.5).to(dtype)
        return Matrix(weight, vector(outputs) if bias else None)

    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    layers = [
        LayerWeights(
            vector(hidden, 1),
            matrix((config.heads + 2 * config.kv_heads) * dim, hidden, config.qkv_bias),
            vector(dim, 1) if config.qk_norm else None,
            vector(dim, 1) if config.qk_norm else None,
            matrix(hidden, config.heads * dim, config.o_bias),
            vector(hidden, 1),
            matrix(inner, hidden, config.mlp_bias),
            matrix(inner, hidden, config.mlp_bias),
            matrix(hidden, inner, config.mlp_bias),
        )
        for _ in range(config.layers)
    ]
    return layers, Head(vector(hidden, 1), matrix(VOCAB, hidden))


def make_layers(
    kind: type, config: ModelConfig, dtype: torch.dtype, *more: int | str
) -> NativeLayers | TorchLayers:
    weights, head = make_weights(config, dtype)
    return kind(config, whole(config), dtype, RopeTable(config, dtype, CPU), weights, head, *more)  # type: ignore[no-any-return]


def make_pool(config: ModelConfig, dtype: torch.dtype, page: int, form: str) -> KVPool:
    return KVPool(config, whole(config), PAGES, page, dtype, CPU, kv_format(form, dtype))


def fill(pool: KVPool) -> None:
    """Something in every page, as if it had been computed before."""
    dice = torch.Generator().manual_seed(5)
    for layer in range(pool.layers):
        for side in pool.sides(layer):
            side.write(
                torch.arange(side.pages[..., 0].numel()),
                torch.randn(side.pages[..., 0].numel(), pool.head_dim, generator=dice),
            )


MODELS = st.builds(
    make_config,
    heads=st.integers(1, 3),
    groups=st.sampled_from([1, 2, 3, 7]),
    head_dim=st.sampled_from([2, 6, 16, 32, 64]),
    hidden=st.sampled_from([16, 34, 48, 100]),
    inner=st.sampled_from([2, 30, 48, 130]),
    flags=st.booleans(),
)
SPANS = st.lists(
    st.tuples(st.sampled_from([1, 1, 1, 2, 5, 17, 40]), st.integers(0, 90), st.booleans()),
    min_size=1,
    max_size=6,
)


def works_of(spans: list[tuple[int, int, bool]], page: int) -> list[SequenceWork]:
    """Sequences on pages of their own, scattered; the last of them may share none."""
    free = [(7 * index) % PAGES for index in range(PAGES)]
    works = []
    for rows, context, suppressed in spans:
        needed = -(-(context + rows) // page)
        if needed > len(free):
            break
        pages, free = free[:needed], free[needed:]
        works.append(
            SequenceWork(rows, context, pages, context + rows if suppressed else None, sample=True)
        )
    return works or [SequenceWork(1, 0, [3], sample=True)]


@settings(max_examples=60)
@given(
    config=MODELS,
    spans=SPANS,
    page=st.sampled_from([5, 16, 64, 100]),
    form=st.sampled_from(["auto", *KV_FORMATS]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    threads=st.integers(1, 3),
    build=st.sampled_from(HERE),
)
def test_whole_layers_equal_pytorchs(
    config: ModelConfig,
    spans: list[tuple[int, int, bool]],
    page: int,
    form: str,
    dtype: torch.dtype,
    threads: int,
    build: str,
) -> None:
    works = works_of(spans, page)
    batch = build_batch(works, page)
    hidden = torch.randn(
        batch.rows, config.hidden_size, generator=torch.Generator().manual_seed(1)
    ).to(dtype)
    found = []
    for layers in (
        make_layers(NativeLayers, config, dtype, threads, build),
        make_layers(TorchLayers, config, dtype),
    ):
        pool = make_pool(config, dtype, page, form)
        fill(pool)
        rows = layers.run(hidden.clone(), batch, pool, None, None)
        found.append((rows.float(), layers.logits(rows), pool))
    (ours, our_logits, our_pool), (theirs, their_logits, their_pool) = found
    # What is rounded may fall the other way in one of them, and then differs by a step of its format.
    exact = dtype == torch.float32 and form in ("auto", "float32")
    step = 1e-4 if exact else 0.12 if form == "fp8_e4m3" else 0.06
    assert (ours - theirs).abs().max() <= step * max(theirs.abs().max(), 1)
    assert (our_logits - their_logits).abs().max() <= step * max(their_logits.abs().max(), 1)
    for layer in range(our_pool.layers):
        for our_side, their_side in zip(
            our_pool.sides(layer), their_pool.sides(layer), strict=True
        ):
            whole_pool = torch.arange(our_side.pages.shape[0] * our_side.pages.shape[1])
            a, b = (side.gather(whole_pool, 1, torch.float32) for side in (our_side, their_side))
            assert (a - b).abs().max() <= step * max(b.abs().max(), 1), "pages"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["auto", "int8", "fp8_e4m3"])
@pytest.mark.parametrize("build", HERE)
def test_a_row_depends_on_nothing_but_what_it_attends_to(
    dtype: torch.dtype, form: str, build: str
) -> None:
    """Bit for bit: one pass, chunks, decodes one by one, beside another sequence, on another number
    of threads. The inner products are deeper than what is widened at a time."""
    config = make_config(2, 3, 32, 96, 300, flags=False)
    rows, page = 70, 16
    hidden = torch.randn(rows, config.hidden_size, generator=torch.Generator().manual_seed(1)).to(
        dtype
    )
    table = [5, 2, 11, 7, 3]

    def in_chunks(chunks: list[int], threads: int, beside: bool = False) -> Tensor:
        layers, pool = (
            make_layers(NativeLayers, config, dtype, threads, build),
            make_pool(config, dtype, page, form),
        )
        parts, done = [], 0
        for chunk in chunks:
            works = [SequenceWork(chunk, done, table)]
            part = hidden[done : done + chunk]
            if beside:
                works.insert(0, SequenceWork(3, 0, [20]))
                part = torch.cat((hidden[40:43], part))
            parts.append(
                layers.run(part.clone(), build_batch(works, page), pool, None, None)[-chunk:]
            )
            done += chunk
        return torch.cat(parts)

    expected = in_chunks([rows], 1)
    assert torch.equal(expected, in_chunks([rows], 3))
    assert torch.equal(expected, in_chunks([1] * rows, 2))
    assert torch.equal(expected, in_chunks([16, 1, 1, 32, 20], 1, beside=True))


def test_two_halves_with_a_sum_over_ranks_between_are_a_layer() -> None:
    """What tensor parallelism calls, in a group of one rank."""
    config = make_config(2, 2, 16, 48, 80, flags=True)
    layers, pool = (
        make_layers(NativeLayers, config, torch.float32, 1),
        make_pool(config, torch.float32, 16, "auto"),
    )
    hidden = torch.randn(9, config.hidden_size, generator=torch.Generator().manual_seed(1))
    batch = build_batch([SequenceWork(9, 0, [1])], 16)
    expected = layers.run(hidden.clone(), batch, pool, None, None)
    seen: list[int] = []
    assert torch.equal(expected, layers.run(hidden.clone(), batch, pool, None, seen.append)), (
        "layer by layer"
    )
    assert seen == [0, 1]
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        group = torch.distributed.group.WORLD
        assert torch.equal(expected, layers.run(hidden.clone(), batch, pool, group, None))
    finally:
        torch.distributed.destroy_process_group()


def test_models_without_code_are_refused() -> None:
    odd = make_config(1, 1, 16, 48, 81, flags=False)
    with pytest.raises(NoKernels, match="even sizes"):
        refuse_unknown(odd, whole(odd), torch.bfloat16)
    refuse_unknown(odd, whole(odd), torch.float32)
    with pytest.raises(NoKernels, match="not in float16"):
        refuse_unknown(odd, Shard(0, 1, 2), torch.float16)


def build(cache: Path, compiler: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "FOREBAY_CACHE_DIR": str(cache), "CC": compiler}
    command = [sys.executable, "-m", "forebay.models.native.build"]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def test_processes_that_start_together_compile_once(tmp_path: Path) -> None:
    said = [
        process.communicate(timeout=paced(120))[1]
        for process in [build(tmp_path, "cc") for _ in range(3)]
    ]
    assert sum("compiling" in text for text in said) == 1, said
    assert len(list((tmp_path / "native").glob("*.so"))) == 1
    assert build(tmp_path, "cc").communicate(timeout=paced(120))[1] == ""


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false", "cc --no-such-flag"])
def test_without_a_working_compiler_one_line_says_so(
    monkeypatch, tmp_path: Path, capsys, make_model, pipeline, compiler: str
) -> None:
    monkeypatch.setenv("FOREBAY_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CC", compiler)
    library.cache_clear()
    try:
        path = make_model()
        capsys.readouterr()
        with pytest.raises(ModelError, match=r"--kernels native: .*; use --kernels auto"):
            pipeline(path, kernels=Kernels.NATIVE)
        model = pipeline(path, kernels=Kernels.AUTO)
        said = [line for line in capsys.readouterr().err.splitlines() if "compiling" not in line]
        assert len(said) == 1 and said[0].startswith("forebay: no compiled kernels: ")
        assert model.run([5, 6], [SequenceWork(2, 0, [3], sample=True)]).shape == (1, 97)
    finally:
        library.cache_clear()


def test_a_compiler_without_float16_computes_the_rest(
    monkeypatch, tmp_path: Path, capsys, make_model, pipeline
) -> None:
    monkeypatch.setenv("FOREBAY_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CC", "cc -U__FLT16_MANT_DIG__")
    library.cache_clear()
    try:
        check_float16_falls_back(make_model(), pipeline, capsys)
    finally:
        library.cache_clear()


def check_float16_falls_back(
    path: Path, pipeline: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    form = KV_FORMATS["float16"]
    with pytest.raises(ModelError, match="--kernels native: the C compiler does not know float16"):
        pipeline(path, form=form, kernels=Kernels.NATIVE)
    capsys.readouterr()
    model = pipeline(path, form=form, kernels=Kernels.AUTO)
    assert "no compiled kernels: the C compiler does not know float16" in capsys.readouterr().err
    assert model.run([5, 6], [SequenceWork(2, 0, [3], sample=True)]).shape == (1, 97)
    assert pipeline(path, kernels=Kernels.NATIVE)


@pytest.mark.parametrize("traps", [HERE[:1], HERE])
def test_a_build_that_traps_is_not_loaded(
    monkeypatch, tmp_path: Path, capfd, make_model, pipeline, traps: list[str]
) -> None:
    """A flag that is there although the instruction is not: loaded here, it would end this process."""
    monkeypatch.setenv("FOREBAY_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CC", str(trapping_compiler(tmp_path / "trapping", traps)))
    path = make_model()
    capfd.readouterr()
    for start in ("first", "second"):
        library.cache_clear()
        try:
            pipeline(path, kernels=Kernels.AUTO).run([5, 6], [SequenceWork(2, 0, [3], sample=True)])
        finally:
            library.cache_clear()
        said = capfd.readouterr().err.splitlines()
        compiled = [line for line in said if "compiling" in line]
        assert bool(compiled) == (start == "first")
        (line,) = [line for line in said if line not in compiled]
        assert f"kernels ({HERE[0]}), tried on this CPU, ends with SIGILL" in line
        assert ("; a lesser build is taken" in line) == (traps != HERE)
        assert ("no compiled kernels: " in line) == (traps == HERE)
    with pytest.raises(
        ModelError, match=rf"--kernels native:{HERE[0]}: .*SIGILL; use --kernels auto"
    ):
        pipeline(path, kernels=Kernels(f"native:{HERE[0]}"))


def trapping_compiler(path: Path, traps: list[str]) -> Path:
    """`cc`, but that builds of these names are a library that traps as it is loaded."""
    trap = path.with_suffix(".c")
    trap.write_text("__attribute__((constructor)) static void trap(void) { __builtin_trap(); }\n")
    flags = [" ".join(build.flags) for build in BUILDS if build.name in traps]
    cases = "|".join(f'*"-ffp-contract=off {one}"*" -o "*' for one in flags)
    path.write_text(
        f"""#!/bin/sh
case "$*" in
{cases})
    while [ "$1" != -o ]; do shift; done
    case "$2" in
    *.o) exec touch "$2" ;;
    *) exec cc -shared -fPIC {trap} -o "$2" ;;
    esac ;;
esac
exec cc "$@"
"""
    )
    path.chmod(0o755)
    return path


def test_a_build_that_this_cpu_cannot_run_is_refused(monkeypatch, make_model, pipeline) -> None:
    monkeypatch.setattr("forebay.models.native.build.cpu_flags", lambda: frozenset({"sse2"}))
    library.cache_clear()
    try:
        with pytest.raises(ModelError, match=r"native:avx2: avx2 needs a CPU with abm, avx, "):
            pipeline(make_model(), kernels=Kernels.NATIVE_AVX2)
    finally:
        library.cache_clear()


def test_of_two_builds_that_may_be_faster_the_trials_decide(monkeypatch) -> None:
    without = cpu_flags() - {"avx512_bf16"}
    monkeypatch.setattr("forebay.models.native.build.cpu_flags", lambda: without)
    here = {build.name: build for build in BUILDS if build.runs_here()}
    first = next(iter(here.values()))
    rivals = [first, *([here[first.rival]] if first.rival else [])]
    chosen = _best()
    assert chosen in rivals
    assert chosen.sources.trial_ns() == min(build.sources.trial_ns() for build in rivals)
