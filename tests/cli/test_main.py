"""Every command has a help text that fits a screen, and a clear message if rich is missing."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

import multilock
from tests.cli.conftest import Run, RunEach, environment

COMMANDS = ["run", "elect", "status", "force-release", "doctor", "demo"]


def test_help_fits_a_screen_of_80_by_24_and_names_every_command(run_each: RunEach) -> None:
    helps = run_each(["--help"], *([command, "--help"] for command in COMMANDS))
    for ended in helps:
        lines = ended.stdout.rstrip().splitlines()
        assert ended.returncode == 0
        assert len(lines) <= 24
        assert max(map(len, lines)) <= 80
    assert all(command in helps[0].stdout for command in COMMANDS)


WITHOUT = """
import sys

class Missing:
    def find_spec(self, name, *_):
        if name == {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
from multilock.cli import main
sys.exit(main())
"""


def _without(missing: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    program = WITHOUT.format(missing=missing)
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], env=environment(), capture_output=True, text=True, check=False
    )


def test_a_missing_library_is_reported_in_one_line_with_the_pip_command(sqlite_url: str) -> None:
    ended = _without("rich", "compare", sqlite_url)
    assert ended.returncode == 64
    assert ended.stderr == "multilock: this command needs rich to show its results: pip install 'multilock[cli]'\n"


def test_a_usage_error_says_what_is_missing_or_wrong(run_each: RunEach) -> None:
    errors = {
        "run": "NAME is missing, the name of the lock: multilock run nightly-report -- make-the-report",
        "elect -- true": "NAME is missing, the name of the lock: multilock elect nightly-report -- make-the-report",
        "run n": "CMD is missing: write it after --, such as multilock run n -- make-the-report",
        "run n --ttl soon -- true": "argument --ttl: 'soon' is no number of seconds: write 30 or 0.5",
        "status --wach": "unrecognized arguments: --wach",
        "demo --nodes x": "argument --nodes: 'x' is not a number from 2 to 20",
    }
    for ended, (line, says) in zip(run_each(*map(str.split, errors)), errors.items(), strict=True):
        command = line.split()[0]
        assert ended.returncode == 64
        assert ended.stderr.splitlines()[1] == f"multilock: {says} (see multilock {command} --help)"
        assert ended.stderr.startswith(f"usage: multilock {command} ")


@pytest.mark.parametrize("command", [["doctor"], ["doctor", "--json"], ["demo"], ["status"]])
def test_a_command_that_only_shows_something_works_without_rich(command: list[str], sqlite_url: str) -> None:
    ended = _without("rich", *command, "--url", sqlite_url)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout or command == ["status"]


def test_doctor_prints_the_sql_of_a_schema_and_asks_no_server(run: Run) -> None:
    ended = run("doctor", "--sql", "--url", "postgresql://nowhere.invalid/shop?schema=locks")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert 'CREATE SCHEMA "locks"' in ended.stdout
    assert '-- GRANT USAGE ON SCHEMA "locks" TO app' in ended.stdout
    ended = run("doctor", "--sql", "--url", "memory://")
    assert (ended.returncode, ended.stdout) == (64, "")
    assert "needs no SQL" in ended.stderr


def test_a_command_runs_under_a_lock_without_any_library(sqlite_url: str) -> None:
    ended = _without("rich", "run", "job", "--url", sqlite_url, "--", "echo", "ran")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "ran\n", "")


def test_an_import_error_of_multilock_itself_never_suggests_pip_install(sqlite_url: str) -> None:
    ended = _without("multilock.cli.signals", "run", "job", "--url", sqlite_url, "--", "true")
    assert ended.returncode == 70
    assert "pip install" not in ended.stderr
    assert "multilock.cli.signals" in ended.stderr


def test_the_version_is_that_of_the_library(run: Run) -> None:
    ended = run("--version")
    assert (ended.returncode, ended.stdout) == (0, f"multilock {multilock.__version__}\n")
    assert re.fullmatch(r"\d+\.\d+\.\d+", multilock.__version__)


def test_the_help_lists_the_exit_codes_and_no_types(run_each: RunEach) -> None:
    helps = {ended.args[0]: ended.stdout for ended in run_each(*([command, "--help"] for command in COMMANDS))}
    assert all(code in helps[command] for command in ("run", "elect") for code in ("76", "69", "64"))
    assert not any("<" in shown for shown in helps.values())


LOADED = """
import sys
from multilock.cli import main
code = main()
print(*sorted({name.partition(".")[0] for name in sys.modules}))
sys.exit(code)
"""


def test_a_cron_job_imports_neither_a_library_nor_asyncio(sqlite_url: str) -> None:
    command = [sys.executable, "-c", LOADED, "run", "job", "--url", sqlite_url, "--", "true"]
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    loaded = set(ended.stdout.split())
    assert "multilock_sqlite" in loaded
    assert not loaded & {"typer", "click", "rich", "pydantic", "asyncio", "redis"}


LAST_LINE = """
import logging
import sys
import time
from multilock.cli.exits import leave, show_warnings
from multilock.log_thread import logger

logging.getLogger("multilock").addFilter(lambda record: time.sleep(0.2) or True)
show_warnings()
logger.warning("why")
{end}(76)
"""


@pytest.mark.parametrize("end", ["sys.exit", "leave"])
def test_the_last_log_lines_are_written_before_the_end(end: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", LAST_LINE.format(end=end)], env=environment(), capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stderr) == (76, "multilock: why\n")
