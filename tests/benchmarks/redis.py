"""``python -m tests.benchmarks.redis``: benchmarks of Redis, and figures that do not depend on the backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import redis

from tests.benchmarks import holding, importing, uncontended
from tests.benchmarks.report import publish, with_ratios
from tests.servers import RedisServer


def _versions() -> dict[str, str]:
    with RedisServer() as server, redis.Redis(port=server.port) as operator:
        running = operator.info("server")["redis_version"]
    return {
        "redis-py": version("redis"),
        "python-redis-lock": version("python-redis-lock"),
        "grelmicro": version("grelmicro"),
        "redis-server": running,
    }


def _uncontended() -> dict[str, Any]:
    return {
        f"{face}, {place}": with_ratios(measure(apart=place != ON_ONE), references)
        for place in (ON_ONE, ON_TWO)
        for face, measure, references in (
            ("blocking", uncontended.blocking_face, (uncontended.RAW, "redis.lock.Lock")),
            ("asyncio", uncontended.asyncio_face, (uncontended.RAW, "redis.asyncio.lock.Lock")),
        )
    }


ON_ONE, ON_TWO = "client and server on one core", "client and server on two cores"


def _held() -> dict[str, Any]:
    return {backend: asdict(held) for backend, held in holding.held_locks().items()}


def _import() -> dict[str, Any]:
    wall, cpu = importing.import_time()
    return {"ms": wall, "cpu ms": cpu, "third party": importing.third_party(), "slowest": importing.slowest()}


BENCHMARKS: Mapping[str, Callable[[], object]] = {
    "uncontended": _uncontended,
    "held locks": _held,
    "import": _import,
}

if __name__ == "__main__":
    publish("redis", _versions, BENCHMARKS)
