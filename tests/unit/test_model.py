"""The frozen classes of `multilock.model`, and the text of an owner, which backends store."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multilock.model import OWNER_BYTES, Busy, Claim, LockInfo, owner_text, parse_owner

words = st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=64)


@given(words, words, st.integers(1, 2**31), st.floats(0.1, 1e6))
def test_an_owner_string_can_be_parsed(host: str, identity: str, pid: int, ttl: float) -> None:
    text = owner_text("c" * 49, "lock", host, pid, identity, ttl)
    info = parse_owner(text)
    assert (info.kind, info.pid, info.identity, info.owner) == ("lock", pid, identity, text)
    assert info.ttl == pytest.approx(ttl, rel=1e-5)


@given(words, words)
def test_an_owner_is_one_word_of_at_most_512_bytes_that_begins_with_the_claim(host: str, identity: str) -> None:
    text = owner_text("c" * 49, "leader", host * 10, 1, identity, 30.0)
    assert text.startswith("c" * 49 + "@")
    assert " " not in text
    assert len(text.encode()) <= OWNER_BYTES or len(identity.encode()) > 100


@pytest.mark.parametrize(
    "text", ["", "redis-py's uuid", "a@b", "@lock:h:1:i:30", "id@lock:h:x:i:30", "id@lock:h:1:i:?"]
)
def test_text_of_another_program_is_shown_unchanged(text: str) -> None:
    assert parse_owner(text) == LockInfo("", owner=text, identity=text)


def test_the_data_classes_are_frozen_and_small() -> None:
    for word, field in ((Busy(1.0), "heartbeat"), (LockInfo("n"), "name")):
        with pytest.raises(AttributeError):
            setattr(word, field, 2.0)
        assert not hasattr(word, "__dict__")


@pytest.mark.parametrize(
    ("kind", "permits", "mode"),
    [
        ("lock", 0, "x"),
        ("leader", 0, "x"),
        ("write", 0, "x"),
        ("read", 0, "r"),
        ("permit", 1, "p1"),
        ("permit", 3, "p3"),
    ],
)
def test_the_mode_of_a_claim_defines_which_modes_it_excludes(kind: str, permits: int, mode: str) -> None:
    assert Claim("n", kind, "id", "id@owner", 30.0, True, False, "me", permits).mode == mode
