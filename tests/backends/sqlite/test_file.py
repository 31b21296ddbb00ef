"""A lock file that is in a wrong place, has other contents, or is replaced, and the effects of a reboot."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol
from unittest.mock import ANY

import pytest

import multilock
import multilock_sqlite
from multilock import BackendRejected, BackendUnavailable, ConfigurationError, LockLost, LossReason
from multilock.model import Busy
from multilock.testing import Helper
from multilock_sqlite import file_locks, host, tables
from multilock_sqlite.diagnosis import weaknesses
from multilock_sqlite.transport import Connection, _live
from tests.backends.memory.askers import Asker, Clock
from tests.backends.sqlite.test_processes import HELPERS, apart


class Ask(Protocol):
    def __call__(self, now: Callable[[], float] = ...) -> Asker: ...


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ask(url: str, request: pytest.FixtureRequest) -> Ask:
    def ask(now: Callable[[], float] = multilock.now) -> Asker:
        asker = Asker(multilock_sqlite.open_backend(url, {}), now)
        request.addfinalizer(asker.backend.close)
        return asker

    return ask


def rejection(path: Path) -> str:
    with multilock.connect(f"sqlite://{path}") as client:
        with pytest.raises(BackendRejected) as caught:
            client.lock("n").acquire(timeout=5)
        assert any(finding.level == "error" for finding in client.diagnose())
    return str(caught.value)


@pytest.mark.parametrize(
    "url",
    ["sqlite://locks.db", "sqlite://", "sqlite:///", "sqlite:////", "sqlite:///var/", "sqlite://host/var/locks.db"],
)
def test_only_an_absolute_path_of_a_file_is_accepted(url: str) -> None:
    with pytest.raises(ConfigurationError, match="absolute path"):
        multilock.connect(url)


@pytest.mark.parametrize("path", ["/locks.db", "//locks.db", "/./locks.db", "/locks.db?ttl=5"])
def test_file_in_the_root_directory_is_refused_as_a_likely_mistake(path: str) -> None:
    with pytest.raises(ConfigurationError, match=r"absolute: write sqlite:////directory/file, with four slashes"):
        multilock.connect(f"sqlite://{path}")
    assert not Path("/locks.db").exists()


def test_a_url_without_a_file_is_shown_without_its_user_info() -> None:
    with pytest.raises(ConfigurationError, match="absolute path") as caught:
        multilock.connect("sqlite://user:hunter2@host/x.db")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("url", ["sqlite://:memory:", "sqlite:///:memory:"])
def test_database_in_memory_is_refused_and_the_memory_backend_is_named(url: str) -> None:
    with pytest.raises(ConfigurationError, match="memory://"):
        multilock.connect(url)


def test_a_path_with_three_slashes_four_slashes_or_escapes_is_the_same_file(tmp_path: Path) -> None:
    with (
        multilock.connect(f"sqlite://{tmp_path}/a b?.db".replace(" ", "%20").replace("?", "%3F")) as three,
        multilock.connect(f"sqlite:///{tmp_path}/a%20b%3F.db") as four,
        three.lock("n"),
    ):
        assert four.lock("n").try_acquire() is None
    assert (tmp_path / "a b?.db").exists()


def test_new_file_is_accessible_only_to_its_owner_whatever_the_umask(path: Path, url: str) -> None:
    before = os.umask(0)
    try:
        with multilock.connect(url) as client, client.lock("n"):
            modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.parent.glob("locks.db*")}
    finally:
        os.umask(before)
    assert modes == {"locks.db": 0o600, "locks.db-wal": 0o600, "locks.db-shm": 0o600}


def test_missing_directory_is_named(tmp_path: Path) -> None:
    assert f"the directory {tmp_path}/missing does not exist: create it" in rejection(tmp_path / "missing" / "locks.db")
    assert not (tmp_path / "missing").exists()


def test_a_directory_is_refused_as_lock_file(tmp_path: Path) -> None:
    assert "is a directory: name a file inside it" in rejection(tmp_path)


def test_a_file_that_is_not_a_database_is_left_alone(path: Path) -> None:
    path.write_text("important" * 1000)
    assert "file is not a database" in rejection(path)
    assert path.read_text() == "important" * 1000


def test_database_of_another_program_is_left_alone(path: Path) -> None:
    with sqlite3.connect(path) as sql:
        sql.execute("CREATE TABLE theirs (x)")
    sql.close()
    before = path.read_bytes()
    assert "another program's database" in rejection(path)
    assert path.read_bytes() == before


def test_file_of_a_newer_format_is_left_alone(path: Path) -> None:
    with multilock.connect(f"sqlite://{path}") as client:
        client.ping()
    with contextlib.closing(sqlite3.connect(path)) as sql:
        sql.execute(f"PRAGMA user_version = {tables.FORMAT + 1}")
    before = contents(path)
    told = rejection(path)
    assert contents(path) == before
    assert f"format {tables.FORMAT + 1}: it was made by a newer multilock" in told
    assert "Update multilock here too" in told


def contents(path: Path) -> dict[str, bytes]:
    """Return the bytes of the file and its log. The shared memory is left out, because each reader changes it."""
    return {file.name: file.read_bytes() for file in path.parent.glob("locks.db*") if not file.name.endswith("-shm")}


def test_two_clients_may_create_the_file_at_once(ask: Ask) -> None:
    askers = [ask() for _ in range(8)]
    start = threading.Barrier(8)
    tokens = []

    def work(asker: Asker) -> None:
        start.wait()
        tokens.append(asker.hold(asker.claim(asker.ear.client)).token or 0)

    threads = [threading.Thread(target=work, args=(asker,)) for asker in askers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(tokens) == list(range(1, 9))


@pytest.mark.parametrize("existing", [True, False], ids=["read-only-file", "read-only-directory"])
def test_missing_write_permission_is_reported(common: Path, existing: bool) -> None:
    path = common / "locks.db"
    if existing:
        with multilock.connect(f"sqlite://{path}") as client, client.lock("n"):
            pass
        path.chmod(0o444)
    common.chmod(0o555)
    with Helper(f"{HELPERS}:try_as_nobody", f"sqlite://{path}") as nobody:
        told = " ".join(nobody.wait_for("BackendRejected", within=10))
    assert "let this user" in told


def test_read_only_file_system_is_reported(tmp_path: Path) -> None:
    with apart("read_only_mount", tmp_path) as helper:
        for _ in ("existing", "new"):
            assert "is on a read-only file system" in " ".join(helper.wait_for("BackendRejected", within=10))


def test_full_disk_is_reported_at_once_and_the_file_stays_valid(tmp_path: Path) -> None:
    with apart("fill_the_disk", tmp_path) as helper:
        helper.wait_for("full", within=10)
        for _ in ("acquire", "renew"):
            assert "free some space" in " ".join(helper.wait_for("BackendRejected", within=10))
        assert helper.wait_for("again", within=10) == ["again", "True"]


def test_too_many_open_files_count_as_silence_and_not_as_a_refusal(url: str) -> None:
    with Helper(f"{HELPERS}:try_with_few_files", url) as helper:
        assert "Too many open files" in " ".join(helper.wait_for("BackendUnavailable", within=10))


def test_holder_is_notified_that_the_file_was_deleted(path: Path, url: str, ask: Ask) -> None:
    losses: list[multilock.Loss] = []
    with multilock.connect(url) as client:
        lease = client.lock("n", on_lost=losses.append).acquire()
        for file in path.parent.glob("locks.db*"):
            file.unlink()
        other = ask()
        other.hold(other.claim())
        with pytest.raises(LockLost):
            lease.renew()
        assert lease.wait_lost(5).reason is LossReason.TAKEN  # type: ignore[union-attr]
        assert client.lock("n").try_acquire() is None


# ---- the log is deleted while it is in use, as some people recommend against "database is locked"


def delete(path: Path, *endings: str) -> None:
    for ending in endings:
        Path(f"{path}{ending}").unlink()


def test_holder_is_notified_that_the_log_with_its_lease_was_deleted(path: Path, url: str, ask: Ask) -> None:
    one = ask()
    claim = one.claim(ttl=3600, renew=False)
    granted = one.hold(claim)
    delete(path, "-wal", "-shm")
    with Helper(f"{HELPERS}:hold", url, 30) as other:
        other.wait_for("held", within=20)
        assert one.renew((claim, granted)) == [None]


@pytest.mark.parametrize("gone", [["-shm"], ["-wal", "-shm"]], ids=" ".join)
def test_name_acquired_after_the_log_was_deleted_is_not_acquired_again(
    path: Path, url: str, ask: Ask, gone: list[str]
) -> None:
    one = ask()
    one.backend.ping(5)
    delete(path, *gone)
    with Helper(f"{HELPERS}:hold", url, 30) as other:
        other.wait_for("held", within=20)
        assert isinstance(one.attempt(one.claim(), join=False), Busy)


def test_deleted_log_is_recreated_by_the_next_request(path: Path, url: str, ask: Ask) -> None:
    one = ask()
    claim = one.claim(ttl=3600, renew=False)
    granted = one.hold(claim)
    delete(path, "-wal")
    assert one.renew((claim, granted)) == [granted._replace(sent_at=ANY)]
    with Helper(f"{HELPERS}:try_once", url) as other:
        other.wait_for("LockTimeout", within=20)


def test_a_client_can_open_while_the_last_connection_deletes_the_log(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = threading.Event()

    def close_slowly(self: Connection) -> None:
        self.exclusion.leave_log()
        sqlite3.Connection.close(self)
        self.exclusion.leave()
        closed.set()
        time.sleep(0.3)
        _live.discard(self)

    with multilock.connect(url) as first:
        first.lock("n").acquire().release()
        monkeypatch.setattr(Connection, "close", close_slowly)
        closing = threading.Thread(target=first.close)
        closing.start()
        assert closed.wait(5)
        with multilock.connect(url) as second:
            assert second.lock("n").try_acquire()
        closing.join()


def test_deleted_log_of_a_running_request_is_not_shared(path: Path, ask: Ask) -> None:
    one, two = ask(), ask()
    with one.backend._database.request(5):  # type: ignore[attr-defined]
        delete(path, "-wal", "-shm")
        with pytest.raises(BackendUnavailable, match="was deleted while") as caught:
            two.backend.ping(5)
        assert not caught.value.unknown
    two.backend.ping(5)


# ---- names of one file


def test_file_with_two_names_is_refused_under_each_of_them(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "elsewhere" / "locks.db"
    other.parent.mkdir()
    with multilock.connect(f"sqlite://{path}") as client, client.lock("n") as lease:
        os.link(path, other)
        assert "2 names" in rejection(other)
        assert "2 names" in rejection(path)
        lease.renew()  # the client renews over its open connection, although a new one would be refused
        assert lease.is_held()
    other.unlink()
    with multilock.connect(f"sqlite://{path}") as client, client.lock("n"):
        pass


def test_file_that_is_a_mount_point_is_refused_and_its_directory_is_not(path: Path, tmp_path: Path) -> None:
    name = tmp_path / "a b" / "locks.db"  # in the table of mounts a blank is escaped
    name.parent.mkdir()
    directory = tmp_path / "directory"
    directory.mkdir()
    with multilock.connect(f"sqlite://{path}") as client, client.lock("n"):
        with apart("try_once_by_a_mount", path, name) as helper:
            assert "mount its directory" in " ".join(helper.wait_for("BackendRejected", within=10))
        with apart("try_once_by_a_mount", path.parent, directory, path.name) as helper:
            helper.wait_for("LockTimeout", within=10)


def test_symbolic_links_in_two_directories_lead_to_one_lock(path: Path, tmp_path: Path) -> None:
    links = [tmp_path / name / "locks.db" for name in "ab"]
    for link in links:
        link.parent.mkdir()
        link.symlink_to(path)
    with (
        multilock.connect(f"sqlite://{links[0]}") as one,  # this creates the file to which the link leads
        multilock.connect(f"sqlite://{links[1]}") as two,
        multilock.connect(f"sqlite://{path}") as three,
        one.lock("n"),
    ):
        assert two.lock("n").try_acquire() is None
        assert three.lock("n").try_acquire() is None
    assert not list(links[0].parent.glob("*-wal"))


def test_changed_symbolic_link_is_followed_to_its_new_file(path: Path, tmp_path: Path) -> None:
    link, target = tmp_path / "link", tmp_path / "other.db"
    link.symlink_to(path)
    with multilock.connect(f"sqlite://{link}") as client, multilock.connect(f"sqlite://{target}") as other:
        lease = client.lock("n").acquire()
        link.unlink()
        link.symlink_to(target)
        with other.lock("n"), pytest.raises(LockLost):
            lease.renew()


# ---- boots


@pytest.fixture
def boot(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], None]:
    def boot(id_: str | None) -> None:
        for module in (host, tables):
            monkeypatch.setattr(module, "boot_id", lambda: id_)

    return boot


def reboot(boot: Callable[[str | None], None], clock: Clock, now: float) -> None:
    """Simulate a reboot, with another boot id and a clock that begins again."""
    boot("after")
    clock.now = now


@pytest.mark.oracle
def test_reboot_ends_leases_that_cannot_be_older_and_skips_reserved_tokens(
    ask: Ask, clock: Clock, boot: Callable[[str | None], None]
) -> None:
    boot("before")
    one = ask(clock)
    claim = one.claim()
    granted = one.hold(claim)
    one.wait(one.claim(fair=True))
    reboot(boot, clock, 100)
    two = ask(clock)
    token = two.hold(two.claim()).token
    assert granted.token == 1
    assert token == 1 + multilock_sqlite.acquire_release.RESERVE + 1
    assert one.renew((claim, granted)) == [None]


def test_lease_from_before_a_reboot_lasts_for_its_ttl_at_most(
    ask: Ask, clock: Clock, boot: Callable[[str | None], None]
) -> None:
    boot("before")
    one = ask(clock)
    one.hold(one.claim(ttl=30, renew=False))  # with renew=False no process checks whether the holder is alive
    reboot(boot, clock, clock.now + 10)
    two = ask(clock)
    assert two.wait(two.claim()).expires_in == pytest.approx(20)
    boot("third")
    clock.now -= 10.5
    three = ask(clock)
    three.hold(three.claim())


def test_different_boot_id_alone_ends_no_lease_no_place_and_no_cancel(
    ask: Ask, clock: Clock, boot: Callable[[str | None], None]
) -> None:
    boot("host")
    one = ask(clock)
    claim, first, late = one.claim(), one.claim(fair=True), one.claim("late")
    granted = one.hold(claim)
    one.wait(first)
    one.release(late, unsure=True)
    boot("container")
    two = ask(clock)
    second = two.claim(fair=True)
    two.wait(second)
    assert all(one.renew((claim, granted)))
    assert isinstance(one.attempt(late), Busy), "it was cancelled"
    one.release(claim, granted)
    two.wait(second)
    assert one.hold(first).token > granted.token  # type: ignore[operator]


def test_container_with_a_boot_id_of_its_own_ends_no_lease_of_others(path: Path, url: str, tmp_path: Path) -> None:
    with multilock.connect(url) as client, client.lock("n") as lease:
        with apart("try_once_under_a_boot_id_of_its_own", url, tmp_path / "boot_id") as helper:
            helper.wait_for("LockTimeout", within=10)
        lease.renew()


@pytest.mark.oracle
def test_power_failure_that_loses_the_last_grants_repeats_no_token(
    path: Path, ask: Ask, boot: Callable[[str | None], None]
) -> None:
    boot("before")
    one = ask()
    tokens = [one.hold(one.claim("a")).token]
    on_disk = {file: file.read_bytes() for file in path.parent.glob("locks.db*")}
    tokens += [one.hold(one.claim(f"b{number}")).token for number in range(5)]
    one.backend.close()
    for file, content in on_disk.items():
        if not file.name.endswith("-shm"):
            file.write_bytes(content)
    boot("after")
    two = ask()
    assert two.hold(two.claim()).token > max(tokens)  # type: ignore[operator,type-var]


def test_process_that_cannot_read_the_boot_id_keeps_the_leases_of_others(
    ask: Ask, boot: Callable[[str | None], None]
) -> None:
    boot("this")
    one = ask()
    claim = one.claim()
    granted = one.hold(claim)
    boot(None)
    two = ask()
    assert isinstance(two.attempt(two.claim(), join=False), Busy)
    other = two.claim("other")
    held = two.hold(other)
    assert held.token > granted.token  # type: ignore[operator]
    boot("this")
    three = ask()
    assert isinstance(three.attempt(three.claim("other"), join=False), Busy)
    assert all(one.renew((claim, granted)))


def test_lease_that_ends_later_than_a_ttl_from_now_is_from_another_boot(
    path: Path, ask: Ask, boot: Callable[[str | None], None]
) -> None:
    boot(None)
    one = ask()
    one.hold(one.claim(ttl=30))
    with sqlite3.connect(path) as sql:
        sql.execute("UPDATE locks SET until = until + 1000")
    sql.close()
    two = ask()
    two.hold(two.claim())


# ---- findings


@pytest.mark.parametrize(("kind", "code"), [("nfs4", "network_file_system"), ("tmpfs", "volatile_file_system")])
def test_diagnose_reports_a_file_system_that_weakens_the_lock(
    kind: str, code: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "file_system", lambda directory: kind)
    with multilock.connect(url) as client:
        assert code in [finding.code for finding in client.diagnose()]


def test_diagnose_finds_nothing_on_a_healthy_file(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "file_system", lambda directory: "ext4")
    with multilock.connect(url) as client:
        assert client.diagnose() == []


def test_kernel_without_open_file_locks_is_reported_and_sqlites_locks_are_used(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The system answers EINVAL to the unknown command 9999, as an old kernel answers to F_OFD_SETLK.
    monkeypatch.setattr(file_locks, "_SETLK", 9999)
    with multilock.connect(url) as client, client.lock("n"):
        with multilock.connect(url) as other:
            assert other.lock("n").try_acquire() is None
        with Helper(f"{HELPERS}:try_once", url) as process:
            process.wait_for("LockTimeout", within=20)
        assert "no_lasting_locks" in [finding.code for finding in client.diagnose()]


def test_diagnose_reports_a_file_that_others_may_write(path: Path, url: str) -> None:
    with multilock.connect(url) as client:
        client.ping()
        path.chmod(0o666)
        assert "writable_by_others" in [finding.code for finding in client.diagnose()]


def test_diagnose_reports_a_host_without_the_needed_information(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "boot_id", lambda: None)
    monkeypatch.setattr(host.Process, "current", lambda: None)
    monkeypatch.setattr(host, "is_mount_point", lambda path: None)
    monkeypatch.setattr(host, "clock_is_shifted", lambda: True)
    monkeypatch.setattr(host, "file_system", lambda directory: None)
    codes = [finding.code for finding in weaknesses("/missing/locks.db")]
    assert codes == ["no_boot_id", "no_process_identity", "no_mount_table", "time_namespace"]


def test_file_system_of_a_directory_is_found_by_the_nearest_mount() -> None:
    assert host.file_system("/proc/self") == "proc"
