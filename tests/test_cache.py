"""Which directory is the cache, and when there is none: homes that are not there, not ours or not to be written."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from forebay.cache import NoCache, cache_directory, why_not_writable


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("FOREBAY_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def test_the_variable_then_the_platforms(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_directory() == home / ".cache" / "forebay"
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "xdg"))
    assert cache_directory() == home / "xdg" / "forebay"
    monkeypatch.setenv("FOREBAY_CACHE_DIR", str(home / "named"))
    assert cache_directory() == home / "named"


def test_no_home_is_no_directory_called_tilde() -> None:
    """A user without an entry and without HOME, as container engines start them."""
    code = (
        "import os; from forebay.cache import NoCache, cache_directory; os.setuid(54321)\n"
        "try: print(cache_directory())\n"
        "except NoCache as error: print(error)"
    )
    if os.geteuid():
        code = "import pwd; del pwd.getpwuid; " + code.replace("os.setuid(54321)", "pass")
    kept = {"PATH": os.environ["PATH"]}
    done = subprocess.run([sys.executable, "-c", code], env=kept, capture_output=True, text=True)
    assert done.stdout.strip() == "this user has no home directory; set FOREBAY_CACHE_DIR", (
        done.stderr
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a directory away")
def test_what_is_another_users_is_used_only_if_it_is_named(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.chown(home, 54321, 54321)
    with pytest.raises(NoCache, match=r"another user's .uid 54321.; set FOREBAY_CACHE_DIR"):
        cache_directory()
    monkeypatch.setenv("FOREBAY_CACHE_DIR", str(home))
    assert cache_directory() == home


def test_where_no_file_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert why_not_writable(tmp_path) == why_not_writable(tmp_path / "not" / "yet") == ""
    assert why_not_writable(tmp_path / "file" / "below") == f"{tmp_path}/file is not a directory"
    assert "cannot be written" in why_not_writable(Path("/proc/self"))
