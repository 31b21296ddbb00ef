"""The JSON value that backends with sessions store."""

from __future__ import annotations

import time

import pytest

from multilock.model import Claim, LockInfo, owner_text
from multilock.values import VALUE_BYTES, decode_value, encode_resting, encode_value


def claim(identity: str = "node-1", host: str = "host") -> Claim:
    claim_id = "0123456789abcdef." + "c" * 32
    owner = owner_text(claim_id, "leader", host, 4242, identity, 30.0)
    return Claim("orders/42", "leader", claim_id, owner, 30.0, True, False, identity)


@pytest.mark.parametrize("identity", ["node-1", "a b:c@d%e", '"\\', "é", "\U0001f600" * 64])
def test_a_value_shows_its_writer_as_the_same_owner(identity: str) -> None:
    mine = claim(identity, "h" * 64)
    value = encode_value(mine)
    info = decode_value(value)
    assert len(value) <= VALUE_BYTES
    assert b"\n" not in value
    assert info.owner == mine.owner
    assert (info.kind, info.identity, info.host, info.pid, info.ttl) == ("leader", identity, "h" * 64, 4242, 30.0)
    assert info.since is not None
    assert info.since.tzinfo is not None


def test_a_value_of_a_resting_name_shows_the_last_holder_and_the_end() -> None:
    mine = claim("\U0001f600" * 64, "h" * 64)
    before = time.time()
    value = encode_resting(mine, 2**63 - 1, 86400.0)
    info = decode_value(value)
    assert len(value) <= VALUE_BYTES
    assert (info.owner, info.token, info.since) == (mine.owner, 2**63 - 1, None)
    assert info.resting_until is not None
    assert before - 0.01 <= info.resting_until.timestamp() - 86400.0 <= time.time() + 0.01
    assert decode_value(encode_value(mine)).resting_until is None


def test_the_value_of_a_permit_contains_the_number_of_permits() -> None:
    mine = claim("\U0001f600" * 64, "h" * 64)._replace(kind="permit", permits=1_000_000)
    value = encode_value(mine)
    assert len(value) <= VALUE_BYTES
    assert (decode_value(value).kind, decode_value(value).permits) == ("permit", 1_000_000)
    assert b"permits" not in encode_value(claim())
    assert decode_value(encode_value(claim())).permits is None


FOREIGN = [b"10.0.0.7:80", b"[1]", b"1", b'{"v":1}', b'{"v":2,"id":"x"}', b"\xff", b"null", b"[" * 100_000]


@pytest.mark.parametrize("value", FOREIGN, ids=lambda value: value[:20])
def test_a_value_of_another_program_is_shown_unchanged(value: bytes) -> None:
    assert decode_value(value) == LockInfo("", identity=value.decode(errors="replace"))


def test_an_empty_value_is_not_shown() -> None:
    assert decode_value(b"") == LockInfo("")
