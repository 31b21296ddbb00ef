"""The page for authors of backends names every method with its arguments, and no other methods."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from multilock import backend

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "writing-a-backend.md").read_text(encoding="utf-8")
EXAMPLE = DOCS / "examples" / "third_party_backend"
CODES = re.findall(r"`([^`\n]+)`", PAGE)


def members(protocol: type) -> dict[str, str]:
    """Return each member as the page writes it: a property by its name, a method with its arguments."""
    shown = {}
    for name, its in vars(protocol).items():
        if not name.startswith("_"):
            arguments = list(inspect.signature(its).parameters)[1:] if callable(its) else None
            shown[name] = name if arguments is None else f"{name}({', '.join(arguments)})"
    return shown


@pytest.mark.parametrize(
    "protocol", [backend.Backend, backend.Rests, backend.AttemptsMany, backend.OpensChannels, backend.FindsTheDead]
)
def test_the_page_names_every_method_with_its_arguments(protocol: type) -> None:
    assert [each for each in members(protocol).values() if each not in CODES] == []


def test_the_page_names_every_method_of_a_channel() -> None:
    assert [name for name in members(backend.Channel) if name not in CODES] == []


def test_every_method_in_the_table_exists() -> None:
    rows = re.findall(r"^\| (`.+?) \|", PAGE.partition("| `Backend` | must |")[2].partition("\n\n")[0], re.MULTILINE)
    assert set(re.findall(r"`([^`]+)`", " ".join(rows))) == set(members(backend.Backend).values())


def test_the_page_names_the_version_that_is_checked() -> None:
    assert f"now `{backend.SPI_VERSION}`" in PAGE


@pytest.mark.parametrize("values", [backend.Capabilities, backend.Granted, backend.Busy])
def test_the_page_has_a_formula_for_every_field(values: Any) -> None:
    rows = re.findall(r"^\| (.+?) \|", PAGE.partition(f"### {values.__name__}\n")[2].partition("\n#")[0], re.MULTILINE)
    fields = values._fields if hasattr(values, "_fields") else [field.name for field in dataclasses.fields(values)]
    assert re.findall(r"`(\w+)`", " ".join(rows)) == list(fields)


def test_the_page_names_every_report_of_a_backend() -> None:
    names = [name for name in members(backend.Notices) if name not in ("client", "now")]
    assert [name for name in names if not re.search(rf"`{name}\(", PAGE)] == []


@pytest.mark.parametrize("file", ["multilock_directory/__init__.py", "tests/test_conformance.py", "pyproject.toml"])
def test_the_page_contains_the_whole_example(file: str) -> None:
    assert (EXAMPLE / file).read_text(encoding="utf-8") in PAGE
