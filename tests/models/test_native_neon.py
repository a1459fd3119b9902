"""The kernels' build for ARM (NEON), cross-compiled and run under qemu: Debian's gcc-aarch64-linux-gnu
and qemu-user. The same program checks the plain build of this machine, so it cannot rot unseen."""

import shutil
import subprocess
from pathlib import Path

import pytest

from forebay.compiled import FLAGS
from forebay.models.native.build import BUILDS

CROSS, QEMU = "aarch64-linux-gnu-gcc", "qemu-aarch64"


def check(compiler: list[str], runner: list[str], to: Path) -> str:
    (plain,) = [build.sources for build in BUILDS if build.name == "plain"]
    units = [str(plain.directory / name) for name in plain.names[: plain.units]]
    program = Path(__file__).with_name("check_kernels.c")
    command = [
        *compiler,
        *FLAGS,
        *plain.flags,
        "-static",
        f"-I{plain.directory}",
        str(program),
        *units,
    ]
    subprocess.run([*command, "-o", str(to), "-lm"], check=True, timeout=300)
    ran = subprocess.run([*runner, str(to)], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, f"{ran.returncode}: {ran.stdout}{ran.stderr}"
    return ran.stdout


@pytest.mark.slow
@pytest.mark.skipif(
    not (shutil.which(CROSS) and shutil.which(QEMU)),
    reason=f"{CROSS} or {QEMU} is not there (.ci/run installs both)",
)
def test_neon_computes_what_plain_loops_do(tmp_path: Path) -> None:
    assert "panel 12" in check([CROSS], [QEMU], tmp_path / "check")


def test_the_plain_build_computes_what_plain_loops_do(tmp_path: Path) -> None:
    assert "panel" in check(["cc"], [], tmp_path / "check")
