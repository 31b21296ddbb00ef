"""A client whose token may not read all keys of a name. The server omits unreadable keys from every list."""

from __future__ import annotations

import pytest

from multilock import BackendRejected
from tests.backends.consul.kit import Ours
from tests.backends.kit import NAME, WITHIN
from tests.servers_consul import ConsulServer

SESSIONS = 'session_prefix "" { policy = "write" }'
ALL = 'key_prefix "multilock/" { policy = "write" } ' + SESSIONS
ONE_KEY = f'key "multilock/{NAME}/.lock" {{ policy = "write" }} ' + SESSIONS
ONE_NAME = f'key_prefix "multilock/{NAME}/" {{ policy = "write" }} ' + SESSIONS


def client(guarded: ConsulServer, rules: str) -> Ours:
    policy = guarded.ask("PUT", "acl/policy", {"Name": f"p{hash(rules) & 0xFFFFFF:x}", "Rules": rules})
    token = guarded.ask("PUT", "acl/token", {"Policies": [{"ID": policy["ID"]}]})["SecretID"]
    return Ours(guarded.url, token=token)


@pytest.mark.oracle
def test_a_token_that_cannot_see_readers_is_refused_instead_of_entering_beside_them(guarded: ConsulServer) -> None:
    full, limited = client(guarded, ALL), client(guarded, ONE_KEY)
    reading = full.take(full.reader())
    for make in (Ours.mutex, Ours.writer, Ours.permit):
        for join in (False, True):
            claim = make(limited)
            with pytest.raises(BackendRejected, match="rights"):
                limited.attempt(claim, join)
            limited.release(claim)
    assert full.renewed(reading) == [True]
    full.take(full.reader())  # a reader can enter only if the refused claim has left no lock
    full.close()
    limited.close()


def test_inspect_is_refused_if_the_token_cannot_see_readers(guarded: ConsulServer) -> None:
    full, limited = client(guarded, ALL), client(guarded, ONE_KEY)
    full.take(full.reader())
    with pytest.raises(BackendRejected):
        limited.backend.inspect(NAME, WITHIN)
    with pytest.raises(BackendRejected):
        limited.backend.force_release(NAME, WITHIN)
    full.close()
    limited.close()


def test_a_waiting_writer_that_loses_the_right_to_see_readers_does_not_enter(guarded: ConsulServer) -> None:
    full = client(guarded, ALL)
    policy = guarded.ask("PUT", "acl/policy", {"Name": "fading", "Rules": ALL})
    token = guarded.ask("PUT", "acl/token", {"Policies": [{"ID": policy["ID"]}]})["SecretID"]
    fading = Ours(guarded.url, token=token)
    full.take(full.reader())
    writing = fading.wait(fading.writer())
    guarded.ask("PUT", f"acl/policy/{policy['ID']}", {"Name": "fading", "Rules": ONE_KEY})
    with pytest.raises(BackendRejected):
        fading.attempt(writing, join=True)
    full.close()
    fading.close()


def test_permission_for_all_keys_of_one_name_is_sufficient_for_that_name(guarded: ConsulServer) -> None:
    ours = client(guarded, ONE_NAME)
    for make in (Ours.mutex, Ours.writer, Ours.permit, Ours.reader):
        claim = ours.take(make(ours))
        assert ours.backend.inspect(NAME, WITHIN) is not None
        assert ours.release(claim)
    ours.close()
