"""Every code block of the README and of docs/ runs, each in its own process and directory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.servers_postgresql import PostgresqlServer

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
WITHIN = 100.0  # seconds for one block; `multilock demo` takes about twenty

# Lines of shell blocks that are not run here, and the reason.
NOT_RUN = {
    "make demo": "CI runs it as a step of its own",
    "make test": "this test is a part of it",
    "make quick": "this test is a part of it",
    "make bench": "the benchmarks take minutes, and cannot pass or fail",
    "make mutants": "all seeded defects take most of an hour",
    "make conformance": "all suites take minutes, and test the product, not the docs",
    "make versions": "the command fetches servers, and takes some minutes",
    "pip install": "the command would fetch this project",
    "git clone": "the command would fetch this project",
}

# Blocks marked ``no-run`` after their language, and the reason.
NO_RUN = {
    "docs/comparing.md": "the adapter in it is the reader's own",
    "docs/graceful-shutdown.md": "the blocks are pieces of a FastAPI application and of a gunicorn configuration",
    "docs/backends/etcd.md": "the etcd cluster in it is the reader's own",
    "docs/backends/zookeeper.md": "the ensemble in it is the reader's own",
    "docs/backends/postgresql.md": "the servers in it are the reader's own",
    "docs/backends/redlock.md": "the three servers in it are the reader's own",
    "docs/backends/consul.md": "the block needs the reader's own token",
    "CONTRIBUTING.md": "its environment is that of `make quick`, and the tests that it starts run here too",
    "docs/writing-a-backend.md": "the block installs the reader's copy; tests/examples installs the example itself",
}

# Server addresses in the code blocks of the pages, each with the fixture that replaces it in these tests.
SERVERS = {
    "redis_url": re.compile(r"redis://(localhost|127\.0\.0\.1)(:6379)?(/0)?"),
    "postgresql_url": re.compile(r"postgresql://app@localhost/app"),
}
SHARED_FILE = "/var/tmp/locks.db"

FENCE = re.compile(
    r"^(?P<indent> *)```(?P<kind>\{[\w-]+\}|\w*)(?P<mark>[^\n]*)\n(?P<code>.*?)^(?P=indent)```",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    kind: str
    code: str
    mark: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks() -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in FENCE.finditer(text):
            indent = len(match["indent"])
            code = "".join(line[indent:] for line in match["code"].splitlines(keepends=True))
            found.append(
                Block(page, text.count("\n", 0, match.start()) + 1, match["kind"], code, match["mark"].strip())
            )
    return found


def of_kind(*kinds: str) -> list[Block]:
    return [block for block in blocks() if block.kind in kinds and block.mark != "no-run"]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Return environment variables, as on a machine with an installed and configured `multilock`."""
    (tmp_path / "multilock.toml").write_text('default = "docs"\n[profiles.docs]\nurl = "memory://docs"\n')
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MULTILOCK_")}
    return {**kept, "PATH": path, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


@pytest.fixture(scope="module")
def postgresql_url() -> Iterator[str]:
    with PostgresqlServer() as server:
        yield server.url


@pytest.fixture
def here(block: Block, tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """Return the code of the block with this machine's addresses."""
    code = block.code.replace(SHARED_FILE, f"{tmp_path}/locks.db")
    for fixture, its_address in SERVERS.items():
        if its_address.search(code):
            code = its_address.sub(request.getfixturevalue(fixture), code)
    return code


def run(command: list[str], folder: Path, environment: dict[str, str]) -> None:
    done = subprocess.run(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=WITHIN, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


@pytest.mark.timeout(2 * WITHIN)
@pytest.mark.parametrize("block", of_kind("python"), ids=str)
def test_a_python_block_runs(block: Block, here: str, tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "block.py").write_text(here, encoding="utf-8")
    run([sys.executable, "-W", "error", "block.py"], tmp_path, environment)


@pytest.mark.timeout(2 * WITHIN)
@pytest.mark.parametrize("block", of_kind("sh", "bash", "console"), ids=str)
def test_a_shell_block_runs(block: Block, here: str, tmp_path: Path, environment: dict[str, str]) -> None:
    lines = here.splitlines()
    if block.kind == "console":
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    script = "\n".join(line for line in lines if not line.startswith(tuple(NOT_RUN)))
    run(["bash", "-eu", "-c", script], tmp_path, environment)


@pytest.mark.parametrize("block", of_kind("toml"), ids=str)
def test_a_toml_block_is_valid(block: Block) -> None:
    tomllib.loads(block.code)


def test_every_block_names_its_language() -> None:
    # {…} are directives of the documentation site
    known = {"python", "sh", "bash", "console", "toml", "text", "sql", "{toctree}", "{eval-rst}"}
    assert [f"{block}: {block.kind!r}" for block in blocks() if block.kind not in known] == []


def test_every_block_that_is_not_run_has_a_reason() -> None:
    marked = {str(block.page.relative_to(ROOT)) for block in blocks() if block.mark}
    assert marked == set(NO_RUN)


def test_every_link_between_pages_leads_somewhere() -> None:
    broken = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", FENCE.sub("", page.read_text(encoding="utf-8"))):
            if "://" not in target and not (page.parent / target).exists():
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert broken == []
