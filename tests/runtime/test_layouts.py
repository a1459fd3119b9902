"""A grid of any shape reads what another wrote: records, manifest, reader over real files, and whole servers."""

import json
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from forebay import LLM, RequestOutput, SamplingParams
from forebay.core.messages import PageKey
from forebay.models.config import parse_config
from forebay.models.kv import KVPool
from forebay.models.shard import Shard
from forebay.pages.block import Block, Part
from forebay.pages.layouts import RECORD_BYTES, SLOTS, Layout, Manifest, match_prefix
from forebay.pages.reader import PageReader
from forebay.pages.spec import KvSpec
from forebay.runtime.host_pool import HostPool
from forebay.store.backend import PutItem, Status
from forebay.store.backends.directory import DirectoryStore
from tests.frontend.tiny_text import VOCABULARY, write_text_model
from tests.runtime import tiny_llama

T = 10.0
WHOLE = Layout((0, 6), (0, 3))
STAGES = Layout((0, 2, 4, 6), (0, 3))
HEADS = Layout((0, 6), (0, 1, 2, 3))
GRID = Layout((0, 3, 6), (0, 1, 2, 3))
LAYOUTS = [WHOLE, STAGES, HEADS, GRID]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


# ---------------------------------------------------------------------------------------------- records


@given(
    st.sets(st.integers(1, 60_000), min_size=1, max_size=400),
    st.sets(st.integers(1, 60_000), min_size=1, max_size=400),
)
def test_a_layout_survives_its_record(layers: set[int], heads: set[int]) -> None:
    layout = Layout((0, *sorted(layers)), (0, *sorted(heads)))
    record = layout.encode()
    assert len(record) == RECORD_BYTES, (
        "equal lengths, or a store would take a second record of a slot for a replacement"
    )
    assert Layout.decode(record) == layout


@given(st.binary(min_size=RECORD_BYTES, max_size=RECORD_BYTES) | st.binary(max_size=100))
def test_other_bytes_are_no_layout(record: bytes) -> None:
    with pytest.raises(ValueError):
        Layout.decode(record)


def test_records_whose_bounds_do_not_rise_are_no_layout() -> None:
    for broken in (
        Layout((0, 4, 4), (0, 3)),
        Layout((1, 4), (0, 3)),
        Layout((0,), (0, 3)),
        Layout((0, 4), ()),
    ):
        with pytest.raises(ValueError):
            Layout.decode(broken.encode())
    with pytest.raises(ValueError, match="holds"):
        Layout(tuple(range(2000)), (0, 1)).encode()


# ---------------------------------------------------------------------------------------------- the manifest


def test_grids_find_each_others_layouts_and_none_of_another_model(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path, 1 << 30)
    for layout in LAYOUTS:
        assert Manifest(store, b"model", layout).add_own(T)
    assert set(Manifest(store, b"model", WHOLE).others(T)) == {STAGES, HEADS, GRID}
    another = Manifest(store, b"another", WHOLE)
    assert another.others(T) == ()
    assert another.name(WHOLE.parts[0]) != Manifest(store, b"model", WHOLE).name(WHOLE.parts[0]), (
        "a flush takes one model's pages"
    )


def test_writers_that_come_at_once_lose_nothing(tmp_path: Path) -> None:
    layouts = [Layout((0, cut, 20), (0, 3)) for cut in range(1, 9)]
    stores = [DirectoryStore(tmp_path, 1 << 30) for _ in layouts]
    barrier = threading.Barrier(len(layouts))
    added: list[bool] = []

    def add(store: DirectoryStore, layout: Layout) -> None:
        barrier.wait()
        added.append(Manifest(store, b"model", layout).add_own(T))

    threads = [
        threading.Thread(target=add, args=pair) for pair in zip(stores, layouts, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert added == [True] * len(layouts)
    assert set(Manifest(stores[0], b"model", Layout((0, 20), (0, 3))).others(T)) == set(layouts)


def test_holes_of_evicted_records_are_passed_over_and_filled_again(tmp_path: Path) -> None:
    store, clock = DirectoryStore(tmp_path, 1 << 30), Clock()
    first, second = (
        Manifest(store, b"model", WHOLE, clock),
        Manifest(store, b"model", STAGES, clock),
    )
    assert first.add_own(T) and second.add_own(T)
    store.files.remove(store.files.path(first._keys[0]).name)
    assert Manifest(store, b"model", GRID, clock).others(T) == (STAGES,)
    clock.now += 60
    assert first.add_own(T), "a server that lives adds its layout again"
    assert set(Manifest(store, b"model", GRID, clock).others(T)) == {WHOLE, STAGES}


def test_a_full_manifest_and_foreign_records_are_no_harm(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path, 1 << 30)
    reader = Manifest(store, b"model", WHOLE)
    records = [Layout((0, 1 + slot, 40), (0, 3)).encode() for slot in range(SLOTS - 1)] + [
        STAGES.encode()
    ]
    assert (
        store.put_from(
            [PutItem(key, record) for key, record in zip(reader._keys, records, strict=True)], T
        )
        == [Status.OK] * SLOTS
    )
    assert reader.others(T) == (STAGES,), "layouts of another number of layers cut another page"
    assert not reader.add_own(T)


def test_the_store_is_not_asked_for_layouts_again_and_again(tmp_path: Path) -> None:
    clock = Clock()
    store = DirectoryStore(tmp_path, 1 << 30)
    manifest = Manifest(store, b"model", WHOLE, clock)
    assert manifest.others(T) == ()
    assert Manifest(store, b"model", STAGES).add_own(T)
    assert manifest.others(T) == (), "it was looked up a moment ago"
    clock.now += 2
    assert manifest.others(T) == (STAGES,)


# ---------------------------------------------------------------------------------------------- reading

PAGE_SIZE, HEAD_DIM = 4, 2
HEAD_BYTES = PAGE_SIZE * HEAD_DIM * 4
CONFIG = parse_config(
    {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 9 * HEAD_DIM,
        "intermediate_size": 9,
        "num_hidden_layers": 6,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 64,
        "max_position_embeddings": 64,
    },
    {},
    "config.json",
)


class Pages:
    """Whole pages of known bytes, put into a store as any grid would."""

    def __init__(self, path: Path, count: int) -> None:
        self.store = DirectoryStore(path, 1 << 30)
        self.hashes = [bytes([number]) * 32 for number in range(count)]
        self.numbers = np.random.default_rng(count).integers(
            0, 256, (count, 6, 2, 3, HEAD_BYTES), dtype=np.uint8
        )

    def block(self, number: int, part: Part) -> bytes:
        layers, heads = (
            slice(part.layers.start, part.layers.stop),
            slice(part.heads.start, part.heads.stop),
        )
        return self.numbers[number, layers, :, heads].tobytes()

    def put(self, layout: Layout, numbers: Sequence[int]) -> None:
        items = [
            PutItem(self.key(number, part), self.block(number, part))
            for number in numbers
            for part in layout.parts
        ]
        assert set(self.store.put_from(items, T)) <= {Status.OK, Status.EXISTS}
        Manifest(self.store, b"model", layout).add_own(T)

    def key(self, number: int, part: Part) -> bytes:
        return self.hashes[number] + Manifest(self.store, b"model", WHOLE).name(part)

    def match(self, own: Layout) -> int:
        return match_prefix(
            self.store, self.hashes, b"", own, Manifest(self.store, b"model", own), T
        )

    def reader(self, own: Layout, part: Part) -> tuple[PageReader, HostPool]:
        shard = Shard(
            part.layers.start,
            part.layers.stop,
            6,
            part.heads.start // len(part.heads),
            3 // len(part.heads),
        )
        pool = KVPool(CONFIG, shard, 1, PAGE_SIZE, torch.float32, torch.device("cpu"))
        host = HostPool(pool, len(self.hashes))
        return PageReader(
            self.store,
            host,
            Block(part, KvSpec.keys_and_values(1, HEAD_BYTES, "uint8", 1)),
            own,
            Manifest(self.store, b"model", own),
        ), host

    def read(self, own: Layout) -> list[int]:
        """How many pages each rank got; what it got is right."""
        found = []
        for part in own.parts:
            reader, host = self.reader(own, part)
            came = reader.read(
                [PageKey(number, hash) for number, hash in enumerate(self.hashes)], T
            )
            assert all(
                bytes(host.block(number)) == self.block(number, part) for number in range(came)
            )
            found.append(came)
        return found


@pytest.mark.parametrize("writer", LAYOUTS, ids=["whole", "stages", "heads", "grid"])
@pytest.mark.parametrize("reader", LAYOUTS, ids=["whole", "stages", "heads", "grid"])
def test_every_grid_reads_every_grids_pages_byte_for_byte(
    tmp_path: Path, writer: Layout, reader: Layout
) -> None:
    pages = Pages(tmp_path, 5)
    pages.put(writer, range(4))
    assert pages.match(reader) == 4
    assert pages.read(reader) == [4] * len(reader.parts)


def test_a_prefix_may_be_of_several_grids(tmp_path: Path) -> None:
    pages = Pages(tmp_path, 7)
    pages.put(STAGES, [0, 1])
    pages.put(HEADS, [2])
    pages.put(WHOLE, [3])
    pages.put(STAGES, [4, 5])
    for reader in LAYOUTS:
        assert pages.match(reader) == 6
        assert pages.read(reader) == [6] * len(reader.parts)


def test_a_page_of_which_a_part_is_missing_is_no_page(tmp_path: Path) -> None:
    pages = Pages(tmp_path, 3)
    pages.put(STAGES, range(3))
    pages.store.files.remove(pages.store.files.path(pages.key(1, STAGES.parts[2])).name)
    assert pages.match(STAGES) == pages.match(WHOLE) == 1
    assert pages.read(WHOLE) == [1]
    assert pages.read(STAGES) == [3, 3, 1], (
        "each rank says what it has, and the planner takes the least"
    )


def test_a_damaged_part_of_another_grid_ends_the_prefix(tmp_path: Path) -> None:
    pages = Pages(tmp_path, 3)
    pages.put(HEADS, range(3))
    path = pages.store.files.path(pages.key(1, HEADS.parts[0]))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert pages.read(WHOLE) == [1]


def test_long_runs_are_read_where_they_belong_and_many_short_ones_at_once(tmp_path: Path) -> None:
    """What the tests above read went both ways."""
    pages = Pages(tmp_path, 1)
    a_third, a_stage = (
        pages.reader(HEADS, HEADS.parts[1])[0],
        pages.reader(STAGES, STAGES.parts[1])[0],
    )
    assert [source.is_direct for source in a_third._sources(WHOLE)] == [False]
    assert [source.is_direct for source in a_stage._sources(WHOLE)] == [True]


# ---------------------------------------------------------------------------------------------- whole servers

PAGE = 16
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
COMMON = {
    "dtype": "float32",
    "page_size": PAGE,
    "threads_per_rank": 1,
    "fetch_threshold": PAGE,
    "fetch_policy": "wait",
}
PROMPT = [5 + (7 * index) % 200 for index in range(150)]
LONGER = [*PROMPT, *range(5, 95)]


def write_nine_heads(path: Path) -> Path:
    """Random weights of 9 heads over 3 key/value heads, which tp = 3 divides."""
    write_text_model(path)
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=72,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=512,
        initializer_range=0.2,
        tie_word_embeddings=True,
        eos_token_id=256,
    )
    transformers.LlamaForCausalLM(config).to(torch.float32).save_pretrained(path)
    assert json.loads((path / "config.json").read_text())["num_key_value_heads"] == 3
    return path


def ask(model: Path, prompts: list[list[int]], **settings: object) -> list[RequestOutput]:
    with LLM(str(model), **(COMMON | settings)) as llm:  # type: ignore[arg-type]
        return [llm.generate([prompt], GREEDY)[0] for prompt in prompts]


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def check(model: Path, store: str, shapes: list[dict[str, int]]) -> None:
    """The first shape writes a prefix; each shape after it finds that and computes the right text from it."""
    assert tokens(ask(model, [PROMPT], store=store, **shapes[0])) == [
        tiny_llama.greedy(model, PROMPT, 6)
    ]
    for shape in shapes[1:]:
        again = ask(model, [LONGER], store=store, **shape)
        assert tokens(again) == [tiny_llama.greedy(model, LONGER, 6)]
        assert (
            again[0].num_cached_tokens is not None
            and again[0].num_cached_tokens >= len(PROMPT) // PAGE * PAGE
        ), shape


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_nine_heads(tmp_path_factory.mktemp("nine-heads"))


def test_servers_of_other_shapes_are_warm_from_the_store(model: Path, tmp_path: Path) -> None:
    check(model, f"file:{tmp_path / 'pages'}", [{"tp": 1}, {"tp": 3}, {"pp": 2}])


@pytest.mark.slow
@pytest.mark.parametrize("shapes", [(1, 2, 4), (4, 2, 1), (2, 4, 1)], ids=str)
def test_pages_go_from_one_number_of_stages_to_another(
    model: Path, tmp_path: Path, shapes: tuple[int, ...]
) -> None:
    check(model, f"file:{tmp_path / 'pages'}", [{"pp": pp} for pp in shapes])


@pytest.mark.slow
@pytest.mark.parametrize("first", [{"tp": 3}, {"pp": 2, "tp": 3}], ids=str)
def test_pages_go_from_one_number_of_heads_to_another(
    model: Path, tmp_path: Path, first: dict[str, int]
) -> None:
    check(
        model, f"embedded:{tmp_path / 'others'}?dram=32MiB&ssd=64MiB", [first, {"tp": 1}, {"pp": 2}]
    )
