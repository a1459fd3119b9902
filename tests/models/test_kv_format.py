"""Numbers of the KV cache in other formats, and the order of a page's bytes."""

import random

import pytest
import torch

from forebay.models.batch import SequenceWork
from forebay.models.config import load_config
from forebay.models.kv import KVPool
from forebay.models.kv_format import KV_FORMATS, kv_format
from forebay.models.llama import Kernels
from forebay.models.shard import whole
from forebay.pages.block import Part
from forebay.runtime.host_pool import HostPool

# Relative to the vector's largest number: half a step of int8, half a step of three bits of mantissa.
ERROR_MAX = {
    "float32": 0.0,
    "bfloat16": 2**-8,
    "float16": 2**-11,
    "int8": 0.5001 / 127,
    "fp8_e4m3": 2**-4,
}
SCALED = [name for name, form in KV_FORMATS.items() if form.is_scaled]
PROMPT = [5, 17, 3, 88, 41, 9, 9, 60, 23, 71, 12, 54, 33, 2, 90, 7, 19, 45, 66, 81, 30]


@pytest.mark.parametrize("name", KV_FORMATS)
@pytest.mark.parametrize("size", [1e-20, 1.0, 1e4])
def test_what_is_read_is_what_was_written_up_to_the_formats_step(name: str, size: float) -> None:
    rows = torch.randn(200, 24, generator=torch.Generator().manual_seed(1)) * (
        size if name != "float16" else 1.0
    )
    rows[7] = 0
    form = KV_FORMATS[name]
    again = form.decode(*form.encode(rows), torch.float32)
    assert ((again - rows).abs() <= ERROR_MAX[name] * rows.abs().amax(-1, keepdim=True)).all()
    assert form.is_scaled == (form.encode(rows)[1] is not None)


def test_auto_keeps_numbers_as_they_are_computed() -> None:
    assert kv_format("auto", torch.bfloat16).storage == torch.bfloat16
    assert kv_format("int8", torch.bfloat16).storage == torch.int8


@pytest.mark.parametrize("name", KV_FORMATS)
def test_a_block_holds_each_layers_pieces_where_the_layout_says(name, make_model) -> None:
    config = load_config(make_model())
    pool = KVPool(config, whole(config), 3, 4, torch.float32, torch.device("cpu"), KV_FORMATS[name])
    host = HostPool(pool, 2)
    dice = random.Random(1)
    for layer in range(pool.layers):
        for piece in pool.pieces(layer):
            raw = piece.view(torch.uint8)
            raw.copy_(
                torch.frombuffer(bytearray(dice.randbytes(raw.nbytes)), dtype=torch.uint8).view(
                    raw.shape
                )
            )
        for device, there in zip(pool.pieces(layer), host.pieces(layer), strict=True):
            there[1].copy_(device[2])
    assert not any(host.block(0)), "the other block is not touched"
    for layer in range(pool.layers):
        keys, values, *scales = pool.pieces(layer)
        for head in range(config.kv_heads):
            (*_, last) = runs = pool.block.runs_into(
                Part(range(layer, layer + 1), range(head, head + 1))
            )
            assert last.target + last.length == pool.block.of(Part(range(1), range(1))).size
            found = b"".join(
                bytes(host.block(1)[run.source : run.source + run.length]) for run in runs
            )
            assert found == b"".join(
                piece[2, head].contiguous().view(torch.uint8).numpy().tobytes()
                for piece in (keys, values, *scales)
            )


@pytest.mark.parametrize("name", ["float16", *SCALED])
@pytest.mark.parametrize("kernels", [Kernels.NATIVE, Kernels.TORCH])
def test_chunks_read_the_same_quantised_pages_as_one_pass(
    name, kernels, make_model, pipeline
) -> None:
    """Whatever is attended to went through the pages, so where a prompt is cut does not matter."""
    path = make_model()
    form = KV_FORMATS[name]
    whole_pass = pipeline(path, 2, form=form, kernels=kernels).run(
        PROMPT, [SequenceWork(len(PROMPT), 0, [9, 4], sample=True)]
    )
    model = pipeline(path, 2, form=form, kernels=kernels)
    model.run(PROMPT[:16], [SequenceWork(16, 0, [9, 4])])
    row = model.run(PROMPT[16:], [SequenceWork(len(PROMPT) - 16, 16, [9, 4], sample=True)])
    assert (row - whole_pass).abs().max() <= 1e-3
    plain = pipeline(path, 2, kernels=kernels).run(
        PROMPT, [SequenceWork(len(PROMPT), 0, [9, 4], sample=True)]
    )
    assert 0 < (whole_pass - plain).abs().max() < 0.25 * plain.abs().max()
