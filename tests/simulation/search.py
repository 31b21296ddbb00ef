"""Run new seeds on all cores, and count them in `seeds.json` by backend, face and profile.

The counts of a backend belong to a hash of the code that its runs can execute. When the hash changes, the counts are
added to those of earlier versions. `try_defects` counts which seeded defects of `tests/mutants` the simulation finds,
and measures how soon.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import Lock, Thread

from tests.mutants.__main__ import copy_tree, read_all
from tests.simulation.plan import BACKENDS, FACES, make_plan
from tests.simulation.threads import install

__all__ = ["COUNTS", "Counts", "code_hash", "code_of", "search", "try_defects", "without_words"]

KINDS = [f"{backend} {face}" for backend in BACKENDS for face in FACES]
ENOUGH = 2000  # number of seeds that each backend and face runs first; afterwards each gets the same processor time
WRITE_EVERY = 30.0  # seconds
ROOT = Path(__file__).parents[2]
COUNTS = Path(__file__).with_name("seeds.json")
COMMENTS = {".lua": "--", ".sql": "--"}  # how a comment begins in a script
MANY = "100000"  # a number of seeds that no run has time for


@cache
def code_hash(backend: str) -> str:
    """Return a hash of all code that a run of this backend can execute. Comments and docstrings do not change it."""
    found = hashlib.sha256()
    for path in sorted(code_of(backend)):
        found.update(f"{path.relative_to(ROOT)} {_code_in(path)}".encode())
    return found.hexdigest()[:16]


def code_of(backend: str) -> set[Path]:
    """Return the files of this project that a run imports, and the scripts beside them."""
    found: set[Path] = set()
    modules = {"tests.simulation.world", f"tests.simulation.{BACKENDS[backend]}"}
    while modules:
        path = _file_of(modules.pop())
        if path is not None and path not in found:
            found.add(path)
            modules |= _imported_by(path)
    scripts = (each for folder in {path.parent for path in found} for each in folder.rglob("*"))
    return found | {each for each in scripts if each.suffix in COMMENTS}


def _file_of(module: str) -> Path | None:
    """Return the file of a module, or None if it is no module of this project."""
    for base in (ROOT, ROOT / "backends"):
        path = base.joinpath(*module.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.exists():
                return file
    return None


@cache
def _imported_by(path: Path) -> set[str]:
    """Return the full names that a file imports. Some of them may not be modules, but parts of modules."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{each.name}" for each in node.names}
    return {name.rsplit(".", drop)[0] for name in names for drop in range(name.count(".") + 1)}


@cache
def _code_in(path: Path) -> str:
    return without_words(path.suffix, path.read_text())


def without_words(suffix: str, text: str) -> str:
    """Return the syntax tree of Python code without docstrings, or the lines of a script that are not comments."""
    if mark := COMMENTS.get(suffix):
        return "\n".join(line for line in text.splitlines() if not line.lstrip().startswith(mark))
    tree = ast.parse(text)
    for node in ast.walk(tree):
        match node:
            case ast.Module() | ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef() if ast.get_docstring(node):
                del node.body[0]
    return ast.dump(tree)


def search(seconds: float) -> int:
    """Run seeds until the time is over, or until a user or the system ends the search. Return 1 if a seed failed."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    counts, until = Counts(), time.monotonic() + seconds
    workers = [Worker(counts) for _ in os.sched_getaffinity(0)]
    with suppress(KeyboardInterrupt):
        while (left := until - time.monotonic()) > 0 and all(each.is_alive() for each in workers):
            workers[0].join(min(left, WRITE_EVERY))
            counts.write()
    for each in workers:
        each.process.kill()
    counts.write()
    print(counts.table())
    return int(counts.has_failed)


class Counts:
    """The contents of `seeds.json`, for each backend and face.

    ``hash`` is that of the code. ``now`` counts the seeds on that code, and ``seconds`` is their processor time.
    ``earlier`` counts the seeds on other code. A seed remains in ``failed`` until somebody removes it.
    """

    def __init__(self) -> None:
        self.read = json.loads(COUNTS.read_text())
        self.has_failed = False
        self._lock = Lock()
        self._running: Counter[str] = Counter()
        for which in KINDS:
            if self.read["hash"].get(which) != (present := code_hash(which.split()[0])):
                earlier = Counter(self.read["earlier"].get(which, {})) + Counter(self.read["now"].get(which, {}))
                self.read["earlier"][which] = dict(earlier)
                self.read["hash"][which], self.read["now"][which], self.read["seconds"][which] = present, {}, 0.0

    def number(self, which: str, when: str) -> int:
        """Return the number of seeds that have run on this code (``now``) or on other code (``earlier``)."""
        return sum(self.read[when].get(which, {}).values())

    def take(self) -> tuple[str, int]:
        """Return the backend and face that should run next, and the seed."""

        def turn(which: str) -> tuple[bool, float]:
            """Return the sort key: first each backend and face gets `ENOUGH` seeds on this code, then each gets the
            same processor time."""
            number = self.number(which, "now") + self._running[which]
            return number >= ENOUGH, number if number < ENOUGH else self.read["seconds"][which] + self._running[which]

        with self._lock:
            which = min(KINDS, key=turn)
            self._running[which] += 1
            seed = self.read["next"].get(which, 0)
            self.read["next"][which] = seed + 1
            return which, seed

    def add(self, which: str, seed: int, profile: str, seconds: float, failure: str) -> None:
        """Count a seed. If it failed, print it, and write the file at once."""
        with self._lock:
            self._running[which] -= 1
            profiles = self.read["now"][which]
            profiles[profile] = profiles.get(profile, 0) + 1
            self.read["seconds"][which] = round(self.read["seconds"][which] + seconds, 2)
            if failure:
                failed = {"seed": seed, "profile": profile, "hash": self.read["hash"][which], "said": failure}
                self.read["failed"].setdefault(which, []).append(failed)
        if failure:
            self.has_failed = True
            self.write()
            print(f"seed {seed} of {which} ({profile}): {failure}", flush=True)

    def write(self) -> None:
        with self._lock:
            (new := COUNTS.with_suffix(".new")).write_text(json.dumps(self.read, indent=1, sort_keys=True) + "\n")
            new.replace(COUNTS)  # the file is whole at every moment

    def table(self) -> str:
        """Return the counts as a table: for each backend and face the seeds on this code, and on all code so far."""
        lines = [(which, self.number(which, "now"), self.number(which, "earlier")) for which in KINDS]
        lines.append(("", sum(now for _, now, _ in lines), sum(earlier for *_, earlier in lines)))
        head = f"{'backend and face':25} {'this code':>10} {'in all':>10}"
        return "\n".join([head, *(f"{which:25} {now:10,} {now + earlier:10,}" for which, now, earlier in lines)])


class Worker(Thread):
    """A thread that lets a process run seeds, one after the other, until the process ends."""

    def __init__(self, counts: Counts) -> None:
        super().__init__(daemon=True)
        self._counts = counts
        command = [sys.executable, "-m", "tests.simulation.search"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        self.start()

    def run(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(OSError):
            while True:
                which, seed = self._counts.take()
                print(which, seed, file=self.process.stdin, flush=True)
                if not (line := self.process.stdout.readline()):
                    break
                self._counts.add(which, seed, *json.loads(line))


def run_seeds() -> None:
    """Run each seed that a line of the input names. Print the profile, the processor time and the violation, if any."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the search ends this process
    install()
    from tests.simulation.world import run

    for backend, face, seed in map(str.split, sys.stdin):
        began = time.process_time()
        result = run(make_plan(int(seed), backend, face), halts=True)
        failure = ": ".join(result.violations[0])[:500] if result.violations else ""
        print(json.dumps([result.plan.profile, time.process_time() - began, failure]), flush=True)


def try_defects(word: str, options: list[str]) -> int:
    """For each defect whose name contains ``word``, run the command ``seeds`` on a tree with that defect.

    Print the first line of the command's output, or MISSED, and the seconds that the command took.
    """
    for mutant in read_all():
        if word in mutant.name:
            with tempfile.TemporaryDirectory(prefix="simulation-defect-") as folder:
                tree = Path(folder)
                copy_tree(tree)
                mutant.apply(tree)
                began = time.monotonic()
                done = subprocess.run(
                    [sys.executable, "-m", "tests.simulation", "seeds", "0", MANY, *options],
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


if __name__ == "__main__":
    run_seeds()
