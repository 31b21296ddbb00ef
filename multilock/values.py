"""The value of a lock's key on Consul, etcd and ZooKeeper: one line of JSON that describes the holder or waiter.

The value is for people, `inspect()` and `leader()`. A backend reads from it only the id of the claim, and whether the
name was released and is kept taken (``hold_at_least``). Values that other tools wrote are shown as they are.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from functools import lru_cache

from multilock import system
from multilock.model import Claim, LockInfo, owner_text, parse_owner

__all__ = ["VALUE_BYTES", "decode_value", "encode_resting", "encode_value"]

VALUE_BYTES = 512
VERSION = 1

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


@lru_cache(maxsize=64)
def _host_and_pid(asker: str) -> tuple[str | None, int | None]:
    """Return host and pid from an owner's text without its id. The text without its id is the same for every
    claim of a lock object."""
    asks = parse_owner(f"id{asker}")
    return asks.host, asks.pid


def encode_value(claim: Claim) -> bytes:
    """Return the value of a claim's key, in at most 512 bytes of UTF-8.

    The value is ``{"v":1,"id":…,"kind":…,"who":…,"host":…,"pid":…,"since":<unix s>,"ttl":…}``, and for a permit also
    ``"permits":…``.
    """
    return _encode(_said(claim)).encode()


def encode_resting(claim: Claim, token: int | None, seconds: float) -> bytes:
    """Return the value of a released name that stays taken for ``seconds``.

    ``since`` is left out, because this function does not know when the name was acquired.
    """
    said = _said(claim)
    del said["since"]
    return _encode({**said, "token": token, "resting_until": round((system.wall() / 1_000_000) + seconds, 3)}).encode()


def _said(claim: Claim) -> dict[str, object]:
    host, pid = _host_and_pid(claim.owner.removeprefix(claim.id))
    return {
        "v": VERSION,
        "id": claim.id,
        "kind": claim.kind,
        "who": claim.identity,
        "host": host,
        "pid": pid,
        "since": int(system.wall() / 1_000_000),
        "ttl": claim.ttl,
        **({"permits": claim.permits} if claim.kind == "permit" else {}),
    }


def decode_value(value: bytes) -> LockInfo:
    """Parse a value that `encode_value` wrote. Returns a LockInfo without a name, with the ``owner`` of the claim.

    Any other value becomes its ``identity``.
    """
    try:
        said = json.loads(value)
        if said["v"] != VERSION:
            raise ValueError("not a value of ours")
        owner = owner_text(said["id"], said["kind"], said["host"], said["pid"], said["who"], said["ttl"])
        return LockInfo(
            "",
            said["kind"],
            owner,
            said["who"],
            said["host"],
            said["pid"],
            token=said.get("token"),
            ttl=float(said["ttl"]),
            since=_moment(said.get("since")),
            resting_until=_moment(said.get("resting_until")),
            permits=said.get("permits"),
        )
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, OSError, RecursionError):
        return LockInfo("", identity=value.decode(errors="replace") or None)


def _moment(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)
