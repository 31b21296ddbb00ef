"""``python -m tests.architecture.sentences``: counts sentences that a reader stumbles over. Part of ``make lint``.

This program reads docstrings, comments and pages, and looks for a few habits that make a sentence hard to read. A hit
may still be a good sentence. So only the number of hits is limited, and the limit may only be lowered. With ``--list``
it prints each hit. With ``--sample SEED`` it prints 60 random sentences instead, to be judged by a reader who does not
know the project.
"""

from __future__ import annotations

import ast
import io
import random
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

__all__ = ["CEILING", "habits", "main"]

ROOT = Path(__file__).parents[2]
FOLDERS = ("multilock", "backends", "tests", "docs")
CEILING = 8  # hits in the whole project; lower it whenever there are fewer
LONGEST = 35  # words in a sentence
SAMPLE = 60

HABITS = {
    "a relative clause without its noun": re.compile(r"(?:^|[;:,] )(?:who|whoever|whom)\b(?!.*\?$)", re.I),
    "a text that begins with what, which or who": re.compile(r"^(?:what|which|who|whose|whoever)\b(?!.*\?$)", re.I),
    "no more, for ever, but for": re.compile(r"\b(?:(?:is|are|can) no more(?! than)|for ever|but for)\b", re.I),
    "he or his for a process": re.compile(r"\b(?:he|his|him|himself)\b", re.I),
    "must, said as 'is to'": re.compile(r"\b(?:is|are|was|were) to (?!be found|say|us)[a-z]+", re.I),
    "None: or True: instead of 'Returns None if'": re.compile(r"(?:^|\. )`*(?:None|True|False)`*: "),
    "two colons": re.compile(r": .*[a-z`)]: [a-z`]"),
}
END = re.compile(r"(?<=[.!?])(?:\*\*)?\s+(?=[A-Z`(\"'])")


def habits(text: str) -> Iterator[tuple[str, str]]:
    """Yield the habit and the sentence of each hit in ``text``."""
    for sentence in END.split(" ".join(text.split())):
        words = len(sentence.split())
        if words < 2:
            continue
        if words > LONGEST:
            yield f"more than {LONGEST} words", sentence
        for habit, pattern in HABITS.items():
            if pattern.search(sentence):
                yield habit, sentence


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield each docstring, comment or paragraph of a file with its line."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        yield from _docstrings(text)
        yield from _comments(text)
    else:
        yield from _paragraphs(text)


def _docstrings(text: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            for part in re.split(r"\n\n|\n(?=\* )", ast.get_docstring(node) or ""):
                if not part.startswith("    "):  # an indented part is an example or a table
                    yield getattr(node, "lineno", 1), part


def _comments(text: str) -> Iterator[tuple[int, str]]:
    """Yield the comments that are on lines of their own. Adjacent lines are one text."""
    block: list[str] = []
    first = last = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT or token.string.startswith("# type:"):
            continue
        alone = token.line.lstrip().startswith("#")
        if block and not (alone and token.start[0] == last + 1):
            yield first, " ".join(block)
            block = []
        first = first if block else token.start[0]
        last = token.start[0] if alone else 0  # a comment behind code ends here: the next line begins another text
        block.append(token.string.lstrip("#: "))
    yield first, " ".join(block)


def _paragraphs(text: str) -> Iterator[tuple[int, str]]:
    block: list[str] = []
    code = False
    for number, line in enumerate([*text.splitlines(), ""], 1):
        code ^= line.lstrip().startswith("```")
        starts = re.match(r"\s*(?:[-*]|\d+\.|#+|\|) ", line)
        if block and (starts or not line.strip() or code):
            yield number - len(block), re.sub(r"\]\([^)]*\)", "]", " ".join(block))
            block = []
        if line.strip() and not code and not line.lstrip().startswith(("```", "<!--", "|")):
            block.append(re.sub(r"^\s*(?:[-*]|\d+\.|#+) ", "", line))


def files() -> Iterator[Path]:
    for folder in FOLDERS:
        for suffix in ("*.py", "*.md"):
            yield from (path for path in sorted((ROOT / folder).rglob(suffix)) if "comparison" not in path.parts)


def sample(seed: str) -> list[str]:
    """Return sentences of at least five words, drawn without regard to habits."""
    found = [
        f"{path.relative_to(ROOT)}:{line}: {sentence}"
        for path in files()
        for line, text in texts(path)
        for sentence in END.split(" ".join(text.split()))
        if len(sentence.split()) >= 5
    ]
    return random.Random(seed).sample(found, SAMPLE)


def main(arguments: list[str]) -> int:
    if "--sample" in arguments:
        print("\n".join(sample(arguments[-1])))
        return 0
    found: Counter[str] = Counter()
    for path in files():
        for line, text in texts(path):
            for habit, sentence in habits(text):
                found[habit] += 1
                if "--list" in arguments:
                    print(f"{path.relative_to(ROOT)}:{line}: {habit}: {sentence[:120]}")
    for habit, count in found.most_common():
        print(f"{count:5} {habit}")
    print(f"{found.total():5} in all, at most {CEILING}")
    return int(found.total() > CEILING)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
