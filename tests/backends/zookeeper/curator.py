"""The real Curator, in a separate process."""

from __future__ import annotations

import atexit
import subprocess
import tempfile
from concurrent.futures import Future
from functools import cache
from pathlib import Path

from multilock.testing.conformance.faces import background
from tests.servers_zookeeper import ZooKeeperServer

__all__ = ["Curator"]


JARS = "/usr/share/java/curator-recipes.jar:/usr/share/java/slf4j-nop.jar"


@cache
def compiled() -> str:
    """Return a class path that includes our program, which is compiled only once."""
    folder = tempfile.TemporaryDirectory(prefix="multilock-curator-")
    atexit.register(folder.cleanup)
    program = Path(__file__).with_name("Contender.java")
    compiler = ["java", "-XX:TieredStopAtLevel=1", "-m", "jdk.compiler/com.sun.tools.javac.Main"]
    subprocess.run([*compiler, "-cp", JARS, "-d", folder.name, program], check=True, capture_output=True)
    return f"{folder.name}:{JARS}"


class Curator:
    """Curator's locks of one path: a "mutex" (InterProcessMutex), and the "read" and the "write" lock of an
    InterProcessReadWriteLock."""

    def __init__(self, server: ZooKeeperServer, path: str) -> None:
        self._process = subprocess.Popen(
            ["java", "-Xmx128m", "-XX:TieredStopAtLevel=1", "-cp", compiled(), "Contender", server.endpoint, path],
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
