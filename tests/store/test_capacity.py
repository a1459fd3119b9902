"""How much a master may know."""

import subprocess
import sys

import pytest

MILLION = """
import resource
from forebay.store.master.machine import Connected, FromClient, FromHolder, Master
from forebay.store.master.records import MasterConfig
from forebay.store.wire.messages import AskStats, Exists, HeldMemory, HeldSsd, Inventory, Register

COUNT, PIECE, SIZE = 1_000_000, 1000, 192
master = Master(MasterConfig(settle_s=0.0), 0.0, epoch=1)
master.step(0.0, Connected(1, "@holder"))
master.step(0.0, FromHolder(1, Register("h", "i", "127.0.0.1", 1, "", "m", COUNT * 256, COUNT * 8192, 0, [])))
for piece in range(COUNT // PIECE):
    numbers = range(piece * PIECE, (piece + 1) * PIECE)
    keys = [number.to_bytes(32, "little") for number in numbers]
    memory = [HeldMemory("default", key, 1, SIZE, number * 256, 1) for number, key in zip(numbers, keys)]
    ssd = [HeldSsd("default", key, 1, SIZE) for key in keys]
    master.step(0.0, FromHolder(1, Inventory(piece, memory, ssd, [], piece == COUNT // PIECE - 1)))
master.step(10.0, Connected(2, "default"))
stats = master.step(10.0, FromClient(2, AskStats(1)))[0].message
assert stats.objects == COUNT and stats.memory_used == COUNT * 256, stats
asked = [number.to_bytes(32, "little") for number in (0, COUNT - 1, COUNT)]
assert list(master.step(10.0, FromClient(2, Exists(2, asked)))[0].message.codes) == [0, 0, 2]
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10)
"""


@pytest.mark.slow
def test_a_million_objects_in_memory_and_on_ssd_fit_in_one_gibibyte() -> None:
    done = subprocess.run(
        [sys.executable, "-c", MILLION], capture_output=True, text=True, timeout=170
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 1 << 30, f"{int(done.stdout) >> 20} MiB"
