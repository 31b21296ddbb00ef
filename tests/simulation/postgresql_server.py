"""A simulated PostgreSQL: sessions, notifications and faults. `postgresql_store` has the tables.

The product's own transport runs over `Libpq`, which replaces a connection of libpq. A message is a list of commands,
and a reply is a list of results.
"""

from __future__ import annotations

import pickle
import re
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import psycopg
from psycopg import pq

import multilock_postgresql
from multilock_postgresql import transport
from multilock_postgresql.transport import OWN_PID, PING
from tests.simulation.network import Network, Socket
from tests.simulation.plan import Fault
from tests.simulation.postgresql_store import LOCK_WAIT, STEPS, Holder, Name, Refused, Row, Store, Waiter
from tests.simulation.scheduler import Process, Simulation
from tests.simulation.server import PREFIX, Server, Simulated

if TYPE_CHECKING:
    from tests.simulation.world import World

__all__ = ["SIMULATED", "Libpq", "PostgresqlServer"]

LOOKS_EVERY = 0.05  # seconds between two tries of a step that waits for a row
PLAIN_WAIT = 1.0  # seconds for which a statement without a lock limit waits
OK, ROWS, ERROR = pq.ExecStatus.COMMAND_OK, pq.ExecStatus.TUPLES_OK, pq.ExecStatus.FATAL_ERROR
SYNC, ABORTED = pq.ExecStatus.PIPELINE_SYNC, pq.ExecStatus.PIPELINE_ABORTED
# the steps (functions of multilock in the database) that may give a name to a claim
GIVING = {STEPS.attempt, STEPS.release, STEPS.rest, STEPS.force}
# The steps whose last argument is the time in ms for which they wait for a locked row.
LIMITED = {*GIVING, STEPS.renew, STEPS.follow}
MISSING, NO_STATEMENT = "42883", "26000"
Words = Sequence[bytes | None]


class Result(NamedTuple):
    """A result, with those methods of a libpq result that the transport calls."""

    status: pq.ExecStatus
    rows: Sequence[Row] = ()
    code: str = ""

    @property
    def ntuples(self) -> int:
        return len(self.rows)

    @property
    def nfields(self) -> int:
        return len(self.rows[0]) if self.rows else 0

    def get_value(self, row: int, column: int) -> bytes | None:
        return self.rows[row][column]

    def error_field(self, field: pq.DiagnosticField) -> bytes:
        return self.code.encode()


class Notify(NamedTuple):
    relname: bytes
    extra: bytes


class Session:
    """The server's end of one connection."""

    def __init__(self, number: int, link: Socket, run: int) -> None:
        self.number, self.link, self.run = number, link, run
        self.channels: set[str] = set()
        self.client = ""  # the client whose advisory lock the session holds
        self.prepared: dict[bytes, bytes] = {}


class PostgresqlServer(Server):
    keeps_tokens = False  # the row of a name contains its last token

    def __init__(self, name: str, sim: Simulation, clock: Callable[[], int], seed: object) -> None:
        super().__init__(name, sim, clock, seed)
        self._sessions: dict[int, Session] = {}
        self._numbers = 0
        self._begin()

    def _begin(self) -> None:
        self.store = Store(self.micros, self._is_present)
        self.has_functions = True

    def _is_present(self, client: str) -> bool:
        return any(each.client == client for each in self._sessions.values())

    # For the oracles

    def holder(self, key: str) -> str | None:
        row = self.store.locks.get(key)
        return row.id if row and row.until and row.id and not row.id.startswith("#") else None

    def is_free(self, key: str) -> bool:
        row, now = self.store.locks.get(key), self.micros()
        if row is None or row.id is None or key in self.store.locked:
            return key not in self.store.locked
        shut = row.sure is not None and row.sure > now and row.boot != self.store.boot
        if row.until is not None:
            return row.until <= now and not shut
        holders = (each for each in self.store.holders.values() if each.key == key)
        return not any(each.until > now or each.id in self.store.locked for each in holders)

    def claims(self) -> Iterator[tuple[str, str]]:
        now, store = self.micros(), self.store
        rows: list[Name | Holder | Waiter] = [*store.locks.values(), *store.holders.values(), *store.queue.values()]
        for row in rows:
            if row.id and row.until is not None and row.until > now and not row.id.startswith("#"):
                yield row.key, row.id

    def waiters(self, key: str, me: str) -> list[str]:
        now = self.micros()
        alive = (each for each in self.store.waiters(key) if each.keeps_place(now) or each.id == me)
        return [each.id for each in alive if not each.listens or each.id == me or self._is_present(each.id[:16])]

    def request(self, data: bytes) -> object:
        return tuple(f"{command[:2]}"[:30] for command in pickle.loads(data)[0])

    def pushed(self, data: bytes) -> str | None:
        told = pickle.loads(data)
        return told.extra.decode() if isinstance(told, Notify) and told.relname != b"multilock_changes" else None

    # Messages

    def accept(self, link: Socket) -> Session | None:
        if not self.up:
            return None
        self._numbers += 1
        session = self._sessions[self._numbers] = Session(self._numbers, link, self.run)
        return session

    def closed(self, session: Session) -> None:
        if session.run == self.run:
            self._sessions.pop(session.number, None)

    def _received(self, session: Session, data: bytes) -> None:
        commands, pipeline = pickle.loads(data)
        self._answer(session, commands, pipeline, self.sim.time)

    def _answer(self, session: Session, commands: list[Any], pipeline: bool, since: float) -> None:
        if not self.up or session.run != self.run:
            return
        if self.paused:
            self.sim.after(LOOKS_EVERY, self._answer, session, commands, pipeline, since)
            return
        results: list[Result | None] = []
        failed = False
        for command in commands:
            if failed:
                results += [Result(ABORTED), None]
                continue
            try:
                results += [Result(*each) for each in self._execute(session, *command)]
            except Refused as refused:
                is_limited = command[0] == "execute" and session.prepared.get(command[1]) in LIMITED
                within = int(command[2][-1]) / 1000 if is_limited else PLAIN_WAIT
                if str(refused) == LOCK_WAIT and self.sim.time < since + within:
                    self.sim.after(LOOKS_EVERY, self._answer, session, commands, pipeline, since)
                    return
                failed = True
                results.append(Result(ERROR, [], str(refused)))
            results.append(None)
        self._send(session, [*results, Result(SYNC)] if pipeline else results)

    def _execute(self, session: Session, what: str, *given: Any) -> list[tuple[Any, ...]]:
        if what == "log in":
            return [(ROWS, [(b"%d" % session.number,)])]
        if what == "script":
            return self._script(session, *given)
        name, *rest = given
        if not self.has_functions:
            raise Refused(MISSING)
        if what == "prepare":
            session.prepared[name] = rest[0]
            return [(OK,)]
        sql = session.prepared.get(name)
        if sql is None:
            raise Refused(NO_STATEMENT)
        return [(ROWS, self._step(sql, rest[0]))]

    def _step(self, sql: bytes, words: Words) -> list[Row]:
        if sql == PING:
            return [(b"1",)]
        executed: Callable[[], None] = lambda: None  # noqa: E731
        key = (words[0] or b"").decode() if words else ""
        if sql in GIVING:
            kind = "force" if sql == STEPS.force else "leave" if sql != STEPS.attempt else "ask"
            barges = kind == "ask" and words[6] == b"t"
            executed = self.on_step(key, (words[1] or b"").decode(), "barge" if barges else kind)
        rows = self.store.execute(sql, words)
        executed()
        self._notify()
        row = self.store.locks.get(key)
        if row is not None and row.until is not None:
            left = row.until - self.micros()
            self.sim.after(max(0.0, left / 1e6), self._look, key, row.until)
        if self.sim.trace is not None:
            shown = sql.decode().partition("multilock")[2][2:20], [*words[1:]]
            self.sim.note(None, f"  {self.name} {key} {shown} -> {rows} {list(self.store.notices)}")
        return rows

    def _look(self, key: str, until: int) -> None:
        row = self.store.locks.get(key)
        if row is not None and row.until == until:
            self.on_expiry(key)

    def _notify(self) -> None:
        for channel, payload in self.store.notices:
            for each in list(self._sessions.values()):
                if channel in each.channels:
                    self._send(each, Notify(channel.encode(), payload.encode()))

    def _script(self, session: Session, sql: bytes) -> list[tuple[Any, ...]]:
        text = sql.decode()
        if text.startswith("DO $multilock$"):
            self.has_functions = True
        elif found := re.search(r"pg_advisory_lock_shared\((-?\d+)\)", text):
            session.client = f"{int(found[1]) % (1 << 64):016x}"
        elif text.startswith("LISTEN"):
            session.channels.update(re.findall(r'LISTEN "?(\w+)', text))
        elif sql == PING or sql.startswith(OWN_PID):
            return [(ROWS, [(b"%d" % session.number,)])]
        else:
            raise NotImplementedError(text)
        return [(OK,)]

    def _send(self, session: Session, what: Any) -> None:
        session.link.deliver(pickle.dumps(what))

    # Faults

    def _ended(self, *, forgets: bool) -> list[Socket]:
        """Shut down cleanly, or crash. A crash may lose the last commits."""
        sessions, self._sessions = list(self._sessions.values()), {}
        self.store.locked = {}
        if forgets:
            self._begin()
            self.has_functions = False
        elif self.random.random() < 0.7 and self.store.crash(loses=self.random.random() < 0.7):
            self.lost = self.sim.time
        return [each.link for each in sessions]

    def lose_scripts(self) -> None:
        self.has_functions = False

    def delete(self, key: str) -> None:
        self.store.delete(key)
        self._notify()

    def lock_row(self, key: str, choice: int, seconds: float) -> None:
        """Let another transaction lock the row of a name or of one of its holders, either as a guard does or against
        every change."""
        rows = [key, *(each.id for each in self.store.holders.values() if each.key == key)]
        row = rows[choice % len(rows)]
        self.store.locked[row] = choice % 5 == 0
        self.sim.after(seconds, self._unlock, row)

    def _unlock(self, row: str) -> None:
        self.store.locked.pop(row, None)


class Libpq:
    """A connection, with those methods of a libpq connection that the transport calls."""

    def __init__(self, network: Network, server: PostgresqlServer) -> None:
        self.socket = Socket(network, server)
        network.on_connect(self.socket.process)
        self.socket.setblocking(False)
        self.backend_pid = 0
        self.status = pq.ConnStatus.MADE  # the host accepts the connection at once, but the login takes time
        self.pipeline_status = 0
        self.nonblocking, self.notice_handler = 0, None
        self._commands: list[tuple[Any, ...]] = []  # not sent yet
        self._is_open = False  # whether a reply is missing, or was not read completely
        self._results: deque[Result | None] = deque()
        self._notices: deque[Notify] = deque()
        self._error = ""
        self.socket.end = server.accept(self.socket)
        if self.socket.end is None:
            self._error = "Connection refused"
        else:
            self._ask("log in")
            self.flush()

    def connect_poll(self) -> pq.PollingStatus:
        try:
            if not self._error:
                self.consume_input()
        except psycopg.OperationalError as error:
            self._error = str(error)
        if self._error:
            return pq.PollingStatus.FAILED
        if self.is_busy():
            return pq.PollingStatus.READING
        result = self.get_result()
        assert result is not None
        self.backend_pid = int(result.get_value(0, 0) or 0)
        self.get_result()
        return pq.PollingStatus.OK

    def get_error_message(self) -> str:
        return self._error

    def _ask(self, *command: Any) -> None:
        self._commands.append(command)
        self._is_open = True

    def send_query(self, sql: bytes) -> None:
        self._ask("script", sql)

    def send_prepare(self, name: bytes, sql: bytes) -> None:
        self._ask("prepare", name, sql)

    def send_query_prepared(self, name: bytes, words: Words) -> None:
        self._ask("execute", name, list(words))

    def enter_pipeline_mode(self) -> None:
        self.pipeline_status = 1

    def pipeline_sync(self) -> None:
        """Do nothing: `flush` sends everything."""

    def exit_pipeline_mode(self) -> None:
        self.pipeline_status = 0

    def flush(self) -> int:
        commands, self._commands = self._commands, []
        if commands:
            self.socket.sendall(pickle.dumps((commands, bool(self.pipeline_status))))
        return 0

    def consume_input(self) -> None:
        came = False
        while True:
            try:
                data = self.socket.recv(0)
            except BlockingIOError:
                return
            except OSError as error:
                if came:
                    return
                raise psycopg.OperationalError(str(error)) from error
            if not data:
                if came:
                    return
                raise psycopg.OperationalError("server closed the connection unexpectedly")
            came, told = True, pickle.loads(data)
            if isinstance(told, Notify):
                self._notices.append(told)
            else:
                self._results += told

    def is_busy(self) -> bool:
        return self._is_open and not self._results

    def get_result(self) -> Result | None:
        if not self._results:
            return None
        result = self._results.popleft()
        self._is_open = bool(self._results)
        return result

    def notifies(self) -> Notify | None:
        return self._notices.popleft() if self._notices else None

    @property
    def transaction_status(self) -> pq.TransactionStatus:
        return pq.TransactionStatus.ACTIVE if self._is_open else pq.TransactionStatus.IDLE

    def finish(self) -> None:
        self.socket.close()


def lock_row(world: World, fault: Fault, process: Process) -> None:
    """Let another transaction lock a row."""
    server = world.server(fault)
    assert isinstance(server, PostgresqlServer)
    server.lock_row(world.key("ab"[fault.choice % 2]), fault.choice // 2, fault.seconds)


def _open(world: World, ttl: float) -> Any:
    server = world.servers[0]
    assert isinstance(server, PostgresqlServer)
    vars(transport)["os"] = SimpleNamespace(dup=lambda sock: sock)
    vars(transport)["socket"] = SimpleNamespace(**{**vars(socket), "socket": lambda fileno: fileno})
    backend: Any = multilock_postgresql.open_backend("postgresql://simulation", {"prefix": PREFIX, "ttl": ttl})
    backend._endpoint._connect_start = lambda conninfo: Libpq(world.network, server)
    return backend


PROFILES = {"slow": ("lock_row", "lock_row"), "all": ("", "lock_row")}
SIMULATED = {"postgresql": Simulated(_open, PostgresqlServer, 1, {"lock_row": lock_row}, PROFILES)}
