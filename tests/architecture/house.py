"""``python -m tests.architecture.house``: the numbers that describe the layout of the project.

Each number has its definition in a docstring here. `test_house.py` tests those that have a ceiling.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.architecture.imports import ROOT, imports_of, module_name, sources

__all__ = [
    "circles",
    "documented",
    "equal_lines_of_the_faces",
    "foreign_private_accesses",
    "names_of_classes_used_twice",
]

PRODUCT = ("multilock", "backends")
OF_TUPLES = {"_asdict", "_fields", "_make", "_replace"}
FACES = (
    ("multilock/client.py", "multilock/aio/client.py"),
    ("multilock/lock.py", "multilock/aio/lock.py"),
    ("multilock/election.py", "multilock/aio/election.py"),
    ("multilock/shared.py", "multilock/aio/shared.py"),
    ("multilock/lock_all.py", "multilock/aio/lock_all.py"),
)


def trees(*folders: str) -> Iterator[tuple[Path, ast.Module]]:
    for path in sources(*folders):
        yield path, ast.parse(path.read_text(encoding="utf-8"), str(path))


def names_of_classes_used_twice() -> dict[str, int]:
    """Return each name that two or more classes of the product have, and the number of these classes."""
    found: Counter[str] = Counter()
    for _, tree in trees(*PRODUCT):
        found.update(node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    return {name: count for name, count in found.items() if count > 1}


def foreign_private_accesses(*folders: str) -> list[str]:
    """Return where code reads ``other._name``, if ``other`` is not ``self`` or ``cls`` and the file defines no
    ``_name`` itself. The methods of named tuples are public."""
    found = []
    for path, tree in trees(*folders):
        own = set(_defined(tree))
        for node in ast.walk(tree):
            if (
                not isinstance(node, ast.Attribute)
                or not re.match(r"_[a-z]", node.attr)
                or node.attr in own | OF_TUPLES
            ):
                continue
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    return found


def _defined(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
                    if target.value.id == "self":
                        yield target.attr
                elif isinstance(target, ast.Name):
                    yield target.id


def circles(*folders: str, types: bool = False) -> list[set[str]]:
    """Return the groups of files that import each other in a circle. With ``types``, imports that only annotations need
    count too."""
    names = {module_name(path): path for path in sources(*folders)}
    graph = {name: imports_of(path, everywhere=types, types=types) & set(names) for name, path in names.items()}
    reached = {name: _reached(graph, name) for name in graph}
    groups: dict[frozenset[str], set[str]] = defaultdict(set)
    for name in graph:
        circle = {other for other in reached[name] if name in reached[other]}
        if circle:
            groups[frozenset(circle)].add(name)
    return list(groups.values())


def _reached(graph: dict[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    rest = list(graph[start])
    while rest:
        if (name := rest.pop()) not in found:
            found.add(name)
            rest += graph[name]
    return found


def equal_lines_of_the_faces() -> dict[str, tuple[int, int]]:
    """Return two numbers for each file of the blocking API: how many of its lines the file of the asyncio API repeats,
    apart from ``async``, and how many lines it has in all."""
    found = {}
    for blocking, asynchronous in FACES:
        ours, theirs = (_plain_lines(ROOT / name) for name in (blocking, asynchronous))
        blocks = difflib.SequenceMatcher(None, ours, theirs, autojunk=False).get_matching_blocks()
        found[blocking] = sum(block.size for block in blocks), len(ours)
    return found


def _plain_lines(path: Path) -> list[str]:
    text = re.sub(r"\b(?:async|await) |\bAsync(?=[A-Z])|\b__a(?=enter|exit)", "", path.read_text(encoding="utf-8"))
    return [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith(("#", '"""'))]


def documented(*folders: str) -> tuple[int, int]:
    """Return how many public classes, functions and methods have a docstring, and how many there are.

    Tests of the conformance suites are not counted. A method that overrides a method with a docstring is not counted
    either, because `help` shows the inherited docstring.
    """
    all_of_them = list(trees(*folders))
    classes = {node.name: node for _, tree in all_of_them for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    found = [ast.get_docstring(node) is not None for _, tree in all_of_them for node in _public(tree, classes)]
    return sum(found), len(found)


def _public(
    tree: ast.AST, classes: dict[str, ast.ClassDef]
) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    said = {name for base in _bases(tree, classes) for name in _documented_methods(base)}
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        if node.name.startswith(("_", "test_")) or (ast.get_docstring(node) is None and node.name in said):
            continue
        yield node
        if isinstance(node, ast.ClassDef):
            yield from _public(node, classes)


def _bases(node: ast.AST, classes: dict[str, ast.ClassDef]) -> Iterator[ast.ClassDef]:
    """Yield the classes from which the class ``node`` inherits, as far as they are in ``classes``."""
    for base in node.bases if isinstance(node, ast.ClassDef) else []:
        if (known := classes.get(ast.unparse(base).partition("[")[0])) and known is not node:
            yield known
            yield from _bases(known, classes)


def _documented_methods(node: ast.ClassDef) -> Iterator[str]:
    for method in node.body:
        if isinstance(method, (ast.FunctionDef, ast.AsyncFunctionDef)) and ast.get_docstring(method) is not None:
            yield method.name


def lines(*folders: str, suffix: str = "*.py") -> tuple[int, int]:
    """Return how many files these folders contain, and how many lines these files have."""
    files = [path for folder in folders for path in (ROOT / folder).rglob(suffix)]
    return len(files), sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)


def main() -> None:
    for name, folders, suffix in (
        ("product", PRODUCT, "*.py"),
        ("tests", ("tests",), "*.py"),
        ("seeded defects", ("tests/mutants",), "*.txt"),
        ("docs", ("docs",), "*.md"),
    ):
        files, count = lines(*folders, suffix=suffix)
        print(f"{name}: {count} lines in {files} files")
    twice = names_of_classes_used_twice()
    print(f"class names used twice or more: {len(twice)}: {', '.join(sorted(twice))}")
    for folder in ("multilock/kernel", "multilock", "backends"):
        count = len(foreign_private_accesses(folder))
        print(f"foreign private accesses in 100 lines of {folder}: {100 * count / lines(folder)[1]:.1f} ({count})")
    for types in (False, True):
        for circle in circles("multilock", types=types):
            why = "with annotations, a" if types else "a"
            print(f"{why} circle of {len(circle)} files: {', '.join(sorted(circle))}")
    for name, (equal, of) in equal_lines_of_the_faces().items():
        print(f"lines of {name} that its asyncio twin repeats: {equal} of {of}")
    having, all_of_them = documented("multilock")
    print(f"public names of multilock with a docstring: {100 * having / all_of_them:.0f} % ({having} of {all_of_them})")


if __name__ == "__main__":
    main()
