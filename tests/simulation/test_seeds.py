"""Fixed seeds of the simulation, plans that failed once, and a seeded defect that it must find.

Each run is a process of its own, because the simulation must replace threads and clocks before multilock is imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants.__main__ import copy_tree, read_all
from tests.simulation.plan import BACKENDS, FACES, Plan, make_plan
from tests.simulation.search import COUNTS, read_counts

ROOT = Path(__file__).parents[2]
REGRESSIONS = sorted(Path(__file__).parent.glob("regressions/*.json"))
# About a minute of one processor in all. `make simulation` runs others.
SEEDS = {"redis": 12, "redlock": 3, "sqlite": 8, "memory": 16}
FAILED, PASSED = 1, 0

pytestmark = pytest.mark.slow


def simulation(*arguments: str, tree: Path = ROOT, hashes: str = "random") -> tuple[int, str]:
    """Run the command. Returns its exit code and its output."""
    path = os.pathsep.join([str(tree), str(tree / "backends")])
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulation", *arguments],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": hashes},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.mark.oracle
@pytest.mark.timeout(600)
@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_oracle_objects_to_these_seeds(backend: str, face: str) -> None:
    code, said = simulation("seeds", "0", str(SEEDS[backend]), "--backend", backend, "--face", face)
    assert code == PASSED, said


@pytest.mark.oracle
@pytest.mark.parametrize("path", REGRESSIONS, ids=lambda path: path.stem)
def test_a_plan_that_failed_once_passes_now(path: Path) -> None:
    code, said = simulation("replay", str(path))
    assert code == PASSED, said


@pytest.mark.parametrize(("seed", "backend", "face"), [("1", "redis", "asyncio"), ("4", "redlock", "blocking")])
def test_a_seed_gives_the_same_run_in_every_interpreter(seed: str, backend: str, face: str, tmp_path: Path) -> None:
    traces = []
    for hashes in ("1", "2"):
        out = tmp_path / hashes
        code, said = simulation("replay", seed, "--backend", backend, "--face", face, "--out", str(out), hashes=hashes)
        assert code == PASSED, said
        traces.append(out.read_bytes())
    assert traces[0] == traces[1]


@pytest.mark.timeout(600)
def test_a_seeded_defect_is_found_shrunk_and_replayed(tmp_path: Path) -> None:
    [defect] = [each for each in read_all() if each.name == "cached-is-held"]
    tree, small = tmp_path / "tree", tmp_path / "small.json"
    copy_tree(tree)
    defect.apply(tree)
    code, said = simulation("seeds", "0", "20", "--profile", "process", tree=tree)
    assert code == FAILED, said
    seed = said.split()[1]
    code, said = simulation("shrink", seed, "--profile", "process", "--seconds", "40", "--out", str(small), tree=tree)
    assert code == PASSED, said
    operations, _ = Plan.from_json(small.read_text()).size()
    assert operations < 10
    code, said = simulation("replay", str(small), tree=tree)
    assert code == FAILED
    assert "the same" in said


def test_a_plan_written_to_a_file_can_be_read_back() -> None:
    plan = make_plan(1, "redis", "asyncio")
    assert Plan.from_json(plan.to_json()) == plan


def test_the_counted_seeds_can_be_read() -> None:
    assert COUNTS.exists()
    assert read_counts()["next"] > 0
