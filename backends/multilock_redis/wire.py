"""The network format (RESP2), and the meaning of each server error for a request."""

from __future__ import annotations

import re
from typing import Any

from multilock import BackendRejected, BackendUnavailable

__all__ = [
    "IS_LOADING",
    "IS_REPLICA",
    "SILENT",
    "Incomplete",
    "Redirected",
    "ScriptMissing",
    "Unclear",
    "bulks",
    "doubted",
    "pack",
    "parse",
    "refusal",
    "refused",
    "spelled",
]

IS_LOADING = "it is loading its data"  #: part of every message about a server that loads its data
IS_REPLICA = "it is a replica"  #: part of every message about a replica

# After these errors nothing was executed, and the server may accept the same request soon.
SILENT = {
    "LOADING": IS_LOADING,
    "BUSY": "it is busy with a script: SCRIPT KILL ends one that has written nothing",
    "READONLY": f"{IS_REPLICA}: give the address of the primary, or redis+sentinel:// with its Sentinels",
    "MASTERDOWN": f"{IS_REPLICA} without its primary: give the address of the primary",
    "CLUSTERDOWN": "its cluster is down",
    "TRYAGAIN": "its cluster is moving this key",
    "NOREPLICAS": "it has fewer replicas than its min-replicas-to-write",
}
_OF_CLUSTER = "it is a node of a cluster: give redis+cluster://, since redis:// is for a single primary"
# After these errors nothing was executed, and repeating the request does not help.
_REFUSED = {
    "NOAUTH": "give username= and password=",
    "WRONGPASS": "check username= and password=",
    "NOPERM": "give this user the commands, keys and channels that multilock's page on Redis lists",
    "WRONGTYPE": "the key is used for something else: choose another name or prefix=",
    "OOM": "its memory is full: raise maxmemory",
    "MISCONF": "it cannot save its data: see its log",
    "MOVED": _OF_CLUSTER,
    "ASK": _OF_CLUSTER,
    "CROSSSLOT": _OF_CLUSTER,
    "DENIED": "it runs in protected mode: see its configuration",
    "ERR": "see the server's message",
}
# Only an ERR with one of these words shows that the request was not executed. A proxy that has forwarded the request
# may reply ERR as well ("ERR Connection timed out").
_NOTHING_DONE = re.compile(
    r"unknown|subcommand|wrong number|syntax|DB index|support|disabled|allowed|permitted|permission|denied|"
    r"redirect|Protocol error|AUTH|password|NOSCRIPT|compiling",
    re.IGNORECASE,
)
# A server sends this text on a new connection that exceeds its limit, without reading a request.
_FULL = "max number of clients"
_IN_NO_CLUSTER = "it is not a node of a cluster: give redis://host:port"
_UNKNOWN = (
    "is it a Sentinel? Then give redis+sentinel://host:port/NAME; else this command must not be renamed or disabled"
)
# Before 7.0 a server wraps the error of a command in a script: "ERR Error running script (…): @user_script:3: -OOM …"
_IN_SCRIPT = re.compile(r"user_script: ?\d+: (?:@user_script: ?\d+: )?-?([A-Z]+) ")
# If the user lacks a right for a command in a script, the error has one of these texts instead of NOPERM: the first up
# to 7.0, the second since then. The script may have written before it failed, but these writes expire, and never take
# the lock.
_LACKING = ("The user executing the script can't", "ACL failure in script")


_SCHEME = re.compile(r"redis(?=s?(\+[a-z]+)?://)")


def spelled(advice: str, where: str) -> str:
    """Return ``advice``, with the scheme ``valkey://`` instead of ``redis://`` if ``where`` begins with ``valkey``."""
    return _SCHEME.sub("valkey", advice) if where.startswith("valkey") else advice


class Redirected(BackendRejected):
    """Another node of the cluster serves the key. The reply is MOVED, or ASK if the other node serves only this one
    request (``once``)."""

    def __init__(self, message: str, told: str) -> None:
        """``told`` is the server's text, such as ``MOVED 3999 127.0.0.1:6381``."""
        super().__init__(message, backend="redis")
        word, slot, place = told.split(" ")[:3]
        host, _, port = place.rpartition(":")
        self.once = word == "ASK"
        self.slot = int(slot)
        self.host = "" if host == "?" else host.strip("[]")  #: "" means the host of the node that sent this redirection
        self.port = int(port)


class Unclear(BackendRejected):
    """An ERR that no known server sends. If the request changes nothing, it counts as refused. For other requests see
    `doubted`."""


def doubted(error: Unclear) -> BackendUnavailable:
    """Return the error for a request that may have changed something: its outcome is unknown."""
    return BackendUnavailable(str(error), unknown=True, backend="redis")


def refused(error: BackendRejected) -> BackendUnavailable:
    """Return the result for leases whose renewal was refused with ``error``, while other leases were renewed."""
    silence = BackendUnavailable(str(error), unknown=False, backend="redis")
    silence.__cause__ = error
    return silence


class ScriptMissing(Exception):
    """NOSCRIPT: nothing was executed. Load the script, and send the request again."""


class Incomplete(Exception):
    """This reply has not arrived completely."""


def bulks(*words: bytes) -> bytes:
    """Encode words of a command."""
    return b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in words])


def pack(*words: bytes | str | int) -> bytes:
    """Encode a whole command."""
    encoded = [word if isinstance(word, bytes) else str(word).encode() for word in words]
    return b"*%d\r\n%b" % (len(encoded), bulks(*encoded))


def parse(data: bytes, at: int, where: str) -> tuple[Any, int]:
    """Parse the reply (RESP2) at ``at``. Returns the reply, and the position of the next one. An error reply is
    returned as an exception.

    Raises `Incomplete`, or ValueError for bytes that no Redis sends.
    """
    end = data.find(b"\r\n", at)
    if end < 0:
        raise Incomplete
    kind, line = data[at : at + 1], data[at + 1 : end]
    at = end + 2
    if kind == b":":
        return int(line), at
    if kind == b"+":
        return line, at
    if kind == b"-":
        return refusal(line.decode(errors="replace"), where), at
    if kind not in (b"$", b"*"):
        raise ValueError("it uses another protocol")
    size = int(line)
    if size < 0:
        return None, at
    if kind == b"$":
        if len(data) < at + size + 2:
            raise Incomplete
        return data[at : at + size], at + size + 2
    items = []
    for _ in range(size):
        item, at = parse(data, at, where)
        items.append(item)
    return items, at


def refusal(text: str, where: str) -> Exception:
    """Return the exception for an error reply.

    If a bug makes a script fail after its first write, the error has none of the words in the tables above. So the
    outcome is reported as unknown.
    """
    word = text.partition(" ")[0]
    if _FULL in text:
        why = f"{where}: {text} (raise maxclients, or run CLIENT LIST to see which clients have the connections)"
        return BackendUnavailable(why, unknown=False, backend="redis")
    if "user_script" in text and (word == "ERR" or word.startswith("@")):
        inner = _IN_SCRIPT.search(text)
        word = inner[1] if inner and inner[1] != "ERR" else ""
    elif "unauthenticated" in text:  # the server's reply to a command of more than ten words without a login
        word, text = "NOAUTH", "NOAUTH Authentication required."
    if any(lacking in text for lacking in _LACKING):
        word = "NOPERM"
    if word == "NOSCRIPT":
        return ScriptMissing()
    if word in _REFUSED:
        hint = _REFUSED[word]
        if "unknown command" in text:
            hint = _UNKNOWN
        elif "cluster support disabled" in text:
            hint = _IN_NO_CLUSTER
        told = f"{where} refused: {text} ({spelled(hint, where)})"
        if word == "ERR" and not _NOTHING_DONE.search(text):
            return Unclear(told, backend="redis")
        return Redirected(told, text) if word in ("MOVED", "ASK") else BackendRejected(told, backend="redis")
    if word in SILENT:
        why = f"{where}: {text} ({spelled(SILENT[word], where)})"
        return BackendUnavailable(why, unknown=False, backend="redis")
    return BackendUnavailable(f"{where} failed: {text}", unknown=True, backend="redis")
