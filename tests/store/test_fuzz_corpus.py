"""What the fuzzer kept, replayed: each input once, and nobody else is harmed."""

import asyncio
import random
from pathlib import Path

import pytest

from forebay.store.crc import crc32c
from forebay.store.holder import data
from forebay.store.master import claims
from forebay.store.wire.frames import encode
from forebay.store.wire.messages import Piece, Write
from tests.store import fuzz_frames


@pytest.mark.parametrize("promotes", [True, False])
def test_the_corpus_harms_nobody(tmp_path: Path, promotes: bool) -> None:
    replayed = asyncio.run(replay(tmp_path, promotes))
    assert replayed["client-to-master"] > 20 and replayed["client-to-holder"] > 20, replayed


async def replay(path: Path, promotes: bool) -> dict[str, int]:
    background: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: background.append(context))
    counts = {}
    async with fuzz_frames.targets(path, promotes) as targets:
        for name, target in targets.items():
            inputs = [*fuzz_frames.read_corpus(name), *target.seeds]
            for one in inputs:
                await target.run(one, random.Random(0))
                assert not background, (name, one.hex(), background)
            await target.check()
            counts[name] = len(inputs)
    return counts


def test_canary_a_holder_that_takes_any_token_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "room_token", lambda *_: b"anything")
    piece = Piece(b"k", (1 << 62) + 1, 0, 5, crc32c(b"wrong"), b"anything")
    with pytest.raises(AssertionError, match="good tenant"):
        asyncio.run(overwrite(tmp_path, encode(Write(1, [piece]), 5) + b"wrong"))


def test_canary_a_master_that_believes_anything_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "highest", lambda _: 0)
    monkeypatch.setattr(fuzz_frames, "SERVES_AGAIN_S", 0.5)
    with pytest.raises(AssertionError):
        asyncio.run(boast(tmp_path))


async def boast(path: Path) -> None:
    async with fuzz_frames.targets(path) as targets:
        target = targets["holder-to-master"]
        await target.check()
        for one in fuzz_frames.boasts():
            await target.run(one, random.Random(0))
        await target.check()


async def overwrite(path: Path, frame: bytes) -> None:
    async with fuzz_frames.targets(path) as targets:
        await targets["client-to-holder"].check()
        await targets["client-to-holder"].run(frame, random.Random(0))
        await targets["client-to-holder"].check()
