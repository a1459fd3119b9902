"""Device -> host -> store -> another process -> host -> device: every byte of every layer, keys, values and scales."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.pace import paced
from tests.runtime import round_trip


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
def test_pages_come_back_byte_for_byte_in_another_process(
    tiny_model: Path, kv_dtype: str, tmp_path: Path
) -> None:
    arguments = [str(tiny_model), kv_dtype, str(tmp_path / "pages")]
    written = round_trip.write(tiny_model, kv_dtype, tmp_path / "pages")
    command = [sys.executable, "-m", "tests.runtime.round_trip", *arguments]
    read = subprocess.run(command, capture_output=True, text=True, check=True, timeout=paced(120))
    assert read.stdout.strip() == written
