"""etcd in an interpreter that a test or a library has patched: a frozen wall clock, gevent, eventlet."""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

import multilock
from multilock import BackendUnavailable, ConfigurationError, now, system
from multilock_etcd.transport import suit_gevent
from tests.backends.etcd.kit import Ours
from tests.servers_etcd import EtcdServer

LONG_AGO, FAR_AHEAD = 1_000_000_000.0, 4_000_000_000.0


@pytest.mark.parametrize("wall", [LONG_AGO, FAR_AHEAD])
def test_a_frozen_wall_clock_delays_no_reply(us: Ours, monkeypatch: pytest.MonkeyPatch, wall: float) -> None:
    monkeypatch.setattr(time, "time", lambda: wall)
    claim = us.claim()
    granted = us.take(claim)
    assert us.renew((claim, granted)) == [True]
    assert us.release(claim)


@pytest.mark.parametrize("wall", [LONG_AGO, FAR_AHEAD])
def test_a_request_ends_in_time_although_the_wall_clock_is_frozen(
    server: EtcdServer, monkeypatch: pytest.MonkeyPatch, wall: float
) -> None:
    ours = Ours(server.url, "multilock/")
    ours.backend.ping(5.0)
    server.pause()
    try:
        monkeypatch.setattr(time, "time", lambda: wall)
        began = now()
        with pytest.raises(BackendUnavailable):
            ours.backend.ping(0.5)
        assert 0.4 < now() - began < 20.0
    finally:
        server.resume()
    ours.backend.close()


@pytest.mark.parametrize("patched", [True, False])
def test_grpc_is_configured_for_gevent_if_gevent_patched_this_interpreter(
    monkeypatch: pytest.MonkeyPatch, patched: bool
) -> None:
    import grpc.experimental.gevent as support

    told: list[bool] = []
    monkeypatch.setattr(support, "init_gevent", lambda: told.append(True))
    _pretend(monkeypatch, "gevent.monkey", is_module_patched=lambda name: patched)
    monkeypatch.setattr(system, "_PATCHED_BY", system.patched_by())
    suit_gevent()
    assert told == [True] * patched


def test_etcd_is_refused_under_eventlet(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend(monkeypatch, "eventlet.patcher", is_monkey_patched=lambda name: True)
    monkeypatch.setattr(system, "_PATCHED_BY", "eventlet")
    with pytest.raises(ConfigurationError, match="does not work under eventlet"):
        multilock.connect("etcd://127.0.0.1")


def test_eventlet_is_allowed_if_it_patched_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend(monkeypatch, "eventlet.patcher", is_monkey_patched=lambda name: False)
    multilock.connect("etcd://127.0.0.1").close()


def _pretend(monkeypatch: pytest.MonkeyPatch, module: str, **members: Any) -> None:
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(**members))
