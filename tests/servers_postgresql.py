"""Start PostgreSQL for the tests, and a PgBouncer in front of it. Both refuse to run as root, so another user starts
them.

``tests/bootstrap/postgresql.sh`` and ``tests/bootstrap/pgbouncer.sh`` find or install the programs.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import time
from pathlib import Path

from tests.servers import Server, bootstrap, unavailable

__all__ = ["PgBouncer", "PostgresqlServer"]

USERS = ("postgres", "nobody")  # if the tests run as root, the first of these users that exists runs the programs
QUICK = {
    "fsync": "off",
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "shared_buffers": "16MB",
    "max_prepared_transactions": "4",
}


def programs() -> Path:
    """Return the folder with initdb, postgres and pg_isready."""
    return Path(bootstrap("postgresql"))


def as_its_user(folder: Path) -> list[str]:
    """Give the folder to the user that runs the server. Returns the prefix of a command that must not run as root.

    The command becomes the server, so its process id is that of the server.
    """
    if os.geteuid():
        return []
    user = next(found for name in USERS if (found := _user(name)))
    shutil.chown(folder, user.pw_uid, user.pw_gid)
    return ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]


def is_ready(server: Server, *options: str) -> bool:
    asked = [str(programs() / "pg_isready"), "-q", "-h", server.host, "-p", str(server.port), *options]
    return subprocess.run(asked, check=False).returncode == 0


class PostgresqlServer(Server):
    """One PostgreSQL server with the superuser ``app``, which needs no password, and the database ``postgres``."""

    name = "postgresql"
    program = "PostgreSQL"
    start_within = 30.0  # a server answers after 0.2 s on an idle machine
    ends_by = signal.SIGQUIT  # with SIGTERM the server would wait for its clients

    def __init__(self, **settings: str) -> None:
        super().__init__()
        self._settings = {**QUICK, **settings}

    def pause(self) -> None:
        super().pause()  # this stops the parent process first, because it would start new children
        for pid in self._children():
            os.kill(pid, signal.SIGSTOP)

    def resume(self) -> None:
        for pid in self._children():
            os.kill(pid, signal.SIGCONT)
        super().resume()

    def kill(self) -> None:
        """Kill all processes of the server at once, so that none of them can finish a commit."""
        children = self._children() if self.alive else []
        for pid in (self.pid, *children) if children else ():  # the parent first, because it would start new children
            os.kill(pid, signal.SIGKILL)
        super().kill()
        # A child that still runs uses the shared memory of the server, and a new server would refuse to start.
        while any(_runs(pid) for pid in children):
            time.sleep(0.005)

    def _children(self) -> list[int]:
        return [int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]

    @property
    def url(self) -> str:
        return f"postgresql://app@{self.endpoint}/postgres"

    def command(self, folder: Path) -> list[str]:
        data = folder / "data"
        as_user = as_its_user(folder)
        if not data.exists():
            self._make(data, as_user)
        settings = [part for key, value in self._settings.items() for part in ("-c", f"{key}={value}")]
        return [*as_user, str(programs() / "postgres"), "-D", str(data), "-p", str(self.port), *settings]

    def _make(self, data: Path, as_user: list[str]) -> None:
        done = subprocess.run(
            [*as_user, *self.making(data)], cwd=data.parent, capture_output=True, text=True, check=False
        )
        if done.returncode:
            unavailable(self.name, done.stderr.strip())

    def making(self, data: Path) -> list[str]:
        """Return the command that makes the files of a new database."""
        options = ["--no-sync", "--auth=trust", "--username=app", "--no-locale", "--encoding=UTF8"]
        return [str(programs() / "initdb"), *options, "-D", str(data)]

    def answers(self) -> bool:
        return is_ready(self)


class PgBouncer(Server):
    """A PgBouncer in front of this server. Its clients share at most ``size`` sessions of the server.

    A client of ``url`` may get another session of the server for each transaction. A client of ``session_url`` keeps
    its session.
    """

    name = "pgbouncer"
    program = "PgBouncer"
    start_within = 20.0
    ends_by = signal.SIGINT

    def __init__(self, before: PostgresqlServer, size: int) -> None:
        super().__init__()
        self._before, self._size = before, size

    @property
    def url(self) -> str:
        return f"postgresql://app@{self.endpoint}/postgres"

    @property
    def session_url(self) -> str:
        return f"postgresql://app@{self.endpoint}/session"

    def command(self, folder: Path) -> list[str]:
        as_user = as_its_user(folder)
        server = f"host={self._before.host} port={self._before.port} dbname=postgres user=app"
        settings = {
            "listen_addr": self.host,
            "listen_port": self.port,
            "unix_socket_dir": "",
            "auth_type": "any",
            "pool_mode": "transaction",
            "default_pool_size": self._size,
        }
        databases = f"[databases]\npostgres = {server}\nsession = {server} pool_mode=session\n[pgbouncer]\n"
        (folder / "pgbouncer.ini").write_text(
            databases + "".join(f"{key} = {value}\n" for key, value in settings.items())
        )
        return [*as_user, bootstrap("pgbouncer"), "-q", "pgbouncer.ini"]

    def answers(self) -> bool:
        return is_ready(self, "-d", "session")


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _user(name: str) -> pwd.struct_passwd | None:
    try:
        return pwd.getpwnam(name)
    except KeyError:
        return None
