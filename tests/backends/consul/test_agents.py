"""Agents and servers of Consul that restart, are killed, leave, or freeze and are removed from the cluster."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

import multilock
from multilock import LeaseState, LossReason, now
from multilock.testing import FaultProxy
from multilock.testing.conformance.base import Pulse, Recorder, believed_until, eventually, until_renewed
from multilock.testing.conformance.faces import background
from multilock_consul import notices
from multilock_consul.keys import LOCK_FLAGS
from tests.backends.consul.conftest import Connect
from tests.servers_consul import ConsulCluster, ConsulServer

WITHIN = 10.0
KEY = "multilock/job/.lock"
LOOKED_FOR = 90.0  # seconds at most until a cluster has removed a frozen server; it takes 9 to 15 on an idle machine


def agents(*servers: ConsulServer) -> str:
    return "consul://" + ",".join(f"127.0.0.1:{server.port}" for server in servers)


def acquired_at(client: multilock.Client, name: str, within: float) -> Future[float]:
    """Acquire the lock in the background. Return a future of the time at which it was acquired."""
    return entered_at(client.lock(name), within)


def entered_at(lock: multilock.DistributedLock, within: float = LOOKED_FOR) -> Future[float]:
    return background(lambda: (lock.acquire(timeout=within), now())[1])


@pytest.fixture
def agent(server: ConsulServer) -> Iterator[ConsulServer]:
    """Start a client agent of that server. The agent keeps its data on disk."""
    home = [f"127.0.0.1:{server.ports['serf_lan']}"]
    with ConsulServer(node="agent", keep=True, server=False, bootstrap_expect=0, retry_join=home) as agent:
        yield agent


# ---- a load balancer in front of several clusters


class _Forward(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Balancer

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        upstream = http.client.HTTPConnection("127.0.0.1", self.server.port_now)
        asked = int(parse_qs(urlsplit(self.path).query).get("index", ["0"])[0])
        if asked:
            self.server.queried.set()
        with contextlib.closing(upstream), contextlib.suppress(OSError):  # the client may have closed the connection
            upstream.request(self.command, self.path, body)
            answer = upstream.getresponse()
            said = answer.read()
            index = int(answer.headers.get("X-Consul-Index", 0))
            self.server.note_answer(asked, index)
            self.send_response(answer.status)
            self.send_header("X-Consul-Index", str(index))
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

    do_PUT = do_GET

    def log_message(self, *_: object) -> None:
        """Print nothing."""


class Balancer(http.server.ThreadingHTTPServer):
    """A load balancer that forwards each request to the server at ``port_now``, even on an existing connection."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, first: ConsulServer) -> None:
        super().__init__(("127.0.0.1", 0), _Forward)
        self.port_now = first.port
        self.queried = threading.Event()  # set when a query with an index waits for a change
        self.went_back = 0
        self.caught_up = False
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore the error: the client has closed its connection."""

    def note_answer(self, asked: int, answered: int) -> None:
        """Record the index in the reply to a query that asked for changes after the index ``asked``."""
        if asked > answered:
            self.went_back += 1
        elif self.went_back:
            self.caught_up = True


@pytest.fixture
def balancer(server: ConsulServer) -> Iterator[Balancer]:
    with Balancer(server) as balancer:
        yield balancer
        balancer.shutdown()


def test_if_the_index_of_a_query_goes_back_the_query_starts_again(
    server: ConsulServer, balancer: Balancer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the index of a query is greater than the server's, the server replies only when the query's waiting time is
    over."""
    monkeypatch.setattr(notices, "WAIT", 2)
    for number in range(100):
        server.ask("PUT", f"kv/noise/{number}", b"")
    with ConsulServer() as fresh:
        for each in (server, fresh):
            session = each.ask("PUT", "session/create", {"TTL": "60s", "NodeChecks": []})["ID"]
            each.ask("PUT", f"kv/{KEY}?acquire={session}&flags={LOCK_FLAGS}", each.node.encode())
        leaders = connect(f"consul://127.0.0.1:{balancer.server_port}").election("job").observe()
        assert next(leaders) is not None
        assert balancer.queried.wait(WITHIN)
        balancer.port_now = fresh.port
        eventually(lambda: balancer.caught_up, within=3 * notices.WAIT + 5)
        assert balancer.went_back == 1
        with Pulse() as pulse:
            deleted_at = now()
            fresh.ask("DELETE", f"kv/{KEY}")
            while next(leaders) is not None:
                pass
            assert now() - deleted_at < 1 + pulse.stopped()


# ---- a client agent


def test_restarting_the_agent_costs_neither_a_lock_nor_a_wake_up(
    server: ConsulServer, agent: ConsulServer, connect: Connect
) -> None:
    lost = Recorder[multilock.Loss]()
    lease = connect(agent.url, ttl=30).lock("held", on_lost=lost).acquire()
    holder = connect(server.url, ttl=30).lock("job").acquire()
    waits = acquired_at(connect(agent.url, ttl=30), "job", within=30)
    time.sleep(0.6)  # wait until every key is watched
    agent.restart()
    eventually(lambda: renewed(lease), WITHIN)
    assert lease.state is LeaseState.HELD
    begun = now()
    assert holder.release()
    # Without the watch, a safety timer would wake the waiter after ten seconds.
    assert waits.result(WITHIN) - begun < 5
    assert lost.stays_at(0)
    assert lease.release()


def renewed(lease: Any) -> bool:
    try:
        lease.renew()
    except multilock.BackendUnavailable:
        return False
    return True


def test_a_killed_agent_costs_no_lock_if_the_url_also_names_a_server(
    server: ConsulServer, agent: ConsulServer, connect: Connect
) -> None:
    """The node of the agent counts as failed but stays in the catalog. Sessions of multilock have no health checks, so
    the failure of the node ends no session."""
    lost = Recorder[multilock.Loss]()
    lease = connect(agents(agent, server), ttl=6).lock("job", on_lost=lost).acquire()
    [session] = server.sessions()
    assert session["Node"] == "agent"
    agent.kill()
    eventually(lambda: health(server, "agent") == "critical", within=30)
    until_renewed(lease, within=6)
    assert lost.stays_at(0, 0.5)
    assert lease.release()


def health(server: ConsulServer, node: str) -> str:
    """Return the state of this node according to Consul's gossip between the nodes."""
    [serf] = [check for check in server.ask("GET", f"health/node/{node}") if check["CheckID"] == "serfHealth"]
    status: str = serf["Status"]
    return status


@pytest.mark.parametrize("alone", [True, False])
def test_a_node_that_leaves_ends_its_sessions_and_their_holder_is_notified_first(
    server: ConsulServer, agent: ConsulServer, connect: Connect, alone: bool
) -> None:
    lost = Recorder[multilock.Loss]()
    client = connect(agents(agent) if alone else agents(agent, server), ttl=10)
    lease = client.lock("job", on_lost=lost).acquire()
    [session] = server.sessions()
    assert session["Node"] == "agent"
    waits = acquired_at(connect(server.url, ttl=10), "job", within=60)
    time.sleep(0.6)  # wait until every key is watched
    agent.cli("leave", within=30)
    loss = lost.wait(1, WITHIN)
    assert (loss.reason, loss.confirmed) == (LossReason.SESSION_LOST, True)
    assert not lease.is_held()
    assert waits.result(20) > lost.times[0]
    assert lost.stays_at(1)


# ---- a server of a cluster freezes, and the others remove it


def taken_out(by: ConsulServer, node: str) -> bool:
    """Return True if the catalog no longer lists the node. When the servers remove a node, they end its sessions."""
    try:
        return node not in [each["Node"] for each in by.ask("GET", "catalog/nodes", within=1.0)]
    except OSError:
        return False


def codes(client: multilock.Client) -> set[str]:
    return {finding.code for finding in client.diagnose()}


@pytest.mark.timeout(200)
def test_a_frozen_server_is_removed_before_its_holder_gives_up_and_diagnose_reports_it(
    cluster: ConsulCluster, connect: Connect
) -> None:
    """A short lock delay does not protect the holder. A longer one does, as the next test shows."""
    frozen, *others = *cluster.followers(), cluster.leader()
    client = connect(agents(frozen), ttl=150, lock_delay=1)
    assert "server-agent" in codes(client)
    lost = Recorder[multilock.Loss]()
    lease = client.lock("job", on_lost=lost).acquire()
    waits = acquired_at(connect(agents(*others), ttl=60), "job", within=LOOKED_FOR + WITHIN)
    time.sleep(0.6)  # wait until every key is watched
    with frozen.paused():
        eventually(lambda: taken_out(others[0], frozen.node), within=LOOKED_FOR)
        waits.result(WITHIN)
        assert lease.is_held(), "it cannot know"
        assert lost.calls == []
    assert lost.wait(1, WITHIN).reason is LossReason.SESSION_LOST
    assert not lease.is_held()


@pytest.mark.timeout(200)
def test_the_lock_delay_excludes_others_until_the_holders_of_a_frozen_server_gave_up(
    cluster: ConsulCluster, connect: Connect
) -> None:
    """One waiter joined before the freeze, and another comes after the server was removed."""
    frozen, *others = *cluster.followers(), cluster.leader()
    client, other = connect(agents(frozen), ttl=20), connect(agents(*others), ttl=20)
    assert "server-agent" not in codes(client)
    lost = Recorder[multilock.Loss]()
    job, read = client.lock("job", on_lost=lost).acquire(), client.read_write_lock("read").reader().acquire()
    permits = [client.semaphore("gpu", 2).acquire() for _ in range(2)]
    waits = acquired_at(other, "job", within=LOOKED_FOR)
    time.sleep(0.6)  # wait until every key is watched
    with frozen.paused():
        eventually(lambda: taken_out(others[0], frozen.node), within=LOOKED_FOR)
        believing = [background(lambda lease=lease: believed_until(lease)) for lease in (job, read, *permits)]  # type: ignore[misc]
        writes, computes = entered_at(other.read_write_lock("read").writer()), entered_at(other.semaphore("gpu", 2))
        working, reading, *computing = [each.result(LOOKED_FOR) for each in believing]
        assert lost.wait(1, WITHIN).reason is LossReason.EXPIRED
        assert waits.result(LOOKED_FOR) > max(working, lost.times[0])
        assert writes.result(LOOKED_FOR) > reading
        assert computes.result(LOOKED_FOR) > min(computing)


def test_diagnose_ends_in_time_whichever_of_its_requests_gets_no_reply(
    cluster: ConsulCluster, connect: Connect
) -> None:
    with FaultProxy.before(cluster.leader().url) as proxy:
        client = connect(proxy.url, ttl=60, lock_delay=1, request_timeout=2)
        assert "server-agent" in codes(client)
        lost = proxy.drop_reply(b"autopilot", then="hold")
        with pytest.raises(multilock.BackendUnavailable):
            client.diagnose()
        assert lost.happened
        proxy.heal()
        # diagnose() sends three requests. Each takes less than the timeout, but together they take longer.
        proxy.delay(0.9, "down")
        begun = now()
        with pytest.raises(multilock.BackendUnavailable):
            client.diagnose()
        assert now() - begun < 4
