"""Interpreters in which gevent or eventlet has replaced threads with greenlets."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest

import multilock
from multilock import ConfigurationError, system


def pretend(monkeypatch: pytest.MonkeyPatch, module: str, **members: Any) -> None:
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(**members))


@pytest.mark.parametrize(
    ("module", "asked"), [("gevent.monkey", "is_module_patched"), ("eventlet.patcher", "is_monkey_patched")]
)
@pytest.mark.parametrize("connect", [multilock.connect, multilock.connect_async])
def test_an_interpreter_that_gevent_patched_too_late_is_refused(
    monkeypatch: pytest.MonkeyPatch, module: str, asked: str, connect: Any
) -> None:
    library = module.partition(".")[0]
    pretend(monkeypatch, module, **{asked: lambda name: True})
    with pytest.raises(ConfigurationError, match=f"{library} patched this interpreter after multilock was imported"):
        connect("memory://late")


def test_an_interpreter_that_gevent_patched_in_time_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "gevent.monkey", is_module_patched=lambda name: True)
    monkeypatch.setattr(system, "_PATCHED_BY", "gevent")
    with multilock.connect("memory://in-time") as client:
        assert client.lock("job").acquire().is_held()


def test_a_library_that_has_patched_no_threads_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "gevent.monkey", is_module_patched=lambda name: name != "threading")
    multilock.connect("memory://unpatched").close()


def test_without_select_poll_a_selector_waits_for_descriptors() -> None:
    reading, writing = os.pipe()
    try:
        poll = system.Poll()
        poll.register(reading, system.POLLIN)
        assert poll.poll(0) == []
        os.write(writing, b"x")
        assert poll.poll(1000) == [(reading, system.POLLIN)]
        poll.register(writing, system.POLLIN)
        poll.register(writing, system.POLLOUT)
        assert sorted(poll.poll(1000)) == sorted([(reading, system.POLLIN), (writing, system.POLLOUT)])
    finally:
        os.close(reading)
        os.close(writing)
