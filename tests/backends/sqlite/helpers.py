"""Functions that run in separate processes: holders that are killed, stopped, forked, or put into other namespaces."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import multilock
import multilock_sqlite
from multilock.errors import MultilockError
from multilock.testing import hear, say
from multilock_sqlite import host
from multilock_sqlite.file_locks import Exclusion
from multilock_sqlite.transport import Connection, Database, transaction
from tests.backends.memory import askers
from tests.backends.memory.askers import Asker

SYS_EXIT = 60 if os.uname().machine == "x86_64" else 93  # number of the system call that ends one thread
CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWPID = 0x00020000, 0x10000000, 0x20000000
PR_SET_PDEATHSIG = 1
NOBODY = 65534


def hold(url: str, ttl: str, renew: str = "renew") -> None:
    with multilock.connect(url) as client, client.lock("n", ttl=float(ttl), renew=renew == "renew") as lease:
        say("held", lease.token)
        hear()
        lease.release()
        say("released")
        hear()


def hold_several(url: str, permits: str, count: str) -> None:
    """Hold ``count`` permits, or ``count`` readers if ``permits`` is 0."""
    with multilock.connect(url) as client:
        lock = client.semaphore("n", int(permits)) if int(permits) else client.read_write_lock("n").reader()
        leases = [lock.acquire() for _ in range(int(count))]
        say("held", *(lease.token for lease in leases))
        hear()
        say("released", *(lease.release() for lease in leases))
        hear()


def wait_fairly(url: str) -> None:
    with multilock.connect(url) as client:
        say("waiting")
        with client.lock("n", fair=True) as lease:
            say("held", lease.token)
            hear()


def count(url: str, file: str, rounds: str) -> None:
    """Increment the number in a file repeatedly, each time under the lock. A lost increment shows that two processes
    held it."""
    path = Path(file)
    with multilock.connect(url) as client:
        lock = client.lock("n")
        for _ in range(int(rounds)):
            with lock as lease:
                number, token = map(int, path.read_text().split())
                assert lease.fence() > token, "a token went back"
                path.write_text(f"{number + 1} {lease.fence()}")
    say("counted")


def try_as_nobody(url: str) -> None:
    """Try the lock as a user without any rights, and print the result."""
    become_nobody()
    try_once(url)


def become_nobody() -> None:
    with multilock.connect("memory://") as client, client.lock("n"):
        pass  # import modules now, because the user nobody may be unable to read them
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)


def wait_as_nobody(url: str) -> None:
    become_nobody()
    wait_for_messages(url)


def wait_by_a_mount(source: str, at: str, file: str) -> None:
    subprocess.run(["mount", "--bind", source, at], check=True)
    wait_for_messages(f"sqlite://{at}/{file}")


def wait_for_messages(url: str) -> None:
    """Print the name of the client's FIFO, and wait for a lock. Only a message can wake the waiter, because it does not
    poll."""
    _never_look_by_a_timer()
    with multilock.connect(url) as client:
        say("waiting", client._kernel.client)
        with client.lock("n"):
            say("held")
            hear()


def _never_look_by_a_timer() -> None:
    vars(multilock_sqlite).update(POLL_FIRST=3600.0, POLL_LAST=3600.0)


def fork_while_waiting(url: str) -> None:
    """Fork while a thread waits for the lock, and let the child wait too. Then this process kills itself, and the child
    prints whether the FIFO still has a reader."""
    _never_look_by_a_timer()
    client, holder = multilock.connect(url), multilock.connect(url)
    lease = holder.lock("n").acquire()
    fifo = f"{url.removeprefix('sqlite://')}-wake/{client._kernel.client}"
    woken = threading.Event()

    def wait() -> None:
        with client.lock("n", fair=True):
            woken.set()
            hear()

    threading.Thread(target=wait, daemon=True).start()
    while not os.path.exists(fifo):  # a waiter joins the queue before it makes its FIFO
        time.sleep(0.01)
    parent = os.getpid()
    if os.fork() == 0:
        say("child", os.path.exists(fifo), "held" if client.lock("child").try_acquire() else "refused")
        while os.getppid() == parent:
            time.sleep(0.01)
        try:
            os.close(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))
            say("orphan", "has a reader")
        except OSError as error:
            say("orphan", errno.errorcode[error.errno or 0])
        os._exit(0)
    there = os.path.exists(fifo)
    lease.release()
    say("parent", there, "woken" if woken.wait(10) else "asleep")
    os.kill(os.getpid(), signal.SIGKILL)


def try_once(url: str) -> None:
    with multilock.connect(url) as client:
        try:
            with client.lock("n").acquire(timeout=0) as lease:
                say("held", lease.token)
        except MultilockError as error:
            say(type(error).__name__, error)


def try_with_few_files(url: str) -> None:
    soft = len(os.listdir("/proc/self/fd")) + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    try_once(url)


def apart(function: str, *arguments: str) -> None:
    """Call ``function`` in the first process of a new pid namespace with separate mounts. That process dies with the
    calling process."""
    libc = ctypes.CDLL(None, use_errno=True)
    me = os.geteuid()
    if libc.unshare(CLONE_NEWNS | CLONE_NEWPID) != 0:
        if libc.unshare(CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID) != 0:
            say("apart", "refused")
            return
        Path("/proc/self/uid_map").write_text(f"0 {me} 1")
    if pid := os.fork():
        os.waitpid(pid, 0)
        return
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    if function != "try_once_below_the_proc_of_another":
        subprocess.run(["mount", "-t", "proc", "proc", "/proc"], check=True)
    say("apart", "done")
    globals()[function](*arguments)


def try_once_below_the_proc_of_another(url: str) -> None:
    assert os.readlink("/proc/self") != str(os.getpid())
    assert host.Process.current() is None, "a start time of another process would be taken for ours"
    try_once(url)


def try_once_by_a_mount(source: str, at: str, file: str = "") -> None:
    """Try the lock through a bind mount of the file, or of its directory."""
    if not file:
        Path(at).touch()
    subprocess.run(["mount", "--bind", source, at], check=True)
    try_once(f"sqlite://{at}/{file}" if file else f"sqlite://{at.replace(' ', '%20')}")


def try_once_under_a_boot_id_of_its_own(url: str, file: str) -> None:
    """Try the lock under a different boot id, as in a container of systemd-nspawn."""
    before = host.boot_id()
    Path(file).write_text("6d756c74-696c-6f63-6b00-000000000000\n")
    subprocess.run(["mount", "--bind", file, "/proc/sys/kernel/random/boot_id"], check=True)
    assert host.boot_id() != before
    try_once(url)


def fill_the_disk(directory: str) -> None:
    """Hold a lock, fill the disk, and print the results of different calls."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", directory], check=True)
    with multilock.connect(f"sqlite://{directory}/locks.db", ttl=30) as client:
        lease = client.lock("held").acquire()
        with open(f"{directory}/fill", "wb", buffering=0) as file:
            try:
                while file.write(bytes(4096)):
                    pass
            except OSError:
                say("full")
        for act in (lambda: client.lock("other").acquire(timeout=0), lease.renew):
            try:
                act()
                say("done")
            except MultilockError as error:
                say(type(error).__name__, error)
        os.unlink(f"{directory}/fill")
        client.lock("other").acquire(timeout=0).release()
        lease.renew()
        say("again", lease.release())


def read_only_mount(directory: str) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", directory], check=True)
    with multilock.connect(f"sqlite://{directory}/locks.db") as client, client.lock("n"):
        pass
    subprocess.run(["mount", "-o", "remount,ro", directory], check=True)
    try_once(f"sqlite://{directory}/locks.db")
    try_once(f"sqlite://{directory}/new.db")


def fork_and_hold(url: str) -> None:
    """Use a client, and fork. The parent ends at once, and the child continues to use the client."""
    client = multilock.connect(url)
    client.lock("before").acquire().release()
    if os.fork():
        os._exit(0)
    with client.lock("n") as lease:
        say("held", lease.token)
        hear()
        with client.lock("second") as second:
            say("second", second.token)
        hear()


BLOCK = """
import sqlite3, sys, time
blocker = sqlite3.connect(sys.argv[1], isolation_level=None)
blocker.execute("BEGIN IMMEDIATE")
print("blocked", flush=True)
time.sleep(float(sys.argv[2]))
"""


def block(url: str, seconds: float) -> subprocess.Popen[bytes]:
    """Start another program that holds the write lock for ``seconds``.

    The other program is not a forked child, because SQLite in a child would believe that it has the parent's locks.
    """
    command = [sys.executable, "-c", BLOCK, url.removeprefix("sqlite://"), str(seconds)]
    blocker = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert blocker.stdout is not None
    blocker.stdout.readline()
    return blocker


def fork_while_asking(url: str) -> None:
    """Fork while another thread waits for the write lock. The fork must wait, because no connection may be open
    then."""
    client = multilock.connect(url, request_timeout=3)
    client.ping()
    blocker = block(url, 0.5)
    asking = threading.Thread(target=client.lock("n").acquire)
    asking.start()
    found = os.stat(url.removeprefix("sqlite://"))
    while not _is_asked((found.st_dev, found.st_ino)):
        time.sleep(0.001)
    pid = os.fork()
    if pid == 0:
        try:
            client.lock("child").acquire(timeout=1).release()
        except BaseException as error:
            say("failed", error)
        say("child")
        os._exit(0)
    asking.join()
    os.waitpid(pid, 0)
    blocker.communicate()
    say("parent", client.lock("n").is_locked())


def fork_while_another_file_is_locked(locked: str, healthy: str) -> None:
    """Fork while another program locks one file. Print how long the fork and the slowest request to another file took,
    and whether the lease in that other file survived."""
    slow, client = multilock.connect(locked, request_timeout=5), multilock.connect(healthy, ttl=3)
    slow.ping()
    lease = client.lock("n").acquire()
    blocker = block(locked, 4)
    asking = threading.Thread(target=slow.lock("n").acquire)
    asking.start()
    longest = 0.0
    forked = threading.Event()

    def ask() -> None:
        nonlocal longest
        while not forked.is_set():
            started = time.monotonic()
            client.lock("other").acquire().release()
            longest = max(longest, time.monotonic() - started)

    asker = threading.Thread(target=ask)
    asker.start()
    found = os.stat(locked.removeprefix("sqlite://"))
    while not _is_asked((found.st_dev, found.st_ino)):
        time.sleep(0.001)
    started = time.monotonic()
    pid = os.fork()
    if pid == 0:
        os._exit(0 if slow.lock("child").try_acquire(timeout=5) else 1)
    took = time.monotonic() - started
    forked.set()
    asker.join()
    asking.join()
    say("forked", took, longest, lease.is_held(), os.waitpid(pid, 0)[1])
    blocker.communicate()


def _is_asked(file: tuple[int, int]) -> bool:
    """Return True if a request to the file is under way in this process."""
    databases = [database for reference in multilock_sqlite.transport._databases if (database := reference())]
    idle = [connection for database in databases for connection in list(database._idle)]
    return any(
        connection.file == file and connection not in idle for connection in list(multilock_sqlite.transport._live)
    )


def fork_often(url: str, times: str) -> None:
    """Fork repeatedly while other threads send requests. Every child must work, and no fork may wait long."""
    client = multilock.connect(url)
    done = threading.Event()

    def ask(number: int) -> None:
        while not done.is_set():
            client.lock(f"t{number}").acquire().release()

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    failures = 0
    longest = 0.0
    for _ in range(int(times)):
        started = time.monotonic()
        pid = os.fork()
        if pid == 0:
            with client.lock("child").acquire(timeout=5):
                os._exit(0)
        longest = max(longest, time.monotonic() - started)
        failures += os.waitpid(pid, 0)[1] != 0
    done.set()
    for thread in threads:
        thread.join()
    say("forked", failures, longest)


def fork_inside_a_request(url: str) -> None:
    """Fork in the middle of a transaction, as a signal handler might."""
    multilock_sqlite.transport.FORK_WAIT = 0.1
    asker = Asker(multilock_sqlite.open_backend(url, {}), multilock.now)
    with asker.backend._database.request(1) as sql:  # type: ignore[attr-defined]
        sql.execute("BEGIN IMMEDIATE")
        pid = os.fork()
        if pid == 0:
            try_once(url)
            os._exit(0)
        os.waitpid(pid, 0)
    asker.hold(asker.claim())
    say("parent")


def fork_by_c_code(url: str) -> None:
    """Fork by C code, which does not call Python's fork hooks."""
    asker = Asker(multilock_sqlite.open_backend(url, {}), multilock.now)
    asker.hold(asker.claim())
    pid = ctypes.PyDLL(None).fork()
    if pid == 0:
        try:
            asker.hold(asker.claim("other"))
        except MultilockError as error:
            say(type(error).__name__, error)
        os._exit(0)
    os.waitpid(pid, 0)
    asker.hold(asker.claim("third"))
    say("parent")


def die_at_every_statement(url: str) -> None:
    """Fork children in turn. The first kills itself at its first SQL statement, the second at its second one, and so
    on. Print the number of killed children and the last token."""
    deaths, token = 0, 0
    while True:
        children, pid = os.pipe(), os.fork()
        if pid == 0:
            live_until(url, deaths + 1, children[1])
            os._exit(0)
        os.close(children[1])
        with open(children[0], "rb") as told:
            tokens = [int(line) for line in told]
        status = os.waitpid(pid, 0)[1]
        asker = Asker(multilock_sqlite.open_backend(url, {}), multilock.now)
        for name in ("n", "m"):
            claim = asker.claim(name)
            granted = asker.hold(claim)
            tokens.append(granted.token or 0)
            assert asker.release(claim, granted)
        asker.backend.close()
        assert [token, *tokens] == sorted({token, *tokens}), f"at statement {deaths + 1} a token came again"
        token = tokens[-1]
        if status != signal.SIGKILL:
            assert status == 0
            break
        deaths += 1
    say("died", deaths, token)


def live_until(url: str, statement: int, told: int) -> None:
    """Run each writing operation once. Kill this process at the SQL statement with this number."""
    statements = itertools.count(1)
    prepare = Database._prepare

    def die(_: str) -> None:
        if next(statements) == statement:
            os.kill(os.getpid(), signal.SIGKILL)

    def counted(self: Database, connection: Connection) -> None:
        connection.set_trace_callback(die)
        prepare(self, connection)

    Database._prepare = counted  # type: ignore[method-assign]
    askers._numbers = itertools.count(time.time_ns())  # so that the ids of claims differ from those of the parent
    asker = Asker(multilock_sqlite.open_backend(url, {}), multilock.now)
    claim, waiting = asker.claim("n"), asker.claim("n", fair=True)
    granted = asker.hold(claim)
    os.write(told, b"%d\n" % (granted.token or 0))
    asker.renew((claim, granted))
    asker.wait(waiting)
    asker.release(waiting, unsure=True)
    asker.backend.rest(claim, granted, False, 0.0, 5)  # type: ignore[attr-defined]
    claim = asker.claim("m")
    os.write(told, b"%d\n" % (asker.hold(claim).token or 0))
    asker.backend.force_release("m", 5)
    asker.backend.close()


def interrupt_often(url: str, times: str) -> None:
    """Acquire and release while KeyboardInterrupt arrives at random points. Then acquire and release once without an
    interrupt."""
    asker = Asker(multilock_sqlite.open_backend(url, {}), multilock.now)
    struck = 0

    def strike(*_: object) -> None:
        nonlocal struck
        struck += 1
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, strike)
    while struck < int(times):
        claim = asker.claim("n")
        unsure = False
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.0002 + struck % 50 * 0.00001)
            for _ in range(20):
                asker.release(claim, asker.hold(claim))
        except KeyboardInterrupt:
            unsure = True
        signal.setitimer(signal.ITIMER_REAL, 0)
        try:
            asker.release(claim, unsure=unsure)
        except KeyboardInterrupt:
            asker.release(claim, unsure=True)
    say("struck", struck)
    hear()


def end_the_main_thread() -> None:
    """End the main thread. The process continues in another thread, but /proc shows its first thread as a zombie."""

    def go_on() -> None:
        while Path(f"/proc/{os.getpid()}/stat").read_text().split()[2] != "Z":
            time.sleep(0.001)
        say("zombie")
        time.sleep(60)

    threading.Thread(target=go_on).start()
    sys.stdout.flush()
    ctypes.CDLL(None).syscall(SYS_EXIT, 0)


def daemon_of_c_code(url: str) -> None:
    """Call daemon(3) between connect() and the first request. It forks and ends the parent, which Python does not
    notice."""
    client = multilock.connect(url, ttl=30)
    ctypes.PyDLL(None).daemon(1, 1)
    with client.lock("n"):
        info = client.inspect("n")
        say("held", os.getpid(), info and info.pid)
        hear()


def end_inside_a_request(url: str) -> None:
    """Kill this process inside a transaction. A child that was forked before keeps all inherited descriptors."""
    multilock_sqlite.transport.FORK_WAIT = 0.1
    asker = Asker(multilock_sqlite.open_backend(url, {}), multilock.now)
    with asker.backend._database.request(5) as sql, transaction(sql):  # type: ignore[attr-defined]
        if os.fork() == 0:
            say("child", os.getpid())
            time.sleep(60)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)


def count_and_read(url: str, file: str, rounds: str) -> None:
    """Increment the number in the file, and read the files of the lock meanwhile, as a backup does."""
    path = url.removeprefix("sqlite://")

    def read() -> None:
        while True:
            for end in ("", "-wal", "-shm"):
                with contextlib.suppress(OSError):
                    Path(path + end).read_bytes()
            time.sleep(0.002)

    threading.Thread(target=read, daemon=True).start()
    count(url, file, rounds)


def count_anew(url: str, file: str, rounds: str) -> None:
    """Increment the number in the file, with a new client each time."""
    for _ in range(int(rounds)):
        count(url, file, "1")


def count_in_threads(url: str, file: str, threads: str, rounds: str) -> None:
    """Increment the number in several threads, each with a separate client, and read the files of the lock
    meanwhile."""
    counters = [threading.Thread(target=count_and_read, args=(url, file, rounds)) for _ in range(int(threads))]
    for counter in counters:
        counter.start()
    for counter in counters:
        counter.join()
    say("all")


def fork_while_closing(url: str) -> None:
    """Fork while another thread closes a connection and releases its locks.

    The child prints whether the other thread had finished before the fork, and how many descriptors of the files it
    has.
    """
    client = multilock.connect(url)
    client.ping()
    closing, given_back = threading.Event(), threading.Event()
    give_back = Exclusion.give_back

    def give_back_slowly(exclusion: Exclusion) -> None:
        closing.set()
        time.sleep(0.3)
        give_back(exclusion)
        given_back.set()

    Exclusion.give_back = give_back_slowly  # type: ignore[method-assign, assignment]
    closer = threading.Thread(target=client.close)
    closer.start()
    closing.wait()
    pid = os.fork()
    if pid == 0:
        say("child", given_back.is_set(), descriptors_of(Path(url.removeprefix("sqlite://"))))
        os._exit(0)
    os.waitpid(pid, 0)
    closer.join()


def descriptors_of(path: Path) -> int:
    """Return how many descriptors of this process are open on the lock file, its log and its shared memory."""
    found = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{number}").startswith(str(path))
    return found
