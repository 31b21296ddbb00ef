"""Forks after use."""

from __future__ import annotations

from multilock.testing import Helper
from tests.servers_zookeeper import ZooKeeperServer


def answers(function: str, url: str) -> dict[str, str]:
    """Run the helper and return its lines by their first word."""
    with Helper(f"tests.backends.zookeeper.children:{function}", url) as helper:
        assert helper.wait(50) == 0, helper.errors
        return {word: rest for word, _, rest in (line.partition(" ") for line in helper.lines)}


def test_children_forked_later_have_their_own_locks_and_the_parent_keeps_its_locks(server: ZooKeeperServer) -> None:
    said = answers("fork_after_use", server.url)
    assert said["children"] == "[0, 0, 0]"
    assert said["parent"] == "True"
    assert said["notice"] == "True"
    assert "done" in said


def test_a_kazoo_client_object_is_replaced_in_a_forked_child(server: ZooKeeperServer) -> None:
    said = answers("fork_with_a_client_handed_over", server.url)
    assert said["children"] == "[0]"
    assert said["parent"] == "True"
