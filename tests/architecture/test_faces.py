"""The blocking and the asyncio API (the two *faces*) have the same members with the same parameters."""

from __future__ import annotations

import inspect
import typing
from typing import Any

import pytest

import multilock

PAIRS = [
    (multilock.Client, multilock.AsyncClient),
    (multilock.DistributedLock, multilock.AsyncDistributedLock),
    (multilock.ReadWriteLock, multilock.AsyncReadWriteLock),
    (multilock.Semaphore, multilock.AsyncSemaphore),
    (multilock.Lease, multilock.AsyncLease),
    (multilock.Election, multilock.AsyncElection),
    (multilock.Leadership, multilock.AsyncLeadership),
]

ONLY_BLOCKING = {"as_threading_lock"}  # a drop-in for the standard library's blocking locks
WITH_A_BODY = ("lock", "read_write_lock", "semaphore", "lock_all")
ONLY_ASYNC = {("AsyncClient", name): ["cancel_on_lost"] for name in WITH_A_BODY}

# Members that ask the backend or wait are awaited, iterators are asynchronous, and all others are plain.
AWAITED = {
    "acquire", "try_acquire", "release", "is_locked", "renew", "guard", "wait_lost", "inspect", "force_release",
    "diagnose", "ping", "close", "campaign", "run", "stop", "leader", "resign",
}  # fmt: skip
ITERATED = {"inspect_all", "observe"}


def members(face: type) -> set[str]:
    return {name for name in dir(face) if not name.startswith("_")}


@pytest.mark.parametrize(("blocking", "asynchronous"), PAIRS, ids=lambda face: face.__name__)
def test_both_faces_have_the_same_members(blocking: type, asynchronous: type) -> None:
    assert members(blocking) - ONLY_BLOCKING == members(asynchronous)


@pytest.mark.parametrize(("blocking", "asynchronous"), PAIRS, ids=lambda face: face.__name__)
def test_both_faces_take_the_same_parameters(blocking: type, asynchronous: type) -> None:
    for name in members(asynchronous):
        extra = ONLY_ASYNC.get((asynchronous.__name__, name), [])
        ours, theirs = parameters(getattr(blocking, name)), parameters(getattr(asynchronous, name))
        assert ours == [parameter for parameter in theirs if parameter[0] not in extra], name


@pytest.mark.parametrize(("blocking", "asynchronous"), PAIRS, ids=lambda face: face.__name__)
def test_a_method_is_awaitable_exactly_if_it_sends_a_request_or_waits(blocking: type, asynchronous: type) -> None:
    for name in members(asynchronous):
        member = getattr(asynchronous, name)
        if not callable(member):
            continue
        returns = str(inspect.signature(member).return_annotation)
        awaited = inspect.iscoroutinefunction(member) or returns.startswith("Acquiring")
        assert awaited == (name in AWAITED), name
        assert returns.startswith("AsyncIterator") == (name in ITERATED), name


def test_connect_takes_the_same_arguments_on_both_faces() -> None:
    assert parameters(multilock.connect) == parameters(multilock.connect_async)


@pytest.mark.parametrize("name", multilock.__all__)
def test_every_exported_name_exists_and_is_documented(name: str) -> None:
    exported = getattr(multilock, name)
    if not isinstance(exported, typing.TypeVar):
        assert inspect.getdoc(exported)


@pytest.mark.parametrize("face", [face for pair in PAIRS for face in pair], ids=lambda face: face.__name__)
def test_every_public_member_is_annotated(face: type) -> None:
    for name in members(face):
        member = inspect.getattr_static(face, name)
        function = member.fget if isinstance(member, property) else member
        if inspect.isfunction(function):
            signature = inspect.signature(function)
            assert signature.return_annotation is not inspect.Signature.empty, name


def parameters(member: Any) -> list[tuple[str, Any, Any]]:
    if not callable(member):
        return []
    found = inspect.signature(member).parameters.values()
    return [(each.name, each.kind, each.default) for each in found if each.name != "self"]
