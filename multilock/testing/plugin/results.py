"""Gather the results of the tests, in the process that reports them: the controller of xdist, or the only process."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from multilock.testing.plugin.matrix import AWAY, BAD, Cell, Matrix, MatrixColumn, row_of
from multilock.testing.plugin.sites import SITES, Site

__all__ = ["JSON", "PAGE", "Results"]

JSON, PAGE = "matrix.json", "matrix.html"
CLEAN_WITHIN = 5.0  # seconds that the clean-up of each backend may take at the end of the run
REQUEST_WITHIN = 2.0
DISK = 65_536  # bytes to write as a trial


class Results:
    """A second pytest plugin, only for the process that reports. ``run`` is the id of the run in each prefix."""

    def __init__(self, config: pytest.Config, run: str) -> None:
        self.config, self.run = config, run
        self.sites = config.stash[SITES]
        self.matrix = Matrix([MatrixColumn(site.label, site.shown) for site in self.sites.all])
        self._where: dict[str, tuple[str, int]] = {}  # node id -> row and column
        self._folder = self._open_folder()
        self._notes: list[str] = []
        self._written = ""

    def _open_folder(self) -> Path | None:
        """Make the folder before any test runs. Raises UsageError if the folder cannot be written."""
        given = self.config.getoption("multilock_report")
        if given is None or self.config.option.collectonly:
            return None
        folder = Path(self.config.invocation_params.dir, given)
        from multilock import ConfigurationError

        try:
            from multilock.testing.plugin import page  # noqa: F401
        except ConfigurationError as error:
            raise pytest.UsageError(f"--multilock-report: {error}") from None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name in (JSON, PAGE):
                trial = folder / f"{name}.part"
                trial.write_bytes(b"\n" * DISK)
                trial.unlink()
        except OSError as error:
            raise pytest.UsageError(f"--multilock-report: {folder} cannot be written ({error.strerror})") from None
        return folder

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tell a new xdist worker the id of the run."""
        node.workerinput["multilock_run"] = self.run

    def pytest_report_header(self) -> str | None:
        """Return the line that lists the backends."""
        if not (self.config.getoption("multilock_urls") or self.config.getini("multilock_urls")):
            return None
        return "multilock: " + ", ".join(f"{site.label} {site.shown}" for site in self.sites.all)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Store the result of a test."""
        told = getattr(report, "multilock", None)
        if told is not None:
            where = row_of(report.nodeid, self.sites.all[told["number"]].label), told["number"]
            self._where[report.nodeid] = where
            self._put(*where, report, told["why"], told["reason"])
        elif report.failed and (report.nodeid in self._where):  # the test's xdist worker crashed
            self.matrix.put(*self._where[report.nodeid], Cell("crashed", self.sites.scrub(str(report.longrepr))))

    def _put(self, row: str, column: int, report: pytest.TestReport, why: str, reason: str) -> None:
        before = self.matrix.cell(row, column)
        if report.when == "call":
            xfail = hasattr(report, "wasxfail")
            outcome = {"passed": "xpassed", "skipped": "xfailed"}.get(report.outcome) if xfail else report.outcome
            outcome = why if report.skipped and why else outcome
            self.matrix.put(row, column, Cell(outcome or report.outcome, reason, report.duration))
        elif report.failed:
            if before is None or report.when == "setup" or before.outcome not in BAD:
                self.matrix.put(row, column, Cell(why if why == AWAY else "error", reason))
        elif report.skipped:
            self.matrix.put(row, column, Cell(why or ("xfailed" if hasattr(report, "wasxfail") else "skipped"), reason))

    # ---- at the end

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Clean up, and write the report."""
        if exitstatus in (pytest.ExitCode.INTERRUPTED, pytest.ExitCode.INTERNAL_ERROR):
            self.matrix.partial = "interrupted" if exitstatus == pytest.ExitCode.INTERRUPTED else "an internal error"
        elif stopped := session.shouldfail or session.shouldstop:
            self.matrix.partial = str(stopped)
        self._notes += self._clean()
        if self._folder is not None and self.matrix.rows:
            self._write(self._folder)

    def _clean(self) -> Iterator[str]:
        """Remove what the run left at the servers, such as locks of killed processes. Yields a line for each
        failure."""
        for number, site in enumerate(self.sites.all):
            if site.isolated and self.matrix.used(number):
                yield from clean(site, self.sites.run_prefix)

    def _write(self, folder: Path) -> None:
        from multilock.testing.plugin.page import page

        data = {**self.matrix.data(), **_provenance()}
        try:
            text = json.dumps(data, indent=1, ensure_ascii=False) + "\n"
            # UTF-8 cannot encode a lone surrogate, which a test's output may contain: it becomes a JSON escape.
            (folder / JSON).write_bytes(text.encode(errors="backslashreplace"))
            (folder / PAGE).write_text(page(self.matrix, data), encoding="utf-8")
        except OSError as error:
            self._notes.append(f"{folder} could not be written: {error.strerror}")
        else:
            self._written = f"written to {folder / JSON} and {PAGE}"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the matrix and the notes."""
        from multilock.testing.plugin.terminal import tell

        tell(
            terminalreporter,
            self.matrix,
            [*self._notes, *([self._written] if self._written else [])],
            whole=self.config.getoption("multilock_compare"),
        )


def _provenance() -> dict[str, str]:
    import multilock

    return {
        "multilock": multilock.__version__,
        "pytest": pytest.__version__,
        "python": platform.python_version(),
        "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def clean(site: Site, prefix: str) -> Iterator[str]:
    """Force-release every lock with this prefix, within a few seconds. Yields a line for each failure."""
    import multilock

    until = multilock.now() + CLEAN_WITHIN
    try:
        with multilock.connect(site.url, prefix=prefix, request_timeout=REQUEST_WITHIN) as client:
            for info in list(client.inspect_all()):
                if multilock.now() > until:
                    yield f"{site.label}: some locks of this run are left under {prefix}, until their ttl is over"
                    return
                client.force_release(info.name)
    except multilock.ConfigurationError:  # every test has already reported the error
        return
    except multilock.MultilockError as error:
        yield f"{site.label}: locks left under {prefix} could not be removed ({type(error).__name__})"
