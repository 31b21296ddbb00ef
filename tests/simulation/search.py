"""Run new seeds on all cores, and count them in `seeds.json` by backend, face and profile.

The counts belong to a hash of the product and of the simulation. When that changes, they are added to the earlier ones.
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
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.simulation.plan import BACKENDS, FACES, make_plan
from tests.simulation.threads import install

__all__ = ["code_hash", "search", "table", "without_words"]

KINDS = [(backend, face) for backend in BACKENDS for face in FACES]
ROOT = Path(__file__).parents[2]
COUNTS = Path(__file__).with_name("seeds.json")


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
    """Run seeds until the time is over, or the user interrupts it. Return 1 if an oracle has objected."""
    counts = read_counts()
    count = len(os.sched_getaffinity(0))
    command = [sys.executable, "-m", "tests.simulation.search"]
    with tempfile.NamedTemporaryFile("w") as results, Path(results.name).open() as lines:
        seeds = [(str(counts["next"] + number), str(count)) for number in range(count)]
        children = [subprocess.Popen([*command, *each], stdout=results, cwd=ROOT) for each in seeds]
        until, failed = time.monotonic() + seconds, 0
        with suppress(KeyboardInterrupt):
            while time.monotonic() < until and all(child.poll() is None for child in children):
                time.sleep(1.0)
                failed += count_seeds(counts, lines)
        for child in children:
            child.terminate()
            child.wait()
        failed += count_seeds(counts, lines)
    print(table(counts))
    return int(failed > 0)


def count_seeds(counts: dict[str, Any], lines: Iterable[str]) -> int:
    """Count the new results, and print the failures. Return how many these are."""
    failed = 0
    for line in map(json.loads, lines):
        profiles = counts["now"].setdefault(line["of"], {})
        profiles[line["profile"]] = profiles.get(line["profile"], 0) + 1
        counts["next"] = max(counts["next"], line["seed"] + 1)
        if line["bad"]:
            failed += 1
            print(f"seed {line['seed']} of {line['of']} ({line['profile']}): {line['bad']}", flush=True)
    COUNTS.write_text(json.dumps(counts, indent=1, sort_keys=True) + "\n")
    return failed


def read_counts() -> dict[str, Any]:
    """Return the counts so far. Those of other code are the earlier ones."""
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
    return "\n".join(f"{backend:10} {face:10} {now:>10} {total:>10}" for backend, face, now, total in lines)


def run_for_ever(first: int, step: int) -> None:
    """Run seeds, each on one backend and face after the other, and print a line of JSON for each.

    It ends when its parent has gone.
    """
    parent = os.getppid()
    install()
    from tests.simulation.world import run

    for seed in itertools.takewhile(lambda seed: os.getppid() == parent, itertools.count(first, step)):
        for backend, face in KINDS:
            result = run(make_plan(seed, backend, face), halts=True)
            bad = ": ".join(result.violations[0])[:500] if result.violations else ""
            line = {"of": f"{backend} {face}", "profile": result.plan.profile, "seed": seed, "bad": bad}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    run_for_ever(int(sys.argv[1]), int(sys.argv[2]))
