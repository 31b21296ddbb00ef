"""PostgreSQL refuses a write that comes too late, because it checks the fencing token.

    pip install 'multilock[redis]' 'psycopg[binary]'
    export MULTILOCK_URL=redis://127.0.0.1:6379/0?ttl=3 DATABASE_URL=postgresql://app@127.0.0.1/app
    python docs/examples/fenced_postgresql.py 10 & sleep 1; kill -STOP $!
    python docs/examples/fenced_postgresql.py 0
    kill -CONT $!; wait

You should see the second process print "wrote with token N", and then the first print "refused". The first process was
frozen after its last check, for longer than its lease. A lock cannot stop its late write, but the token can.
"""

from __future__ import annotations

import os
import sys
import time

import psycopg

import multilock

SCHEMA = "CREATE TABLE IF NOT EXISTS documents (name TEXT PRIMARY KEY, text TEXT, token BIGINT NOT NULL)"

# One statement compares the tokens and writes, so that no other write comes in between. An equal token may write again.
WRITE = """
INSERT INTO documents (name, text, token) VALUES (%(name)s, %(text)s, %(token)s)
ON CONFLICT (name) DO UPDATE SET text = excluded.text, token = excluded.token WHERE documents.token <= excluded.token
"""


class Stale(Exception):
    """Raised if a process with a newer token has already written."""


def write(database: psycopg.Connection, name: str, text: str, token: int) -> None:
    with database.transaction():
        if database.execute(WRITE, {"name": name, "text": text, "token": token}).rowcount == 0:
            raise Stale(f"a newer token than {token} has written {name!r}")


def main(seconds: float) -> None:
    with (
        psycopg.connect(os.environ["DATABASE_URL"], autocommit=True) as database,
        multilock.connect() as client,  # $MULTILOCK_URL
        client.lock("report") as lease,
    ):
        database.execute(SCHEMA)
        token = lease.fence()
        print("holds token", token, flush=True)
        time.sleep(seconds)  # make the report
        write(database, "report", f"by pid {os.getpid()}", token)
        print("wrote with token", token, flush=True)


if __name__ == "__main__":
    try:
        main(float(sys.argv[1]))
    except Stale as error:
        sys.exit(f"refused: {error}")
