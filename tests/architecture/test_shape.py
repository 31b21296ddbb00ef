"""In all backends, files with the same job have the same name, so that a reader of one backend can read the others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from multilock.registry import OURS

ROOT = Path(__file__).parents[2]
BACKENDS = {ours.module.removeprefix("multilock_") for ours in OURS.values()}
SERVERS = {"redis", "consul", "etcd", "zookeeper", "postgresql"}

# Each file that a backend must have, its job, and the backends without that job.
JOBS = {
    "__init__": ("the Backend class, the options, the capabilities", set[str]()),
    "acquire_release": ("the algorithm: attempt, release, rest, and renew if there is no `renewal.py`", set[str]()),
    "transport": ("the requests; it turns exceptions of the client library into errors of multilock", {"memory"}),
    "notices": ("notifications of waiters and losses", set()),
    "diagnosis": ("settings of the server that weaken a lock", {"memory"}),
    "keys": ("names and keys, and the values of keys", {"memory", "sqlite"}),
    "wire": ("encoding and decoding of the protocol, without decisions", {"memory", "sqlite"}),
    "inspection": ("`inspect()`, `inspect_all()` and `force_release()`", {"memory", "sqlite"}),
}
# Each file that only some backends need, its job, and the backends that have it.
EXTRAS = {
    "transactions": (
        "operations that the server executes completely or not at all",
        {"redis", "consul", "etcd", "postgresql"},
    ),
    "sessions": ("the sessions or leases that keep locks alive at the server", {"consul", "etcd"}),
    "session_validity": ("for how long a session certainly lives; no I/O", {"zookeeper"}),
    "sockets": ("the sockets and threads of the client library", {"zookeeper"}),
    "claims": ("the state of each claim of this client, and the cancelled claims", {"etcd", "zookeeper"}),
    "queue": ("the order of the claims for a name, and which of them are ahead of a claim", {"etcd", "zookeeper"}),
    "main_thread": ("the main thread's requests, sent by another thread", {"etcd"}),
    "renewal": ("renew: the proof that leases are still held", {"consul", "etcd", "zookeeper"}),
    "sweep": ("work of a renewal besides its requests, such as the search for leftovers", {"consul", "etcd"}),
    "reader_locks": ("the keys of readers, and the wait for readers", {"consul"}),
    "semaphore": ("the layout of the server's own semaphore", {"consul"}),
    "watched_claims": ("which claims are watched, by claim and by name", {"redis"}),
    "connections": ("the idle connections to a server, and which one a request uses", {"redis"}),
    "connect_errors": ("why a connection fails, and what to change", {"redis"}),
    "node": ("the backend of one Redis primary; a cluster has one for each", {"redis"}),
    "endpoints": (
        "the addresses of servers, from a URL or from a client object passed to connect()",
        {"redis", "postgresql"},
    ),
    "cluster": ("a node for each primary of a cluster", {"redis"}),
    "cluster_map": ("the choice of the node for a request", {"redis"}),
    "slot_table": ("the table of slots and primaries, as the nodes report it", {"redis"}),
    "sentinel": ("the questions to Sentinels for the primary", {"redis"}),
    "followed_primary": ("the choice of the primary, from the answers of Sentinels", {"redis"}),
    "redlock/__init__": ("the lock on the majority of several primaries", {"redis"}),
    "redlock/votes": ("one claim at all servers: its votes and their sum; no I/O", {"redis"}),
    "redlock/connections": ("one connection to each server; one thread asks all at once", {"redis"}),
    "redlock/acquire_release": ("acquire, release and rest, at a majority", {"redis"}),
    "redlock/background_thread": ("the thread for late replies, waiting claims, and repeated releases", {"redis"}),
    "redlock/event_loop": ("acquire and release for an event loop", {"redis"}),
    "redlock/notices": ("the pushes of the servers, counted for each claim; watches", {"redis"}),
    "redlock/renewal": ("renew: the majority for each lease", {"redis"}),
    "redlock/servers": ("subscriptions and calls of operators; a thread for each server", {"redis"}),
    "redlock/restarts": ("the time from which a restarted server counts", {"redis"}),
    "redlock/inspection": ("the calls of operators to a majority", {"redis"}),
    "event_loop": ("a connection for an event loop", {"redis", "postgresql"}),
    "tables": ("the tables, and how they are created", {"sqlite", "postgresql"}),
    "file_locks": ("locks on the file that outlast other descriptors", {"sqlite"}),
    "host": ("the host's information about processes and boots", {"sqlite"}),
}


def files_of(backend: str) -> set[str]:
    folder = ROOT / "backends" / f"multilock_{backend}"
    return {path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.py")}


def test_every_package_of_the_folder_is_a_backend_of_the_registry() -> None:
    folders = {path.parent.name.removeprefix("multilock_") for path in (ROOT / "backends").glob("*/__init__.py")}
    assert folders == BACKENDS


@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_each_backend_has_the_same_files_for_the_same_jobs_and_no_others(backend: str) -> None:
    jobs = {name for name, (_, excused) in JOBS.items() if backend not in excused}
    extras = {name for name, (_, those) in EXTRAS.items() if backend in those}
    assert files_of(backend) == jobs | extras


@pytest.mark.parametrize("backend", sorted(SERVERS))
def test_no_backend_of_a_server_lacks_the_file_for_a_job(backend: str) -> None:
    assert JOBS.keys() <= files_of(backend)


def test_contributing_lists_the_common_files() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert [
        f"| `{name}.py` | {job} |" for name, (job, _) in JOBS.items() if f"| `{name}.py` | {job} |" not in page
    ] == []


def test_every_file_that_contributing_names_exists() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    here = {path.name for folder in ("multilock", "backends", "tests") for path in (ROOT / folder).rglob("*.py")}
    assert [name for name in re.findall(r"\b[a-z_]+\.py\b", page) if name not in here] == []
