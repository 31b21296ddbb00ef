"""``make mutants`` makes small defects (*mutants*) in copies of the product, and checks that a test finds each. A word
after the command selects mutants by name.

``tests/mutants/<part of the product>.txt`` contains the mutants:

    # name
    Why: the failure that a user would see
    Tests: the fewest tests that should catch it, as pytest takes them
    Invariant: the one of `INVARIANTS` that it breaks, if any
    In: the file that it changes (again for each place)
    -a line that it removes
    +a line that it adds
     a line around them, if the file contains the removed lines more than once

For each mutant, the command copies the source tree, changes the copy and runs the mutant's tests. A mutant is killed if
a test fails or hangs. It is an error if a mutant survives, if its old lines are no longer in the file, or if it uses an
undefined name. It is also an error if the tests fail without any mutant. ``--check``, like ``make test``, only checks
that the old lines are in the file.
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
#: The rules for all clients that share a name. The models of Redis' scripts have the same rules.
INVARIANTS = {
    "I1": "simultaneous believers have one mode",
    "I2": "a client that believes has a lease at the server",
    "I3": "a cancelled claim neither holds nor waits",
    "I4": "a live waiter that must wait is not overtaken",
    "I5": "each grant has its own token, which orders it among claims that exclude each other",
    "I6": "a deleted lease is never renewed",
    "I7": "after a release or a cancel no admissible waiter stays in the queue",
    "I8": "the holders at the server have one mode, and are no more than the permits",
}
LIMIT = 180.0  # seconds for the tests of one mutant; if they take longer, the mutant counts as killed
OUTCOMES = {0: "survived", 1: "killed"}  # exit codes of pytest; any other code is an error of this command


@dataclass(frozen=True, slots=True)
class Edit:
    file: str
    old: str
    new: str

    def apply(self, tree: Path) -> None:
        """Replace the old lines. Raises ValueError unless the file contains them exactly once."""
        path = tree / self.file
        text = "\n" + (path.read_text() if path.exists() else "")
        if (count := text.count("\n" + self.old)) != 1:
            raise ValueError(f"its lines occur {count} times in {self.file}")
        path.write_text(text.replace("\n" + self.old, "\n" + self.new)[1:])


@dataclass(frozen=True, slots=True)
class Mutant:
    name: str
    why: str
    tests: tuple[str, ...]
    edits: tuple[Edit, ...]
    invariant: str | None

    def apply(self, tree: Path) -> None:
        for edit in self.edits:
            edit.apply(tree)


@dataclass(frozen=True, slots=True)
class Result:
    mutant: Mutant
    outcome: str
    seconds: float
    details: str = ""


def read_all(folder: Path = Path(__file__).parent) -> list[Mutant]:
    texts = (text for path in sorted(folder.glob("*.txt")) for text in re.split(r"^# ", path.read_text(), flags=re.M))
    return [_read(text) for text in texts if text]


def _read(text: str) -> Mutant:
    head, *places = re.split(r"^In: ", text, flags=re.M)
    name, *lines = head.splitlines()
    about = dict(line.split(": ", 1) for line in lines)
    edits = tuple(_edit(*place.rstrip("\n").split("\n")) for place in places)
    return Mutant(name, about["Why"], tuple(about["Tests"].split()), edits, about.get("Invariant"))


def _edit(file: str, *lines: str) -> Edit:
    old, new = ("".join(f"{line[1:]}\n" for line in lines if line[:1] != other) for other in "+-")
    return Edit(file, old, new)


def misfits(mutants: Iterable[Mutant], root: Path = ROOT) -> list[str]:
    """Return a line for each mutant that no longer fits the product."""
    found = []
    for mutant in mutants:
        with tempfile.TemporaryDirectory(prefix="multilock-mutant-") as folder:
            tree = Path(folder)
            for file in {edit.file for edit in mutant.edits}:
                (tree / file).parent.mkdir(parents=True, exist_ok=True)
                (tree / file).write_text((root / file).read_text() if (root / file).exists() else "")
            try:
                mutant.apply(tree)
            except ValueError as error:
                found.append(f"{mutant.name}: {error}")
    return found


def copy_tree(to: Path) -> None:
    for name in TREE:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, to / name, ignore=shutil.ignore_patterns("__pycache__", "results", ".*"))
        else:
            shutil.copy(source, to / name)


def run_tests(tree: Path, tests: Iterable[str], limit: float = LIMIT) -> tuple[int | None, str]:
    """Run the tests. Returns pytest's exit code, or None after a timeout, and the end of its output."""
    # The original tree may be installed in site-packages, but PYTHONPATH comes first.
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
        try:
            mutant.apply(tree)
        except ValueError as error:
            return result("does not fit", str(error))
        if said := undefined_names(tree, mutant):
            return result("proves nothing", said)
        code, said = run_tests(tree, mutant.tests)
        outcome = "killed (hangs)" if code is None else OUTCOMES.get(code, "broken")
        return result(outcome, "" if outcome.startswith("killed") else said)


def undefined_names(tree: Path, mutant: Mutant) -> str:
    """Return ruff's report of undefined names in the changed files. A mutant with an undefined name would fail any
    test, so it would prove nothing."""
    files = sorted({edit.file for edit in mutant.edits if edit.file.endswith(".py")})
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "-q", "--select", "F821,F823"]
    found = subprocess.run([*command, *files], cwd=tree, capture_output=True, text=True, check=False) if files else None
    return found.stdout if found and found.returncode else ""


def healthy(mutants: Iterable[Mutant]) -> bool:
    """Return whether the tests pass without any mutant."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    with tempfile.TemporaryDirectory(prefix="multilock-mutant-") as folder:
        copy_tree(Path(folder))
        code, said = run_tests(Path(folder), tests, 10 * LIMIT)
    if code != 0:
        print(said, "\nthe tests fail without any mutant", file=sys.stderr)
    return code == 0


def main(arguments: list[str]) -> int:
    options = [each for each in arguments if each.startswith("--")]
    words = [each for each in arguments if each not in options]
    if set(options) - {"--check"}:
        print(__doc__)
        return 2
    mutants = [mutant for mutant in read_all() if not words or any(word in mutant.name for word in words)]
    if not mutants:
        print("no mutant has such a name", file=sys.stderr)
        return 2
    if found := misfits(mutants):
        print("\n".join(found), file=sys.stderr)
        return 1
    if "--check" in options:
        return 0
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
