"""Counts the seeded defects in `tests/mutants` that the simulation finds, and measures how soon."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.mutants.__main__ import copy_tree, read_all

__all__ = ["try_all"]

MUTANTS = Path(__file__).parents[1] / "mutants"
ALL = 100_000  # more seeds than there is time for


def try_all(file: str, only: str, backend: str, face: str, seconds: float) -> int:
    """Print for each defect of a file whether it was found, by which oracle, and after how many seconds of the
    processor."""
    text = (MUTANTS / file).read_text()
    for mutant in read_all(MUTANTS):
        if f"# {mutant.name}\n" not in text or only not in mutant.name:
            continue
        with tempfile.TemporaryDirectory(prefix="simulation-defect-") as folder:
            tree = Path(folder)
            copy_tree(tree)
            mutant.apply(tree)
            print(f"{mutant.name:60} {find(tree, backend, face, seconds)}", flush=True)
    return 0


def find(tree: Path, backend: str, face: str, seconds: float) -> str:
    """Return what the simulation says of a changed tree."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), str(tree / "backends")])}
    command = [sys.executable, "-u", "-m", "tests.simulation", "seeds", "0", str(ALL), "--backend", backend]
    child = subprocess.Popen(
        [*command, "--face", face, "--seconds", str(seconds)],
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert child.stdout is not None
    began, last = time.monotonic(), ""
    for line in child.stdout:
        if line.startswith("seed "):
            child.kill()
            child.wait()
            return f"found after {time.monotonic() - began:.1f} s: {line[:150].strip()}"
        last = line
    return "MISSED" if child.wait() == 0 else f"BROKEN {last.strip()}"
