"""Every backend passes every suite, every suite runs on every face, and every promise has its tests."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest

import multilock
from multilock.api_mistakes import Theirs
from multilock.kernel.holding import AnyHeld, Holding
from multilock.registry import OURS
from multilock.testing import conformance
from tests.conformance.chosen import Question, why_left_out
from tests.conformance.promises import PROMISES, RULES

ROOT = Path(__file__).parents[2]

EXCUSED = {
    ("memory", conformance.ProcessConformance): "it lives in one process, and another one has nothing of it",
}

ONE_FACE = {
    conformance.ThreadingConformance: ["blocking"],  # stand-ins for threading.Lock
    conformance.CancelConformance: ["asyncio"],  # cancellation
    conformance.BackendConformance: ["blocking"],  # a backend has no asyncio API
    conformance.ProcessConformance: ["blocking"],  # the helper processes use the blocking API
}

BACKENDS = sorted({ours.module.removeprefix("multilock_") for ours in OURS.values()})
#: Each scheme, and the file in which the suites run on it.
SCHEMES = {
    **{backend: f"test_{backend}" for backend in BACKENDS},
    "redis+sentinel": "test_sentinel",
    "redis+cluster": "test_cluster",
    "redlock": "test_redlock",
}

PUBLIC = [
    multilock.Client,
    multilock.DistributedLock,
    multilock.ReadWriteLock,
    multilock.Lease,
    multilock.Election,
    multilock.Leadership,
]


def own_tests(suite: type) -> set[str]:
    return {name for name in vars(suite) if name.startswith("test_")}


def runs_of(file: str) -> list[type[conformance.Conformance]]:
    """Return the test classes of ``tests/conformance/<file>.py``."""
    module = importlib.import_module(f"tests.conformance.{file}")
    classes = [each for name, each in vars(module).items() if name.startswith("Test") and inspect.isclass(each)]
    return [each for each in classes if issubclass(each, conformance.Conformance)]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_suite_runs_on_every_backend_and_every_way_to_reach_it(scheme: str) -> None:
    runs = runs_of(SCHEMES[scheme])
    for suite in conformance.SUITES:
        mine = [each for each in runs if issubclass(each, suite)]
        assert len(mine) == (0 if (scheme, suite) in EXCUSED else 1), suite
        for run in mine:
            assert vars(run)["backend"].scheme == scheme
            assert own_tests(run) == set(), "a backend is excused by a declared capability, and not by another test"


@pytest.mark.parametrize("suite", conformance.SUITES, ids=lambda suite: suite.__name__)
def test_every_suite_covers_every_backend_and_every_face_in_each_run(
    suite: type[conformance.Conformance],
) -> None:
    faces = ONE_FACE.get(suite, list(conformance.FACES))
    asked = {
        (backend, face)
        for backend in BACKENDS
        for face in faces
        if not why_left_out(Question(f"test_{backend}", suite, backend, face, None, None, None))
    }
    assert {backend for backend, _ in asked} == set(BACKENDS)
    assert {face for _, face in asked} == set(faces)


@pytest.mark.parametrize("suite", conformance.SUITES, ids=lambda suite: suite.__name__)
def test_every_suite_runs_on_every_face(suite: type[conformance.Conformance]) -> None:
    fixture = suite.face
    params = fixture._fixture_function_marker.params
    assert sorted(map(str, params or ())) == sorted(ONE_FACE.get(suite, conformance.FACES))


def test_the_list_of_suites_is_complete() -> None:
    exported = {getattr(conformance, name) for name in conformance.__all__ if name.endswith("Conformance")}
    assert set(conformance.SUITES) == exported - {conformance.Conformance}


def test_the_tests_of_every_promise_exist() -> None:
    for rows in PROMISES.values():
        for sentence, tests in rows.items():
            assert tests, f"nothing tests: {sentence}"
            for test in tests:
                assert exists(test), f"{sentence}: there is no test {test}"


def test_every_conformance_test_belongs_to_a_promise() -> None:
    named = {test for rows in PROMISES.values() for tests in rows.values() for test in tests}
    ours = {f"{suite.__name__}.{test}" for suite in conformance.SUITES for test in own_tests(suite)}
    assert ours - named == set()


def test_every_public_member_has_a_promise() -> None:
    data = {*AnyHeld.__slots__, *Holding.__slots__}  # internal attributes, without a promise
    members = {
        f"{each.__name__}.{name}"
        for each in PUBLIC
        for name in dir(each)
        if not name.startswith("_") and name not in data and not isinstance(getattr(each, name), Theirs)
    } | {f"LossReason.{reason.name}" for reason in multilock.LossReason}
    missing = {
        member for member in members if member not in PROMISES and f"Lease.{member.partition('.')[2]}" not in PROMISES
    }
    assert missing == set()


def test_every_rule_of_the_kernel_has_a_promise() -> None:
    assert [rule for rule in RULES if f"kernel: {rule}" not in PROMISES] == []


def exists(test: str) -> bool:
    if "::" in test:
        path, name = test.split("::")
        return re.search(rf"def {name}\b", (ROOT / path).read_text(encoding="utf-8")) is not None
    suite, _, name = test.partition(".")
    return name in own_tests(getattr(conformance, suite))
