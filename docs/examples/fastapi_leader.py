"""FastAPI: one leader among all workers of all hosts, a health endpoint, and a shutdown in which no two leaders work at
once.

Run it on two hosts (here on two ports), each with two workers, and ask which process leads:

    pip install 'multilock[redis]' fastapi uvicorn
    export MULTILOCK_URL=redis://127.0.0.1:6379/0
    python docs/examples/fastapi_leader.py --port 8000 --workers 2 &
    python docs/examples/fastapi_leader.py --port 8001 --workers 2 &
    curl localhost:8000/leader

You should see one of the four processes work. End its server with SIGTERM: the next leader's first line comes after the
old leader's "cleaned up", because the lease is released only when the work has ended.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import uvicorn
from fastapi import FastAPI, Response

import multilock
from multilock.aio import AsyncLeadership

GRACE = 20.0  # seconds that the work may take to clean up; the supervisor must send SIGKILL later than that
CONNECTIONS = 5  # seconds that uvicorn waits for open connections before the lifespan ends


async def work(leadership: AsyncLeadership) -> None:
    """Do the work that only one process may do. It is cancelled when this node stops or loses the leadership."""
    say = f"pid {os.getpid()}, term {leadership.term}:"
    print(say, "begins", flush=True)
    try:
        while True:
            print(say, "works", flush=True)
            await asyncio.sleep(0.2)
    finally:
        await asyncio.sleep(0.5)  # clean up, for example flush and commit: no other process leads yet
        print(say, "cleaned up", flush=True)


@contextlib.asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with (
        multilock.connect_async() as client,  # $MULTILOCK_URL
        client.election("fastapi", on_elected=work, grace=GRACE) as election,
    ):
        app.state.client, app.state.election = client, election
        yield


app = FastAPI(lifespan=lifespan)


@app.get("/leader")
async def leader() -> dict[str, object]:
    now = await app.state.election.leader()
    return {"leader": now and now.identity, "term": now and now.term, "me": app.state.election.is_leader()}


@app.get("/healthz")
async def healthz(response: Response) -> dict[str, bool]:
    """Answer a probe without I/O. A process that cannot renew its leases in time should be restarted."""
    healthy: bool = app.state.client.is_healthy()
    response.status_code = 200 if healthy else 503
    return {"healthy": healthy}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    uvicorn.run(
        "fastapi_leader:app",
        app_dir=str(Path(__file__).parent),
        host=options.host,
        port=options.port,
        workers=options.workers,
        timeout_graceful_shutdown=CONNECTIONS,
    )
