"""The counter of sentences that a reader stumbles over."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.architecture.sentences import LONGEST, habits, texts


@pytest.mark.parametrize(
    "sentence",
    [
        "What the server said last.",
        "It belongs to the client, who must release it.",
        "The lease is no more.",
        "None: the key is missing.",
        "The holder renews his lease.",
        " ".join(["word"] * (LONGEST + 1)),
    ],
)
def test_the_check_finds_each_habit(sentence: str) -> None:
    assert len(list(habits(sentence))) == 1


def test_the_check_accepts_plain_sentences() -> None:
    assert list(habits("Returns None if the key is missing. What if the reply is lost? The waiter asks again.")) == []


def test_the_check_reads_docstrings_comments_and_paragraphs(tmp_path: Path) -> None:
    code, page = tmp_path / "a.py", tmp_path / "a.md"
    code.write_text('"""First.\n\nSecond."""\n\n# Third\n# continues.\nx = 1  # Fourth.\n')
    page.write_text("# Title\n\nOne paragraph\nof two lines.\n\n```\nno text\n```\n\n- An item\n")
    assert [text for _, text in texts(code)] == ["First.", "Second.", "Third continues.", "Fourth."]
    assert [text for _, text in texts(page)] == ["Title", "One paragraph of two lines.", "An item"]
