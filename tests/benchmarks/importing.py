"""The cost of ``import multilock``, and of a command under a lock."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time

import multilock

__all__ = ["command_time", "import_time", "slowest", "third_party"]

CLOCK = """
import time
wall, cpu = time.perf_counter(), time.process_time()
import multilock
print(time.perf_counter() - wall, time.process_time() - cpu)
"""
MODULES = "import sys; import multilock; print(*sys.modules)"


def import_time(runs: int = 21) -> tuple[float, float]:
    """Return the milliseconds of elapsed time and of processor time that the import takes in a new interpreter, as
    medians."""
    _python("-m", "compileall", "-q", *multilock.__path__)  # an installer compiles the files too
    spent = [tuple(map(float, _python("-c", CLOCK).split())) for _ in range(runs)]
    wall, cpu = (round(statistics.median(each) * 1000, 1) for each in zip(*spent, strict=True))
    return wall, cpu


def command_time(runs: int = 11) -> float:
    """Return the median milliseconds of ``multilock run … -- true`` on SQLite, less the time that Python itself needs
    to start."""
    with tempfile.TemporaryDirectory(prefix="multilock-bench-") as folder:
        command = ["-m", "multilock", "run", "job", "--url", f"sqlite:///{folder}/locks.db", "--", "true"]
        whole = statistics.median(_seconds(*command) for _ in range(runs))
        bare = statistics.median(_seconds("-c", "pass") for _ in range(runs))
    return round((whole - bare) * 1000, 1)


def _seconds(*arguments: str) -> float:
    began = time.perf_counter()
    _python(*arguments)
    return time.perf_counter() - began


def third_party() -> list[str]:
    """Return the imported modules that belong neither to multilock nor to the standard library. There must be none."""
    plain = set(_python("-c", "import sys; print(*sys.modules)").split())
    loaded = {name.partition(".")[0] for name in set(_python("-c", MODULES).split()) - plain}
    return sorted(loaded - set(sys.stdlib_module_names) - {"multilock"})


def slowest(count: int = 8) -> list[tuple[str, float]]:
    """Return the slowest modules, with the milliseconds in the module itself as ``-X importtime`` reports them."""
    command = [sys.executable, "-X", "importtime", "-c", "import multilock"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    rows = [line.removeprefix("import time:").split("|") for line in told.splitlines() if "|" in line][1:]
    spent = sorted(((int(own), name.strip()) for own, _, name in rows), reverse=True)
    return [(name, own / 1000) for own, name in spent[:count]]


def _python(*arguments: str) -> str:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True).stdout
