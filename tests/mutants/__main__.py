"""``make mutants``: seeded defects, each of which a test must catch. A word after the command selects by name.

A mutant is ``tests/mutants/<name>.patch``: a small diff against the product, with two lines on top of it, or three,

    Why: what goes wrong for whom
    Tests: the fewest tests that should catch it, as pytest takes them
    Invariant: which one of `INVARIANTS` it breaks

The tree is copied, the patch applied, the tests run. A mutant is killed when a test fails or hangs. It is an error when
one survives, when a patch no longer applies or names something undefined, or when its tests fail without any patch.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
TREE = ("multilock", "backends", "tests", "pyproject.toml")
SIDE_BY_SIDE = 2
#: What holds for those who share a name, as the models of Redis' scripts have it.
INVARIANTS = {
    "I1": "those who believe at one time are of one mode",
    "I2": "who believes has a lease at the server",
    "I3": "what was given up neither holds nor waits",
    "I4": "nobody overtakes a waiter that is alive and does not fit",
    "I5": "each grant has a token of its own, which orders it among those who do not hold together",
    "I6": "what was deleted is never renewed",
    "I7": "whatever is given back or up, nobody who fits since then is left standing",
    "I8": "those who hold at the server are of one mode, and no more than there are permits",
}
LIMIT = 180.0  # seconds for the tests of one mutant; one that hangs is caught
OUTCOMES = {0: "survived", 1: "killed"}  # pytest's exit codes; any other is a mistake of ours


@dataclass(frozen=True, slots=True)
class Mutant:
    name: str
    why: str
    tests: tuple[str, ...]
    patch: str
    invariant: str | None


@dataclass(frozen=True, slots=True)
class Result:
    mutant: Mutant
    outcome: str
    seconds: float
    details: str = ""


def read(path: Path) -> Mutant:
    text = path.read_text()
    head = dict(line.split(": ", 1) for line in text.partition("--- ")[0].splitlines() if ": " in line)
    return Mutant(path.stem, head["Why"], tuple(head["Tests"].split()), text, head.get("Invariant"))


def read_all() -> list[Mutant]:
    return [read(path) for path in sorted(Path(__file__).parent.glob("*.patch"))]


def copy_tree(to: Path) -> None:
    for name in TREE:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, to / name, ignore=shutil.ignore_patterns("__pycache__", "results", ".*"))
        else:
            shutil.copy(source, to / name)


def run_tests(tree: Path, tests: Iterable[str], limit: float = LIMIT) -> tuple[int | None, str]:
    """pytest's exit code, None if it did not end in time, and the end of what it said."""
    # The path goes before site-packages, where the tree itself may be installed.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), str(tree / "backends")])}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "--timeout=30", "-p", "no:cacheprovider"]
    try:
        done = subprocess.run(
            [*command, *tests], cwd=tree, env=environment, capture_output=True, text=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        return None, ""
    return done.returncode, (done.stdout + done.stderr)[-3000:]


def try_out(mutant: Mutant) -> Result:
    began = time.monotonic()

    def result(outcome: str, details: str = "") -> Result:
        return Result(mutant, outcome, time.monotonic() - began, details)

    with tempfile.TemporaryDirectory(prefix="multilock-mutant-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        applied = subprocess.run(
            ["git", "apply", "-C1", "-"],
            cwd=tree,
            input=mutant.patch,
            capture_output=True,
            text=True,
            check=False,
        )
        if applied.returncode:
            return result("does not apply", applied.stderr)
        if said := undefined_names(tree, mutant):
            return result("proves nothing", said)
        code, said = run_tests(tree, mutant.tests)
        outcome = "killed (hangs)" if code is None else OUTCOMES.get(code, "broken")
        return result(outcome, "" if outcome.startswith("killed") else said)


def undefined_names(tree: Path, mutant: Mutant) -> str:
    """What a patched file names and nobody defines: it fails any test, and so shows nothing."""
    files = [file for file in re.findall(r"^\+\+\+ b/(\S+\.py)$", mutant.patch, re.M) if (tree / file).exists()]
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "-q", "--select", "F821,F823"]
    found = subprocess.run([*command, *files], cwd=tree, capture_output=True, text=True, check=False) if files else None
    return found.stdout if found and found.returncode else ""


def healthy(mutants: Iterable[Mutant]) -> bool:
    """Whether the tests pass as long as nothing is broken."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    with tempfile.TemporaryDirectory(prefix="multilock-mutant-") as folder:
        copy_tree(Path(folder))
        code, said = run_tests(Path(folder), tests, 10 * LIMIT)
    if code != 0:
        print(said, "\nthe tests fail without any mutant", file=sys.stderr)
    return code == 0


def main(words: list[str]) -> int:
    mutants = [mutant for mutant in read_all() if not words or any(word in mutant.name for word in words)]
    if not mutants:
        print("no mutant has such a name", file=sys.stderr)
        return 2
    if not healthy(mutants):
        return 1
    bad = []
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        for result in pool.map(try_out, mutants):
            print(
                f"{result.outcome:15} {result.seconds:5.1f} s  {result.mutant.name:45} {result.mutant.why}", flush=True
            )
            if not result.outcome.startswith("killed"):
                bad.append(result)
    for result in bad:
        print(f"\n{result.mutant.name}: {result.outcome}\n{result.details}", file=sys.stderr)
    print(f"{len(mutants) - len(bad)} of {len(mutants)} mutants killed")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
