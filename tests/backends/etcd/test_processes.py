"""Forks after the client was used, and client objects that are passed to connect()."""

from __future__ import annotations

from multilock.testing import Helper
from tests.servers_etcd import EtcdServer


def answers(function: str, url: str) -> dict[str, str]:
    """Run the helper and return its lines by their first word."""
    with Helper(f"tests.backends.etcd.children:{function}", url, env={"GRPC_VERBOSITY": "ERROR"}) as helper:
        assert helper.wait(50) == 0, helper.errors
        return {word: rest for word, _, rest in (line.partition(" ") for line in helper.lines)}


def test_children_forked_later_have_their_own_locks_and_the_parent_keeps_its_locks(server: EtcdServer) -> None:
    said = answers("fork_after_use", server.url)
    assert said["children"] == "[0, 0, 0]"
    assert said["parent"] == "True"
    assert said["notice"] == "True"
    assert "done" in said


def test_forks_during_requests_of_other_threads_never_hang(server: EtcdServer) -> None:
    said = answers("fork_under_traffic", server.url)
    assert set(said["children"]) <= set("[0, ]")
    assert "done" in said


def test_a_channel_passed_to_connect_is_not_used_in_a_forked_child(server: EtcdServer) -> None:
    said = answers("fork_with_a_client_handed_over", server.url)
    assert said["children"] == "[0]"
    assert said["parent"] == "True"
