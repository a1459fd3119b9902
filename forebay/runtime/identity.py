"""The model's fingerprint, made beside the ranks' loading: both read the same files, once.

    planner's process:  thread --fingerprint--> loop --> keys of pages, and Allocate to all ranks

Nothing can be looked up or stored before, so ranks that have loaded wait for it, and for nothing
else. At a later start hashes are remembered, and it is there before a rank's interpreter is.
"""

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from forebay.models.content_hash import FileMark
from forebay.models.errors import ModelError
from forebay.models.fingerprint import check_marks, fingerprint


class Identifying:
    """``fingerprint`` or ``error`` is set when it is done, then ``done`` can be read.

    ``marks``: of the files as they were at the start; those of another time are an error.
    """

    def __init__(self, path: Path, marks: Sequence[FileMark]) -> None:
        self.done = os.eventfd(0, os.EFD_NONBLOCK)
        self.fingerprint: bytes | None = None
        self.error = ""
        self.seconds = 0.0
        self._path = path
        self._marks = marks
        # A thread that reads for minutes keeps nobody from ending.
        threading.Thread(target=self._run, name="identity", daemon=True).start()

    def _run(self) -> None:
        began = time.monotonic()
        try:
            found = fingerprint(self._path)
            check_marks(self._path, self._marks)
            self.seconds = time.monotonic() - began
            self.fingerprint = found
        except ModelError as error:
            self.error = str(error)
        except Exception as error:  # the loop waits for a word of this thread
            self.error = f"{self._path}: cannot be identified ({type(error).__name__}: {error})"
        os.eventfd_write(self.done, 1)
