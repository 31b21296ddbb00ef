"""A Redis primary with replicas, and the Sentinels that watch them.

``python -m tests.servers_sentinel -- COMMAND {url}`` runs a command with the address of fresh servers and Sentinels.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.servers import RedisServer, Server, Service, unavailable

__all__ = ["NAME", "Guarded", "SentinelServer"]

NAME = "mymaster"
DOWN_AFTER = 0.3  # seconds
NEVER_DOWN_AFTER = 600.0  # seconds: so long that Sentinels start no failover of their own
FAILOVER_TIMEOUT = 1.0  # seconds
AGREED_WITHIN = 40.0  # seconds to wait at most until the Sentinels agree, on a busy machine
HEALED_WITHIN = 15.0  # seconds to wait at most for a repair; if it fails, all servers are started anew
LAST_LINES = 12  # lines of each server's log

# With their default periods the Sentinels need seconds for a change of roles, and ten seconds to demote a former
# primary. Since Redis 7.0 the periods can be set. A replica is not promoted if its last reply to a Sentinel is older
# than three times the first period.
QUICK = {"info-period": 1000, "ask-period": 100, "publish-period": 200, "min-slave-reconf-timeout": 500}


class SentinelServer(Server):
    """One Sentinel. It keeps its state at `kill`."""

    name = "redis+sentinel"
    program = "redis-server --sentinel"
    start_within = 10.0

    def __init__(self, settings: Callable[[], list[str]], *options: str) -> None:
        """``settings`` returns lines of its configuration file, read at the first start. ``options`` are further
        lines."""
        super().__init__()
        self._settings = settings
        self._options = options

    def command(self, folder: Path) -> list[str]:
        program = shutil.which("redis-server") or unavailable("redis", "redis-server is not on the PATH")
        file = folder / "sentinel.conf"
        if not file.exists():
            lines = [f"port {self.port}", f"bind {self.host}", f"dir {folder}", *self._settings(), *self._options]
            file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return [program, str(file), "--sentinel"]

    def answers(self) -> bool:
        try:
            with self.client() as client:
                client.ping()
        except redis.AuthenticationError:
            return True
        except (redis.RedisError, OSError):
            return False
        return True

    def client(self, **options: Any) -> Any:
        once = Retry(NoBackoff(), 0)
        return redis.Redis(port=self.port, socket_timeout=2, decode_responses=True, retry=once, **options)


class Guarded(Service):
    """One primary, its ``replicas``, and three Sentinels. A test may cause any fault of any server, and `heal` repairs
    them all."""

    def __init__(self, *options: str, replicas: int = 2, guards: int = 3) -> None:
        """``options`` are command line arguments of each Redis."""
        fixed = ("--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "1", *options)
        self._first = RedisServer(*fixed)
        self.servers = [self._first, *(RedisServer(*fixed) for _ in range(replicas))]
        self.guards = [SentinelServer(self._monitor) for _ in range(guards)]
        self._down_after = DOWN_AFTER  # the setting of each Sentinel that is started

    def _monitor(self) -> list[str]:
        return [
            f"sentinel monitor {NAME} {self._first.host} {self._first.port} {len(self.guards) // 2 + 1}",
            f"sentinel down-after-milliseconds {NAME} {self._down_after * 1000:.0f}",
            f"sentinel failover-timeout {NAME} {FAILOVER_TIMEOUT * 1000:.0f}",
        ]

    @property
    def url(self) -> str:
        return self.url_to(self.guards)

    def url_to(self, guards: list[SentinelServer]) -> str:
        return f"redis+sentinel://{','.join(each.endpoint for each in guards)}/{NAME}/0"

    def start(self) -> None:
        self._start()
        self._repair(AGREED_WITHIN)

    def _start(self) -> None:
        for server in self.servers:
            server.start()
        for guard in self.guards:
            guard.start()

    def stop(self) -> None:
        for server in (*self.guards, *self.servers):
            server.stop()

    # ---- actions of the tests

    def primary(self) -> RedisServer:
        """Return the primary that the Sentinels name."""
        return self._at(self._told(next(each for each in self.guards if each.alive))["port"])

    def replicas(self) -> list[RedisServer]:
        primary = self.primary()
        return [server for server in self.servers if server is not primary]

    def failover(self) -> RedisServer:
        """Wait until every replica is in sync, and request a failover as an operator would. Return the new primary as
        soon as a Sentinel names it."""
        former, guard = self.primary(), self.guards[0]
        self.await_replicas(former)

        def is_over() -> bool:
            facts = self._told(guard)
            if int(facts["port"]) != former.port:
                return True
            if "failover_in_progress" not in facts["flags"]:  # the failover has not begun, or was given up
                self.ask_for_failover(guard)
            return False

        self._until(is_over)
        return self.await_other(former)

    def ask_for_failover(self, guard: SentinelServer) -> None:
        """Request a failover as an operator would, until this Sentinel accepts the request. A Sentinel refuses it while
        it has no recent reply of a replica. Then nothing changes."""

        def is_accepted() -> bool:
            with guard.client() as client:
                try:
                    client.execute_command("SENTINEL", "FAILOVER", NAME)
                except redis.ResponseError as refused:
                    return "INPROG" in str(refused)  # an earlier request, whose reply was lost, was accepted
            return True

        self._until(is_accepted)

    def await_replicas(self, primary: RedisServer) -> None:
        """Wait until each replica has everything written so far."""
        with redis.Redis(port=primary.port) as client:
            client.set("written", "so far")
            self._until(lambda: client.wait(len(self.servers) - 1, 500) == len(self.servers) - 1)
            client.delete("written")

    def await_other(self, former: RedisServer) -> RedisServer:
        """Wait until a Sentinel names another primary, and return it."""
        self._until(lambda: self.primary() is not former)
        return self.primary()

    def make_sentinels_anew(self) -> None:
        """Start new Sentinels at the same addresses, like containers without a volume. They know the present primary,
        but no earlier failover. Until `heal`, a primary that answers late causes no failover."""
        while True:
            for guard in self.guards:
                guard.stop()
            # The old Sentinels may have chosen another primary before they ended, so ask the servers which one is the
            # primary.
            self._first = next(server for server in self.servers if _is_primary(server))
            self._lead(self._first)
            # A replica that is behind would still deliver messages of the old Sentinels to the new ones.
            self.await_replicas(self._first)
            self._down_after = NEVER_DOWN_AFTER
            try:
                for guard in self.guards:
                    guard.start()
            finally:
                self._down_after = DOWN_AFTER
            self._until(self._know_each_other)
            # A late message of an old Sentinel may give its epoch to the new Sentinels, or make them count the old
            # Sentinel forever. In this case, repeat.
            told = [self._told(guard) for guard in self.guards]
            if all(facts["config-epoch"] == "0" and self._strangers(facts) == 0 for facts in told):
                return

    def _know_each_other(self) -> bool:
        return all(self._strangers(self._told(guard)) >= 0 for guard in self.guards)

    def _strangers(self, facts: dict[str, str]) -> int:
        """Return how many unexpected Sentinels this Sentinel knows, or a negative number while some of ours are
        missing."""
        return int(facts["num-other-sentinels"]) - (len(self.guards) - 1)

    def move_sentinels_to(self, primary: Server) -> None:
        """Point all Sentinels at another primary. First all must forget the old primary, because a Sentinel that still
        knew it would report it to the others."""
        for guard in self.guards:
            with guard.client() as client:
                client.execute_command("SENTINEL", "REMOVE", NAME)
        for guard in self.guards:
            with guard.client() as client:
                client.execute_command("SENTINEL", "MONITOR", NAME, primary.host, primary.port, 2)
        self._set(DOWN_AFTER, FAILOVER_TIMEOUT)

    def report(self) -> str:
        """Return the Sentinels' reports of the primary, the role of each server, and the last log lines, to explain a
        failed test."""
        told = [(guard, lambda guard=guard: self._told(guard)) for guard in self.guards]
        said = [(server, lambda server=server: _role(server)) for server in self.servers]
        return "\n".join(
            f"{each.program} {each.endpoint}: {_said(ask) if each.alive else 'does not run'}\n{each.logged(LAST_LINES)}"
            for each, ask in (*told, *said)
        )

    @contextlib.contextmanager
    def slow_to_demote(self) -> Iterator[None]:
        """Make the Sentinels demote a returning primary only after a while, as with their default settings."""
        self.tell({"publish-period": 2000})
        try:
            yield
        finally:
            self.tell(QUICK)

    @contextlib.contextmanager
    def slow_to_reconfigure(self) -> Iterator[None]:
        """After a promotion, keep the remaining replica from following the new primary, so that the failover does not
        end."""
        self._let_replicas_follow(False)
        try:
            yield
        finally:
            self._let_replicas_follow(True)

    def _set(self, down_after: float, failover_timeout: float) -> None:
        for guard in self.guards:
            with guard.client() as client:
                for name, seconds in (("down-after-milliseconds", down_after), ("failover-timeout", failover_timeout)):
                    client.execute_command("SENTINEL", "SET", NAME, name, int(1000 * seconds))

    def _let_replicas_follow(self, follow: bool) -> None:
        if follow:
            self._set(DOWN_AFTER, FAILOVER_TIMEOUT)
        else:
            self._set(20.0, 180.0)  # a failover does not wait for a replica that seems to be down
        for server in self.servers:
            with redis.Redis(port=server.port) as client:
                client.config_set("masteruser", "" if follow else "nobody")
                client.config_set("masterauth", "" if follow else "wrong")

    def promoted_by(self, guard: SentinelServer) -> RedisServer:
        """Return the primary that this Sentinel gives to clients, even while the failover continues."""
        with guard.client() as client:
            _, port = client.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", NAME)
        return self._at(port)

    def tell(self, periods: dict[str, int]) -> None:
        for guard in self.guards:
            with guard.client() as client:
                for name, milliseconds in periods.items():
                    with contextlib.suppress(redis.ResponseError):  # refused before 7.0, or for an unknown period
                        client.execute_command("SENTINEL", "DEBUG", name, milliseconds)

    def heal(self) -> None:
        """Start or resume every server, wait until all agree, and empty the data.

        If the Sentinels are in a state that they never leave, such as watching a replica, all servers are started anew.
        """
        try:
            self._repair(HEALED_WITHIN)
        except (TimeoutError, OSError, redis.RedisError):
            self.stop()
            self._first = self.servers[0]
            self.start()

    def _repair(self, within: float) -> None:
        for server in (*self.guards, *self.servers):
            if server.alive:
                server.resume()
            else:
                server.start()
        self.tell(QUICK)
        self._set(DOWN_AFTER, FAILOVER_TIMEOUT)
        self._until(self._of_one_mind, within)
        with redis.Redis(port=self.primary().port) as primary:
            primary.config_set("min-replicas-to-write", 0)
            primary.flushall()

    def _of_one_mind(self) -> bool:
        told = [self._told(guard) for guard in self.guards]
        if len({facts["port"] for facts in told}) > 1 or any(facts["flags"] != "master" for facts in told):
            return False
        primary = self._at(told[0]["port"])
        self._lead(primary)
        return all(
            int(facts["num-slaves"]) == len(self.servers) - 1 and self._strangers(facts) == 0 for facts in told
        ) and self._replicates(primary)

    def _lead(self, primary: RedisServer) -> None:
        """Make every other server follow this primary at once. A Sentinel would need seconds for this."""
        for server in self.servers:
            if server is not primary:
                with redis.Redis(port=server.port) as client:
                    role: Any = client.role()
                    if role[0] == b"master" or role[2] != primary.port:
                        client.replicaof(primary.host, primary.port)

    def _replicates(self, primary: RedisServer) -> bool:
        with redis.Redis(port=primary.port) as client:
            facts: Any = client.info("replication")
        online = [facts[f"slave{n}"]["state"] == "online" for n in range(facts.get("connected_slaves", 0))]
        return facts["role"] == "master" and len(online) == len(self.servers) - 1 and all(online)

    def _until(self, condition: Callable[[], bool], within: float = AGREED_WITHIN) -> None:
        pause = threading.Event()
        until = time.monotonic() + within
        while True:
            with contextlib.suppress(redis.RedisError):
                if condition():
                    return
            if time.monotonic() > until:
                raise TimeoutError(f"the Sentinels do not come to agree\n{self.report()}")
            pause.wait(0.02)

    def _told(self, guard: SentinelServer) -> dict[str, str]:
        with guard.client() as client:
            answer = client.execute_command("SENTINEL", "MASTER", NAME)
        return answer if isinstance(answer, dict) else dict(zip(answer[::2], answer[1::2], strict=True))

    def _at(self, port: str) -> RedisServer:
        """Return the server of ours that listens on this port. Raises `RedisError` if the Sentinels watch a server that
        is not ours."""
        for server in self.servers:
            if server.port == int(port):
                return server
        raise redis.RedisError(f"the Sentinels watch port {port}, where none of these servers is")


def _is_primary(server: RedisServer) -> bool:
    """Return whether a replica of ours follows this server."""
    if not server.alive:
        return False
    with redis.Redis(port=server.port, socket_timeout=2) as client:
        facts: Any = client.info("replication")
    return bool(facts["role"] == "master" and facts["connected_slaves"])


def _role(server: RedisServer) -> object:
    with redis.Redis(port=server.port, socket_timeout=2) as client:
        return client.role()


def _said(ask: Callable[[], object]) -> object:
    try:
        return ask()
    except redis.RedisError as error:
        return repr(error)


def main(command: list[str]) -> int:
    with Guarded() as guarded:
        return subprocess.run([part.replace("{url}", guarded.url) for part in command], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[2:]))
