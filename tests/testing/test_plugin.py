"""The pytest plugin runs a user's test on every named backend."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

TEST = """
import asyncio

def test_blocking(multilock_client, multilock_url):
    with multilock_client.lock("n") as lease:
        assert lease.is_held()
    print("used", multilock_url)

def test_asyncio(multilock_async_client):
    async def use():
        await multilock_async_client.lock("held at the end").acquire()
        assert await multilock_async_client.lock("held at the end").try_acquire() is None
    asyncio.run(use())

def test_what_another_test_held_was_given_back(multilock_client):
    assert multilock_client.lock("held at the end").try_acquire() is not None
"""


DYNAMIC = """
import unittest
import pytest

def test_asked_for_while_it_runs(request):
    assert request.getfixturevalue("multilock_client").lock("n").try_acquire()
    print("used", request.getfixturevalue("multilock_url"))

class TestOfUnittest(unittest.TestCase):
    @pytest.fixture(autouse=True)
    def client(self, multilock_client):
        self.client = multilock_client

    def test(self):
        with self.client.lock("n") as lease:
            self.assertTrue(lease.is_held())
"""

PARAMETRIZED = """
import pytest

@pytest.mark.parametrize("multilock_url", ["memory://mine"], indirect=True)
def test_indirect(multilock_client, multilock_url):
    assert multilock_url == "memory://mine"

@pytest.mark.parametrize(("number", "multilock_url"), [(1, "memory://mine")])
def test_direct(multilock_client, multilock_url, number):
    assert multilock_url == "memory://mine"

@pytest.mark.parametrize(argnames="number, multilock_url", argvalues=[(1, "memory://mine")])
class TestClass:
    def test(self, multilock_client, multilock_url, number):
        assert multilock_url == "memory://mine"
"""

# Between two tests, the event loop is open but does not run, as with a plugin whose loop lives for the whole session.
IDLE_LOOP = """
import asyncio
import time

loop = asyncio.new_event_loop()
losses = []
left_at = None

def test_its_loop_is_left_open(multilock_async_client):
    async def on_lost(loss):
        losses.append(loss.reason.value)

    async def use():
        await multilock_async_client.lock("n", on_lost=on_lost).acquire()

    global left_at
    asyncio.set_event_loop(loop)
    loop.run_until_complete(use())
    left_at = time.monotonic()

def test_the_client_was_closed_at_once_and_the_loop_is_still_the_threads():
    assert time.monotonic() - left_at < 2.5
    assert losses == ["closed"]
    assert asyncio.get_event_loop() is loop
    loop.close()
"""


def run(folder: Path, *arguments: str, test: str = TEST) -> str:
    (folder / "test_user.py").write_text(test)
    command = [sys.executable, "-m", "pytest", "-p", "no:randomly", "-p", "no:asyncio", "-v", "-rP", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_without_a_url_the_fixtures_use_memory(tmp_path: Path) -> None:
    said = run(tmp_path)
    assert "used memory://" in said
    assert "3 passed" in said


def test_every_url_of_the_option_is_used(tmp_path: Path) -> None:
    said = run(tmp_path, "--multilock-url", "memory://one", "--multilock-url", f"sqlite://{tmp_path}/locks.db")
    assert "used memory://one" in said
    assert f"used sqlite://{tmp_path}/locks.db" in said
    assert "6 passed" in said


ISOLATED = """
import multilock

def test_service_and_client_meet_and_nobody_else_does(multilock_client, multilock_url):
    with multilock_client.lock("report"):
        with multilock.connect(multilock_url) as service:
            assert service.lock("report").try_acquire() is None
        with multilock.connect(multilock_url.partition("?")[0]) as production:
            assert production.lock("report").try_acquire() is not None
    print("used", multilock_url)
"""


def test_locks_of_different_runs_never_have_the_same_name(tmp_path: Path) -> None:
    url = f"sqlite://{tmp_path}/locks.db"
    one, other = (run(tmp_path, "--multilock-url", url, test=ISOLATED) for _ in range(2))
    used = [re.findall(r"^used (.*)", said, re.MULTILINE) for said in (one, other)]
    assert used[0] != used[1]
    assert all(each.startswith(f"{url}?prefix=multilock-test/") for [each] in used)


def test_a_url_that_names_a_prefix_keeps_it(tmp_path: Path) -> None:
    url = f"sqlite://{tmp_path}/locks.db?ttl=5&prefix=mine/"
    assert f"used {url}\n" in run(tmp_path, "--multilock-url", url)


def test_the_urls_of_the_ini_file_are_the_default(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmultilock_urls =\n    memory://one\n    memory://two\n")
    said = run(tmp_path)
    assert "used memory://one" in said
    assert "used memory://two" in said


def test_a_password_never_shows_in_the_name_of_a_test(tmp_path: Path) -> None:
    (tmp_path / "test_user.py").write_text("def test(multilock_url): pass\n")
    url = "redis://user:hush@localhost/0"
    command = [sys.executable, "-m", "pytest", "-v", "--multilock-url", url, "--multilock-missing=skip"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert "hush" not in said


def test_a_fixture_without_parameters_uses_the_first_url(tmp_path: Path) -> None:
    said = run(tmp_path, "--multilock-url", "memory://one", "--multilock-url", "memory://two", test=DYNAMIC)
    assert "used memory://one" in said
    assert "2 passed" in said


def test_a_test_may_choose_its_urls_itself(tmp_path: Path) -> None:
    assert "3 passed" in run(tmp_path, test=PARAMETRIZED)


def test_a_client_is_closed_on_its_own_loop_if_that_loop_is_idle(tmp_path: Path) -> None:
    assert "2 passed" in run(tmp_path, "-W", "error", test=IDLE_LOOP)
