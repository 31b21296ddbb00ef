"""End the session of a lock, as an operator would: a session of Consul or ZooKeeper, or a lease of etcd.

The request goes through the backend's client library, separately from the lock. So the holder of the lock learns of it
only from the server, not from us.
"""

from __future__ import annotations

from typing import Any

from multilock.backend import Backend

__all__ = ["HAVE_SESSIONS", "close_kazoo", "end_session"]

HAVE_SESSIONS = frozenset({"consul", "consuls", "etcd", "etcds", "zookeeper", "zk"})
"""The schemes of backends with sessions."""

WITHIN = 5.0
TRIES = 8


def end_session(backend: Backend, session: Any) -> bool:
    """End a session. ``session`` is the group of a grant. Returns False if it did not exist."""
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
    """End the session of this KazooClient, which learns of it from the server.

    Another connection takes over the session and closes it. On a busy machine this client may take it back first. So we
    ask for the session once more: if we get another one, the first one has ended.
    """
    if (its := client.client_id) is None:
        return False
    hosts = ",".join(f"{host}:{port}" for host, port in client.hosts)
    timeout = client._session_timeout / 1000
    for tried in range(TRIES):
        number = _close(hosts, its, timeout, tls or {})
        if number is not None and number != its[0]:
            return tried > 0  # at the first try it means that the session had ended before
    return False


def _close(hosts: str, its: tuple[int, bytes], timeout: float, tls: Any) -> int | None:
    """Return the number of the session that was closed. It is another one if ``its`` does not exist any longer."""
    from kazoo.client import KazooClient

    other = KazooClient(hosts, client_id=its, timeout=timeout, **tls)
    other.start(WITHIN)
    try:
        return None if other.client_id is None else int(other.client_id[0])
    finally:
        other.stop()
        other.close()
