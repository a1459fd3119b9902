"""A content hash is remembered while its file is the same, and never believed of another one."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import blake3
import pytest

from forebay.models import content_hash as module
from forebay.models.content_hash import Content, bytes_hash, check_unchanged, content_hash, mark_of
from forebay.models.errors import ModelError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "cache"
    monkeypatch.setenv("FOREBAY_CACHE_DIR", str(path))
    return path / "hashes"


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every file had last been changed long ago."""
    monkeypatch.setattr(module, "_settled_after_ns", lambda device: -(10**12))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(5 << 20))
    return path


def after_reading(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """``act`` happens when the file's bytes have been read and its marks not yet compared."""
    digest = module._digest

    def late(stream: object) -> tuple[bytes, int]:
        found = digest(stream)  # type: ignore[arg-type]
        act()
        return found

    monkeypatch.setattr(module, "_digest", late)


@pytest.mark.usefixtures("settled")
def test_the_hash_is_of_all_bytes_and_is_remembered(file: Path) -> None:
    first, again = content_hash(file), content_hash(file)
    assert first.hash == again.hash == blake3.blake3(file.read_bytes()).digest()
    assert (first.was_known, again.was_known) == (False, True)


@pytest.mark.usefixtures("settled")
def test_a_remembered_hash_takes_no_time(file: Path) -> None:
    content_hash(file)
    began = time.perf_counter()
    for _ in range(20):
        assert content_hash(file).was_known
    assert (time.perf_counter() - began) / 20 < 0.05


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("change", ["content", "mtime", "size", "inode", "ctime"])
def test_a_changed_file_is_read_again(file: Path, change: str) -> None:
    """Also one byte in the middle with size and mtime as they were: ctime cannot be set back."""
    content_hash(file)
    before = file.stat()
    raw = bytearray(file.read_bytes())
    if change == "mtime":
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    elif change == "ctime":
        file.chmod(0o600)
    elif change == "size":
        file.write_bytes(raw + b"x")
    elif change == "inode":
        other = file.with_name("other")
        other.write_bytes(raw)
        os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
        other.replace(file)
    else:
        raw[len(raw) // 2] ^= 1
        with file.open("r+b") as stream:
            stream.write(raw)
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    found = content_hash(file)
    assert not found.was_known
    assert found.hash == blake3.blake3(file.read_bytes()).digest()


def test_a_file_changed_a_moment_ago_is_not_remembered(file: Path, cache: Path) -> None:
    """It may change again within the same tick of the file system's clock."""
    assert not content_hash(file).was_known
    assert not content_hash(file).was_known
    assert not cache.exists()


def test_where_other_machines_write_a_change_is_new_for_an_hour(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LOCAL", frozenset())
    assert module._settled_after_ns(file.stat().st_dev) == module.SETTLED_SHARED_NS


def test_a_file_that_changes_while_it_is_read_is_an_error(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    after_reading(monkeypatch, lambda: file.write_bytes(b"shorter"))
    with pytest.raises(ModelError, match=r"weights: changed while it was read; start again"):
        content_hash(file)


def test_a_file_that_is_replaced_while_it_is_read_is_an_error(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = file.with_name("other")
    other.write_bytes(file.read_bytes())
    after_reading(monkeypatch, lambda: other.replace(file) and None)
    with pytest.raises(ModelError, match="changed while it was read"):
        content_hash(file)


@pytest.mark.usefixtures("settled")
def test_a_link_is_the_file_that_it_points_to(file: Path, tmp_path: Path) -> None:
    link, other = tmp_path / "link", tmp_path / "other"
    other.write_bytes(b"other")
    link.symlink_to(file)
    found = content_hash(link)
    assert found.hash == content_hash(file).hash
    link.unlink()
    link.symlink_to(other)
    assert content_hash(link).hash != found.hash
    with pytest.raises(ModelError, match="link: changed"):
        check_unchanged(link, found.mark)


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("record", [b"", b"{", b"\0" * 200, b'{"version":1}', None])
def test_a_torn_record_is_none(file: Path, cache: Path, record: bytes | None) -> None:
    right = content_hash(file).hash
    (path,) = cache.iterdir()
    path.write_bytes(path.read_bytes()[:-9] if record is None else record)
    found = content_hash(file)
    assert (found.hash, found.was_known) == (right, False)
    assert content_hash(file).was_known


@pytest.mark.usefixtures("settled")
def test_what_a_killed_writer_left_is_swept_away(file: Path, cache: Path) -> None:
    content_hash(file)
    (path,) = cache.iterdir()
    path.rename(path.with_name(f"{path.name}.killed"))
    assert not content_hash(file).was_known
    assert [left.name for left in cache.iterdir()] == [path.name]


@pytest.mark.usefixtures("settled")
def test_without_a_place_for_records_hashes_are_made_each_time(
    file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cache").write_text("a file where the directory should be")
    assert content_hash(file).hash == content_hash(file).hash
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 2 and "cannot be kept" in said[0]


@pytest.mark.usefixtures("settled")
def test_many_at_once_agree(file: Path, cache: Path) -> None:
    found: list[Content] = []
    threads = [threading.Thread(target=lambda: found.append(content_hash(file))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len({each.hash for each in found}) == 1
    assert len(list(cache.iterdir())) == 1


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"gone: cannot be read \(No such file"):
        mark_of(tmp_path / "gone")


def test_parts_are_framed() -> None:
    assert bytes_hash(b"ab", b"c") != bytes_hash(b"a", b"bc")


def test_where_a_map_writes_without_a_time_nothing_is_remembered() -> None:
    """A shared map's writes on tmpfs leave both times as they were."""
    device = Path("/dev/shm").stat().st_dev
    assert module._settled_after_ns(device) == module.NEVER_NS
