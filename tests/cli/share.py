"""``make share``: write the man page and the shell completions of ``multilock`` into share/, from its parser.

These files are in the wheel, and pip puts them under the environment's share/. `test_share` compares them with the
parser.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from multilock.cli import arguments

SHARE = Path(__file__).parents[2] / "share"
MAN = SHARE / "man/man1/multilock.1"
BASH = SHARE / "bash-completion/completions/multilock"
ZSH = SHARE / "zsh/site-functions/_multilock"


def top() -> argparse.ArgumentParser:
    return arguments._parsers()[0]


def commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    [subparsers] = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    return dict(subparsers.choices)


def shown(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Return the options that the help shows, except the help itself."""
    for action in parser._actions:
        if action.option_strings and action.help != argparse.SUPPRESS and action.dest != "help":
            yield action


def write() -> None:
    import shtab
    from argparse_manpage.manpage import Manpage

    parser = top()
    for command in commands(parser).values():
        for action in command._actions:
            kind = {"FILE": shtab.FILE, "CMD": shtab.FILE, "DIR": shtab.DIRECTORY}.get(str(action.metavar))
            if kind:
                action.complete = kind  # type: ignore[attr-defined]
    for shell, path in (("bash", BASH), ("zsh", ZSH)):
        path.write_text(shtab.complete(parser, shell, root_prefix="multilock"), encoding="utf-8")
    for command in commands(parser).values():
        # The man page's generator shows only the epilog of the top command, so the epilogs of the commands, with their
        # exit codes, are added to the descriptions.
        command.description = f"{command.description}. {command.epilog or ''}".strip()
    about = {
        "project_name": "multilock",
        "manual_title": "User commands",
        "description": "distributed locks and leader election",
        "format": "pretty",
    }
    MAN.write_text(str(Manpage(parser, about)), encoding="utf-8")


if __name__ == "__main__":
    write()
