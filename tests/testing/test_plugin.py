"""The pytest plugin: one test of a user, run on every backend that is named."""

from __future__ import annotations

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


def run(folder: Path, *arguments: str) -> str:
    (folder / "test_user.py").write_text(TEST)
    command = [sys.executable, "-m", "pytest", "-p", "no:randomly", "-v", "-rP", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_without_a_url_the_fixtures_live_in_memory(tmp_path: Path) -> None:
    said = run(tmp_path)
    assert "used memory://" in said
    assert "3 passed" in said


def test_every_url_of_the_option_is_used(tmp_path: Path) -> None:
    said = run(tmp_path, "--multilock-url", "memory://one", "--multilock-url", f"sqlite://{tmp_path}/locks.db")
    assert "used memory://one" in said
    assert f"used sqlite://{tmp_path}/locks.db" in said
    assert "6 passed" in said


def test_the_urls_of_the_ini_file_are_used_where_no_option_is_given(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmultilock_urls =\n    memory://one\n    memory://two\n")
    said = run(tmp_path)
    assert "used memory://one" in said
    assert "used memory://two" in said


def test_a_password_never_shows_in_the_name_of_a_test(tmp_path: Path) -> None:
    (tmp_path / "test_user.py").write_text("def test(multilock_url): pass\n")
    command = [sys.executable, "-m", "pytest", "-v", "--multilock-url", "redis://user:hush@localhost/0"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert "hush" not in said
