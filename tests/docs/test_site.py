"""`make docs` builds the site without a warning, and its pages fit a phone and load nothing from a network."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import chromium

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # the first test builds the site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site as `make docs` does. A link to a missing page or heading is an error."""
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "docs", str(target)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target


def test_wide_pages_fit_a_phone_and_load_nothing_from_the_network(site: Path) -> None:
    names = ["index", "choosing", "reference", "api", "cli", "recipes", "performance", "backends/redis", "search"]
    pages = [site / f"{name}.html" for name in names]  # pages with wide tables, code and signatures
    wrong = []
    with chromium.running() as browser:
        for page in pages:
            opened = browser.open(page.as_uri(), 400, "light")
            far = [address for address in opened.requests if not address.startswith(("file:", "data:"))]
            wide = browser.run("document.documentElement.scrollWidth")
            if far or opened.errors or wide > 400:
                wrong.append(f"{page.relative_to(site)}: {wide} wide, {opened.errors}, {far}")
    assert wrong == []


def test_the_list_for_programs_names_existing_pages(site: Path) -> None:
    lines = (site / "llms.txt").read_text(encoding="utf-8").splitlines()
    named = [line.partition("](")[2].rstrip(")") for line in lines if line.startswith("- ")]
    assert "_sources/quickstart.md.txt" in named
    assert [name for name in named if not (site / name).exists()] == []
