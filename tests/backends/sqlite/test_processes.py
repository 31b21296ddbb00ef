"""Locks in a SQLite file among processes that are killed, stopped or forked, or run in other namespaces."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import multilock
import multilock_sqlite
from multilock.testing import Helper
from multilock_sqlite.file_locks import Closed, Exclusion
from multilock_sqlite.host import Process
from multilock_sqlite.transport import CONNECTIONS, _log, transaction
from tests.backends.in_order import ORDERS, together, writes_and_reads_are_in_order
from tests.backends.memory.askers import Asker
from tests.backends.sqlite.helpers import descriptors_of

HELPERS = "tests.backends.sqlite.helpers"
START = 30.0  # seconds for a process to start on an overloaded machine
AT_ONCE = 1.5  # seconds at most for a handover: a waiter reads the file every 40 ms, but the machine may freeze


@pytest.fixture
def client(url: str) -> Iterator[multilock.Client]:
    with multilock.connect(url) as client:
        yield client


def apart(function: str, *arguments: object) -> Helper:
    """Run a helper process in separate namespaces. The test is skipped if the operating system forbids that."""
    helper = Helper(f"{HELPERS}:apart", function, *arguments)
    if helper.wait_for("apart", within=10)[1] == "refused":
        helper.close()
        pytest.skip("this machine does not let us make namespaces")
    return helper


@pytest.mark.parametrize("reaped", [True, False], ids=["reaped", "zombie"])
def test_lock_of_a_killed_holder_is_free_at_once(client: multilock.Client, url: str, reaped: bool) -> None:
    with Helper(f"{HELPERS}:hold", url, 30) as holder:
        (_, token) = holder.wait_for("held", within=10)
        assert client.lock("n").try_acquire() is None
        killed_at = time.monotonic()
        if reaped:
            holder.kill()
        else:
            holder.signal(signal.SIGKILL)
        with client.lock("n").acquire(timeout=5) as lease:
            assert time.monotonic() - killed_at < AT_ONCE
            assert lease.fence() > int(token)


@pytest.mark.oracle
def test_permits_of_a_killed_process_are_free_at_once_and_never_exceeded(client: multilock.Client, url: str) -> None:
    semaphore = client.semaphore("n", 3)
    with Helper(f"{HELPERS}:hold_several", url, 3, 2) as holder:
        holder.wait_for("held", within=10)
        mine = semaphore.acquire(timeout=5)
        assert semaphore.try_acquire() is None
        holder.kill()
        killed_at = time.monotonic()
        others = [semaphore.acquire(timeout=5) for _ in range(2)]
        assert time.monotonic() - killed_at < AT_ONCE
        assert semaphore.try_acquire() is None
    assert all(lease.release() for lease in (mine, *others))


def test_frozen_reader_delays_a_writer_by_its_own_lease_and_other_readers_are_unaffected(
    client: multilock.Client, url: str
) -> None:
    reading = client.read_write_lock("n", ttl=30).reader().acquire()
    with (
        multilock.connect(url) as other,
        Helper(f"{HELPERS}:hold_several", f"{url}?ttl=6", 0, 3) as holder,
    ):
        holder.wait_for("held", within=10)
        with holder.paused():
            stopped_at = time.monotonic()
            assert other.read_write_lock("n").writer().try_acquire(timeout=0.5) is None
            reading.renew()
            assert reading.release()
            with other.read_write_lock("n").writer().acquire(timeout=10):
                assert 6 * 2 / 3 * 0.8 < time.monotonic() - stopped_at < 6 + AT_ONCE
        holder.tell("release")
        assert holder.wait_for("released", within=10)[1:] == ["False"] * 3


@pytest.mark.oracle
def test_waiting_writer_enters_before_later_readers_of_four_processes(url: str) -> None:
    with ExitStack() as stack:
        client = stack.enter_context(multilock.connect(url, prefix="", ttl=30))
        readers = [stack.enter_context(Helper("tests.backends.holders:stream", url, "", 30)) for _ in range(4)]
        writes_and_reads_are_in_order(client, readers, START)


def test_processes_that_name_the_same_locks_in_different_orders_never_deadlock(url: str, tmp_path: Path) -> None:
    file = tmp_path / "count"
    file.write_text("0")
    with ExitStack() as stack:
        counters = [
            stack.enter_context(Helper("tests.backends.holders:count_with_all", url, file, 10, *names))
            for names in ORDERS * 2
        ]
        together(counters, START)
    assert file.read_text() == "80"


def test_killed_holder_without_renewal_keeps_its_lock_until_its_ttl(client: multilock.Client, url: str) -> None:
    with Helper(f"{HELPERS}:hold", url, 2, "no") as holder:
        holder.wait_for("held", within=10)
        holder.kill()
        killed_at = time.monotonic()
        assert client.lock("n").try_acquire(timeout=1) is None
        with client.lock("n").acquire(timeout=5):
            assert time.monotonic() - killed_at < 2 + AT_ONCE


def test_frozen_holder_keeps_its_lock_until_its_ttl_and_no_longer(client: multilock.Client, url: str) -> None:
    with Helper(f"{HELPERS}:hold", url, 6) as holder:
        holder.wait_for("held", within=10)
        with holder.paused():
            stopped_at = time.monotonic()
            with client.lock("n").acquire(timeout=10):
                assert 6 * 2 / 3 * 0.8 < time.monotonic() - stopped_at < 6 + AT_ONCE


@pytest.mark.oracle
def test_process_killed_at_any_statement_leaves_nothing_and_repeats_no_token(url: str) -> None:
    with Helper(f"{HELPERS}:die_at_every_statement", url) as helper:
        (_, deaths, _) = helper.wait_for("died", within=40)
    assert int(deaths) > 40


def test_killed_waiter_is_skipped_at_once(client: multilock.Client, url: str) -> None:
    held = client.lock("n").acquire()
    with Helper(f"{HELPERS}:wait_fairly", url) as waiter:
        waiter.wait_for("waiting", within=10)
        until = time.monotonic() + 5
        while not (info := client.inspect("n")) or not info.waiting:
            assert time.monotonic() < until
        waiter.kill()
        held.release()
        started = time.monotonic()
        with client.lock("n", fair=True).acquire(timeout=5):
            assert time.monotonic() - started < AT_ONCE


@pytest.mark.oracle
def test_two_processes_with_one_counter_lose_no_count(url: str, tmp_path: Path) -> None:
    file = tmp_path / "count"
    file.write_text("0 0")
    with Helper(f"{HELPERS}:count", url, file, 200) as one, Helper(f"{HELPERS}:count", url, file, 200) as two:
        one.wait_for("counted", within=40)
        two.wait_for("counted", within=40)
    assert file.read_text() == "400 400"


def test_killed_holder_of_another_pid_namespace_keeps_its_ttl(client: multilock.Client, url: str) -> None:
    with apart("hold", url, 3) as holder:
        holder.wait_for("held", within=10)
        holder.kill()
        killed_at = time.monotonic()
        assert client.lock("n").try_acquire(timeout=1) is None, "pids of another namespace mean nothing here"
        with client.lock("n").acquire(timeout=5):
            assert time.monotonic() - killed_at < 3 + AT_ONCE


def test_live_holder_is_not_released_from_another_pid_namespace(client: multilock.Client, url: str) -> None:
    with client.lock("n"), apart("try_once", url) as other:
        other.wait_for("LockTimeout", within=10)


def test_proc_directory_of_another_pid_namespace_proves_nothing(client: multilock.Client, url: str) -> None:
    with client.lock("n"), apart("try_once_below_the_proc_of_another", url) as other:
        other.wait_for("LockTimeout", within=10)


def test_client_from_before_a_fork_works_in_the_child_after_the_parent_ended(
    client: multilock.Client, url: str
) -> None:
    with Helper(f"{HELPERS}:fork_and_hold", url) as helper:
        (_, token) = helper.wait_for("held", within=10)
        # A process that closes the file deletes the log if it believes that no other process has the file open.
        with multilock.connect(url) as last:
            assert last.lock("n").try_acquire() is None
        helper.tell("continue")
        (_, second) = helper.wait_for("second", within=10)
        assert int(second) > int(token)
        with client.lock("third") as lease:
            assert lease.fence() > int(second), "what the child wrote is lost"
        helper.tell("end")


def test_fork_waits_for_a_running_request(url: str) -> None:
    with Helper(f"{HELPERS}:fork_while_asking", url) as helper:
        helper.wait_for("child", within=10)
        assert helper.wait_for("parent", within=10) == ["parent", "True"]
        assert not any(line.startswith("failed") for line in helper.lines), helper.lines


def test_fork_that_waits_for_one_file_does_not_block_another_file(url: str, tmp_path: Path) -> None:
    with Helper(f"{HELPERS}:fork_while_another_file_is_locked", f"sqlite://{tmp_path}/locked.db", url) as helper:
        (_, took, longest, held, child) = helper.wait_for("forked", within=20)
    assert float(took) > 1, "nothing was slow"
    assert float(longest) < AT_ONCE
    assert (held, child) == ("True", "0")


def test_forks_under_load_are_quick_and_every_child_works(url: str) -> None:
    with Helper(f"{HELPERS}:fork_often", url, 20) as helper:
        (_, failures, longest) = helper.wait_for("forked", within=40)
    assert int(failures) == 0, helper.errors
    assert float(longest) < 3


def test_child_forked_inside_a_request_is_refused(url: str) -> None:
    with Helper(f"{HELPERS}:fork_inside_a_request", url) as helper:
        assert "connect after the fork" in " ".join(helper.wait_for("BackendRejected", within=10))
        helper.wait_for("parent", within=10)


def test_child_forked_by_c_code_is_refused(url: str) -> None:
    with Helper(f"{HELPERS}:fork_by_c_code", url) as helper:
        assert "connect after the fork" in " ".join(helper.wait_for("BackendRejected", within=10))
        helper.wait_for("parent", within=10)


def test_child_of_a_process_killed_while_writing_blocks_no_other_process(url: str) -> None:
    with Helper(f"{HELPERS}:end_inside_a_request", url) as helper, multilock.connect(url) as other:
        (_, child) = helper.wait_for("child", within=START)
        try:
            assert other.lock("n").try_acquire(timeout=START)
        finally:
            os.kill(int(child), signal.SIGKILL)


def test_lock_of_a_daemon_made_by_c_code_names_the_daemon(url: str) -> None:
    with Helper(f"{HELPERS}:daemon_of_c_code", url) as helper, multilock.connect(url) as other:
        _, pid, recorded = helper.wait_for("held", within=START)
        assert pid == recorded != str(helper.pid)
        helper.wait(within=START)  # wait until the daemon's parent has ended
        assert other.lock("n").try_acquire() is None
        helper.tell("end")


# ---- SQLite's own locks end as soon as the process closes another descriptor of the file


def test_transaction_excludes_others_although_its_process_reads_the_file(path: Path, url: str) -> None:
    asker = Asker(multilock_sqlite.open_backend(url, {}), multilock.now)
    with asker.backend._database.request(5) as sql, transaction(sql):  # type: ignore[attr-defined]
        read_files(path)
        with Helper(f"{HELPERS}:try_once", url) as other:
            assert "locked by another program" in " ".join(other.wait_for("BackendUnavailable", within=START))
    asker.backend.close()


def test_log_of_an_idle_process_stays_although_it_reads_the_file(path: Path, url: str) -> None:
    with multilock.connect(url) as client, client.lock("n"):
        log = _log(str(path))
        read_files(path)
        with Helper(f"{HELPERS}:try_once", url) as other:
            other.wait_for("LockTimeout", within=START)
            other.wait(within=START)
        assert _log(str(path)) == log


def test_shared_memory_counts_as_used_although_its_process_reads_it(path: Path, url: str) -> None:
    with multilock.connect(url) as client, client.lock("n"):
        read_files(path)
        with open(f"{path}-shm", "r+b") as memory, pytest.raises(BlockingIOError):
            # A process locks this byte as long as it uses the shared memory.
            fcntl.lockf(memory, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 128)


def test_processes_lose_no_count_while_one_of_them_reads_the_file(url: str, tmp_path: Path) -> None:
    file = tmp_path / "count"
    file.write_text("0 0")
    with ExitStack() as stack:
        for function, rounds in (("count_and_read", 300), ("count_anew", 40), ("count_anew", 40), ("count_anew", 40)):
            helper = stack.enter_context(Helper(f"{HELPERS}:{function}", url, file, rounds))
            stack.callback(helper.wait, within=4 * START)
    assert file.read_text().split()[0] == "420"


def test_last_process_deletes_the_log_as_it_closes(path: Path, url: str) -> None:
    with multilock.connect(url) as client:
        client.lock("n").acquire().release()
        assert _log(str(path))
    assert _log(str(path)) is None


def test_an_interrupt_that_ends_a_close_early_blocks_no_other_process(
    client: multilock.Client, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(exclusion: Exclusion) -> None:
        raise KeyboardInterrupt

    client.ping()
    with monkeypatch.context() as patch:
        patch.setattr(Exclusion, "give_back", interrupt)
        with pytest.raises(KeyboardInterrupt):
            client.close()
    gc.collect()  # the exception referred to the connection until now
    with Helper(f"{HELPERS}:try_once", url) as other:
        other.wait_for("held", within=START)


def test_the_file_does_not_stay_open_if_its_locks_cannot_be_made(
    path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Exclusion, "of", refuse)
    asker = Asker(multilock_sqlite.open_backend(url, {}), multilock.now)
    with (
        pytest.raises(multilock.BackendRejected) as caught,
        asker.backend._database.request(5),  # type: ignore[attr-defined]
    ):
        pass
    assert caught.tb  # the traceback refers to the connection
    assert descriptors_of(path) == 0
    asker.backend.close()


def test_fork_waits_until_a_closing_connection_has_released_its_locks(url: str) -> None:
    with Helper(f"{HELPERS}:fork_while_closing", url) as helper:
        assert helper.wait_for("child", within=START)[1:] == ["True", "0"]


def test_all_connections_of_a_process_take_their_locks_on_two_descriptors(path: Path, url: str) -> None:
    asker = Asker(multilock_sqlite.open_backend(url, {}), multilock.now)
    with ExitStack() as requests:
        for _ in range(CONNECTIONS):
            requests.enter_context(asker.backend._database.request(5))  # type: ignore[attr-defined]
        assert descriptors_of(path) <= CONNECTIONS * 2 + 1 + 2, "SQLite has two for each connection, and one for all"
    asker.backend.close()
    assert descriptors_of(path) == 0


def test_only_one_connection_of_a_process_writes_at_a_time(url: str) -> None:
    asker = Asker(multilock_sqlite.open_backend(url, {}), multilock.now)
    request = asker.backend._database.request  # type: ignore[attr-defined]
    with request(5) as one, request(5) as two:
        with transaction(one):
            with pytest.raises(Closed):
                two.exclusion.enter(multilock.now())
            assert not two.exclusion.is_inside
        two.exclusion.enter(multilock.now())
        assert two.exclusion.is_inside
    asker.backend.close()


def test_threads_on_the_same_descriptors_lose_no_count(url: str, tmp_path: Path) -> None:
    file = tmp_path / "count"
    file.write_text("0 0")
    with Helper(f"{HELPERS}:count_in_threads", url, file, 8, 20) as helper:
        helper.wait_for("all", within=4 * START)
    assert file.read_text().split()[0] == "160"


def read_files(path: Path) -> None:
    for end in ("", "-wal", "-shm"):
        Path(f"{path}{end}").read_bytes()


# ---- what a process knows about another process


def test_living_process_never_counts_as_dead() -> None:
    me = Process.current()
    assert me is not None
    assert not me.knows_gone(me)
    with Helper(f"{HELPERS}:end_the_main_thread") as helper:
        helper.wait_for("zombie", within=10)
        start = int(Path(f"/proc/{helper.pid}/stat").read_text().split()[21])
        assert not me.knows_gone(Process(me.space, helper.pid, start)), "it continues in another thread"
        assert me.knows_gone(Process(me.space, helper.pid, start - 1)), "the pid was used again"
        assert not me.knows_gone(Process("elsewhere", helper.pid, start - 1))
        helper.kill()
        assert me.knows_gone(Process(me.space, helper.pid, start))
        assert not me.knows_gone(Process("elsewhere", helper.pid, start))
