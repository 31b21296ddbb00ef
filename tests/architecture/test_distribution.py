"""The wheel has every file of every package. The table of backends (`multilock.registry.OURS`) agrees with the entry
points, the extras and the folders."""

from __future__ import annotations

import configparser
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

from multilock.registry import OURS
from tests.architecture.imports import ROOT


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unpack a source distribution of this tree, and build a wheel from it."""
    target = tmp_path_factory.mktemp("dist")
    build("sdist", ROOT, target)
    [archive] = target.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(target, filter="data")
    build("wheel", source_of(target), target)
    return target


def build(what: str, source: Path, target: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", what, "-d", str(target)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def source_of(built: Path) -> Path:
    [folder] = [path for path in built.iterdir() if path.is_dir()]
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> zipfile.ZipFile:
    [path] = built.glob("*.whl")
    return zipfile.ZipFile(path)


def sources(folder: str) -> set[str]:
    """Return every file of a package by its path relative to the parent of ``folder``."""
    root = ROOT / folder
    return {
        str(path.relative_to(root.parent))
        for path in root.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_core_has_no_dependencies(project: dict[str, Any]) -> None:
    assert project["project"]["dependencies"] == []


def test_the_table_of_schemes_and_the_entry_points_agree(project: dict[str, Any]) -> None:
    points = project["project"]["entry-points"]["multilock.backends"]
    assert points == {scheme: f"{ours.module}:open_backend" for scheme, ours in OURS.items()}


def test_every_extra_of_the_table_is_declared_and_is_part_of_the_extra_all(project: dict[str, Any]) -> None:
    extras = project["project"]["optional-dependencies"]
    needed = {ours.extra for ours in OURS.values() if ours.extra}
    assert needed <= set(extras)
    assert all(extra in extras["all"][0] for extra in needed | {"cli", "compare"})


def test_the_wheel_has_every_file_of_every_package(project: dict[str, Any], wheel: zipfile.ZipFile) -> None:
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert set(packages) == {"multilock", *(f"backends/{ours.module}" for ours in OURS.values())}
    files = {name.partition(".data/data/")[2] or name for name in wheel.namelist() if ".dist-info/" not in name}
    assert files == set().union(*(sources(package) for package in packages), sources("share"))
    assert "multilock/py.typed" in files
    assert any(name.endswith(".lua") for name in files)


def test_the_wheel_declares_the_command_the_backends_and_the_pytest_plugin(wheel: zipfile.ZipFile) -> None:
    [path] = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    points = configparser.ConfigParser()
    points.read_string(wheel.read(path).decode())
    assert dict(points["console_scripts"]) == {"multilock": "multilock.cli:main"}
    assert dict(points["pytest11"]) == {"multilock": "multilock.testing.plugin"}
    assert dict(points["pyinstaller40"]) == {"hook-dirs": "multilock.contrib.pyinstaller:hook_dirs"}
    assert set(points["multilock.backends"]) == set(OURS)


def test_the_source_distribution_has_the_sources_of_the_wheel_and_the_tests(built: Path) -> None:
    source = source_of(built)
    names = {str(path.relative_to(source)) for path in source.rglob("*")}
    assert {"pyproject.toml", "LICENSE", "README.md", "Makefile", "multilock/__init__.py", "tests/conftest.py"} <= names
    assert {f"backends/{ours.module}/__init__.py" for ours in OURS.values()} <= names
    assert not [name for name in names if name.startswith((".venv", ".state", "dist"))]


def test_no_folder_has_the_name_of_a_client_library() -> None:
    libraries = {ours.library for ours in OURS.values() if ours.library}
    assert not [path for path in ROOT.iterdir() if path.name in libraries]
    assert not [path for path in (ROOT / "backends").iterdir() if path.name in libraries]
