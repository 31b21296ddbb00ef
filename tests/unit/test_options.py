"""How a backend reads its options: as text from a URL or as objects from a program. Mistakes are reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from multilock import ConfigurationError, connect
from multilock.options import host_list, number, tls_context, tls_only, user_info, yes_or_no


@pytest.mark.parametrize(("value", "said"), [(3, 3), ("3", 3), ("-1", -1), ("3.5", None), (3.5, None), (True, None)])
def test_a_whole_number_may_be_text_or_a_number(value: object, said: int | None) -> None:
    assert number(int, value) == said


@pytest.mark.parametrize(
    ("value", "said"), [(3, 3.0), ("0.5", 0.5), (0.5, 0.5), ("x", None), (None, None), (10**400, None)]
)
def test_a_number_may_be_text_or_a_number(value: object, said: float | None) -> None:
    assert number(float, value) == said


@pytest.mark.parametrize(("value", "said"), [("Yes", True), ("0", False), (True, True), (False, False)])
def test_a_truth_value_may_be_text_or_a_boolean(value: object, said: bool) -> None:
    assert yes_or_no("tls", value) is said


@pytest.mark.parametrize("value", ["perhaps", 1, None])
def test_any_other_truth_value_is_refused(value: object) -> None:
    with pytest.raises(ConfigurationError, match="tls must be true or false"):
        yes_or_no("tls", value)


def test_each_host_of_a_list_has_a_port() -> None:
    assert host_list("h1:1,[::1],h3", 7, "host") == ["h1:1", "[::1]:7", "h3:7"]


@pytest.mark.parametrize("hosts", ["", "h1,,h2", "h:0", "h:65536", "::1", "h:x"])
def test_a_malformed_host_is_refused_with_the_right_form(hosts: str) -> None:
    with pytest.raises(ConfigurationError, match=r"is not a host of a URL: write host:port, or \[::1\]:7 for IPv6"):
        host_list(hosts, 7, "host of a URL")


@pytest.mark.parametrize(
    "url",
    [
        *(f"{scheme}://user:secret/7" for scheme in ("redis+cluster", "redis+sentinel", "redlock", "etcd")),
        "redis+cluster://user:secret",
        "redis+sentinel://user:secret/name",
        "zookeeper://user:secret",
    ],
)
def test_a_password_without_a_host_is_not_shown(url: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        connect(url)
    assert "secret" not in str(caught.value)


def test_user_and_password_of_a_url_are_percent_decoded() -> None:
    assert user_info("u%40:p%3A:q") == {"username": "u@", "password": "p::q"}
    assert user_info("") == {}


def test_certificate_files_without_tls_are_refused() -> None:
    assert tls_only({"ca": "x"}, "rediss", "rediss") == {"ca": "x"}
    with pytest.raises(ConfigurationError, match="ca: only rediss:// has these"):
        tls_only({"ca": "x"}, "redis", "rediss")


def test_a_missing_file_is_reported_before_the_first_connection(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="PEM files"):
        tls_context({"ca": str(tmp_path / "none.pem")})
