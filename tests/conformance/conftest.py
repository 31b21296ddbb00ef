"""Leave out the tests that `chosen` names, unless ``MULTILOCK_CONFORMANCE=all``."""

from __future__ import annotations

import pytest

from tests.conformance.chosen import ALL, question_of, why_left_out


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if ALL:
        return
    questions = [question_of(item) for item in items]
    left = {item for item, it in zip(items, questions, strict=True) if it and why_left_out(it)}
    if left:
        config.hook.pytest_deselected(items=list(left))
        items[:] = [item for item in items if item not in left]
