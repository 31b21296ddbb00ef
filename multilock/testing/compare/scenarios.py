"""What goes wrong in a cycle, and how.

In every cycle A holds, B waits, something happens; then B holds and C waits, and A, if it lives, gives back what it may
have lost long ago. Faults are made by signals and by proxies of ours. The server is only asked; but
operators take locks away, end sessions, and stop a server that we were told how to stop.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

from multilock import now
from multilock.testing.compare.mates import Mate
from multilock.testing.compare.servers import ServerProcess
from multilock.testing.network import Network

__all__ = ["SCENARIOS", "Need", "Scenario", "Scene", "tells_in_time"]

Need = Literal["processes", "network", "operator", "loop", "session", "server", "restart"]
When = Literal["acquire", "hold", "release"]


FIRST_REPLY = 0.7  # share of cycles in which the first reply is the one that is held back
STOPPED = 1.5  # ttls
BACK_WITHIN = 60.0  # seconds until a server that was started again answers
AFTERWARDS = 0.1  # of a ttl: who ran on with what he had lost is seen to


class Scene(Protocol):
    """The cycle, as a scenario sees it. Each wait ends with the first of: it happened, it did not in time."""

    ttl: float
    bound: float  #: seconds until another can hold what A held
    a: Mate

    @property
    def net(self) -> Network:
        """Of A."""

    @property
    def server(self) -> ServerProcess: ...
    def server_stopped(self, within: float) -> AbstractContextManager[None]:
        """The fault begins, for all cycles that share it; the server stands still inside this block."""

    def is_silent(self) -> bool:
        """Whether somebody who answered before the cycle does not now. False where we have nothing to ask with."""

    def dice(self, least: float, most: float) -> float: ...
    def begin(self) -> None:
        """The fault begins now."""

    def end(self) -> None:
        """… and ends now."""

    def pass_time(self, seconds: float) -> None: ...
    def until(self, look: Callable[[], object], within: float) -> bool: ...
    def until_said(self, mate: Mate, what: str, role: str, within: float) -> bool: ...
    def until_b_has_it(self) -> None: ...
    def until_a_is_over(self) -> None:
        """It said that it does not believe in it any more, or never did."""

    def acquire_a(self) -> None: ...
    def acquire_b(self) -> None: ...
    def take(self) -> bool:
        """As an operator does."""

    def end_session(self) -> bool:
        """… of A."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """``act`` makes the fault, and returns whether it took place. ``when`` A acquires, holds (then B waits), or
    releases."""

    name: str
    says: str
    act: Callable[[Scene], bool]
    when: When = "hold"
    needs: frozenset[Need] = frozenset({"processes"})
    freezes: bool = False  #: the process of A does not run meanwhile
    hears: bool = True  #: A can be told that it lost it before anybody else gets it

    @property
    def alone(self) -> bool:
        """What it does is felt by all who use the server."""
        return "server" in self.needs

    @property
    def shared(self) -> bool:
        """… and it may be done to several cycles at once."""
        return self.act is _stop_server


def tells_in_time(scenario: Scenario) -> bool:
    """Whether A runs, and can be told of a loss before the next holder is in."""
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
    return after.up_in > before.up_in  # something was said into it


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
    """As it runs again it has the lock, by an answer that is older than the lease."""
    before = scene.net.traffic()
    first = scene.dice(0.0, 1.0) < FIRST_REPLY
    slow = 0.075 * scene.ttl
    if first:
        scene.net.black_hole("down")
    else:
        scene.net.delay(slow, "down")
    scene.acquire_a()
    asked = scene.until(lambda: scene.net.traffic().down_in > before.down_in, 10.0)
    if not first:  # the one that makes it the holder may be a later one
        scene.pass_time(scene.dice(0.0, 1.5) * slow)
    scene.begin()
    scene.a.pause()
    try:
        unanswered = asked and scene.a.said("got", "A") is None
        scene.net.heal()  # it arrives, and nobody reads it
        scene.acquire_b()
        scene.until_b_has_it()
    finally:
        scene.end()
        scene.a.helper.resume()
    scene.pass_time(AFTERWARDS * scene.ttl)
    return unanswered


def _lose_a_reply(scene: Scene, request: Callable[[], None], within: float) -> bool:
    """What is asked is executed, what is answered never arrives."""
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
