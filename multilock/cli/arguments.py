"""The commands and their arguments. The other modules do the work.

The imports of this file delay every command. So the standard library parses the arguments, and a command imports its
modules only when it is called.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import multilock
from multilock import ConfigurationError
from multilock.cli.exits import TAKEN, USAGE, code_of, say, show_warnings
from multilock.config import resolve

__all__ = ["run_app"]

NOT_HELD = 1
NO_READER = 1
EXITS = "Exit code: that of CMD; 76 lock lost, 69 backend unreachable, 64 usage error, 128 + N if signal N ended CMD"
WITH_CMD = ("run", "elect")


def run_app() -> int:
    """Run the command of ``sys.argv``. Returns the exit code. No command ends with a traceback."""
    try:
        arguments = _parse(sys.argv[1:])
        show_warnings()
        code: int = arguments.act(arguments)
        sys.stdout.flush()
        return code
    except SystemExit as ended:  # help, the version or a usage error has been printed
        return int(ended.code or 0)
    except BrokenPipeError:
        _drop_output()
        return NO_READER
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, OSError):
            _drop_output()
        return code_of(error)


def _drop_output() -> None:
    """Send further output to /dev/null, so that Python does not retry at exit the output that stdout refused."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


# ---- the actions of the commands


def _connect(arguments: argparse.Namespace, ttl: float | None = None) -> multilock.Client:
    return multilock.connect(arguments.url, profile=arguments.profile, config=arguments.config, ttl=ttl)


def _connect_shared(arguments: argparse.Namespace) -> multilock.Client:
    if resolve(arguments.url, profile=arguments.profile, config=arguments.config).scheme == "memory":
        raise ConfigurationError(
            "memory:// works only inside one process: choose a backend that several processes can reach"
        )
    return _connect(arguments, arguments.ttl)


def _run(arguments: argparse.Namespace) -> int:
    from multilock.cli import run_and_elect

    with run_and_elect.Signals() as signals, _connect_shared(arguments) as client:
        lock = _lock(client, arguments)
        return run_and_elect.run(
            client, lock, arguments.command, signals, arguments.timeout, arguments.taken, arguments.quiet
        )


def _lock(client: multilock.Client, arguments: argparse.Namespace) -> multilock.DistributedLock:
    name, rest, permits = arguments.name, arguments.hold_at_least, arguments.permits
    options: dict[str, Any] = {"max_hold": arguments.max_hold, "hard_fence": arguments.hard_fence}
    if arguments.shared and (rest or permits is not None):
        raise ConfigurationError("--shared cannot be combined with --permits or --hold-at-least: leave one out")
    if arguments.shared:
        return client.read_write_lock(name, **options).reader()
    if permits is not None:
        return client.semaphore(name, permits, hold_at_least=rest, **options)
    return client.lock(name, hold_at_least=rest, **options)


def _elect(arguments: argparse.Namespace) -> int:
    from multilock.cli import run_and_elect

    with run_and_elect.Signals() as signals, _connect_shared(arguments) as client:
        election = client.election(
            arguments.name,
            identity=arguments.identity,
            grace=arguments.grace,
            max_hold=arguments.max_hold,
            hard_fence=arguments.hard_fence,
        )
        return run_and_elect.elect(client, election, arguments.command, signals, arguments.grace)


def _status(arguments: argparse.Namespace) -> int:
    from multilock.cli import status

    with _connect(arguments) as client:
        act = status.watch if arguments.watch else status.show
        act(client, arguments.prefix, arguments.json)
    return 0


def _force_release(arguments: argparse.Namespace) -> int:
    name = arguments.name
    with _connect(arguments) as client:
        holder = client.inspect(name)
        who = "nobody" if holder is None else _holders(holder)
        if not arguments.yes:
            held = f"{name!r} is held by {who}, which may still be at work" if holder else f"nobody holds {name!r} now"
            say(f"{held}: add --yes to take the lock away")
            return USAGE
        if client.force_release(name):
            print(f"{name} was taken from {who}")
            return 0
        print(f"nobody held {name}")
        return NOT_HELD


def _holders(info: multilock.LockInfo) -> str:
    first = info.identity or "an unknown holder"
    return f"{first} and {others} more" if (others := (info.holders or 1) - 1) else first


def _doctor(arguments: argparse.Namespace) -> int:
    from multilock.cli.doctor import doctor

    return doctor(arguments.url, arguments.profile, arguments.config, arguments.json, arguments.strict, arguments.sql)


def _demo(arguments: argparse.Namespace) -> int:
    from multilock.cli.demo import demo

    return demo(arguments.url, arguments.profile, arguments.config, arguments.nodes)


def _compare(arguments: argparse.Namespace) -> int:
    from multilock.cli.compare import Wanted, compare, show, verify

    if arguments.verify is not None:
        return verify(arguments.verify)
    if arguments.page is not None:
        return show(arguments.page, arguments.card)
    its = vars(arguments)
    wanted = Wanted(**{field: its[field] for field in Wanted.__dataclass_fields__})
    return compare(wanted)


# ---- the arguments of the commands


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.format_usage()}multilock: {message} (see {self.prog} --help)\n")


def _parse(words: Sequence[str]) -> argparse.Namespace:
    top, commands = _parsers()
    if not words:
        top.print_help()
        raise SystemExit(USAGE)
    if words[0] not in WITH_CMD:
        arguments, unknown = top.parse_known_args(words)
        if unknown:
            commands.get(words[0], top).error(f"unrecognized arguments: {' '.join(unknown)}")
        return arguments
    # Everything after -- belongs to CMD, including further dashes.
    end = words.index("--") if "--" in words else len(words)
    parser = commands[words[0]]
    arguments, unknown = parser.parse_known_intermixed_args(words[1:end])
    if unknown:
        remedy = "" if "--" in words else ": write CMD after --"
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{remedy}")
    arguments.command += words[end + 1 :]
    if arguments.name is None:
        parser.error(f"NAME is missing, the name of the lock: {parser.prog} nightly-report -- make-the-report")
    if not arguments.command:
        parser.error(f"CMD is missing: write it after --, such as {parser.prog} {arguments.name} -- make-the-report")
    return arguments


def _parsers() -> tuple[_Parser, dict[str, _Parser]]:
    top = _Parser(
        prog="multilock",
        description="Locks and leader election over Redis, PostgreSQL, etcd, Consul, ZooKeeper and SQLite.",
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"multilock {multilock.__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(
        name: str, act: Callable[[argparse.Namespace], int], words: str, text: str, exits: str | None = None
    ) -> _Parser:
        usage = f"multilock {name} [options] {words}".strip()
        parser = commands.add_parser(name, help=text, description=text, usage=usage, epilog=exits, allow_abbrev=False)
        parser.set_defaults(act=act)
        return parser

    run = command("run", _run, "NAME -- CMD...", "run CMD while holding the lock NAME; end CMD if the lock is lost",
                  f"{EXITS}; 75 NAME not obtained.")  # fmt: skip
    _add_command(run)
    run.add_argument("--timeout", metavar="S", type=_seconds, help="seconds to wait; 0 tries once (default: no limit)")
    run.add_argument("--hold-at-least", metavar="S", type=_seconds, default=0.0,
                     help="keep NAME taken for S seconds, even if CMD is shorter")  # fmt: skip
    run.add_argument("--shared", action="store_true", help="hold NAME as a reader, together with other readers")
    run.add_argument("--permits", metavar="N", type=int, help="hold NAME as one of at most N holders")
    run.add_argument("--quiet", "-q", action="store_true", help="do not say that NAME is awaited or was not obtained")
    run.add_argument("-E", metavar="CODE", dest="taken", type=int, default=TAKEN,
                     help="exit code if NAME is not obtained (default: 75)")  # fmt: skip
    # This is -E with the long name that flock gives it. The help has no space for this name.
    run.add_argument("--conflict-exit-code", dest="taken", type=int, help=argparse.SUPPRESS)
    elect = command("elect", _elect, "NAME -- CMD...", "run CMD while this node is the leader; resign when CMD ends",
                    f"{EXITS}. After a loss the node is a candidate again; 76 if CMD cannot be ended.")  # fmt: skip
    _add_command(elect)
    elect.add_argument("--identity", metavar="ID", help="the name of this node (default: host and pid)")
    elect.add_argument(
        "--grace", metavar="S", type=_seconds, help="seconds for CMD to end after SIGTERM (default: the ttl)"
    )
    for holding in (run, elect):
        holding.add_argument(
            "--ttl", metavar="S", type=_seconds, help="seconds the lock outlives a dead holder (default: 30)"
        )
        holding.add_argument(
            "--max-hold", metavar="S", type=_seconds, help="end CMD after S seconds, as if NAME was lost"
        )
        holding.add_argument(
            "--hard-fence", action="store_true", help="Linux: kill CMD in time even if this is stopped"
        )

    status = command("status", _status, "[PREFIX]", "list the held locks and their holders")
    status.add_argument("prefix", metavar="PREFIX", nargs="?", default="", help="only names that begin with PREFIX")
    status.add_argument("--json", action="store_true", help="print JSON, for programs")
    status.add_argument("--watch", action="store_true", help="update the list until interrupted")

    force = command("force-release", _force_release, "NAME", "take the lock NAME away from its holder, and notify it",
                    "Exit code: 0 taken away, 1 nobody held it, 69 backend unreachable, 64 usage error.")  # fmt: skip
    force.add_argument("name", metavar="NAME", help="the lock's name")
    force.add_argument("--yes", action="store_true", help="required: confirm that the holder loses the lock")

    doctor = command("doctor", _doctor, "", "check the installation and the backend, and show its promises",
                     "Exit code: 0 no problem, 1 a finding of level error, 69 unreachable, 64 usage.")  # fmt: skip
    doctor.add_argument("--json", action="store_true", help="print JSON, for programs")
    doctor.add_argument("--strict", action="store_true", help="also exit with 1 for a finding of level warning")
    doctor.add_argument(
        "--sql", action="store_true", help="postgresql: only print the SQL by which an owner makes the tables"
    )

    demo = command("demo", _demo, "", "watch a leader being elected, killed and replaced")
    demo.add_argument(
        "--nodes", metavar="N", type=_nodes, default=3, help="number of processes, from 2 to 20 (default: 3)"
    )

    compare = command("compare", _compare, "URL...", "cause faults, and show how each backend behaves",
                      "Exit code: 0 no promise broken, 1 a promise broken, 3 void (it proves nothing), "
                      "69 unreachable, 64 usage error, 130 interrupted. --verify: 1 if a verdict differs.")  # fmt: skip
    compare.add_argument("urls", metavar="URL", nargs="*", help="servers to test, with locks named compare-...")
    compare.add_argument("--quick", action="store_true", help="two cycles of each fault, in about two minutes")
    compare.add_argument("--scenarios", metavar="A,B", help="only these faults (default: all that are possible)")
    compare.add_argument("--cycles", metavar="N", type=int, help="cycles for each fault and backend (default: 20)")
    compare.add_argument(
        "--control-cycles", metavar="N", type=int, help="cycles for each control (default: as --cycles)"
    )
    compare.add_argument("--minutes", metavar="M", type=float, help="start no further cycle after M minutes")
    compare.add_argument(
        "--ttl", metavar="S", type=_seconds, default=2.0, help="ttl of the locks in seconds (default: 2)"
    )
    compare.add_argument("--seed", metavar="N", type=int, help="repeat the order and random choices of an earlier run")
    compare.add_argument("--adapter", metavar="M:N=URL", dest="adapters", action="append", default=[],
                         help="also test your own lock: package.module:Name=URL (repeatable)")  # fmt: skip
    compare.add_argument("--scale", action="store_true", help="measure with 10,000 held locks, not 1,000")
    compare.add_argument("--server-pid", metavar="URL=PID", dest="server_pids", action="append", default=[],
                         help="process PID may be paused with SIGSTOP (repeatable)")  # fmt: skip
    compare.add_argument("--server-container", metavar="URL=NAME", dest="server_containers", action="append",
                         default=[], help="this container may be paused, killed, restarted (repeatable)")  # fmt: skip
    compare.add_argument("--out", metavar="DIR", help="write the history and the report to DIR")
    compare.add_argument("--resume", action="store_true", help="continue the run in --out that ended early")
    compare.add_argument("--card", metavar="FILE", help="draw the results as an SVG of 1200 x 630")
    compare.add_argument("--against", metavar="FILE", help="show what changed since this older report.json")
    compare.add_argument("--verify", metavar="DIR", help="judge the history in DIR again; run nothing")
    compare.add_argument("--page", metavar="DIR", help="write report.html in DIR again; run nothing")
    compare.add_argument("--json", dest="as_json", action="store_true", help="print report.json, for programs")

    for parser in (run, elect, status, force, doctor, demo):
        where = "SQLite in a new folder" if parser is demo else "$MULTILOCK_URL"
        parser.add_argument("--url", metavar="URL", help=f"such as redis://host:6379 (default: {where})")
        parser.add_argument("--config", metavar="FILE", help="configuration file, instead of multilock.toml")
        parser.add_argument("--profile", metavar="NAME", help="profile in that file")
    return top, commands.choices


def _add_command(parser: _Parser) -> None:
    # The usage line shows NAME and CMD. For argparse both are optional, because our own error for a missing one has an
    # example.
    parser.add_argument("name", metavar="NAME", nargs="?", help="the lock's name")
    parser.add_argument("command", metavar="CMD", nargs="*", help=argparse.SUPPRESS)


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds: write 30 or 0.5") from None


def _nodes(text: str) -> int:
    if text not in map(str, range(2, 21)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 2 to 20")
    return int(text)
