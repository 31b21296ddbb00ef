"""``help()`` describes each member of every object that a user may get, of the blocking and of the asyncio API."""

from __future__ import annotations

import asyncio
import inspect
import pydoc
from typing import Any

import pytest

import multilock


def blocking() -> dict[str, Any]:
    """Return the objects that a user of the blocking API may get."""
    with multilock.connect("memory://") as client:
        lock = client.lock("n")
        election = client.election("e")
        with lock.acquire() as lease, election.campaign() as leadership:
            return {
                "client": client,
                "lock": lock,
                "lease": lease,
                "election": election,
                "leadership": leadership,
                "threading lock": lock.as_threading_lock(),
                "observer": election.observe(),
                "events": client.events,
                "read-write lock": client.read_write_lock("rw"),
                "reader": client.read_write_lock("rw").reader(),
                "semaphore": client.semaphore("s", 2),
                "set of locks": client.lock_all(["a", "b"]),
                "set of leases": client.lock_all(["a", "b"]).acquire(),
            }


def asynchronous() -> dict[str, Any]:
    async def collect() -> dict[str, Any]:
        async with multilock.connect_async("memory://") as client:
            lock = client.lock("n")
            election = client.election("e")
            acquiring = lock.acquire()
            async with acquiring as lease, election.campaign() as leadership:
                return {
                    "async client": client,
                    "async lock": lock,
                    "async lease": lease,
                    "async election": election,
                    "async leadership": leadership,
                    "async observer": election.observe(),
                    "acquiring": acquiring,
                    "async events": client.events,
                    "async read-write lock": client.read_write_lock("rw"),
                    "async reader": client.read_write_lock("rw").reader(),
                    "async semaphore": client.semaphore("s", 2),
                    "async set of locks": client.lock_all(["a", "b"]),
                    "async set of leases": await client.lock_all(["a", "b"]).acquire(),
                }

    return asyncio.run(collect())


GIVEN = blocking() | asynchronous()


@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
def test_every_member_of_a_returned_object_is_documented(given: Any) -> None:
    shown = pydoc.plain(pydoc.render_doc(given))
    for name in members(given):
        static = inspect.getattr_static(given, name)
        member = getattr(type(given), name) if inspect.isdatadescriptor(static) else getattr(given, name)
        doc = inspect.getdoc(member)
        assert doc, f"{name} has no docstring"
        for line in doc.splitlines():
            assert line.strip() in shown, f"help() does not show what {name} does"


def test_help_of_the_package_shows_every_name() -> None:
    shown = pydoc.plain(pydoc.render_doc(multilock))
    assert [name for name in multilock.__all__ if name not in shown] == []


@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
def test_help_shows_no_catch_all_parameter_for_wrong_arguments(given: Any) -> None:
    assert "theirs" not in pydoc.plain(pydoc.render_doc(given))


def members(given: Any) -> list[str]:
    return [name for name in dir(given) if not name.startswith("_") and name not in getattr(given, "__dict__", {})]
