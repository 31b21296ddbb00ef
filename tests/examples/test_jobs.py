"""Celery, APScheduler, cron, and a pool of workers: a lock keeps several hosts from running the same job."""

from __future__ import annotations

import collections
import http.server
import itertools
import json
import re
import sys
import threading
import time
import urllib.parse
from pathlib import Path

import psycopg
import pytest

import multilock
from tests.examples.conftest import EXAMPLES, ROOT, Programs, until

pytestmark = pytest.mark.timeout(180)
# The backends with hold_at_least that several hosts or processes share.
RESTS = ["redis", *(pytest.param(each, marks=pytest.mark.rare) for each in ("sqlite", "etcd"))]
# On PostgreSQL the lock is in the migrated database. With any other lock, the migrated database is SQLite.
MIGRATIONS = ["postgresql", pytest.param("redis", marks=pytest.mark.rare)]


@pytest.mark.parametrize("place", ["redis"], indirect=True)
def test_a_celery_task_that_is_sent_twice_runs_once(programs: Programs, broker_url: str) -> None:
    programs.env["CELERY_BROKER_URL"] = broker_url
    worker = programs.start("celery", "-A", "celery_once", "worker", "-c", "2", "-l", "INFO", cwd=EXAMPLES)
    programs.wait_for("ready.")
    programs.all_end(programs.python("celery_once.py"))
    programs.wait_for("done: report of monday with token")
    programs.wait_for("skipped: the report of monday")
    assert programs.terminate(worker) == 0


def test_one_celery_beat_runs_and_another_host_takes_over(programs: Programs, place: str, broker_url: str) -> None:
    programs.env["CELERY_BROKER_URL"] = broker_url
    elect, beat = ["multilock", "elect", "beat", "--identity"], ["celery", "-A", "celery_once", "beat", "-l", "INFO"]
    hosts = {
        name: programs.start(*elect, name, "--", *beat, "-s", programs.folder / name, cwd=EXAMPLES)
        for name in ("host-1", "host-2")
    }
    programs.wait_for("Sending due task")
    assert len(programs.lines("beat: Starting")) == 1
    with multilock.connect(place) as client:
        info = client.inspect("beat")
    assert info is not None
    assert info.identity is not None
    programs.terminate(hosts[info.identity])
    programs.wait_for("beat: Starting", times=2)
    sent = len(programs.lines("Sending due task"))
    programs.wait_for("Sending due task", times=sent + 1)


@pytest.mark.parametrize("place", RESTS, indirect=True)
def test_each_tick_of_apscheduler_runs_on_one_of_two_hosts(programs: Programs) -> None:
    hosts = [programs.python("apscheduler_two_hosts.py") for _ in range(2)]
    programs.wait_for("tick", times=2)
    for host in hosts:
        assert programs.terminate(host) == 0
    ticks = [re.findall(r"tick (\d+) on pid", line)[0] for line in programs.lines("on pid")]
    assert [tick for tick, times in collections.Counter(ticks).items() if times > 1] == [], programs.said()


@pytest.mark.parametrize("place", RESTS, indirect=True)
def test_a_cron_job_started_a_second_later_on_another_host_runs_once(programs: Programs) -> None:
    for _ in range(2):  # the second run begins when the first has ended
        programs.all_end(programs.python("cron_nightly.py"))
    assert len(programs.lines("made on")) == 1
    assert len(programs.lines("has just made it")) == 1


@pytest.mark.parametrize("place", RESTS, indirect=True)
def test_a_job_as_a_line_of_a_crontab_runs_once(programs: Programs) -> None:
    recipe = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    [line] = re.findall(r"^0 3 \* \* \* +(multilock run .*) -- make-the-report$", recipe, re.MULTILINE)
    for _ in range(2):
        programs.all_end(programs.start(*line.split(), "--", "echo", "made"))
    assert programs.said() == "made\n"


@pytest.mark.parametrize("place", ["sqlite", pytest.param("redis", marks=pytest.mark.rare)], indirect=True)
def test_a_pool_of_workers_does_each_job_once(programs: Programs, tmp_path: Path) -> None:
    inbox, done = tmp_path / "inbox", tmp_path / "done"
    inbox.mkdir()
    done.mkdir()
    names = {f"{n:03}" for n in range(40)}
    for name in names:
        (inbox / name).touch()
    programs.all_end(*(programs.python("asyncio_worker_pool.py", inbox, done) for _ in range(2)))
    lines = programs.lines("job", "by pid")
    assert sorted(line.split()[1] for line in lines) == sorted(names)
    assert {path.name for path in done.iterdir()} == names


def may_lock(role: str, url: str) -> bool:
    with multilock.connect(url.replace("app@", f"{role}@")) as client:
        return client.lock("of a program").try_acquire() is not None


@pytest.mark.parametrize("place", MIGRATIONS, indirect=True)
def test_django_migrates_once_and_makes_one_report(programs: Programs, tmp_path: Path, place: str) -> None:
    programs.env["DATABASE"] = str(tmp_path / "site.db")
    if place.startswith("postgresql:"):
        at = urllib.parse.urlsplit(place)
        programs.env |= {"PGHOST": str(at.hostname), "PGPORT": str(at.port), "PGUSER": "app", "PGDATABASE": at.path[1:]}
        programs.env["MULTILOCK_URL"] = f"postgresql://?{at.query}"
    manage = [sys.executable, EXAMPLES / "django_project" / "manage.py"]
    programs.all_end(*(programs.start(*manage, "migrate_once") for _ in range(3)))
    assert len(programs.lines("Applying jobs.0001_initial")) == 1
    with multilock.connect(place) as client, client.lock("django/migrate"):
        programs.all_end(programs.start(*manage, "migrate_once"))
    assert programs.lines("nothing to migrate")
    programs.all_end(*(programs.start(*manage, "nightly") for _ in range(3)))
    time.sleep(2.5)  # as on a host whose clock is behind
    programs.all_end(programs.start(*manage, "nightly"))
    assert len(programs.lines("made report")) == 1
    assert len(programs.lines("another host makes it, or has just made it")) == 3
    assert not place.startswith("postgresql:") or may_lock("web", place)


@pytest.mark.parametrize("place", MIGRATIONS, indirect=True)
def test_alembic_migrates_once(programs: Programs, tmp_path: Path, place: str) -> None:
    programs.env["DATABASE_URL"] = f"sqlite:///{tmp_path}/app.db"
    if place.startswith("postgresql:"):
        programs.env["DATABASE_URL"] = place.partition("?")[0].replace("postgresql:", "postgresql+psycopg:")
        del programs.env["MULTILOCK_URL"]
    folder = EXAMPLES / "alembic_project"
    programs.all_end(*(programs.start("alembic", "upgrade", "head", cwd=folder) for _ in range(3)))
    assert len(programs.lines("creating accounts")) == 1
    assert not place.startswith("postgresql:") or may_lock("web", place)


def test_no_operator_takes_the_lock_of_an_open_migration_away(programs: Programs, postgresql_url: str) -> None:
    programs.env["DATABASE_URL"] = postgresql_url.replace("postgresql:", "postgresql+psycopg:")
    del programs.env["MULTILOCK_URL"]
    with psycopg.connect(postgresql_url) as other, multilock.connect(postgresql_url, ttl=5) as client:
        other.execute("CREATE TABLE accounts ()")  # the migration waits for the end of this transaction
        migrating = programs.start("alembic", "upgrade", "head", cwd=EXAMPLES / "alembic_project")
        programs.wait_for("creating accounts")
        with pytest.raises(multilock.BackendUnavailable, match="has a guarded transaction open"):
            client.force_release("alembic")
        other.rollback()
        programs.all_end(migrating)


@pytest.mark.parametrize("place", ["redis"], indirect=True)
def test_a_replica_whose_database_is_migrated_acquires_no_lock(programs: Programs, tmp_path: Path, place: str) -> None:
    programs.env["DATABASE_URL"] = f"sqlite:///{tmp_path}/app.db"
    folder = EXAMPLES / "alembic_project"
    programs.all_end(programs.start("alembic", "upgrade", "head", cwd=folder))
    with multilock.connect(place) as client, client.lock("alembic"):
        programs.all_end(programs.start("alembic", "upgrade", "head", cwd=folder))


def test_one_of_many_workers_refreshes_a_token(programs: Programs, tmp_path: Path) -> None:
    used: list[str] = []

    class Login(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            form = urllib.parse.parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
            used.extend(form["refresh_token"])
            reply = json.dumps({"access_token": "new", "refresh_token": "second", "expires_in": 3600}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, *_: object) -> None: ...

    store = tmp_path / "token.json"
    store.write_text(json.dumps({"access_token": "old", "refresh_token": "first", "expires_at": time.time() + 5}))
    with http.server.HTTPServer(("127.0.0.1", 0), Login) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        programs.env["TOKEN_URL"] = f"http://127.0.0.1:{server.server_port}/token"
        programs.all_end(*(programs.python("refreshed_token.py", store) for _ in range(3)))
        server.shutdown()
    assert used == ["first"]
    assert len(programs.lines("uses new")) == 3


@pytest.mark.parametrize("place", ["redis"], indirect=True)
def test_a_cache_is_filled_once(programs: Programs, broker_url: str) -> None:
    programs.env["CACHE_URL"] = broker_url
    programs.all_end(*(programs.python("cached_once.py") for _ in range(3)))
    assert len(programs.lines("computed by pid")) == 1
    assert len(set(programs.lines("page made at"))) == 1


@pytest.mark.parametrize("place", ["redis"], indirect=True)
def test_there_are_never_more_requests_at_a_time_than_permits(programs: Programs) -> None:
    programs.all_end(*(programs.python("rate_limited_api.py", 4) for _ in range(2)))
    assert len(programs.lines("answered")) == 8
    moments = sorted(
        (float(line.split()[1]), 1 if line.startswith("begins") else -1)
        for line in [*programs.lines("begins"), *programs.lines("ends")]
    )
    assert max(itertools.accumulate(step for _, step in moments)) <= 3


@pytest.mark.parametrize("place", ["redis"], indirect=True)
def test_each_partition_has_one_consumer_and_each_process_its_share(programs: Programs) -> None:
    one, _ = (programs.python("partitions.py") for _ in range(2))
    until(lambda: len({line.split()[-1] for line in programs.lines("begins in pid")}) == 2, why=programs.said)
    programs.wait_for("ends in pid", times=4)
    consumer: dict[str, str] = {}
    for line in programs.lines("partition"):
        partition, did, pid = line.split()[1], line.split()[2], line.split()[-1]
        assert consumer.get(partition) in ((None,) if did == "begins" else (pid,)), programs.said()
        consumer[partition] = pid
        if did == "ends":
            del consumer[partition]
    programs.terminate(one)
    before = len(programs.lines("begins in pid"))
    until(
        lambda: {line.split()[1] for line in programs.lines("begins in pid")[before:]} == set("0123"),
        why=programs.said,
    )
