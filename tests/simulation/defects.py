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

ALL = "100000"  # more seeds than there is time for


def try_all(word: str, options: list[str]) -> int:
    """For each defect whose name contains ``word``, run the command ``seeds`` on a tree with that defect.

    Print the first line of its output, or MISSED, and the seconds that it took.
    """
    for mutant in read_all():
        if word in mutant.name:
            with tempfile.TemporaryDirectory(prefix="simulation-defect-") as folder:
                tree = Path(folder)
                copy_tree(tree)
                mutant.apply(tree)
                began = time.monotonic()
                done = subprocess.run(
                    [sys.executable, "-m", "tests.simulation", "seeds", "0", ALL, *options],
                    cwd=tree,
                    env={**os.environ, "PYTHONPATH": f"{tree}{os.pathsep}{tree / 'backends'}"},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    check=False,
                )
            said = done.stdout.splitlines()[0] if done.returncode else "MISSED"
            print(f"{mutant.name:50} {time.monotonic() - began:5.1f} s  {said[:150]}", flush=True)
    return 0
