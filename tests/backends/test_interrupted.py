"""An interrupt at any point of a request leaves no internal lock taken, and no connection of a pool in use."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

import multilock_consul
import multilock_etcd
import multilock_zookeeper
from multilock.testing.conformance.spi import Ear
from multilock_sqlite import transport as sqlite
from tests.backends.kit import TTL, ByHand, interrupted
from tests.servers_consul import ConsulServer
from tests.servers_etcd import EtcdServer
from tests.servers_zookeeper import ZooKeeperServer

KINDS: dict[str, tuple[Any, Any, tuple[ModuleType, ...]]] = {
    "consul": (ConsulServer, multilock_consul, (multilock_consul.sessions, multilock_consul.transport)),
    "etcd": (EtcdServer, multilock_etcd, (multilock_etcd.sessions, multilock_etcd.transport)),
    "zookeeper": (ZooKeeperServer, multilock_zookeeper, (multilock_zookeeper.transport,)),
}


class Driven(ByHand):
    queues = True


def has_no_session(kind: str, backend: Any) -> None:
    """Let the next request to ZooKeeper create a session. On other backends a claim with a new ttl needs one anyway."""
    if kind == "zookeeper":
        backend._recipe._transport._session = None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an interrupt may come in a finalizer
# An interrupted connection is closed by the garbage collector.
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupt_at_any_point_of_a_request_leaves_a_client_that_works(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, package, modules = KINDS[kind]
    with start() as server:
        backend = package.open_backend(server.url, {"ttl": TTL, "prefix": "multilock/", "identity": "kit"})
        client = Driven(backend)
        client.take(client.mutex(name="warm"))
        moment, more = 0, True
        while more:
            moment += 1
            has_no_session(kind, backend)
            claim = client.mutex(name=f"n{moment}", ttl=TTL + moment)
            more = interrupted(lambda claim=claim: client.attempt(claim), moment, *modules)  # type: ignore[misc]
            has_no_session(kind, backend)
            client.take(client.mutex(name=f"after{moment}", ttl=TTL + 1000 + moment))
        if kind == "consul":
            assert backend._agents._room.qsize() == multilock_consul.transport.AT_A_TIME
        # the recorder may not know a session, because of an interrupt
        monkeypatch.setattr(Ear, "group_gone", lambda *_: None)
        backend.close()
    assert moment > 10


def test_an_interrupt_at_any_point_around_a_fork_leaves_the_file_usable() -> None:
    def fork() -> None:
        sqlite._before_fork()
        sqlite._after_in_parent()

    moment = 1
    while interrupted(fork, moment, sqlite):
        sqlite._after_in_parent()  # Python calls all fork hooks even if one of them raises
        assert not sqlite._opening.locked()
        moment += 1
    assert moment > 10
