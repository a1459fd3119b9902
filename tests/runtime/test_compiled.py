"""What is compiled: nothing that was not asked for, and every compilation is said in one line."""

import os
import subprocess
import sys
from pathlib import Path

import httpx

from tests.frontend.tiny_text import write_random_weights, write_text_model
from tests.serving import end_servers, start_server

PROBE = """
import sys
from forebay import compiled
if sys.argv[1] == "nothing":
    compiled.compile_nothing()
from forebay.runtime import page_copy
from forebay.store.native import library, reads
print(page_copy.library() is not None, library.exchange() is not None, reads._library() is not None)
"""


def probe(cache: Path, mode: str) -> tuple[str, list[str]]:
    environment = os.environ | {"FOREBAY_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", PROBE, mode], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr.splitlines()


def test_small_libraries_are_said_and_only_then_compiled(tmp_path: Path) -> None:
    assert probe(tmp_path, "nothing") == ("False False False", [])
    assert not list(tmp_path.rglob("*.so"))
    found, said = probe(tmp_path, "all")
    assert found == "True True True"
    what = [line.removeprefix("forebay: compiling ") for line in said]
    assert [line.partition(" for this machine")[0] for line in what] == [
        "page copies",
        "the store's copies",
        "the store's reads",
    ]
    assert probe(tmp_path, "nothing") == ("True True True", [])  # taken as they lie there


def test_a_library_that_traps_is_not_loaded(monkeypatch, tmp_path: Path) -> None:
    """A flag of the CPU that is there although the instruction is not: the process goes on without."""
    trap = tmp_path / "trap.c"
    trap.write_text("__attribute__((constructor)) static void trap(void) { __builtin_trap(); }\n")
    compiler = tmp_path / "trapping"
    tried = 'case "$*" in *-march=native*-shared*) exec cc "$@"'
    compiler.write_text(f'#!/bin/sh\n{tried} {trap} ;; esac\nexec cc "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    assert probe(tmp_path / "cache", "all")[0] == "True False False"  # page copies need no flag
    found, said = probe(tmp_path / "cache", "all")
    assert (found, said) == ("True False False", [])  # neither compiled nor tried again


def test_a_server_with_torch_kernels_compiles_nothing(tmp_path: Path) -> None:
    """Nor does the private store's process, which its parent has to tell."""
    model = write_random_weights(write_text_model(tmp_path / "model"))
    cache = tmp_path / "cache"
    store = f"embedded:{tmp_path / 'store'}?dram=8MiB&ssd=64MiB"
    served = start_server(model, cache, "--kernels", "torch", "--store", store)
    try:
        body = {"model": "tiny", "prompt": "to the turbines " * 8, "max_tokens": 2}
        assert httpx.post(f"{served.url}/v1/completions", json=body, timeout=60).status_code == 200
        assert httpx.get(f"{served.url}/health").json()["store"]["state"] == "closed"
        served.process.terminate()
        assert served.wait_end() == 0
    finally:
        end_servers([served])
    assert not [line for line in served.lines if "compiling" in line]
    assert not list(tmp_path.rglob("*.so"))
