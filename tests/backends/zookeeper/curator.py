"""The real Curator, in a separate process."""

from __future__ import annotations

import subprocess
from concurrent.futures import Future
from pathlib import Path

from multilock.testing.conformance.faces import background
from tests.servers_zookeeper import ZooKeeperServer

__all__ = ["Curator"]


class Curator:
    """Curator's locks of one path: a "mutex" (InterProcessMutex), and the "read" and the "write" lock of an
    InterProcessReadWriteLock."""

    def __init__(self, server: ZooKeeperServer, path: str) -> None:
        jars = "/usr/share/java/curator-recipes.jar:/usr/share/java/slf4j-nop.jar"
        program = Path(__file__).parent / "Contender.java"
        self._process = subprocess.Popen(
            ["java", "-Xmx128m", "-XX:TieredStopAtLevel=1", "-cp", jars, str(program), server.endpoint, path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert background(self._line).result(30) == "ready"

    def tell(self, word: str, lock: str = "mutex") -> Future[str]:
        """Send a command, and return its answer as a future."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word} {lock}\n")
        self._process.stdin.flush()
        return background(self._line)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()
