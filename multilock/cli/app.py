"""The commands and their arguments; what they do is in the other modules."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Annotated, NoReturn

import typer

import multilock
from multilock.cli import doctor as _doctor
from multilock.cli import hold
from multilock.cli import status as _status
from multilock.cli.demo import demo as _demo
from multilock.cli.exits import TAKEN, USAGE, Finished, code_of, say, show_warnings

__all__ = ["app", "run_app"]

app = typer.Typer(
    help="Locks and leader election over Redis, SQLite and more.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="The lock's name.", show_default=False)]
Command = Annotated[
    list[str], typer.Argument(metavar="CMD", help="Command and arguments, after --", show_default=False)
]
Identity = Annotated[str | None, typer.Option(metavar="ID", help="Who this node is (host and pid).")]
Timeout = Annotated[float | None, typer.Option(metavar="S", help="Longest wait, 0: one try (for ever).")]
Taken = Annotated[int, typer.Option("--conflict-exit-code", "-E", metavar="CODE", help="Exit if not obtained.")]
Ttl = Annotated[float | None, typer.Option(metavar="S", help="Seconds it outlives a dead holder (30).")]
Url = Annotated[str | None, typer.Option(metavar="URL", help="Where locks live: redis://host:6379/0.")]
Profile = Annotated[str | None, typer.Option(metavar="NAME", help="A profile of that file.")]
Config = Annotated[str | None, typer.Option(metavar="FILE", help="Instead of multilock.toml.")]
Json = Annotated[bool, typer.Option("--json", help="For programs.")]


def run_app() -> int:
    """Run the command of ``sys.argv``; returns the exit code."""
    try:
        app(prog_name="multilock")
    except Finished as finished:
        return finished.code
    except SystemExit as ended:
        # typer's own exits. 2 is a mistake in the arguments, which it has explained; it has a reader who went away too.
        return USAGE if ended.code == 2 else int(ended.code or 0)
    except Exception as error:
        return code_of(error)
    return 0


@contextlib.contextmanager
def _client(
    url: str | None, profile: str | None, config: str | None, ttl: float | None = None
) -> Iterator[multilock.Client]:
    with multilock.connect(url, profile=profile, config=config, ttl=ttl) as client:
        yield client


@contextlib.contextmanager
def _ending() -> Iterator[None]:
    """No command ends with a traceback."""
    show_warnings()
    try:
        yield
        sys.stdout.flush()  # here, where its reader's absence is still typer's affair
    except BrokenPipeError:
        raise
    except (Exception, KeyboardInterrupt) as error:
        _finish(code_of(error))


def _finish(code: int) -> NoReturn:
    raise Finished(code)


@app.command(epilog="Exit: that of CMD; 75 not obtained, 76 lost, 69 unreachable, 64 usage.")
def run(
    name: Name,
    command: Command,
    timeout: Timeout = None,
    ttl: Ttl = None,
    taken: Taken = TAKEN,
    url: Url = None,
    config: Config = None,
    profile: Profile = None,
) -> None:
    """Run CMD while the lock NAME is held; end it if that is lost."""
    with _ending(), _client(url, profile, config, ttl) as client:
        _finish(hold.run(client, name, command, timeout, taken))


@app.command()
def elect(
    name: Name,
    command: Command,
    identity: Identity = None,
    ttl: Ttl = None,
    url: Url = None,
    config: Config = None,
    profile: Profile = None,
) -> None:
    """Run CMD whenever this node leads; when CMD ends, resign."""
    with _ending(), _client(url, profile, config, ttl) as client:
        _finish(hold.elect(client, name, command, identity))


@app.command()
def status(
    prefix: Annotated[str, typer.Argument(metavar="PREFIX", help="Only names that begin so.", show_default=False)] = "",
    as_json: Json = False,
    watch: Annotated[bool, typer.Option("--watch", help="Go on until interrupted.")] = False,
    url: Url = None,
    config: Config = None,
    profile: Profile = None,
) -> None:
    """Show who holds what."""
    with _ending(), _client(url, profile, config) as client:
        if watch:
            _status.watch(client, prefix, as_json)
        else:
            _status.show(client, prefix, as_json)


@app.command()
def force_release(
    name: Name,
    yes: Annotated[bool, typer.Option("--yes", help="Yes, its holder shall lose it.")] = False,
    url: Url = None,
    config: Config = None,
    profile: Profile = None,
) -> None:
    """Take the lock NAME away from its holder, who is told."""
    with _ending(), _client(url, profile, config) as client:
        holder = client.inspect(name)
        who = "nobody" if holder is None else holder.identity or "an unknown holder"
        if not yes:
            at_work = ", who may still be at work" if holder else " now"
            say(f"{name!r} is held by {who}{at_work}: add --yes to take it away")
            _finish(USAGE)
        print(f"{name} was {'taken from' if client.force_release(name) else 'held by'} {who}")


@app.command()
def doctor(as_json: Json = False, url: Url = None, config: Config = None, profile: Profile = None) -> None:
    """Show what is installed, and what the backend promises."""
    with _ending():
        _finish(_doctor.doctor(url, profile, config, as_json))


@app.command()
def demo(
    nodes: Annotated[int, typer.Option(metavar="N", min=2, max=20, help="How many processes.")] = 3,
    url: Annotated[str | None, typer.Option(metavar="URL", help="Where they meet (SQLite, a new folder).")] = None,
    config: Config = None,
    profile: Profile = None,
) -> None:
    """Watch a leader elected, killed, and replaced."""
    with _ending():
        _finish(_demo(url, profile, config, nodes))
