"""Has a GGUF file converted by a process of its own (`gguf_process`).

The library maps the file. A file that somebody cuts short meanwhile, or a disk that fails, then
ends whoever reads it with SIGBUS, so that must not be the process of a user or a server.

    converter --file, directory--> python -m forebay.models.gguf_process
        <--status, one line of text on stdout--
        stdin stays open: at its end the converter is dead, and the process ends too
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from forebay.models.errors import ModelError

MODEL_ERROR = 3
OS_ERROR = 4


def write_directory_apart(file: Path, into: Path) -> None:
    """`gguf.write_directory` in a process that may be lost. Raises ModelError; OSError if `into`
    cannot be written."""
    command = [sys.executable, "-P", "-m", "forebay.models.gguf_process", str(file), str(into)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0
    ) as process:
        assert process.stdout is not None
        try:
            said = process.stdout.read().strip()
        except BaseException:
            process.kill()
            raise
    _check_end(file, process.returncode, said)


def _check_end(file: Path, status: int, said: str) -> None:
    if status == 0:
        return
    if status == MODEL_ERROR:
        raise ModelError(said)
    if status == OS_ERROR:
        raise OSError(said)
    if status == -signal.SIGBUS:
        raise ModelError(
            f"{file}: was cut short while it was read, or its disk fails; "
            "start again once nothing writes to it"
        )
    how = f"status {status}" if status > 0 else signal.Signals(-status).name
    raise ModelError(
        f"{file}: its conversion ended with {how}; look above, free memory, and start again"
    )
