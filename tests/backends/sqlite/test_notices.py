"""Messages between the processes that use a file wake waiters. Any message may be lost."""

from __future__ import annotations

import errno
import gc
import os
import signal
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import multilock
import multilock_sqlite
from multilock import now
from multilock.kernel import worker
from multilock.model import Claim
from multilock.testing import Helper
from multilock.testing.conformance.base import eventually
from multilock.timing import liveness
from multilock_sqlite.notices import ROOM, STILLBORN, Mailbox
from tests.backends.memory.askers import WITHIN, Asker
from tests.backends.sqlite.helpers import NOBODY
from tests.backends.sqlite.test_processes import apart

HELPERS = "tests.backends.sqlite.helpers"
START = 30.0  # seconds for a process to start on an overloaded machine
SOON = 10.0  # seconds for a message on an overloaded machine
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act for another user")


class Waiter(Asker):
    """A client that records the messages that it receives."""

    def __init__(self, url: str, clock: Callable[[], float] = now) -> None:
        super().__init__(multilock_sqlite.open_backend(url, {}), clock)
        self._heard = threading.Condition()
        record = self.ear.told.append

        def told(message: tuple[Any, ...]) -> None:
            with self._heard:
                record(message)
                self._heard.notify_all()

        self.ear.wake = lambda claim_id: told(("wake", claim_id))  # type: ignore[method-assign]
        self.ear.silent = lambda group: told(("silent", group))  # type: ignore[method-assign]

    def hears(self, *message: object) -> None:
        """Wait for this message."""
        with self._heard:
            assert self._heard.wait_for(lambda: message in self.ear.told, SOON), self.ear.told

    def hears_wake(self, claim: Claim) -> None:
        self.hears("wake", claim.id)

    @property
    def mailbox(self) -> Mailbox:
        mailbox: Mailbox = self.backend._mailbox  # type: ignore[attr-defined]
        return mailbox

    def fifo(self, path: Path) -> Path:
        return Path(f"{path}-wake/{self.ear.client}")


Ask = Callable[[], Waiter]


@pytest.fixture
def ask(url: str, request: pytest.FixtureRequest) -> Ask:
    def ask() -> Waiter:
        waiter = Waiter(url)
        request.addfinalizer(waiter.backend.close)
        return waiter

    return ask


@pytest.fixture
def one(ask: Ask) -> Waiter:
    return ask()


@pytest.fixture
def two(ask: Ask) -> Waiter:
    return ask()


# ---- which waiter is woken


def test_a_release_wakes_the_first_waiter_only(one: Waiter, two: Waiter) -> None:
    held, first, second = one.claim(), two.claim(), two.claim()
    granted = one.hold(held)
    two.wait(first)
    two.wait(second)
    one.release(held, granted)
    two.hears_wake(first)
    two.hold(first)
    two.release(first)
    two.hears_wake(second)
    assert two.ear.told == [("wake", first.id), ("wake", second.id)]


def test_a_writer_that_gives_up_wakes_the_readers_behind_it(one: Waiter, two: Waiter) -> None:
    one.hold(one.reader())
    writer, readers, last = one.writer(), [two.reader() for _ in range(20)], two.writer()
    one.wait(writer)
    for claim in (*readers, last):
        two.wait(claim)
    one.release(writer)
    for reader in readers:
        two.hears_wake(reader)
    assert ("wake", last.id) not in two.ear.told


def test_a_claim_refused_for_its_number_of_permits_wakes_those_behind_it(one: Waiter, two: Waiter) -> None:
    held, first, other, behind = one.writer(), one.permit(3), one.permit(4), two.permit(3)
    granted = one.hold(held)
    one.wait(first)
    one.wait(other)
    two.wait(behind)
    one.release(held, granted)
    one.hold(first)
    assert two.ear.told == []
    with pytest.raises(multilock.BackendRejected, match="has 3 permits here"):
        one.attempt(other)
    two.hears_wake(behind)


def test_a_new_holder_of_a_permit_wakes_the_next_waiter_that_fits(one: Waiter, two: Waiter) -> None:
    held = [one.permit(3) for _ in range(3)]
    for permit in held:
        one.hold(permit)
    waiting = [two.permit(3) for _ in range(4)]
    for permit in waiting:
        two.wait(permit)
    with one.backend._database.request(WITHIN) as sql:  # type: ignore[attr-defined]
        sql.execute("DELETE FROM locks")  # as if the holders had been killed, so no message is sent
    two.hold(waiting[0])
    assert two.ear.told == [("wake", waiting[1].id), ("wake", waiting[2].id)]
    two.hold(waiting[1])
    assert len(two.ear.told) == 2, "it was called, so it need not call"


def test_a_force_release_wakes_a_waiter_and_makes_the_holder_renew(one: Waiter, two: Waiter, ask: Ask) -> None:
    held, waiting = one.claim(), two.claim()
    granted = one.hold(held)
    one.backend.watch("sqlite", [(held, granted)], WITHIN)
    two.wait(waiting)
    assert ask().backend.force_release("n", WITHIN)
    one.hears("silent", "sqlite")
    two.hears_wake(waiting)


def test_a_resting_name_wakes_its_first_waiter_once(one: Waiter, two: Waiter) -> None:
    held, waiting = one.claim(), two.claim()
    granted = one.hold(held)
    two.wait(waiting)
    one.backend.rest(held, granted, False, 20.0, WITHIN)  # type: ignore[attr-defined]
    two.hears_wake(waiting)
    expires_in = two.wait(waiting).expires_in
    assert expires_in is not None
    assert expires_in < 20.1


def test_the_first_waiter_of_a_client_looks_again_soon(one: Waiter, two: Waiter) -> None:
    """The waiter joins the queue before its client has a FIFO, and the holder may release the name in between."""
    one.hold(one.claim())
    one.wait(one.claim())
    first, second = two.claim(), two.claim()
    assert two.wait(first).heartbeat <= multilock_sqlite.POLL_FIRST
    assert two.wait(first).heartbeat >= multilock_sqlite.POLL_LAST
    assert two.wait(second).heartbeat >= multilock_sqlite.POLL_LAST


# ---- a message is only a hint


def test_forged_messages_create_no_holder_and_no_loss(path: Path, url: str) -> None:
    with multilock.connect(url) as holder, multilock.connect(url) as client:
        lease = holder.lock("n").acquire()
        got = threading.Event()

        def wait() -> None:
            with client.lock("n").acquire(timeout=SOON):
                got.set()

        waiting = threading.Thread(target=wait)
        waiting.start()
        fifo = Path(f"{path}-wake/{client._kernel.client}")
        eventually(fifo.exists, SOON)
        claims = list(client._kernel.monitor.waiting)
        for message in (*(claim.encode() for claim in claims), b"!", b"*", b"\xff" * 100, b"granted"):
            fifo.write_bytes(message + b"\n")
        assert not got.wait(0.2)
        assert lease.is_held()
        lease.release()
        waiting.join(SOON)
        assert not waiting.is_alive()


def test_a_full_fifo_wakes_every_waiter_and_renews_every_lease(one: Waiter, path: Path) -> None:
    blocked, go_on = threading.Event(), threading.Event()
    wake = one.ear.wake

    def stand(claim_id: str | None) -> None:
        blocked.set()
        go_on.wait(SOON)
        wake(claim_id)

    one.ear.wake = stand  # type: ignore[method-assign]
    one.backend.ping(WITHIN)
    one.mailbox.open(str(path))
    with one.fifo(path).open("wb", buffering=0) as fifo:
        fifo.write(b"first\n")
        assert blocked.wait(SOON)
        fifo.write(b"x" * (ROOM - 1) + b"\n")
        go_on.set()
        one.hears("wake", None)
        one.hears("silent", "sqlite")


# ---- how often a waiter reads the file


@pytest.mark.parametrize("why", ["no room", "no right", "no thread", "planted link", "another owner"])
def test_without_a_fifo_waiters_look_at_their_usual_intervals(
    one: Waiter, two: Waiter, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    one.hold(one.claim())
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o755)
    directory = Path(f"{path}-wake")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC if why == "no room" else errno.EACCES, "refused")

    if why == "planted link":
        directory.symlink_to(elsewhere)
    elif why == "another owner":
        if os.geteuid():
            pytest.skip("only root can give a directory away")
        directory.mkdir()
        os.chown(directory, NOBODY, NOBODY)
    elif why == "no thread":
        monkeypatch.setattr(worker, "begin_thread", lambda *_: "refused")
    else:
        monkeypatch.setattr(os, "mkfifo" if why == "no room" else "mkdir", refuse)
    claims = [two.claim() for _ in range(40)]
    for claim in claims:
        two.wait(claim)
    assert two.wait(claims[-1]).heartbeat <= multilock_sqlite.POLL_LAST
    assert list(elsewhere.iterdir()) == []
    assert stat.S_IMODE(elsewhere.stat().st_mode) == 0o755
    monkeypatch.undo()
    two.backend.close()
    worker.try_again()  # the thread whose start was refused starts now, and ends


def test_a_woken_waiter_looks_at_a_time_that_depends_on_its_place(url: str) -> None:
    clock = [1000.0]
    holder, waiter = Waiter(url, lambda: clock[0]), Waiter(url, lambda: clock[0])
    holder.hold(holder.claim(ttl=300))
    claims = [waiter.claim(ttl=300) for _ in range(40)]
    for claim in claims:
        waiter.wait(claim)
    clock[0] += 1
    looks = [waiter.wait(claim).heartbeat for claim in claims]
    assert looks[:4] == pytest.approx([0.04, 0.04, 0.08, 0.12])
    assert looks[-1] == pytest.approx(1.0)
    short = waiter.claim(ttl=0.5)
    waiter.wait(short)
    assert waiter.wait(short).heartbeat == pytest.approx(liveness(short.ttl) / 3)
    for each in (holder, waiter):
        each.backend.close()


def test_one_heartbeat_keeps_the_places_of_all_waiters_of_its_client(url: str) -> None:
    clock = [1000.0]
    holder, waiter = Waiter(url, lambda: clock[0]), Waiter(url, lambda: clock[0])
    holder.hold(holder.claim(ttl=300))
    first, second, stopped, left = [waiter.claim(ttl=300, fair=True) for _ in range(4)]
    for claim in (first, second, stopped, left):
        waiter.wait(claim)
    clock[0] += 1.9
    waiter.wait(second)
    clock[0] += 0.1
    waiter.release(left)
    waiter.wait(first)
    with waiter.backend._database.request(WITHIN) as sql:  # type: ignore[attr-defined]
        places = dict(sql.execute("SELECT id, until FROM queue"))
    assert places == {first.id: 1008.0, second.id: pytest.approx(1007.9), stopped.id: 1006.0}
    assert left.id not in waiter.backend._waiting  # type: ignore[attr-defined]
    for each in (holder, waiter):
        each.backend.close()


def test_a_look_reads_one_row_of_a_queue_of_thousands(one: Waiter, two: Waiter) -> None:
    def steps() -> int:
        count = 0

        def step() -> None:
            nonlocal count
            count += 1

        with two.backend._database.request(WITHIN) as sql:  # type: ignore[attr-defined]
            sql.set_progress_handler(step, 10)
            two.backend._recipe.ahead(sql, "multilock/n", last, now())  # type: ignore[attr-defined]
            two.backend._recipe.place(sql, "multilock/n", last.id, 25)  # type: ignore[attr-defined]
            two.backend._recipe.next_in(sql, "multilock/n", now())  # type: ignore[attr-defined]
            sql.set_progress_handler(None, 0)
        return count

    held, last = one.claim(), two.claim(fair=True)
    granted = one.hold(held)
    for _ in range(30):
        one.wait(one.claim(fair=True))
    two.wait(last)
    one.release(held, granted)
    few = steps()
    with one.backend._database.request(WITHIN) as sql:  # type: ignore[attr-defined]
        sql.execute(
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 3000) "
            "INSERT INTO queue (key, id, mode, fair, until) SELECT 'multilock/n', 'id' || i, 'x', 1, ? FROM n",
            (now() + 60,),
        )
    last = two.claim(fair=True)
    two.wait(last)
    assert 0 < steps() <= 2 * few


# ---- the files


@pytest.mark.parametrize("mode", [0o600, 0o660, 0o666])
def test_directory_and_fifo_are_accessible_to_the_users_of_the_file(one: Waiter, path: Path, mode: int) -> None:
    one.hold(one.claim())
    path.chmod(mode)
    umask = os.umask(0o077)
    try:
        one.wait(one.claim())
    finally:
        os.umask(umask)
    assert stat.S_IMODE(one.fifo(path).stat().st_mode) == mode
    assert stat.S_IMODE(one.fifo(path).parent.stat().st_mode) == mode | (mode & 0o444) >> 2


def test_a_closed_client_leaves_no_fifo_and_no_thread(one: Waiter, two: Waiter, path: Path) -> None:
    one.hold(one.claim())
    two.wait(two.claim())
    fifo = two.mailbox._fifo
    assert fifo is not None
    assert fifo.reader is not None
    two.backend.close()
    fifo.reader.join(SOON)
    assert not fifo.reader.is_alive()
    assert list(Path(f"{path}-wake").iterdir()) == []
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fifo.descriptor)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_client_that_is_never_closed_leaves_no_fifo(url: str, path: Path) -> None:
    client = multilock.connect(url)
    client.ping()
    client._kernel.backend.watch("sqlite", [], WITHIN)
    [_] = Path(f"{path}-wake").iterdir()
    del client
    until = now() + SOON
    while list(Path(f"{path}-wake").iterdir()):
        assert now() < until
        gc.collect()


def test_a_deleted_fifo_is_recreated_with_the_next_claim(one: Waiter, two: Waiter, path: Path) -> None:
    held = one.claim()
    granted = one.hold(held)
    first, second = two.claim(), two.claim()
    two.wait(first)
    two.fifo(path).unlink()
    two.wait(second)
    one.release(held, granted)
    two.hears_wake(first)


def test_fifos_of_killed_processes_are_deleted_and_others_stay(one: Waiter, two: Waiter, path: Path, ask: Ask) -> None:
    one.hold(one.claim())
    two.wait(two.claim())
    directory = Path(f"{path}-wake")
    for name in ("0123456789abcdef", "new-0123456789abcde0", "new-0123456789abcde1", "notes"):
        os.mkfifo(directory / name)
    long_ago = now() - 2 * STILLBORN / 1_000_000
    os.utime(directory / "new-0123456789abcde0", (long_ago, long_ago))
    third = ask()
    third.wait(third.claim())
    kept = {two.ear.client, third.ear.client, "new-0123456789abcde1", "notes"}
    assert {entry.name for entry in directory.iterdir()} == kept


@pytest.mark.parametrize("planted", ["file", "link", "unread FIFO"])
def test_a_planted_file_in_place_of_a_fifo_gets_no_message(
    one: Waiter, two: Waiter, path: Path, tmp_path: Path, planted: str
) -> None:
    held, waiting = one.claim(), two.claim()
    granted = one.hold(held)
    two.wait(waiting)
    fifo, other = two.fifo(path), tmp_path / "other"
    other.touch()
    fifo.unlink()
    if planted == "file":
        fifo.touch()
    elif planted == "link":
        fifo.symlink_to(other)
    else:
        os.mkfifo(fifo)
    handler = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        one.release(held, granted)
    finally:
        signal.signal(signal.SIGPIPE, handler)
    assert other.read_bytes() == b""
    assert planted != "file" or fifo.read_bytes() == b""
    two.hold(waiting)


def test_an_invalid_claim_id_never_becomes_a_file_name(one: Waiter, path: Path) -> None:
    one.hold(one.claim())
    one.wait(one.claim())
    target = path.parent / "target"
    os.mkfifo(target)
    with open(os.open(target, os.O_RDWR | os.O_NONBLOCK), "rb", buffering=0) as read:
        one.mailbox.send(str(path), ["../target.1", f"{'0' * 16}.{'1' * 65}", "", "!rests:0123456789"], ["../target"])
        assert read.read() is None


# ---- several processes


def reads_its_fifo(waiter: Helper, path: Path) -> None:
    """Wait until the FIFO of the waiter exists. An earlier message would be lost, and the test has switched the
    waiter's timer off."""
    fifo = waiter.wait_for("waiting", START)[1]
    eventually((Path(f"{path}-wake") / fifo).exists, START)


def test_a_waiter_in_other_namespaces_is_woken_by_another_path_of_the_directory(
    url: str, path: Path, tmp_path: Path
) -> None:
    mount = tmp_path / "mount"
    mount.mkdir()
    with multilock.connect(url) as client:
        lease = client.lock("n").acquire()
        with apart("wait_by_a_mount", path.parent, mount, path.name) as waiter:
            reads_its_fifo(waiter, path)
            lease.release()
            waiter.wait_for("held", SOON)


@AS_ROOT
def test_users_of_a_shared_file_wake_each_other(url: str, path: Path, common: Path) -> None:
    shared = common / "locks.db"
    with multilock.connect(f"sqlite://{shared}") as maker:
        maker.inspect("n")
        # Do this before the directory of the FIFOs is made, because the directory gets the rights of the file.
        for file in common.iterdir():
            file.chmod(0o666)
    common.chmod(0o777)
    with multilock.connect(f"sqlite://{shared}") as client:
        lease = client.lock("n").acquire()
        client._kernel.backend.watch("sqlite", [], WITHIN)  # the owner of the file makes the directory
        with Helper(f"{HELPERS}:wait_as_nobody", f"sqlite://{shared}") as waiter:
            reads_its_fifo(waiter, shared)
            lease.release()
            waiter.wait_for("held", SOON)


def test_clients_with_and_without_messages_are_both_served(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with multilock.connect(url) as old, multilock.connect(url) as new:
        for each, name in ((old, "open"), (old, "send")):
            monkeypatch.setattr(vars(each._kernel.backend)["_mailbox"], name, lambda *_: False)
        served: list[str] = []

        def work(client: multilock.Client, name: str) -> None:
            for _ in range(10):
                with client.lock("n", fair=True).acquire(timeout=START):
                    served.append(name)

        threads = [threading.Thread(target=work, args=args) for args in [(old, "old"), (new, "new")] * 2]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(served) == ["new"] * 20 + ["old"] * 20


def test_a_lost_message_delays_a_waiter_only_until_its_next_look(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mailbox, "send", lambda *_: None)
    with multilock.connect(url) as one, multilock.connect(url) as two:
        lease = one.lock("n").acquire()
        got = threading.Event()

        def wait() -> None:
            with two.lock("n"):
                got.set()

        waiting = threading.Thread(target=wait)
        waiting.start()
        assert not got.wait(0.1)
        lease.release()
        assert got.wait(SOON)
        waiting.join()


def test_a_forked_child_keeps_the_fifo_of_its_parent(url: str) -> None:
    """The child opens the backend again, which must not delete the FIFO of the parent. When the parent is killed, its
    FIFO must have no reader, although the child lives."""
    with Helper(f"{HELPERS}:fork_while_waiting", url) as helper:
        assert helper.wait_for("child", START)[1:] == ["True", "held"]
        assert helper.wait_for("parent", START)[1:] == ["True", "woken"]
        assert helper.wait_for("orphan", START)[1:] == ["ENXIO"]
