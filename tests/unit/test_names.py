"""The rules for names, identities and times, and how a name becomes a key."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multilock.identity import check_identity
from multilock.names import check_name, check_prefix, check_seconds, check_timeout, escape, unescape

names = st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=60)


@given(names)
def test_every_name_without_control_characters_is_allowed(name: str) -> None:
    assert check_name(name) == name


@given(names)
def test_the_name_can_be_read_from_its_key(name: str) -> None:
    assert unescape(escape(name)) == name


@given(names)
def test_a_key_that_belongs_to_no_name_gives_none(text: str) -> None:
    name = unescape(text)
    assert name is None or escape(name) == text


@pytest.mark.parametrize("key", ["teamA/job", "a b", "%2f", "%41", "%FF", "%", ".", "ä"])
def test_a_key_of_a_longer_prefix_or_of_another_program_gives_no_name(key: str) -> None:
    assert unescape(key) is None


@given(names, names)
def test_different_names_do_not_exclude_each_other(one: str, other: str) -> None:
    assert (escape(one) == escape(other)) == (one == other)


@given(names)
def test_a_key_has_no_separator_and_needs_no_quoting(name: str) -> None:
    key = escape(name)
    assert key.isascii()
    assert key.isprintable()
    assert not set(key) & set("/ \\'\"?*[]")
    assert key not in (".", "..")


@pytest.mark.parametrize("name", ["invoices-42", "a.b_c~d:e", "UPPER", "9"])
def test_a_simple_name_is_its_own_key(name: str) -> None:
    assert escape(name) == name


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("", ValueError, "empty"),
        ("x" * 1001, ValueError, "1001 characters"),
        ("a\nb", ValueError, "control character"),
        ("a\x00", ValueError, "control character"),
        ("\x85", ValueError, "control character"),
        ("\ud800", ValueError, "surrogate"),
        (b"bytes", TypeError, "bytes"),
        (None, TypeError, "NoneType"),
        (5, TypeError, "int"),
    ],
)
def test_an_invalid_name_is_refused_with_the_reason(name: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        check_name(name)


def test_the_longest_name_is_a_thousand_characters() -> None:
    assert len(check_name("ä" * 1000)) == 1000


def test_the_limit_for_an_identity_is_lower_and_a_prefix_may_be_empty() -> None:
    assert check_identity("i" * 255)
    assert check_identity("/" * 85)
    with pytest.raises(ValueError):
        check_identity("i" * 256)
    for too_long in ("/" * 86, ":" * 86, "ü" * 43):
        with pytest.raises(ValueError, match="bytes in percent-encoding: at most 255"):
            check_identity(too_long)
    with pytest.raises(ValueError):
        check_identity("")
    assert check_prefix("") == ""
    with pytest.raises(ValueError):
        check_prefix("a\tb")


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (0, ValueError),
        (-1, ValueError),
        (math.nan, ValueError),
        (math.inf, ValueError),
        pytest.param(10**400, ValueError, id="no float is so great"),
        pytest.param(-(10**400), ValueError, id="nor so small"),
        (True, TypeError),
        ("1", TypeError),
    ],
)
def test_a_ttl_is_a_positive_finite_number(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="ttl"):
        check_seconds(value, "ttl")


def test_a_timeout_of_none_or_inf_means_forever() -> None:
    assert check_timeout(None) is None
    assert check_timeout(math.inf) is None
    assert check_timeout(sys.maxsize) is None, "threading could not wait so long"
    assert check_timeout(10**400) is None, "no float is so great"
    with pytest.raises(ValueError):
        check_timeout(-(10**400))
    assert check_timeout(0) == 0.0
    assert check_timeout(2) == 2.0
