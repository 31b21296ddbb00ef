"""Threads do not survive a fork, so the election is started in each worker, not in the master."""

from __future__ import annotations

bind = "127.0.0.1:8000"
workers = 2
preload_app = True
graceful_timeout = 30  # seconds; more than the election's grace (20) and one request_timeout (5)


def post_worker_init(worker: object) -> None:
    from app import election

    election.start()


def worker_exit(server: object, worker: object) -> None:
    from app import client

    client.close()  # the leader's work ends, and then the lease is released
