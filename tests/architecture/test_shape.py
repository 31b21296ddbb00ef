"""Backends of one shape: the same file name for the same job, so that who has read one finds his way in each."""

from __future__ import annotations

from pathlib import Path

import pytest

from multilock.registry import OURS

ROOT = Path(__file__).parents[2]
BACKENDS = {ours.module.removeprefix("multilock_") for ours in OURS.values()}
SERVERS = {"redis", "consul", "etcd", "zookeeper"}

# Each file that a backend must have, its job, and who has no such job.
JOBS = {
    "__init__": ("its Backend class, its options, its capabilities", set[str]()),
    "recipe": ("the algorithm: attempt, renew, release, rest", set[str]()),
    "transport": ("the requests; foreign exceptions become ours here, once", {"memory"}),
    "notices": ("what is pushed: wake-ups and losses", {"sqlite"}),
    "diagnosis": ("what this server, or this place, takes away", {"memory"}),
    "keys": ("names and keys, and what a key says", {"memory", "sqlite"}),
    "wire": ("the bytes of the protocol, without a decision", {"memory", "sqlite"}),
    "inspection": ("what operators ask, and force_release", {"memory", "sqlite"}),
}
# Each file that only some need, its job, and who has it.
EXTRAS = {
    "transactions": ("what the server executes whole or not at all", {"redis", "consul", "etcd"}),
    "sessions": ("what keeps locks alive at the server, and for how long", {"consul", "etcd", "zookeeper"}),
    "places": ("where each claim of this client stands, and which were given up", {"etcd", "zookeeper"}),
    "counting": ("who is ahead of a claim, counted down by what is pushed", {"etcd"}),
    "sweep": ("what a renewal looks after besides", {"consul", "etcd"}),
    "readers": ("what readers lock, and who waits for them", {"consul"}),
    "semaphore": ("the layout of the server's own semaphore", {"consul"}),
    "watched": ("which claims are watched, by claim and by name", {"redis"}),
    "node": ("all of it for one primary", {"redis"}),
    "endpoints": ("where servers are, out of a URL or of a client handed over", {"redis"}),
    "cluster": ("a node for each primary of a cluster", {"redis"}),
    "topology": ("which of these nodes is asked", {"redis"}),
    "slots": ("which primary serves which slot, as the nodes say", {"redis"}),
    "sentinel": ("who says which server is the primary", {"redis"}),
    "following": ("which primary is followed, out of what Sentinels say", {"redis"}),
    "redlock/__init__": ("the lock on the majority of several primaries", {"redis"}),
    "redlock/place": ("one claim at every server: its votes, and what they amount to; no I/O", {"redis"}),
    "redlock/fan": ("one connection to each server, and all asked at once by one thread", {"redis"}),
    "redlock/rounds": ("acquire, release, rest, and what servers push", {"redis"}),
    "redlock/clerk": ("the thread for late answers, claims that wait, and releases told again", {"redis"}),
    "redlock/channel": ("acquire and release for an event loop", {"redis"}),
    "redlock/renewal": ("renew: what a majority says of each lease", {"redis"}),
    "redlock/servers": ("subscriptions, watches, and questions of operators, a thread for each server", {"redis"}),
    "redlock/guard": ("from when on a server that has restarted counts", {"redis"}),
    "redlock/inspection": ("what operators ask of a majority", {"redis"}),
    "channel": ("a connection for an event loop", {"redis"}),
    "layout": ("what is in the file", {"sqlite"}),
    "host": ("what the host knows about processes and boots", {"sqlite"}),
}


def files_of(backend: str) -> set[str]:
    folder = ROOT / "backends" / f"multilock_{backend}"
    return {path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.py")}


def test_every_package_of_the_folder_is_a_backend_of_the_registry() -> None:
    folders = {path.parent.name.removeprefix("multilock_") for path in (ROOT / "backends").glob("*/__init__.py")}
    assert folders == BACKENDS


@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_a_backend_has_a_file_for_each_job_under_the_name_that_all_give_it_and_no_other_file(backend: str) -> None:
    jobs = {name for name, (_, excused) in JOBS.items() if backend not in excused}
    extras = {name for name, (_, those) in EXTRAS.items() if backend in those}
    assert files_of(backend) == jobs | extras


@pytest.mark.parametrize("backend", sorted(SERVERS))
def test_a_backend_of_a_server_is_excused_from_no_job(backend: str) -> None:
    assert JOBS.keys() <= files_of(backend)


@pytest.mark.parametrize("name", sorted(JOBS | EXTRAS))
def test_the_page_for_those_who_write_one_says_what_is_in_which_file(name: str) -> None:
    [job, _] = (JOBS | EXTRAS)[name]
    page = (ROOT / "docs" / "writing-a-backend.md").read_text(encoding="utf-8")
    assert f"| `{name}.py` | {job}" in page
