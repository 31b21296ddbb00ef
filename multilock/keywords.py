"""`ConnectOptions`: the keywords of `connect` and `connect_async`, for type checkers."""

from __future__ import annotations

from typing import TypedDict

__all__ = ["ConnectOptions"]


class ConnectOptions(TypedDict, total=False):
    """The options of multilock's own backends, as keywords of `connect`. Each backend's page says which of them it has.

    A type checker refuses any other keyword, so a misspelt keyword is found before the program runs. The options of a
    third party's backend go through the URL, a mapping, or ``Client(backend, …)``. None means "not given", except for
    ``outage_timeout`` and ``request_timeout``.
    """

    ttl: float | None
    prefix: str | None
    identity: str | None
    outage_timeout: float | None
    request_timeout: float | None
    username: str | None
    password: str | None
    token: str | None
    ca: str | None
    cert: str | None
    key: str | None
    tls: bool | None
    tls_verify: bool | None
    db: int | str | None
    replicas: int | None
    replicas_on_renew: bool | None
    sentinel_username: str | None
    sentinel_password: str | None
    restart_guard: float | None
    lock_delay: float | None
    node_style: str | None
    schema: str | None
    listen: str | None
    connections: int | None
