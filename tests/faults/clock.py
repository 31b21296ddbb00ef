"""Servers with the preloaded library `clock.c`, by which a test steps or stops their wall clocks."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from tests.servers import RedisServer

__all__ = ["ClockedRedis", "compiled", "preloaded"]


def compiled(folder: Path) -> Path:
    """Compile `clock.c` in this folder. Without a compiler the test is skipped."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler: nothing can change the clock of a process")
    shim, source = folder / "clock.so", Path(__file__).with_name("clock.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", shim, source, "-ldl"], check=True)
    return shim


def preloaded(shim: Path, clock: Path) -> dict[str, str]:
    """Return environment variables that make a process use the clock described in the file ``clock``."""
    return {"LD_PRELOAD": str(shim), "CLOCK_OFFSET": str(clock)}


class ClockedRedis(RedisServer):
    """A Redis whose wall clock a test can step or stop."""

    def __init__(self, shim: Path, clock: Path, *options: str) -> None:
        super().__init__(*options)
        self._shim, self._clock = shim, clock
        self.step(0.0)

    def step(self, seconds: float) -> None:
        self._write(struct.pack("q", round(seconds * 1e6)))

    def hold(self, micros: int) -> None:
        self._write(struct.pack("qq", 0, micros))

    def _write(self, numbers: bytes) -> None:
        with self._clock.open("r+b" if self._clock.exists() else "wb") as file:
            file.write(numbers)

    def command(self, folder: Path) -> list[str]:
        environment = [f"{name}={value}" for name, value in preloaded(self._shim, self._clock).items()]
        return ["env", *environment, *super().command(folder)]
