"""A queue of jobs in PostgreSQL: a worker writes its result only while it holds the job.

    pip install 'multilock[postgresql]'
    export DATABASE_URL=postgresql://app@127.0.0.1/app MULTILOCK_URL=postgresql://app@127.0.0.1/app?ttl=3
    python docs/examples/job_queue.py 10 & sleep 2; kill -STOP $!
    python docs/examples/job_queue.py 0
    kill -CONT $!; wait

You should see the second worker do all jobs, and then the first print "lost job 1". The first worker was frozen during
its work for longer than its lease. Its write comes too late, so the database refuses it: guard and write are one
commit.

A worker could also lock the row itself, with SELECT … FOR UPDATE SKIP LOCKED. But then its transaction is open for as
long as the job takes. Meanwhile VACUUM cannot remove rows that are deleted, and if the connection is lost, another
worker gets the job and the first is not notified.
"""

from __future__ import annotations

import os
import sys
import time

import psycopg

import multilock

TABLE = "CREATE TABLE IF NOT EXISTS jobs (id BIGINT PRIMARY KEY, result TEXT)"
SOME_JOBS = "INSERT INTO jobs (id) VALUES (1), (2), (3) ON CONFLICT DO NOTHING"
OPEN = "SELECT id FROM jobs WHERE result IS NULL ORDER BY id"
STILL_OPEN = "SELECT FROM jobs WHERE id = %s AND result IS NULL"
WRITE = "UPDATE jobs SET result = %s WHERE id = %s"


def do(database: psycopg.Connection, job: int, lease: multilock.Lease, seconds: float) -> None:
    if database.execute(STILL_OPEN, [job]).fetchone() is None:
        return  # the previous holder has just done this job
    print("begins job", job, flush=True)
    time.sleep(seconds)  # the work, without an open transaction
    with database.transaction():
        lease.guard(database)  # LockLost if another worker has taken the job
        database.execute(WRITE, [f"done by pid {os.getpid()}", job])
    print("wrote job", job, "in pid", os.getpid(), flush=True)


def main(seconds: float) -> None:
    with psycopg.connect(os.environ["DATABASE_URL"], autocommit=True) as database, multilock.connect() as client:
        database.execute(TABLE)
        database.execute(SOME_JOBS)
        while jobs := [job for (job,) in database.execute(OPEN)]:
            for job in jobs:
                if lease := client.lock(f"jobs/{job}").try_acquire():
                    try:
                        with lease:
                            do(database, job, lease, seconds)
                    except multilock.LockLost as error:
                        print(f"lost job {job}:", error, flush=True)
            time.sleep(0.2)


if __name__ == "__main__":
    main(float(sys.argv[1]))
