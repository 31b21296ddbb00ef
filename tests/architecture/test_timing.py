"""Each number of seconds that several modules share is defined once, in `multilock.timing`."""

from __future__ import annotations

import re
from pathlib import Path

from multilock import timing
from tests.architecture.imports import ROOT, sources

HOME = Path(timing.__file__)
OTHERS = [path for path in sources("multilock", "backends") if path != HOME and "testing" not in path.parts]
DEFINED = re.compile(rf"[^=(]*\b_?(?:{'|'.join(timing.__all__)}|TOMBSTONE|LIVENESS)\b[^=(]*= \(?\d")
# Matches periods of renewals and heartbeats, doubled pauses, and the shares of drift, callback and jitter.
WRITTEN = re.compile(
    r"\b(ttl|valid_for|wait) */ *3\b|liveness\(.*?\) */ *3\b|min\(failures, 10|\b0\.89\b|uniform\(0\.9\b"
    r"|\b1\.1 *\* *(wait|liveness|heartbeat|POLL)"
)
# Matches milliseconds in Lua; 1000 and 1000000 convert units.
MILLISECONDS = re.compile(r"\b(?!1000(000)?\b)\d+000\b")


def test_a_shared_number_of_seconds_is_defined_once() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line}"
        for path in OTHERS
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if DEFINED.match(line) or WRITTEN.search(line.partition("#")[0])
    ]
    assert found == []


def test_the_scripts_of_redis_receive_their_numbers_of_seconds() -> None:
    scripts = (ROOT / "backends" / "multilock_redis" / "scripts").glob("*.lua")
    code = {path.name: re.sub(r"--.*", "", path.read_text(encoding="utf-8")) for path in scripts}
    assert [name for name, text in code.items() if MILLISECONDS.search(text)] == []
