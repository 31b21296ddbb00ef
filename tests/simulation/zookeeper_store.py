"""A model of ZooKeeper's tree: the nodes, the sessions, and the effect of each request.

Each server of an ensemble has such a store, and executes the same writes in the same order, so all stores become equal.
Requests and replies are the bodies of messages. `test_zookeeper_model` compares the model with a real server.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "ANSWERED_HERE",
    "CHANGED",
    "CHILDREN",
    "CLOSE",
    "CREATE",
    "CREATED",
    "CREATE_CONTAINER",
    "CREATE_SESSION",
    "DELETE",
    "DELETED",
    "DELETE_CONTAINER",
    "EXISTS",
    "GET",
    "GET_CHILDREN",
    "PING",
    "SESSION_EXPIRED",
    "SESSION_MOVED",
    "SET",
    "SYNC",
    "Failed",
    "Store",
    "parent_of",
    "text_of",
    "texts",
    "written",
]

# The kinds of requests
DELETE, EXISTS, GET, SET, GET_CHILDREN, SYNC, PING = 2, 3, 4, 5, 8, 9, 11
CREATE, CREATE_CONTAINER, DELETE_CONTAINER, CREATE_SESSION, CLOSE = 15, 19, 20, -10, -11
ANSWERED_HERE = {EXISTS, GET, GET_CHILDREN, PING}  # the requests that a server does not pass on to the leader
# Errors
NO_NODE, BAD_VERSION, NO_CHILDREN, NODE_EXISTS, NOT_EMPTY = -101, -103, -108, -110, -111
SESSION_EXPIRED, SESSION_MOVED, UNIMPLEMENTED = -112, -118, -6
# The kinds of events
CREATED, DELETED, CHANGED, CHILDREN = 1, 2, 3, 4

EPHEMERAL, SEQUENTIAL, CONTAINER = 1, 2, 4  # flags of a create
OWNER_OF_CONTAINERS = -(1 << 63)
Event = tuple[int, str]


class Failed(Exception):
    """A request was refused. ``code`` is the error of its reply."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


@dataclass(slots=True)
class Znode:
    """A node of the tree. ``creates`` counts all children that were ever created."""

    data: bytes
    czxid: int
    ctime: int
    owner: int = 0
    mzxid: int = 0
    mtime: int = 0
    pzxid: int = 0
    version: int = 0
    creates: int = 0
    children: dict[str, None] = field(default_factory=dict)

    def stat(self) -> bytes:
        size = len(self.children)
        changes, owner = 2 * self.creates - size, max(0, self.owner)
        return struct.pack(
            "!qqqqiiiqiiq",
            *(self.czxid, self.mzxid, self.ctime, self.mtime, self.version, changes),
            *(0, owner, len(self.data), size, self.pzxid),
        )


class Store:
    """The data of one server. ``zxid`` is the number of the last write that it has executed."""

    def __init__(self) -> None:
        self.zxid = 0
        self.nodes = {"/": Znode(b"", 0, 0)}
        self.sessions: dict[int, float] = {}  # session -> its timeout in seconds
        self.owned: dict[int, dict[str, None]] = {}  # session -> the paths of its ephemeral nodes
        self.events: list[Event] = []  # the events of the present write
        self._writes: dict[int, Callable[..., bytes]] = {
            CREATE: self._create,
            CREATE_CONTAINER: self._create,
            DELETE: self._delete,
            DELETE_CONTAINER: self._delete_container,
            SET: self._set,
            CREATE_SESSION: self._create_session,
            CLOSE: self._close_session,
        }

    def write(self, kind: int, body: bytes, session: int, now: int) -> bytes:
        """Execute a write, and return the body of its reply. ``now`` is the leader's time in milliseconds.

        Every write takes a number, even if it is refused.
        """
        self.zxid += 1
        self.events = []
        return self._writes[kind](body, session, now)

    def fail(self) -> None:
        """Count a write that the leader has refused because of its session."""
        self.zxid += 1
        self.events = []

    def read(self, kind: int, body: bytes) -> bytes:
        """Return the body of the reply to a read."""
        if kind == PING:
            return b""
        path, _ = text_of(body, 0)
        node = self._node(path)
        if kind == EXISTS:
            return node.stat()
        return written(node.data) + node.stat() if kind == GET else texts(node.children)

    def _node(self, path: str) -> Znode:
        if node := self.nodes.get(path):
            return node
        raise Failed(NO_NODE)

    # Writes

    def _create(self, body: bytes, session: int, now: int) -> bytes:
        path, at = text_of(body, 0)
        data, _ = bytes_of(body, at)
        flags = int.from_bytes(body[-4:], "big")
        above = self._node(parent_of(path))
        if flags & SEQUENTIAL:
            path += f"{above.creates:010d}"
        if path in self.nodes:
            raise Failed(NODE_EXISTS)
        if above.owner not in (0, OWNER_OF_CONTAINERS):
            raise Failed(NO_CHILDREN)
        owner = OWNER_OF_CONTAINERS if flags == CONTAINER else session if flags & EPHEMERAL else 0
        node = Znode(data, self.zxid, now, owner, self.zxid, now, self.zxid)
        self.nodes[path] = node
        if flags & EPHEMERAL:
            self.owned.setdefault(session, {})[path] = None
        above.children[path.rpartition("/")[2]] = None
        above.creates += 1
        above.pzxid = self.zxid
        self.events += [(CREATED, path), (CHILDREN, parent_of(path))]
        return written(path.encode()) + node.stat()

    def _delete(self, body: bytes, session: int, now: int) -> bytes:
        path, at = text_of(body, 0)
        node, [version] = self._node(path), struct.unpack_from("!i", body, at)
        if version not in (-1, node.version):
            raise Failed(BAD_VERSION)
        if node.children:
            raise Failed(NOT_EMPTY)
        self._remove(path)
        return b""

    def _delete_container(self, body: bytes, session: int, now: int) -> bytes:
        path, _ = text_of(body, 0)
        if path in self.abandoned():
            self._remove(path)
        return b""

    def _remove(self, path: str) -> None:
        node, above = self.nodes.pop(path), self.nodes[parent_of(path)]
        self.owned.get(node.owner, {}).pop(path, None)
        del above.children[path.rpartition("/")[2]]
        above.pzxid = self.zxid
        self.events += [(DELETED, path), (CHILDREN, parent_of(path))]

    def _set(self, body: bytes, session: int, now: int) -> bytes:
        path, at = text_of(body, 0)
        data, at = bytes_of(body, at)
        node, [version] = self._node(path), struct.unpack_from("!i", body, at)
        if version not in (-1, node.version):
            raise Failed(BAD_VERSION)
        node.data, node.mzxid, node.mtime, node.version = data, self.zxid, now, node.version + 1
        self.events.append((CHANGED, path))
        return node.stat()

    def _create_session(self, body: bytes, session: int, now: int) -> bytes:
        self.sessions[session] = int.from_bytes(body, "big") / 1000
        return b""

    def _close_session(self, body: bytes, session: int, now: int) -> bytes:
        for path in list(self.owned.pop(session, ())):
            self._remove(path)
        self.sessions.pop(session, None)
        return b""

    def abandoned(self) -> list[str]:
        """Return the containers that had children and have none now."""
        containers = ((path, each) for path, each in self.nodes.items() if each.owner == OWNER_OF_CONTAINERS)
        return [path for path, each in containers if each.creates and not each.children]


# The format of messages


def parent_of(path: str) -> str:
    return path.rpartition("/")[0] or "/"


def written(data: bytes) -> bytes:
    """Return bytes with their length before them, as in a message."""
    return len(data).to_bytes(4, "big") + data


def texts(words: Any) -> bytes:
    """Return a list of texts as in a message."""
    return len(words).to_bytes(4, "big") + b"".join(written(each.encode()) for each in words)


def bytes_of(body: bytes, at: int) -> tuple[bytes, int]:
    """Return the bytes at this offset of a message, and the offset behind them."""
    end = at + 4 + max(0, int.from_bytes(body[at : at + 4], "big", signed=True))
    return body[at + 4 : end], end


def text_of(body: bytes, at: int) -> tuple[str, int]:
    data, end = bytes_of(body, at)
    return data.decode(), end
