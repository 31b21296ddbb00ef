"""The man page and the completions name all commands and options of the parser, and the shells accept them."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from tests.cli.share import BASH, MAN, ZSH, commands, shown, top

REMEDY = "run `make share`"


def test_every_option_is_in_the_man_page_and_the_completions() -> None:
    man = MAN.read_text(encoding="utf-8").replace("\\-", "-")
    bash, zsh = BASH.read_text(encoding="utf-8"), ZSH.read_text(encoding="utf-8")
    for name, parser in commands(top()).items():
        assert f"multilock {name}'" in man, REMEDY
        [options] = [line for line in bash.splitlines() if f"_{name.replace('-', '_')}_option_strings=" in line]
        for action in shown(parser):
            for option in action.option_strings:
                assert f"\\fB{option}\\fR" in man, REMEDY
                assert option in options.partition("=")[2].strip("()").split(), REMEDY
                assert f"{option}[" in zsh or f"{option}," in zsh or f"{option}}}" in zsh, REMEDY
        assert (parser.epilog or "") in man.replace("\n", " "), REMEDY


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("do", {"doctor"}),
        ("run --hard", {"--hard-fence"}),
        ("force-release --y", {"--yes"}),
    ],
)
def test_bash_completes_commands_and_options(words: str, offered: set[str]) -> None:
    typed = ["multilock", *words.split()]
    script = (
        f"source {BASH}; COMP_WORDS=({' '.join(typed)}); COMP_CWORD={len(typed) - 1}; "
        '_shtab_multilock multilock "${COMP_WORDS[COMP_CWORD]}" ""; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "--norc", "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert set(done.stdout.split()) == offered
    assert done.stderr == ""


@pytest.mark.skipif(not shutil.which("groff"), reason="groff is not installed")
def test_groff_reads_the_man_page_without_a_warning() -> None:
    done = subprocess.run(
        ["groff", "-man", "-Tutf8", "-ww", str(MAN)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr == ""
    assert "76 lock lost" in done.stdout
