"""The process that converts a GGUF file and may be lost: see `gguf_apart`."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from forebay.models.errors import ModelError
from forebay.models.gguf import write_directory
from forebay.models.gguf_apart import MODEL_ERROR, OS_ERROR


def _end_with_parent() -> None:
    os.read(sys.stdin.fileno(), 1)  # nothing ever comes
    os._exit(1)


def main() -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        write_directory(Path(sys.argv[1]), Path(sys.argv[2]))
        status = 0
    except ModelError as error:
        print(error)
        status = MODEL_ERROR
    except OSError as error:
        print(error)
        status = OS_ERROR
    sys.exit(status)


if __name__ == "__main__":
    main()
