"""How long a session certainly lives by the leader's clock. The test supplies the times by hand."""

from __future__ import annotations

import pytest

from multilock_zookeeper.session_validity import Session

T = 6.0


def until(session: Session) -> float:
    return session.validity().until


def test_a_session_counts_from_its_handshake() -> None:
    assert until(Session(1, T, 100.0)) == pytest.approx(100 + T * 2 / 3)


def test_a_timely_renewal_proves_the_session_for_two_thirds_of_the_timeout() -> None:
    session = Session(1, T, 100.0)
    for step in range(1, 20):
        session.prove(100 + step * T / 6)
        assert until(session) == pytest.approx(100 + step * T / 6 + T * 2 / 3)


def test_the_first_write_after_a_silence_counts_from_before_the_silence() -> None:
    session = Session(1, T, 100.0)
    session.prove(104.0)
    assert until(session) == pytest.approx(100 + T)


def test_the_first_write_after_a_silence_longer_than_the_timeout_proves_nothing() -> None:
    session = Session(1, T, 100.0)
    session.prove(150.0)
    assert until(session) < 150


def test_a_third_of_the_timeout_after_a_silence_writes_prove_as_before() -> None:
    session = Session(1, T, 100.0)
    for sent_at in (104.0, 105.0):
        session.prove(sent_at)
        assert until(session) == pytest.approx(100 + T)
    session.prove(106.0)
    assert until(session) == pytest.approx(106 + T * 2 / 3)


def test_a_reconnect_ends_a_silence_because_the_leader_confirms_the_session() -> None:
    session = Session(1, T, 100.0)
    session.touch(104.0)
    assert until(session) == pytest.approx(100 + T * 2 / 3)  # only an acknowledged write extends the validity
    session.prove(104.1)
    assert until(session) == pytest.approx(104.1 + T * 2 / 3)


def test_a_late_reply_to_an_older_write_does_not_move_the_validity_back() -> None:
    session = Session(1, T, 100.0)
    session.prove(101.0)
    session.prove(100.5)
    assert session.validity().sent_at == 101.0
