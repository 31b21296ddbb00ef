"""Run new seeds on all cores, and count them in `seeds.json` by backend, face and profile.

The counts belong to a hash of the product and of the simulation. When the hash changes, the counts are added to those
of earlier versions. `try_defects` counts which seeded defects of `tests/mutants` the simulation finds, and measures how
soon.
"""

from __future__ import annotations

import ast
import hashlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.mutants.__main__ import copy_tree, read_all
from tests.simulation.plan import BACKENDS, FACES, make_plan
from tests.simulation.threads import install

__all__ = ["code_hash", "search", "try_defects", "without_words"]

KINDS = [(backend, face) for backend in BACKENDS for face in FACES]
ROOT = Path(__file__).parents[2]
COUNTS = Path(__file__).with_name("seeds.json")
MANY = "100000"  # number of seeds, more than there is time for


def code_hash() -> str:
    """Return a hash of the product and the simulation. Comments and docstrings do not change it."""
    found = hashlib.sha256()
    for folder in ("multilock", "backends", "tests/simulation"):
        for path in sorted((ROOT / folder).rglob("*")):
            parts = path.relative_to(ROOT).parts
            if path.suffix in (".py", ".lua") and "testing" not in parts and not path.name.startswith("test_"):
                found.update(f"{parts} {without_words(path.suffix, path.read_text())}".encode())
    return found.hexdigest()[:16]


def without_words(suffix: str, text: str) -> str:
    """Return the syntax tree of Python code without docstrings, or the lines of Lua code that are not comments."""
    if suffix == ".lua":
        return "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("--"))
    tree = ast.parse(text)
    for node in ast.walk(tree):
        match node:
            case ast.Module() | ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef() if ast.get_docstring(node):
                del node.body[0]
    return ast.dump(tree)


def search(seconds: float) -> int:
    """Run seeds until the time is over, or until the user interrupts it. Return 1 if an oracle has reported a
    violation."""
    counts, bad, cores = read_counts(), [], len(os.sched_getaffinity(0))
    reads, writes = os.pipe()  # a line is short enough to arrive whole
    for number in range(cores):
        command = [sys.executable, "-m", "tests.simulation.search", str(counts["next"] + number), str(cores)]
        subprocess.Popen([*command, str(seconds)], stdout=writes, cwd=ROOT)
    os.close(writes)
    with suppress(KeyboardInterrupt), open(reads) as lines:
        for of, profile, seed, text in map(json.loads, lines):
            profiles = counts["now"].setdefault(of, {})
            profiles[profile] = profiles.get(profile, 0) + 1
            counts["next"] = max(counts["next"], seed + 1)
            (new := COUNTS.with_suffix(".new")).write_text(json.dumps(counts, indent=1, sort_keys=True) + "\n")
            new.replace(COUNTS)  # whole at every moment
            if text:
                bad.append(seed)
                print(f"seed {seed} of {of} ({profile}): {text}", flush=True)
    print(table(counts))
    return int(bool(bad))


def read_counts() -> dict[str, Any]:
    """Return the counts so far. Counts of other versions of the code are added to ``earlier``."""
    counts: dict[str, Any] = json.loads(COUNTS.read_text())
    if counts["hash"] != (present := code_hash()):
        for which, profiles in counts["now"].items():
            counts["earlier"][which] = dict(Counter(counts["earlier"].get(which, {})) + Counter(profiles))
        counts["hash"], counts["now"] = present, {}
    return counts


def table(counts: dict[str, Any]) -> str:
    """Return the counts as a table: for each backend and face the seeds on this code, and on all code so far."""
    lines = [("backend", "face", "this code", "in all")]
    sums = [0, 0]
    for backend, face in KINDS:
        now, earlier = (sum(counts[when].get(f"{backend} {face}", {}).values()) for when in ("now", "earlier"))
        sums = [sums[0] + now, sums[1] + now + earlier]
        lines.append((backend, face, f"{now:,}", f"{now + earlier:,}"))
    lines.append(("", "", f"{sums[0]:,}", f"{sums[1]:,}"))
    return "\n".join(f"{backend:14} {face:10} {now:>10} {total:>10}" for backend, face, now, total in lines)


def run_seeds(first: int, step: int, seconds: float) -> None:
    """Run seeds, each on one backend and face after the other, and print a line of JSON for each.

    The process ends when its parent has ended.
    """
    parent, until = os.getppid(), time.monotonic() + seconds
    install()
    from tests.simulation.world import run

    for seed in itertools.count(first, step):
        for backend, face in KINDS:
            if os.getppid() != parent or time.monotonic() > until:
                return
            result = run(make_plan(seed, backend, face), halts=True)
            bad = ": ".join(result.violations[0])[:500] if result.violations else ""
            line = json.dumps([f"{backend} {face}", result.plan.profile, seed, bad])
            os.write(1, line.encode() + b"\n")  # in one piece, because other processes write to the same pipe


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
    with suppress(BrokenPipeError, KeyboardInterrupt):
        run_seeds(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
