"""SQLite in the simulation: the real library, with a new file for each run."""

from __future__ import annotations

import os
import shutil
import tempfile
from typing import TYPE_CHECKING, Any

import multilock_sqlite
from tests.simulation.server import PREFIX, Group, Server, Simulated

if TYPE_CHECKING:
    from tests.simulation.world import World

__all__ = ["SIMULATED"]

MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None  # a file there needs no disk


class Folder(Group):
    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.path = tempfile.mkdtemp(prefix="simulation-", dir=MEMORY)

    def end(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


class NoServer(Server):
    group = Folder


def _open(world: World, ttl: float) -> Any:
    assert isinstance(world.group, Folder)
    return multilock_sqlite.open_backend(f"sqlite:///{world.group.path}/locks", {"prefix": PREFIX})


SIMULATED = {"sqlite": Simulated(_open, NoServer)}
