"""Run new seeds on all cores, and count them in `seeds.json` by backend, face and profile.

The counts belong to a hash of the product and of the simulation. When that changes, they are added to the earlier ones.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.simulation.plan import BACKENDS, FACES, make_plan
from tests.simulation.threads import install

__all__ = ["code_hash", "search", "table"]

ROOT = Path(__file__).parents[2]
COUNTS = Path(__file__).with_name("seeds.json")
LOOK_EVERY = 5.0  # seconds between two looks at the children


def code_hash() -> str:
    """Return a hash of the product and the simulation."""
    found = hashlib.sha256()
    for folder in ("multilock", "backends", "tests/simulation"):
        for path in sorted((ROOT / folder).rglob("*")):
            parts = path.relative_to(ROOT).parts
            if path.suffix in (".py", ".lua") and "testing" not in parts and not path.name.startswith("test_"):
                found.update("/".join(parts).encode() + path.read_bytes())
    return found.hexdigest()[:16]


def search(seconds: float) -> int:
    """Run seeds until the time is over, or the user interrupts it. Return 1 if an oracle has objected."""
    counts = read_counts()
    first = counts["next"]
    count = os.cpu_count() or 1
    command = [sys.executable, "-m", "tests.simulation.search"]
    # The children write to a file. A pipe that nobody reads would stop them after some hundred seeds.
    with tempfile.TemporaryFile("w+") as lines:
        children = [
            subprocess.Popen([*command, str(first + number), str(count)], stdout=lines, cwd=ROOT)
            for number in range(count)
        ]
        began, failed = time.monotonic(), 0
        try:
            while time.monotonic() - began < seconds and all(child.poll() is None for child in children):
                time.sleep(min(LOOK_EVERY, max(0.1, seconds - (time.monotonic() - began))))
        except KeyboardInterrupt:
            pass
        for child in children:
            child.terminate()
            child.wait()
        lines.seek(0)
        for line in lines:
            each = json.loads(line)
            counts["now"].setdefault(each["of"], Counter())[each["profile"]] += 1
            counts["next"] = max(counts["next"], each["seed"] + 1)
            if each["bad"]:
                failed += 1
                print(f"seed {each['seed']} of {each['of']} ({each['profile']}): {each['bad']}")
    write_counts(counts)
    print(table(counts))
    return int(failed > 0)


def read_counts() -> dict[str, Any]:
    """Return the counts so far. Those of other code are the earlier ones."""
    empty: dict[str, Any] = {"hash": "", "next": 0, "now": {}, "earlier": {}}
    counts: dict[str, Any] = json.loads(COUNTS.read_text()) if COUNTS.exists() else empty
    if counts["hash"] != code_hash():
        for which, profiles in counts["now"].items():
            total = Counter(counts["earlier"].get(which, {}))
            total.update(profiles)
            counts["earlier"][which] = dict(total)
        counts["hash"], counts["now"] = code_hash(), {}
    counts["now"] = {which: Counter(profiles) for which, profiles in counts["now"].items()}
    return counts


def write_counts(counts: dict[str, Any]) -> None:
    COUNTS.write_text(json.dumps(counts, indent=1, sort_keys=True) + "\n")


def table(counts: dict[str, Any]) -> str:
    """Return the counts as a table: for each backend and face the seeds on this code, and on all code so far."""
    lines = [f"{'backend':10} {'face':10} {'this code':>10} {'in all':>10}"]
    sums = [0, 0]
    for backend in BACKENDS:
        for face in FACES:
            which = f"{backend} {face}"
            now = sum(counts["now"].get(which, {}).values())
            all_of_them = now + sum(counts["earlier"].get(which, {}).values())
            sums[0], sums[1] = sums[0] + now, sums[1] + all_of_them
            lines.append(f"{backend:10} {face:10} {now:10,} {all_of_them:10,}")
    lines.append(f"{'':21} {sums[0]:10,} {sums[1]:10,}")
    return "\n".join(lines)


def run_for_ever(first: int, step: int) -> None:
    """Run seeds, each on one backend and face after the other, and print a line of JSON for each."""
    install()
    from tests.simulation.world import run

    kinds = [(backend, face) for backend in BACKENDS for face in FACES]
    seed = first
    while True:
        for backend, face in kinds:
            result = run(make_plan(seed, backend, face), halts=True)
            bad = ": ".join(result.violations[0])[:500] if result.violations else ""
            line = {"of": f"{backend} {face}", "profile": result.plan.profile, "seed": seed, "bad": bad}
            print(json.dumps(line), flush=True)
        seed += step


if __name__ == "__main__":
    run_for_ever(int(sys.argv[1]), int(sys.argv[2]))
