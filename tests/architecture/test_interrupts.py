"""A backend acquires an internal lock only in a way that an interrupt cannot break."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.architecture.imports import module_name, sources

BROKEN = [
    "taken = self._lock.acquire(timeout=1.0)",
    "_opening.acquire()",
    "take = self._lock.acquire",
    "room = self._room.get(timeout=within)",
    "room = self._room.get(True, within)",
]
SOUND = [
    "with self._lock:\n    pass",
    "with system.Taking(self._lock, within, refusal):\n    pass",
    "system.take(self._lock.acquire, within, taken)",
    "system.take(self._room.get, within, room)",
    "outcome = result.get(timeout=within)",
    "lease = self._leases.get(name)",
]


def breakable(tree: ast.AST) -> list[int]:
    """Return the lines that acquire a lock, or take a shared item from a queue, without `take` or `Taking`.

    An interrupt between the acquire and the next ``try`` leaves the lock taken forever. A queue in a local variable
    does not count, because it belongs to one call and its items need not be given back.
    """
    given = {node.args[0] for node in ast.walk(tree) if isinstance(node, ast.Call) and _is_take(node.func)}
    names = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node not in given)
    lines = [node.lineno for node in names if node.attr == "acquire"]
    return lines + [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Call) and _is_get(node)]


def _is_take(function: ast.expr) -> bool:
    return isinstance(function, ast.Attribute) and function.attr == "take" and ast.unparse(function.value) == "system"


def _is_get(call: ast.Call) -> bool:
    function = call.func
    if not (isinstance(function, ast.Attribute) and function.attr == "get"):
        return False
    if not isinstance(function.value, ast.Attribute):
        return False
    waits = any(isinstance(argument, ast.Constant) and argument.value is True for argument in call.args)
    return waits or any(keyword.arg in ("block", "timeout") for keyword in call.keywords)


@pytest.mark.parametrize("text", BROKEN)
def test_the_check_finds_a_lock_that_an_interrupt_would_leave_taken(text: str) -> None:
    assert breakable(ast.parse(text)) == [1]


@pytest.mark.parametrize("text", SOUND)
def test_the_check_accepts_a_lock_that_an_interrupt_cannot_leave_taken(text: str) -> None:
    assert breakable(ast.parse(text)) == []


@pytest.mark.parametrize("path", sources("backends"), ids=module_name)
def test_an_interrupt_cannot_leave_a_lock_of_a_backend_taken(path: Path) -> None:
    assert breakable(ast.parse(path.read_text(encoding="utf-8"))) == []
