"""What a rank's libraries keep beside weights and pages."""

import os
import subprocess
import sys

from forebay.runtime.spawn import worker_environment

# Linear layers of a model too small to matter, at as many row counts as a server meets in minutes.
ROWS = """
import psutil, torch
from forebay.models.linear import Linear
torch.set_num_threads(1)
layer, me = Linear(torch.randn(16, 16)), psutil.Process()
with torch.inference_mode():
    layer(torch.randn(1, 16))
    before = me.memory_info().rss
    for rows in range(1, 701):
        layer(torch.randn(rows, 16))
print((me.memory_info().rss - before) >> 20)
"""
ALLOWED_MIB = 200  # 140 at 256 kernels; without a bound it is 390 here and goes on to 1,024 kernels


def test_kernels_for_every_number_of_rows_do_not_fill_the_memory() -> None:
    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", ROWS],
        env=worker_environment(1) | path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) <= ALLOWED_MIB
