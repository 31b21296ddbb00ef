"""PostgreSQL for the tests: a database of the test's own. PostgreSQL refuses to run as root, so another user starts
it.

``tests/bootstrap/postgresql.sh`` finds or installs the programs.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import time
from functools import lru_cache
from pathlib import Path

from tests.servers import Server, unavailable

__all__ = ["PostgresqlServer"]

BOOTSTRAP = Path(__file__).parent / "bootstrap" / "postgresql.sh"
USERS = ("postgres", "nobody")  # the user that runs it if we are root
QUICK = {
    "fsync": "off",
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "shared_buffers": "16MB",
    "max_prepared_transactions": "4",
}


@lru_cache
def programs() -> Path:
    """Return the folder with initdb, postgres and pg_isready."""
    found = subprocess.run([str(BOOTSTRAP)], capture_output=True, text=True, check=False)
    if found.returncode:
        unavailable("postgresql", found.stderr.strip().replace("\n", " "))
    return Path(found.stdout.strip())


class PostgresqlServer(Server):
    """One PostgreSQL with the superuser ``app``, which needs no password, and the database ``postgres``."""

    name = "postgresql"
    program = "PostgreSQL"
    start_within = 30.0  # a server answers after 0.2 on an idle machine
    ends_by = signal.SIGQUIT  # with SIGTERM the server would wait for its clients

    def __init__(self, **settings: str) -> None:
        super().__init__()
        self._settings = {**QUICK, **settings}

    def pause(self) -> None:
        super().pause()  # so it starts no further process
        for pid in self._children():
            os.kill(pid, signal.SIGSTOP)

    def resume(self) -> None:
        for pid in self._children():
            os.kill(pid, signal.SIGCONT)
        super().resume()

    def kill(self) -> None:
        """End all its processes at once, so that none of them can finish a commit."""
        children = self._children() if self.alive else []
        for pid in (self.pid, *children) if children else ():  # the first would start others
            os.kill(pid, signal.SIGKILL)
        super().kill()
        while any(_runs(pid) for pid in children):
            time.sleep(0.005)  # they would still use the shared memory

    def _children(self) -> list[int]:
        return [int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]

    @property
    def url(self) -> str:
        return f"postgresql://app@{self.endpoint}/postgres"

    def command(self, folder: Path) -> list[str]:
        data = folder / "data"
        as_user = self._own(folder)
        if not data.exists():
            self._make(data, as_user)
        settings = [part for key, value in self._settings.items() for part in ("-c", f"{key}={value}")]
        return [*as_user, str(programs() / "postgres"), "-D", str(data), "-p", str(self.port), *settings]

    def _own(self, folder: Path) -> list[str]:
        """Return the prefix of a command that must not run as root. The process we start is still the server itself."""
        if os.geteuid():
            return []
        user = next(found for name in USERS if (found := _user(name)))
        shutil.chown(folder, user.pw_uid, user.pw_gid)
        return ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]

    def _make(self, data: Path, as_user: list[str]) -> None:
        initdb = [
            str(programs() / "initdb"),
            "--no-sync",
            "--auth=trust",
            "--username=app",
            "--no-locale",
            "--encoding=UTF8",
            "-D",
            str(data),
        ]
        done = subprocess.run([*as_user, *initdb], cwd=data.parent, capture_output=True, text=True, check=False)
        if done.returncode:
            unavailable(self.name, done.stderr.strip())

    def answers(self) -> bool:
        asked = [str(programs() / "pg_isready"), "-q", "-h", self.host, "-p", str(self.port)]
        return subprocess.run(asked, check=False).returncode == 0


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
