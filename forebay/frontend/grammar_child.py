"""The process that tries grammars out before anything is queued: it may be ended at any time.

    stdin: one JSON line (model directory, vocabulary, limit), then one line for each grammar
    stdout: one JSON line for each grammar, what is wrong with it or ""

It loads no torch. Its memory is bounded (``RLIMIT_AS``): a grammar that needs more ends it, and its
parent says so.
"""

import ctypes
import resource
import signal
import sys
from pathlib import Path

import msgspec

from forebay.core.sampling import Grammar
from forebay.models.config import load_config
from forebay.models.grammar import GrammarCompiler, GrammarError, load_compiler

_PR_SET_PDEATHSIG = 1


class Start(msgspec.Struct):
    """``memory_bytes``: what grammars may take on top of the tokenizer."""

    model: str
    memory_bytes: int


def main() -> int:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the server
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=Start)
    compiler, problem = _load(Path(start.model))
    _bound(start.memory_bytes)
    for line in iter(sys.stdin.buffer.readline, b""):
        grammar = msgspec.json.decode(line, type=Grammar)
        said = problem if compiler is None else _problem(compiler, grammar)
        sys.stdout.buffer.write(msgspec.json.encode(said) + b"\n")
        sys.stdout.buffer.flush()
    return 0


def _load(model: Path) -> tuple[GrammarCompiler | None, str]:
    try:
        return load_compiler(model, load_config(model)), ""
    except GrammarError as error:
        return None, str(error)


def _problem(compiler: GrammarCompiler, grammar: Grammar) -> str:
    try:
        compiler.compile(grammar)
    except GrammarError as error:
        return str(error)
    except MemoryError:
        return "it takes too much memory"
    return ""


def _bound(memory_bytes: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    sys.exit(main())
