"""Blocking queries that are refused, or whose connection or thread ends: which claims are notified, and when the
queries begin again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import multilock
from multilock import BackendRejected, BackendUnavailable, now, system
from multilock.backend import Claim
from multilock.testing import FaultProxy
from multilock.testing.conformance.base import Pulse, Recorder, eventually
from multilock.testing.conformance.faces import background
from multilock_consul import notices
from multilock_consul.notices import FAILED, Listener
from multilock_consul.sessions import OWN, Session, Sessions
from multilock_consul.transport import AT_A_TIME, Agents
from multilock_consul.wire import Response
from tests.backends.consul.conftest import Connect
from tests.backends.consul.kit import Ours
from tests.backends.kit import NAME, WITHIN
from tests.servers_consul import ConsulServer

# Seconds. An event within this time was pushed, because renewals and the timers of waiters take ten seconds.
SOON = 3.0
SESSIONS = 'session_prefix "" { policy = "write" }'


# ---- threads


@pytest.mark.parametrize("number", range(1, 13))
def test_one_refused_thread_delays_no_loss_and_no_handover(
    shared: ConsulServer, connect: Connect, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    real = system.Thread
    starts: list[str] = []

    class Counted(real):  # type: ignore[valid-type, misc]
        def start(self) -> None:
            starts.append(self.name)
            if len(starts) == number:
                raise RuntimeError("can't start new thread")
            super().start()

    options: dict[str, Any] = {"prefix": f"refused-{number}-{now()}/", "ttl": 30}
    other = connect(shared.url, **options)
    held = other.lock("awaited").acquire()
    monkeypatch.setattr(system, "Thread", Counted)
    client = connect(shared.url, **options)
    lost = Recorder[multilock.Loss]()
    lease = client.lock("taken", on_lost=lost).acquire(timeout=WITHIN)
    waits = background(lambda: client.lock("awaited").acquire(timeout=30).release())
    queries = client._kernel.backend._listener._queries  # type: ignore[attr-defined]
    eventually(lambda: sum(query.reading is not None for query in list(queries.values())) == 3, WITHIN)
    assert lease.is_held()
    with Pulse() as pulse:
        begun = now()
        other.force_release("taken")
        held.release()
        lost.wait(1, WITHIN)
        assert waits.result(WITHIN)
    assert lost.times[0] - begun < SOON + pulse.stopped()
    assert now() - begun < SOON + pulse.stopped()
    eventually(client.is_healthy)


@pytest.mark.usefixtures("threads_may_die")
def test_a_listener_that_fails_restarts_and_still_reports_a_loss(
    shared: ConsulServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaths: list[str] = []
    look = Listener._look_at_key

    def die_once(self: Listener, *args: Any) -> None:
        if not deaths:
            deaths.append("died")
            raise ZeroDivisionError
        look(self, *args)

    options: dict[str, Any] = {"prefix": f"defect-{now()}/", "ttl": 30}
    client, other = connect(shared.url, **options), connect(shared.url, **options)
    first, second = Recorder[multilock.Loss](), Recorder[multilock.Loss]()
    client.lock("first", on_lost=first).acquire()
    client.lock("second", on_lost=second).acquire()
    queries = client._kernel.backend._listener._queries  # type: ignore[attr-defined]
    eventually(lambda: sum(query.reading is not None for query in list(queries.values())) == 3, WITHIN)
    monkeypatch.setattr(Listener, "_look_at_key", die_once)
    with Pulse() as pulse:
        begun = now()
        other.force_release("first")
        first.wait(1, WITHIN)
        other.force_release("second")
        second.wait(1, WITHIN)
        assert now() - begun < 2 * SOON + pulse.stopped()
    assert deaths


# ---- reports to the kernel


def watch(ours: Ours) -> Claim:
    claim = ours.take(ours.mutex())
    ours.backend.watch(ours.grant(claim).group, [(claim, ours.grant(claim))], WITHIN)
    queries = ours.backend._listener._queries
    eventually(lambda: sum(query.reading is not None for query in list(queries.values())) == 2, WITHIN)
    return claim


def test_an_agent_that_is_down_is_reported_once_and_so_is_its_return(server: ConsulServer) -> None:
    with FaultProxy.before(server.url) as proxy:
        ours = Ours(proxy.url)
        watch(ours)
        assert ours.ear.down == {}
        proxy.refuse()
        proxy.cut()
        assert ours.ear.wait(lambda: list(ours.ear.down) == [FAILED], WITHIN)
        proxy.heal()
        assert ours.ear.wait(lambda: ours.ear.down == {}, WITHIN)
        ours.close()


def test_a_query_that_is_no_longer_needed_is_not_reported_as_down(server: ConsulServer) -> None:
    with FaultProxy.before(server.url) as proxy:
        ours, holder = Ours(proxy.url), Ours(server.url)
        holder.take(holder.mutex())
        claim = ours.wait(ours.mutex())
        eventually(lambda: claim.id in ours.backend._listener._serves, WITHIN)
        proxy.refuse()
        proxy.cut()
        assert ours.ear.wait(lambda: list(ours.ear.down) == [FAILED], WITHIN)
        ours.backend._listener.forget(claim.id)
        assert ours.ear.wait(lambda: ours.ear.down == {}, WITHIN)
        ours.close()
        holder.close()


def test_a_refused_query_is_named_and_repeated(guarded: ConsulServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "WAIT", 1)
    monkeypatch.setattr(notices, "REFUSED_PAUSE", 0.2)
    rights = f'key_prefix "multilock/" {{ policy = "%s" }} {SESSIONS}'
    policy = guarded.ask("PUT", "acl/policy", {"Name": "locks", "Rules": rights % "write"})
    token = guarded.ask("PUT", "acl/token", {"Policies": [{"ID": policy["ID"]}]})["SecretID"]
    ours = Ours(guarded.url, token=token)
    watch(ours)
    guarded.ask("PUT", f"acl/policy/{policy['ID']}", {"Name": "locks", "Rules": rights % "deny"})
    name = f"blocking query on the key 'multilock/{NAME}/.lock'"
    assert ours.ear.wait(lambda: list(ours.ear.down) == [name], WITHIN)
    assert "Permission denied" in ours.ear.down[name]
    assert ours.ear.losses == []
    guarded.ask("PUT", f"acl/policy/{policy['ID']}", {"Name": "locks", "Rules": rights % "write"})
    assert ours.ear.wait(lambda: ours.ear.down == {}, WITHIN)
    ours.close()


def test_a_reply_from_before_the_grant_reports_no_loss(server: ConsulServer) -> None:
    """The late reply shows no key, because this client had released its previous lock."""
    with FaultProxy.before(server.url) as proxy:
        ours = Ours(proxy.url)
        claim = watch(ours)
        proxy.black_hole("down", which="present")
        # After this, requests use new connections.
        ours.backend._agents._leave(ours.backend._agents._address())
        assert ours.release(claim)
        again = ours.take(ours.mutex())
        ours.backend.watch(ours.grant(again).group, [(again, ours.grant(again))], WITHIN)
        eventually(lambda: again.id in ours.backend._listener._serves, WITHIN)
        proxy.heal()
        assert not ours.ear.wait(lambda: ours.ear.losses, 1.0)
        server.ask("DELETE", f"kv/multilock/{NAME}/.lock")
        assert ours.ear.wait(lambda: [claim_id for claim_id, _ in ours.ear.losses] == [again.id], SOON)
        ours.close()


# ---- many sessions, dead connections


def test_many_permits_are_renewed_in_time_over_a_slow_network(shared: ConsulServer) -> None:
    """Each permit has a separate session. Renewing sixty sessions one after the other would take twelve seconds."""
    with FaultProxy.before(shared.url) as proxy:
        ours = Ours(proxy.url, f"far-{now()}/")
        claims = [ours.take(ours.permit(70)) for _ in range(60)]
        held = [(claim, ours.grant(claim)) for claim in claims]
        proxy.delay(0.1)
        with Pulse() as pulse:
            begun = now()
            answers = ours.backend.renew(OWN, held, 8.0)
            took = now() - begun
        assert all(isinstance(answer, multilock.model.Granted) and answer.sent_at >= begun for answer in answers)
        assert took < 5.0 + pulse.stopped()
        ours.close()


def test_a_permit_whose_renewal_is_refused_affects_no_other_permit(
    shared: ConsulServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = Ours(shared.url, f"refused-{now()}/")
    claims = [ours.take(ours.permit()) for _ in range(3)]
    renew = Sessions.renew

    def refuse(self: Sessions, session: Session, within: float) -> bool:
        if session.id == ours.session(claims[1]):
            raise BackendRejected("not yours")
        return renew(self, session, within)

    monkeypatch.setattr(Sessions, "renew", refuse)
    first, second, third = ours.backend.renew(OWN, [(claim, ours.grant(claim)) for claim in claims], WITHIN)
    assert isinstance(second, BackendUnavailable)
    assert isinstance(first, multilock.model.Granted)
    assert isinstance(third, multilock.model.Granted)
    ours.close()


def test_many_dead_connections_cost_the_time_of_one_request(server: ConsulServer) -> None:
    with FaultProxy.before(server.url) as proxy:
        ours = Ours(proxy.url)
        agents = ours.backend._agents
        for wire in [agents.connect(WITHIN) for _ in range(5)]:
            agents._give(wire)
        eventually(lambda: len(proxy.connections) == 5, WITHIN)
        proxy.black_hole(which="present")
        with pytest.raises(BackendUnavailable):
            ours.attempt(ours.mutex(), within=0.5)
        with Pulse() as pulse:
            begun = now()
            ours.take(ours.mutex())
            assert now() - begun < 2.0 + pulse.stopped()
        ours.close()


def test_a_renewal_does_not_wait_behind_many_requests_of_its_own_client(shared: ConsulServer) -> None:
    ours = Ours(shared.url, f"crowd-{now()}/")
    claim = ours.take(ours.mutex())
    room = ours.backend._agents._room
    crowd = [room.get(timeout=WITHIN) for _ in range(AT_A_TIME)]
    session = ours.backend._sessions.get(ours.session(claim))
    assert session
    assert ours.backend._sessions.renew(session, 2.0)
    with pytest.raises(BackendUnavailable, match="requests that one client may send") as silence:
        ours.attempt(ours.mutex(name="another"), within=0.1)
    assert not silence.value.unknown
    for each in crowd:
        room.put(each)
    assert ours.release(claim)
    assert room.qsize() == AT_A_TIME
    ours.close()


def test_an_error_page_of_a_proxy_does_not_prove_that_a_session_ended(
    shared: ConsulServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = Ours(shared.url, f"page-{now()}/")
    claim = ours.take(ours.mutex())
    sessions = ours.backend._sessions
    session = sessions.get(ours.session(claim))
    assert session
    call: Callable[..., Any] = Agents.call

    def page(self: Agents, method: str, target: str, within: float, body: bytes = b"") -> Any:
        if "destroy" in target:
            return Response(404, {}, b"<html>not found</html>"), now()
        return call(self, method, target, within, body)

    with monkeypatch.context() as patched:
        patched.setattr(Agents, "call", page)
        with pytest.raises(BackendUnavailable):
            sessions.destroy(session, WITHIN)
    assert not sessions.known_over(session.id)
    ours.close()
