"""Fixed seeds of the simulation must pass, and so must plans that failed once. The simulation must find a seeded
defect.

Each run has its own process, because the simulation must replace threads and clocks before multilock is imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.mutants.__main__ import Edit, copy_tree, read_all
from tests.simulation.plan import BACKENDS, FACES, Plan, make_plan
from tests.simulation.search import KINDS, Counts, code_of, without_words

ROOT = Path(__file__).parents[2]
REGRESSIONS = Path(__file__).parent / "regressions"
#: For each plan that failed once, the edit of the code that undoes the repair.
UNDONE = {
    "report-after-the-end": Edit(
        "multilock/kernel/losses.py",
        "        if confirmed and not released and self._kernel.now() >= lease.valid_until:\n",
        "        if False:\n",
    ),
    "lease-in-its-last-second": Edit(
        "backends/multilock_etcd/sessions.py",
        "        if said.TTL < 0:",
        "        if said.TTL <= 0:",
    ),
    "key-of-two-attempts": Edit(
        "backends/multilock_etcd/acquire_release.py",
        "        with one_attempt(waiter.attempting, within):\n",
        "        if True:\n",
    ),
    "replies-read-by-another-thread": Edit(
        "backends/multilock_redis/redlock/acquire_release.py",
        "        return min(left, BETWEEN) if self._elsewhere else left\n",
        "        return left\n",
    ),
    "release-after-a-late-attempt": Edit(
        "backends/multilock_etcd/acquire_release.py",
        "            if waiter.session is not None and waiter.session.lease != waiter.lease:\n",
        "            if True:\n",
    ),
    "two-attempts-of-one-claim": Edit(
        "backends/multilock_zookeeper/acquire_release.py",
        "        with one_attempt(waiter.attempting, within):\n",
        "        if True:\n",
    ),
}
# The number of seeds for each backend, which take about a minute of processor time in all. `make simulation` runs other
# seeds.
SEEDS = {
    "redis": 12,
    "redis+sentinel": 8,
    "redis+cluster": 8,
    "redlock": 3,
    "postgresql": 6,
    "etcd": 8,
    "consul": 10,
    "zookeeper": 10,
    "sqlite": 8,
    "memory": 16,
}
FAILED, PASSED = 1, 0

pytestmark = pytest.mark.slow


def simulation(*arguments: str, tree: Path = ROOT, hashes: str = "random") -> tuple[int, str]:
    """Run ``python -m tests.simulation``. Returns its exit code and its output."""
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
@pytest.mark.parametrize("name", UNDONE)
def test_a_plan_that_failed_once_fails_only_without_the_mend(name: str, tmp_path: Path) -> None:
    plan = str(REGRESSIONS / f"{name}.json")
    code, said = simulation("replay", plan)
    assert code == PASSED, said
    copy_tree(tmp_path)
    UNDONE[name].apply(tmp_path)
    code, said = simulation("replay", plan, tree=tmp_path)
    assert code == FAILED, said


def test_each_plan_that_failed_once_names_its_mend() -> None:
    assert {path.stem for path in REGRESSIONS.glob("*.json")} == set(UNDONE)


@pytest.mark.parametrize(
    ("seed", "backend", "face"),
    [
        ("1", "redis", "asyncio"),
        ("2", "redis+sentinel", "blocking"),
        ("3", "redis+cluster", "asyncio"),
        ("4", "redlock", "blocking"),
        ("5", "postgresql", "asyncio"),
        ("7", "consul", "blocking"),
        ("6", "zookeeper", "blocking"),
        ("23", "sqlite", "blocking"),
        ("24", "memory", "asyncio"),
    ],
)
def test_a_seed_gives_the_same_run_in_every_interpreter(seed: str, backend: str, face: str, tmp_path: Path) -> None:
    """Several interpreters run at once, and each runs the seed twice."""

    def replay(hashes: str) -> bytes:
        out = tmp_path / hashes
        code, said = simulation("replay", seed, "--backend", backend, "--face", face, "--out", str(out), hashes=hashes)
        assert code == PASSED, said
        return out.read_bytes()

    with ThreadPoolExecutor() as pool:
        assert len(set(pool.map(replay, ("1", "2")))) == 1


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
    assert set(Counts().read["next"]) == set(KINDS)


IMPORTED = """
import sys
from tests.simulation.plan import FACES, make_plan
from tests.simulation.threads import install

install()
from tests.simulation.world import run

for seed in range(2):
    run(make_plan(seed, sys.argv[1], FACES[seed % 2]))
for each in list(sys.modules.values()):
    print(getattr(each, "__file__", None))
"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_change_of_any_code_that_a_run_imports_resets_the_count(backend: str) -> None:
    said = subprocess.check_output(
        [sys.executable, "-c", IMPORTED, backend],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'backends'}", "PYTHONHASHSEED": "0"},
        text=True,
    )
    folders = tuple(f"{ROOT / each}{os.sep}" for each in ("multilock", "backends", "tests"))
    imported = {Path(line) for line in said.splitlines() if line.startswith(folders)}
    assert any(
        each.parent.name == f"multilock_{backend.replace('redlock', 'redis').split('+')[0]}" for each in imported
    )
    assert not imported - code_of(backend)


@pytest.mark.parametrize(
    ("suffix", "text", "other_words", "other_code"),
    [
        (
            ".py",
            'def f():\n    """A."""\n    return 1  # one\n',
            "def f():\n    return 1\n",
            "def f():\n    return 2\n",
        ),
        (".lua", "-- a\nreturn 1\n", "  -- b\nreturn 1\n", "-- a\nreturn 2\n"),
    ],
)
def test_only_other_code_resets_the_count_of_this_code(
    suffix: str, text: str, other_words: str, other_code: str
) -> None:
    assert without_words(suffix, text) == without_words(suffix, other_words)
    assert without_words(suffix, text) != without_words(suffix, other_code)
