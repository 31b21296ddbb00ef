"""What holds for every command: help that fits a screen, and an honest word where typer is missing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.cli.conftest import Run, environment

COMMANDS = ["run", "elect", "status", "force-release", "doctor", "demo"]


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits_a_screen_of_80_by_24(run: Run, command: str) -> None:
    ended = run(*filter(None, [command]), "--help")
    lines = ended.stdout.rstrip().splitlines()
    assert ended.returncode == 0
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80


def test_the_help_names_every_command(run: Run) -> None:
    shown = run("--help").stdout
    assert all(command in shown for command in COMMANDS)


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


def _without(missing: str) -> subprocess.CompletedProcess[str]:
    program = WITHOUT.format(missing=missing)
    return subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_a_missing_library_is_said_in_one_line_with_the_install_line(missing: str) -> None:
    ended = _without(missing)
    assert ended.returncode == 64
    assert ended.stderr == "multilock: the command line needs typer and rich: pip install 'multilock[cli]'\n"


def test_a_missing_module_of_ours_never_reads_pip_install() -> None:
    ended = _without("multilock.cli.signals")
    assert "pip install" not in ended.stderr
    assert "multilock.cli.signals" in ended.stderr
