"""Blocks of a page under every cut: bytes that one grid wrote are the bytes another one reads."""

import itertools

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from forebay.pages.block import Block, Part
from forebay.pages.spec import Cut, KvSpec, Plane

Bytes = npt.NDArray[np.uint8]


def written(page: Bytes, scales: Bytes, part: Part) -> Bytes:
    """A part's block cut out of a whole page by numpy alone: (layers, 2, heads, bytes of a head)."""
    cut = (
        slice(part.layers.start, part.layers.stop),
        slice(None),
        slice(part.heads.start, part.heads.stop),
    )
    return np.concatenate([page[cut].reshape(-1), scales[cut].reshape(-1)])


@st.composite
def cuts(draw: st.DrawFn, size: int) -> list[range]:
    inner = draw(st.sets(st.integers(1, size - 1))) if size > 1 else set()
    bounds = [0, *sorted(inner), size]
    return [range(start, stop) for start, stop in itertools.pairwise(bounds)]


@given(st.data(), st.integers(1, 6), st.integers(1, 4), st.integers(1, 5), st.integers(0, 3))
def test_any_grid_reads_what_any_grid_wrote(
    data: st.DataObject, layers: int, heads: int, head_bytes: int, scale_bytes: int
) -> None:
    random = np.random.default_rng(layers * heads)
    page = random.integers(0, 256, (layers, 2, heads, head_bytes), dtype=np.uint8)
    scales = random.integers(0, 256, (layers, 2, heads, scale_bytes), dtype=np.uint8)
    writers = [
        Part(rows, columns)
        for rows in data.draw(cuts(layers))
        for columns in data.draw(cuts(heads))
    ]
    readers = [
        Part(rows, columns)
        for rows in data.draw(cuts(layers))
        for columns in data.draw(cuts(heads))
    ]
    for reader in readers:
        spec = KvSpec.keys_and_values(1, head_bytes, "uint8", 1, scale_bytes)
        target = Block(reader, spec)
        found = np.zeros(target.size, dtype=np.uint8)
        filled = 0
        for writer in writers:
            source = target.of(writer)
            stored = written(page, scales, writer)
            assert len(stored) == source.size
            runs = source.runs_into(reader)
            assert bool(runs) == writer.overlaps(reader)
            for run in runs:
                found[run.target : run.target + run.length] = stored[
                    run.source : run.source + run.length
                ]
                filled += run.length
        assert filled == target.size, "every byte once"
        assert np.array_equal(found, written(page, scales, reader))


def test_runs_are_as_few_as_the_cut_allows() -> None:
    whole = Block(
        Part(range(30), range(3)), KvSpec.keys_and_values(1, 100, "uint8", 1, scale_bytes=4)
    )
    assert len(whole.runs_into(whole.part)) == 1
    assert len(whole.runs_into(Part(range(15), range(3)))) == 2, (
        "a cut of layers: numbers, then scales"
    )
    assert len(whole.runs_into(Part(range(30), range(1, 2)))) == 2 * 30 * 2, (
        "a cut of heads: each layer, keys and values"
    )


def test_names_differ_where_parts_do() -> None:
    parts = [
        Part(range(a, b), range(c, d))
        for a in range(2)
        for b in range(2, 4)
        for c in range(2)
        for d in range(2, 4)
    ]
    assert len({part.name for part in parts}) == len(parts)


LATENT = Plane("latent", 5, "uint8", 1, 2, Cut.WHOLE)
SIDES = (Plane("keys", 3, "uint8", 1, 1), Plane("values", 4, "uint8", 1))


@given(st.data(), st.sampled_from([(LATENT,), (*SIDES, LATENT), (LATENT, *SIDES)]))
def test_planes_of_any_kind_are_read_by_any_grid_and_every_byte_once(
    data: st.DataObject, planes: tuple[Plane, ...]
) -> None:
    """Each byte is marked with what it is: section, layer, plane, head, number."""
    layers, heads, spec = 4, 3, KvSpec(2, planes)

    def marked(part: Part) -> list[tuple[object, ...]]:
        rows = {Cut.HEADS: list(part.heads), Cut.WHOLE: ["whole"]}
        return [
            (section, layer, plane.name, row, number)
            for section in ("numbers", "scales")
            for layer in part.layers
            for plane in planes
            for row in rows[plane.cut]
            for number in range(2 * (plane.elements if section == "numbers" else plane.scale_bytes))
        ]

    writers = [
        Part(rows, columns)
        for rows in data.draw(cuts(layers))
        for columns in data.draw(cuts(heads))
    ]
    for rows in data.draw(cuts(layers)):
        for columns in data.draw(cuts(heads)):
            target = Block(Part(rows, columns), spec)
            expected = marked(target.part)
            assert len(expected) == target.size
            found: list[tuple[object, ...] | None] = [None] * target.size
            for writer in writers:
                stored = marked(writer)
                for run in target.of(writer).runs_into(target.part):
                    into = slice(run.target, run.target + run.length)
                    assert found[into] == [None] * run.length, "no byte twice"
                    found[into] = stored[run.source : run.source + run.length]
            assert found == expected


def test_a_window_bounds_what_is_needed_of_a_prefix() -> None:
    near = Plane("keys", 4, "float32", 4, window=100)
    assert KvSpec(64, (near,)).first_page(1000) == (1000 - 99) // 64
    assert KvSpec(64, (near,)).first_page(50) == 0
    assert KvSpec(64, (near, LATENT)).first_page(1000) == 0, "one plane looks at everything"
