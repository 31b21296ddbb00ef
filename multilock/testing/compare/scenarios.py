"""The faults of a cycle, and how they are made.

In every cycle A holds the lock, B waits for it, and a fault happens. Then B holds the lock and C waits. If A still
runs, it now releases the lock, which it may have lost long ago. Faults are made by signals and by our proxies. The
server is stopped only if the user gave its pid or container.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

from multilock import now
from multilock.testing.compare.pool import WorkerProcess
from multilock.testing.compare.servers import ServerProcess
from multilock.testing.network import Network

__all__ = ["PROOF", "SCENARIOS", "Need", "Scenario", "Scene", "tells_in_time"]

Need = Literal["processes", "network", "operator", "loop", "session", "server", "restart"]
When = Literal["acquire", "hold", "release"]

PROOF = "pause"  # each backend has a control (a contestant that is known to be weak) that must fail in this scenario
FIRST_REPLY = 0.7  # share of cycles in which the first reply is held back, not a later one
STOPPED = 1.5  # ttls for which a server is stopped
BACK_WITHIN = 60.0  # seconds until a restarted server must answer
# share of a ttl for which A is observed after its loss, in case it still believes that it holds the lock
AFTERWARDS = 0.1


class Scene(Protocol):
    """The methods of a cycle that a scenario calls."""

    ttl: float
    bound: float  #: seconds until another client can get the lock if A vanishes
    a: WorkerProcess

    @property
    def net(self) -> Network:
        """The network of A."""

    @property
    def server(self) -> ServerProcess:
        """The server, for faults of servers."""

    def server_stopped(self, within: float) -> AbstractContextManager[None]:
        """Stop the server inside this context, for all cycles that share the stop."""

    def is_silent(self) -> bool:
        """Return whether a server that answered before the cycle is silent now. Returns False if the server cannot be
        asked."""

    def dice(self, least: float, most: float) -> float:
        """Return a random number between ``least`` and ``most``."""

    def begin(self) -> None:
        """Record that the fault begins now."""

    def end(self) -> None:
        """Record that the fault ends now."""

    def pass_time(self, seconds: float) -> None:
        """Wait for ``seconds``."""

    def until(self, look: Callable[[], object], within: float) -> bool:
        """Wait until ``look()`` is true. Returns False after ``within`` seconds."""

    def until_said(self, worker: WorkerProcess, what: str, role: str, within: float) -> bool:
        """Wait for the event ``what`` of a role. Returns False after ``within`` seconds."""

    def until_b_has_it(self) -> None:
        """Wait until B holds the lock."""

    def until_a_is_over(self) -> None:
        """Wait until A reports that it no longer believes that it holds the lock."""

    def acquire_a(self) -> None:
        """Let A call acquire()."""

    def acquire_b(self) -> None:
        """Let B call acquire(), if B has not called it yet."""

    def take(self) -> bool:
        """Take the lock away, as an operator would. Return whether the lock had a holder."""

    def end_session(self) -> bool:
        """End the session of A, as an operator would. Return whether there was a session."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """A fault. ``act`` causes it, and returns whether it took place.

    ``when`` says what A does during the fault: acquire, hold (B then waits) or release.
    """

    name: str
    says: str
    act: Callable[[Scene], bool]
    when: When = "hold"
    needs: frozenset[Need] = frozenset({"processes"})
    freezes: bool = False  #: whether the process of A is frozen during the fault
    hears: bool = True  #: whether A can be notified of the loss before B gets the lock

    @property
    def alone(self) -> bool:
        """Return whether the fault affects all users of the server."""
        return "server" in self.needs

    @property
    def shared(self) -> bool:
        """Return whether several cycles can share one fault."""
        return self.act is _stop_server


def tells_in_time(scenario: Scenario) -> bool:
    """Return whether A runs during the fault, and can be notified of a loss before the next holder has the lock."""
    return scenario.hears and not scenario.freezes and "loop" not in scenario.needs


def _kill(scene: Scene) -> bool:
    scene.begin()
    scene.a.fit = False
    scene.a.helper.signal(signal.SIGKILL)
    scene.end()
    return scene.until(lambda: scene.a.helper.returncode == -signal.SIGKILL, 10.0)


def _pause(scene: Scene) -> bool:
    scene.begin()
    scene.a.pause()
    try:
        scene.until_b_has_it()
    finally:
        scene.end()
        scene.a.helper.resume()
    scene.pass_time(AFTERWARDS * scene.ttl)
    return True


def _hog(scene: Scene) -> bool:
    scene.begin()
    scene.a.order("hog", seconds=scene.bound + 1.5 * scene.ttl)
    scene.until_b_has_it()
    handed = now()
    scene.a.order("go-on")

    def stalled() -> bool:
        return any(each["what"] == "stall" and each["at"] < handed < each["until"] for each in scene.a.events())

    took_place = scene.until(stalled, scene.bound + scene.ttl + 10.0)
    scene.end()
    scene.pass_time(AFTERWARDS * scene.ttl)
    return took_place


def _block(scene: Scene) -> bool:
    seconds = 1.5 * scene.ttl
    scene.begin()
    scene.a.order("block", "A", seconds=seconds)
    took_place = scene.until_said(scene.a, "blocked", "A", 2 * seconds + 10.0)
    scene.end()
    return took_place


def _partition(scene: Scene) -> bool:
    before = scene.net.traffic()
    scene.begin()
    scene.net.black_hole()
    scene.until_b_has_it()
    scene.pass_time(AFTERWARDS * scene.ttl)
    after = scene.net.traffic()
    scene.end()
    scene.net.heal()
    return after.up_in > before.up_in  # the fault took place if A sent anything while it was cut off


def _reset(scene: Scene) -> bool:
    met = scene.net.connections()
    scene.begin()
    scene.net.cut()
    scene.end()
    scene.pass_time(1.2 * scene.ttl)
    return met > 0


def _half_open(scene: Scene) -> bool:
    met = scene.net.connections()
    scene.begin()
    scene.net.half_open()
    scene.pass_time(1.5 * scene.ttl)
    scene.end()
    return met > 0


def _delay(scene: Scene) -> bool:
    before = scene.net.traffic()
    scene.begin()
    scene.net.delay(0.05 * scene.ttl)
    scene.pass_time(1.2 * scene.ttl)
    scene.end()
    after = scene.net.traffic()
    scene.net.heal()
    return after.down_out > before.down_out


def _late_answer(scene: Scene) -> bool:
    """Pause A while its reply is under way. When it continues, the reply is older than the lease that it grants."""
    before = scene.net.traffic()
    first = scene.dice(0.0, 1.0) < FIRST_REPLY
    slow = 0.075 * scene.ttl
    if first:
        scene.net.black_hole("down")
    else:
        scene.net.delay(slow, "down")
    scene.acquire_a()
    asked = scene.until(lambda: scene.net.traffic().down_in > before.down_in, 10.0)
    if not first:  # the lock may be granted by a later reply
        scene.pass_time(scene.dice(0.0, 1.5) * slow)
    scene.begin()
    scene.a.pause()
    try:
        unanswered = asked and scene.a.said("got", "A") is None
        scene.net.heal()  # the reply arrives, but A does not run to read it
        scene.acquire_b()
        scene.until_b_has_it()
    finally:
        scene.end()
        scene.a.helper.resume()
    scene.pass_time(AFTERWARDS * scene.ttl)
    return unanswered


def _lose_a_reply(scene: Scene, request: Callable[[], None], within: float) -> bool:
    """Let the server execute a request, but drop the reply."""
    before = scene.net.traffic()
    scene.begin()
    scene.net.black_hole("down")
    request()

    def answered() -> bool:
        after = scene.net.traffic()
        return after.up_out > before.up_out and after.down_in > before.down_in

    took_place = scene.until(answered, within)
    scene.net.cut()
    scene.net.heal()
    scene.end()
    return took_place


def _lost_acquire(scene: Scene) -> bool:
    took_place = _lose_a_reply(scene, scene.acquire_a, 10.0)
    scene.until(lambda: scene.a.said("got", "A") or scene.a.said("refused", "A"), scene.bound + scene.ttl)
    return took_place


def _lost_renew(scene: Scene) -> bool:
    took_place = _lose_a_reply(scene, lambda: None, scene.ttl)
    scene.pass_time(1.2 * scene.ttl)
    return took_place


def _lost_release(scene: Scene) -> bool:
    return _lose_a_reply(scene, lambda: scene.a.order("release", "A"), 10.0)


def _taken(scene: Scene) -> bool:
    scene.begin()
    took_place = scene.take()
    scene.end()
    scene.until_a_is_over()
    return took_place


def _end_session(scene: Scene) -> bool:
    scene.begin()
    took_place = scene.end_session()
    scene.end()
    scene.until_a_is_over()
    return took_place


def _stop_server(scene: Scene) -> bool:
    with scene.server_stopped(4 * scene.ttl + 30.0):
        silent = scene.is_silent()
        scene.pass_time(STOPPED * scene.ttl)
    scene.end()
    scene.until_b_has_it()
    scene.pass_time(AFTERWARDS * scene.ttl)
    return silent


def _kill_server(scene: Scene) -> bool:
    return _down_and_up(scene, scene.server.killed(4 * scene.ttl + 30.0), scene.dice(0.0, STOPPED) * scene.ttl)


def _restart_server(scene: Scene) -> bool:
    return _down_and_up(scene, scene.server.ended(4 * scene.ttl + 30.0), 0.0)


def _down_and_up(scene: Scene, down: AbstractContextManager[None], seconds: float) -> bool:
    before = scene.server.started()
    scene.begin()
    with down:
        silent = scene.is_silent()
        scene.pass_time(seconds)
    return _comes_back(scene, silent and scene.server.started() != before)


def _comes_back(scene: Scene, took_place: bool) -> bool:
    scene.until(lambda: not scene.is_silent(), BACK_WITHIN)
    scene.end()
    scene.until_b_has_it()
    scene.pass_time(AFTERWARDS * scene.ttl)
    return took_place


_NET: frozenset[Need] = frozenset({"processes", "network"})

_SERVER: frozenset[Need] = frozenset({"processes", "server"})

SCENARIOS = {
    each.name: each
    for each in (
        Scenario("kill", "holder killed (SIGKILL)", _kill),
        Scenario("pause", "holder stopped (SIGSTOP) beyond the ttl", _pause, freezes=True),
        Scenario("gil", "holder's interpreter stuck beyond the ttl", _hog, freezes=True),
        Scenario("loop", "holder's event loop blocked beyond the ttl", _block, needs=frozenset({"processes", "loop"})),
        Scenario("partition", "holder's network silent beyond the ttl", _partition, needs=_NET),
        Scenario("reset", "holder's connections reset", _reset, needs=_NET),
        Scenario("half-open", "holder's connections dead without a word", _half_open, needs=_NET),
        Scenario("delay", "holder's network slow", _delay, needs=_NET),
        Scenario(
            "late-answer", "holder stopped while it is answered", _late_answer, "acquire", needs=_NET, freezes=True
        ),
        Scenario("lost-acquire", "reply to acquire lost", _lost_acquire, "acquire", needs=_NET),
        Scenario("lost-renew", "reply to renewal lost", _lost_renew, needs=_NET),
        Scenario("lost-release", "reply to release lost", _lost_release, "release", needs=_NET),
        Scenario(
            "taken", "lock taken away by an operator", _taken, needs=frozenset({"processes", "operator"}), hears=False
        ),
        Scenario(
            "session",
            "session or lease ended by an operator",
            _end_session,
            needs=frozenset({"processes", "session"}),
            hears=False,
        ),
        Scenario("server-stop", "server stopped beyond the ttl (SIGSTOP)", _stop_server, needs=_SERVER),
        Scenario("server-kill", "server killed, and started again", _kill_server, needs=_SERVER | {"restart"}),
        Scenario("server-restart", "server restarted in order", _restart_server, needs=_SERVER | {"restart"}),
    )
}
"""By name, in the order of the report."""
