"""An operator ends the session that a lock lives in: Consul's and ZooKeeper's sessions, and etcd's leases.

It is asked for by a request of its own, through the client library of the backend: who holds the lock is not told by
us, only by his server.
"""

from __future__ import annotations

from typing import Any

from multilock.backend import Backend

__all__ = ["HAVE_SESSIONS", "close_kazoo", "end_session"]

HAVE_SESSIONS = frozenset({"consul", "consuls", "etcd", "etcds", "zookeeper", "zk"})
"""Schemes."""

WITHIN = 5.0
TRIES = 8


def end_session(backend: Backend, session: Any) -> bool:
    """``session``: the group of a grant. False: there was none to end."""
    its: Any = backend
    match backend.scheme:
        case "consul" | "consuls":
            agents = its._agents
            answer, _ = agents.call("PUT", agents.target(f"/v1/session/destroy/{session}"), WITHIN)
            return bool(answer.json())
        case "etcd":
            from multilock_etcd.transport import LeaseMissing, calls
            from multilock_etcd.wire import LeaseRevokeRequest

            try:
                its._requests.call(calls.REVOKE, LeaseRevokeRequest(ID=session), WITHIN)
            except LeaseMissing:
                return False
            return True
        case "zookeeper":
            return close_kazoo(its._transport._client, its._ensemble.tls)
    return False


def close_kazoo(client: Any, tls: Any = None) -> bool:
    """The session of this KazooClient, which is then told of it by the server.

    Another connection takes the session over and closes it; but this client may take it back first, on a busy machine.
    So it is asked for once more: who is given another session then knows that this one has ended.
    """
    if (its := client.client_id) is None:
        return False
    hosts = ",".join(f"{host}:{port}" for host, port in client.hosts)
    timeout = client._session_timeout / 1000
    for tried in range(TRIES):
        number = _close(hosts, its, timeout, tls or {})
        if number is not None and number != its[0]:
            return tried > 0  # else it had ended before
    return False


def _close(hosts: str, its: tuple[int, bytes], timeout: float, tls: Any) -> int | None:
    """The number of the session that was closed: another one, where ``its`` is no more."""
    from kazoo.client import KazooClient

    other = KazooClient(hosts, client_id=its, timeout=timeout, **tls)
    other.start(WITHIN)
    try:
        return None if other.client_id is None else int(other.client_id[0])
    finally:
        other.stop()
        other.close()
