"""The example backend of docs/writing-a-backend.md can be built and installed, and multilock finds it by its entry
point."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "third_party_backend"

# Tests that take seconds. `make conformance` runs all suites, which takes minutes.
QUICK = ["tests/test_conformance.py::TestBackendConformance"]
ALL = os.environ.get("MULTILOCK_CONFORMANCE") == "all"
CHOSEN, AT_LEAST = ([], 400) if ALL else (QUICK, 18)
# Packages that the tests do not need.
PLUGINS = [f"no:{name}" for name in ("randomly", "asyncio", "hypothesispytest", "xdist")]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the interpreter of a new environment with the backend's wheel, multilock and pytest."""
    folder = tmp_path_factory.mktemp("third_party")
    source = folder / "source"
    shutil.copytree(EXAMPLE, source)
    call(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder / "dist", at=source)
    call(sys.executable, "-m", "venv", "--without-pip", folder / "venv", at=folder)
    python = folder / "venv" / "bin" / "python"
    [wheel] = (folder / "dist").glob("*.whl")
    call(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, at=folder)
    # multilock and pytest come from the environment that runs this test, so nothing is downloaded.
    [site] = folder.glob("venv/lib/python*/site-packages")
    (site / "ours.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    return python


def call(*command: object, at: Path) -> str:
    done = subprocess.run([str(each) for each in command], cwd=at, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(1200 if ALL else 300)
def test_the_example_backend_passes_the_public_suite_when_it_is_installed(python: Path, tmp_path: Path) -> None:
    # The tests run in another folder, from which only the installed package can be imported.
    shutil.copytree(EXAMPLE / "tests", tmp_path / "tests")
    told = call(python, "-m", "pytest", "-q", *(f"-p{name}" for name in PLUGINS), *CHOSEN, at=tmp_path)
    assert int(told.split(" passed")[0].split()[-1]) >= AT_LEAST
