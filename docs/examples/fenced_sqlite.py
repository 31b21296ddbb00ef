"""SQLite refuses a write that comes too late, because it checks the fencing token.

    export MULTILOCK_URL=redis://127.0.0.1:6379/0?ttl=3
    python docs/examples/fenced_sqlite.py report.db 10 & sleep 1; kill -STOP $!
    python docs/examples/fenced_sqlite.py report.db 0
    kill -CONT $!; wait

You should see the second process print "wrote with token N", and then the first print "refused". The first process was
frozen after its last check, for longer than its lease. A lock cannot stop its late write, but the token can.
"""

from __future__ import annotations

import os
import sqlite3
import sys
import time

import multilock

SCHEMA = "CREATE TABLE IF NOT EXISTS documents (name TEXT PRIMARY KEY, text TEXT, token INTEGER NOT NULL)"

# One statement compares the tokens and writes, so that no other write comes in between. An equal token may write again.
WRITE = """
INSERT INTO documents (name, text, token) VALUES (:name, :text, :token)
ON CONFLICT (name) DO UPDATE SET text = excluded.text, token = excluded.token WHERE documents.token <= excluded.token
"""


class Stale(Exception):
    """Raised if a process with a newer token has already written."""


def write(database: sqlite3.Connection, name: str, text: str, token: int) -> None:
    with database:
        if database.execute(WRITE, {"name": name, "text": text, "token": token}).rowcount == 0:
            raise Stale(f"a newer token than {token} has written {name!r}")


def main(path: str, seconds: float) -> None:
    database = sqlite3.connect(path, timeout=10)
    database.execute(SCHEMA)
    with multilock.connect() as client, client.lock("report") as lease:  # $MULTILOCK_URL
        token = lease.fence()
        print("holds token", token, flush=True)
        time.sleep(seconds)  # make the report
        write(database, "report", f"by pid {os.getpid()}", token)
        print("wrote with token", token, flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1], float(sys.argv[2]))
    except Stale as error:
        sys.exit(f"refused: {error}")
