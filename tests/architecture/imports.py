"""Find the imports between modules in their source. Imports inside functions count, but imports that only type checkers
execute do not."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

__all__ = ["ROOT", "imports_of", "module_name", "sources"]

ROOT = Path(__file__).parents[2]


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def module_name(path: Path) -> str:
    """Return the module of a file: ``multilock/aio/lock.py`` → ``multilock.aio.lock``. The folder ``backends`` itself
    is on the path."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[1:] if parts[0] == "backends" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path, *, everywhere: bool = True, types: bool = False) -> set[str]:
    """Return the modules that this file imports when it runs. With ``everywhere=False``, leave out imports inside
    functions. With ``types``, add imports that only annotations need."""
    return {name for node in _statements(_tree(path), everywhere, types) for name in _modules(node)}


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def _statements(node: ast.AST, everywhere: bool, types: bool) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not types and isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        if not everywhere and isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        yield child
        yield from _statements(child, everywhere, types)


def _modules(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        assert node.module
        # `from multilock import lease` imports a module, but `from multilock import now` imports a name from one.
        for alias in node.names:
            inner = ROOT / (node.module.replace(".", "/")) / f"{alias.name}.py"
            yield f"{node.module}.{alias.name}" if inner.exists() else node.module
