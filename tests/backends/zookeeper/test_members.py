"""The findings of diagnose() about the members of an ensemble, without a server."""

from __future__ import annotations

import pytest

from multilock_zookeeper.diagnosis import _about_members


@pytest.mark.parametrize(
    ("voters", "said"), [(4, "tolerate 1 failure, the same as 3"), (6, "tolerate 2 failures, the same as 5")]
)
def test_diagnose_reports_how_many_failures_an_even_number_of_servers_tolerates(voters: int, said: str) -> None:
    lines = [f"server.{number}=host{number}:2888:3888:participant" for number in range(1, voters + 1)]
    (finding,) = _about_members("\n".join(lines))
    assert finding.message.endswith(said)


def test_an_odd_number_of_servers_is_not_a_finding() -> None:
    assert not list(_about_members("\n".join(f"server.{n}=h:1:2:participant" for n in range(1, 4))))
