"""How settings from a URL, a mapping, a file and the environment combine, and which error a mistake in them raises."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multilock import AsyncClient, Client
from multilock.backend import Backend
from multilock.config import Settings, open_configured, resolve, settings_for
from multilock.errors import CapabilityMissing, ConfigurationError
from multilock.identity import default_identity
from multilock.keywords import ConnectOptions
from multilock.options import reject_unknown
from multilock.registry import OURS, open_backend
from multilock.urls import redact

WriteFile = Callable[[str], Path]

SECRET = "hunter2"


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("MULTILOCK_URL", "MULTILOCK_PROFILE", "MULTILOCK_CONFIG", "MULTILOCK_REQUIRES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def file(tmp_path: Path) -> WriteFile:
    """Return a function that writes multilock.toml in the working directory."""

    def write(text: str) -> Path:
        path = tmp_path / "multilock.toml"
        path.write_text(text)
        return path

    return write


# ---- the ways to give settings


def test_a_url_alone_gets_the_documented_defaults() -> None:
    assert resolve("memory://here") == Settings("memory", "memory://here", 30.0, "multilock/", None, 30.0, None)


def test_the_query_becomes_options_and_leaves_the_url() -> None:
    settings = resolve("redis://h:6379/0?ttl=15&prefix=app/&identity=a%3A1&outage_timeout=none&request_timeout=.5&db=3")
    assert settings == Settings("redis", "redis://h:6379/0", 15.0, "app/", "a:1", None, 0.5, {"db": "3"})


def test_the_query_is_percent_decoded_and_the_rest_of_the_url_is_not() -> None:
    settings = resolve("redis://u:p%40ss@h/0?password=a%26b%3D%25&prefix=my+app%2F")
    assert settings.url == "redis://u:p%40ss@h/0"
    assert settings.options == {"password": "a&b=%"}
    assert settings.prefix == "my app/"


def test_a_prefix_may_be_empty() -> None:
    assert resolve("redis://h?prefix=").prefix == ""
    assert resolve("redis://h", options={"prefix": ""}).prefix == ""


def test_the_scheme_is_found_in_any_case() -> None:
    assert resolve("REDIS://h").scheme == "redis"


def test_a_mapping_is_a_url_with_keywords() -> None:
    mapping = {"url": "redis://h", "ttl": 15, "requires": ["fencing"], "password": "x"}
    assert resolve(mapping) == resolve("redis://h", requires={"fencing"}, options={"ttl": 15, "password": "x"})


def test_a_mapping_may_name_profile_and_file(tmp_path: Path) -> None:
    path = tmp_path / "other.toml"
    path.write_text('[profiles.prod]\nurl = "memory://prod"')
    assert resolve({"profile": "prod", "config": str(path), "ttl": 5}).url == "memory://prod"


def test_a_keyword_wins_over_the_mapping_beside_it() -> None:
    assert resolve({"url": "memory://", "ttl": 15}, options={"ttl": 20}).ttl == 20


def test_none_as_a_keyword_means_not_given() -> None:
    settings = resolve("redis://h?ttl=15&password=x", options={"ttl": None, "identity": None, "password": None})
    assert (settings.ttl, settings.identity, settings.options) == (15.0, None, {"password": "x"})


def test_none_for_outage_timeout_means_unlimited() -> None:
    assert resolve("memory://?outage_timeout=3", options={"outage_timeout": None}).outage_timeout is None


@pytest.mark.parametrize("given", [float("inf"), None])
def test_an_outage_timeout_may_be_unlimited(given: float | None) -> None:
    assert resolve("memory://", options={"outage_timeout": given}).outage_timeout is None


def test_an_outage_timeout_of_zero_gives_up_at_the_first_silence() -> None:
    assert resolve("memory://?outage_timeout=0").outage_timeout == 0.0


def test_a_client_object_reaches_the_backend_as_an_option() -> None:
    client = object()
    assert resolve("redis://", client=client).backend_options()["client"] is client
    assert "client" not in resolve("redis://").backend_options()


def test_a_request_timeout_must_be_valid_for_a_socket() -> None:
    assert resolve("redis://h?request_timeout=1e300").request_timeout == 1e9


def test_the_backend_receives_ttl_prefix_identity_and_request_timeout() -> None:
    options = resolve("redis://h?db=3", options={"request_timeout": 1}).backend_options()
    assert options == {
        "db": "3",
        "ttl": 30.0,
        "prefix": "multilock/",
        "identity": default_identity(),
        "request_timeout": 1.0,
    }


def test_the_default_identity_is_host_and_pid_in_64_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_identity() == f"{os.uname().nodename}:{os.getpid()}"
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(("", "h" * 80, "", "", "")))
    assert len(default_identity()) == 64
    assert default_identity().endswith(f"h:{os.getpid()}")


# ---- file and environment

PROFILES = """
default = "prod"
ttl = 20
prefix = "top/"
[profiles.prod]
url = "redis://prod?request_timeout=2"
[profiles.test]
url = "memory://test"
ttl = 5
outage_timeout = "none"
"""


def test_without_arguments_the_default_profile_is_used(file: WriteFile) -> None:
    file(PROFILES)
    assert resolve() == Settings("redis", "redis://prod", ttl=20.0, prefix="top/", request_timeout=2.0)


def test_the_profile_argument_selects_another_profile(file: WriteFile) -> None:
    file(PROFILES)
    assert resolve(profile="test") == Settings("memory", "memory://test", 5.0, "top/", outage_timeout=None)


def test_the_environment_selects_another_profile(file: WriteFile, monkeypatch: pytest.MonkeyPatch) -> None:
    file(PROFILES)
    monkeypatch.setenv("MULTILOCK_PROFILE", "test")
    assert resolve().url == "memory://test"


def test_the_url_of_the_environment_wins_over_its_profile(file: WriteFile, monkeypatch: pytest.MonkeyPatch) -> None:
    file(PROFILES)
    monkeypatch.setenv("MULTILOCK_PROFILE", "test")
    monkeypatch.setenv("MULTILOCK_URL", "memory://env")
    assert resolve().url == "memory://env"


def test_the_profile_argument_wins_over_the_environment(file: WriteFile, monkeypatch: pytest.MonkeyPatch) -> None:
    file(PROFILES)
    monkeypatch.setenv("MULTILOCK_PROFILE", "prod")
    monkeypatch.setenv("MULTILOCK_URL", "memory://env")
    assert resolve(profile="test").url == "memory://test"


def test_a_url_argument_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MULTILOCK_URL", "memory://env")
    assert resolve("memory://arg").url == "memory://arg"


def test_an_empty_environment_variable_counts_as_unset(file: WriteFile, monkeypatch: pytest.MonkeyPatch) -> None:
    file(PROFILES)
    for name in ("MULTILOCK_URL", "MULTILOCK_PROFILE", "MULTILOCK_CONFIG", "MULTILOCK_REQUIRES"):
        monkeypatch.setenv(name, "")
    assert resolve().url == "redis://prod"


def test_keyword_beats_query_beats_profile_beats_top_level(file: WriteFile) -> None:
    file('ttl = 1\n[profiles.p]\nurl = "memory://"\nttl = 2\n[profiles.q]\nurl = "memory://?ttl=3"\nttl = 2')
    assert resolve("memory://").ttl == 1
    assert resolve(profile="p").ttl == 2
    assert resolve(profile="q").ttl == 3
    assert resolve(profile="q", options={"ttl": 4}).ttl == 4


def test_a_url_beside_a_profile_wins_and_the_profile_gives_the_rest(file: WriteFile) -> None:
    file('[profiles.p]\nurl = "redis://p"\nttl = 2\nprefix = "p/"')
    assert resolve("memory://mine?ttl=3", profile="p") == Settings("memory", "memory://mine", 3.0, "p/")


def test_a_url_alone_uses_no_profile(file: WriteFile) -> None:
    file('default = "p"\n[profiles.p]\nurl = "redis://p"\nttl = 2')
    assert resolve("memory://").ttl == 30.0


def test_a_url_at_the_top_level_is_the_last_resort(file: WriteFile) -> None:
    file('url = "memory://top"\n[profiles.p]\nttl = 2')
    assert resolve().url == "memory://top"
    assert resolve(profile="p") == Settings("memory", "memory://top", 2.0)


def test_the_file_is_the_argument_then_the_environment_then_the_working_directory(
    file: WriteFile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file('url = "memory://cwd"')
    for name in ("arg", "env"):
        (tmp_path / name).write_text(f'url = "memory://{name}"')
    assert resolve().url == "memory://cwd"
    monkeypatch.setenv("MULTILOCK_CONFIG", str(tmp_path / "env"))
    assert resolve().url == "memory://env"
    assert resolve(config=tmp_path / "arg").url == "memory://arg"


def test_required_capabilities_of_argument_and_file_are_combined(file: WriteFile) -> None:
    file('url = "memory://"\nrequires = ["fencing"]')
    assert resolve(requires=["fair"]).requires == {"fencing", "fair"}


# ---- mistakes


def _refused(*args: object, **kwargs: object) -> str:
    with pytest.raises(ConfigurationError) as caught:
        resolve(*args, **kwargs)  # type: ignore[arg-type]
    return str(caught.value)


def test_an_error_without_configuration_says_how_to_configure() -> None:
    message = _refused()
    for way in ("redis://localhost:6379/0", "$MULTILOCK_URL", "multilock.toml"):
        assert way in message


def test_an_unknown_profile_lists_the_known_profiles(file: WriteFile) -> None:
    file(PROFILES)
    message = _refused(profile="production")
    assert "'production'" in message
    assert "prod, test" in message


def test_the_error_about_a_missing_profile_file_lists_the_searched_places() -> None:
    assert "multilock.toml in the working directory" in _refused(profile="prod")


def test_a_file_of_profiles_without_a_default_asks_for_one(file: WriteFile) -> None:
    file('[profiles.a]\nurl = "memory://"\n[profiles.b]\nurl = "memory://"')
    message = _refused()
    assert "(a, b)" in message
    assert "$MULTILOCK_PROFILE" in message


def test_a_profile_without_a_url_is_reported(file: WriteFile) -> None:
    file("[profiles.a]\nttl = 3")
    assert "profile 'a' of multilock.toml has no url" in _refused(profile="a")


@pytest.mark.parametrize(
    ("text", "line"), [("ttl = 3\nttl = = 4\n", 2), ('\n\nurl = "', 3), ("[profiles.a]\n[profiles.a]\n", 2)]
)
def test_malformed_toml_names_file_and_line(file: WriteFile, text: str, line: int) -> None:
    path = file(text)
    assert f"{path}, line {line}:" in _refused(config=path)


def test_a_file_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "latin.toml"
    path.write_bytes(b'url = "memory://\xe9"')
    assert repr(str(path)) in _refused(config=path)


def test_a_file_that_is_named_must_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "'nowhere.toml' (config=)" in _refused(config="nowhere.toml")
    monkeypatch.setenv("MULTILOCK_CONFIG", "elsewhere.toml")
    assert "'elsewhere.toml' ($MULTILOCK_CONFIG)" in _refused()


def test_a_directory_in_place_of_a_file_is_named(tmp_path: Path) -> None:
    assert repr(str(tmp_path)) in _refused(config=tmp_path)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("default = 3", "default must be the name of a profile"),
        ("profiles = 3", "[profiles.NAME]"),
        ("[profiles]\na = 3", "[profiles.NAME]"),
        ('url = "memory://"\n[prod]\nttl = 3', "[profiles.prod]"),
        ("url = 3", "url must be text"),
        ('url = "memory://"\nttl = true', "multilock.toml: ttl must be a number"),
        ('url = "memory://"\nttl = 0', "multilock.toml: ttl is 0"),
        ('url = "memory://"\nprefix = 3', "multilock.toml: prefix must be a str"),
        ('url = "memory://"\nclient = "x"', "argument of connect()"),
        ('url = "memory://"\nrequires = "fencing"', "multilock.toml: requires must be a collection"),
        ('url = "memory://"\nrequires = ["x"]', "multilock.toml: unknown capability 'x'"),
    ],
)
def test_a_wrong_entry_of_the_file_is_named(file: WriteFile, text: str, hint: str) -> None:
    file(text)
    assert hint in _refused()


@pytest.mark.parametrize(
    ("url", "hint"),
    [
        ("", "empty"),
        ("localhost:6379", "must begin with a scheme"),
        ("redis:h", "must begin with a scheme"),
        ("1redis://h", "must begin with a scheme"),
        (" redis://h", "white space"),
        ("redis://h\n", "white space"),
        ("redis://h/\x00", "control character"),
        ("sqlite:///a dir/x.db", "%20"),
        ("redis://h#1", "%23"),
        ("redis://:100%@h", "%25"),
        ("redis://[::1", "IPv6"),
        ("redis://h?ttl=1&ttl=2", "'ttl' twice"),
        ("redis://h?ttl=", "no value for 'ttl'"),
        ("redis://h?ttl", "name=value"),
        ("redis://h?=3", "name=value"),
        ("redis://h?db=1&&ttl=2", "name=value"),
        ("redis://h?prefix=%ff", "UTF-8"),
        ("redis://h?prefix=%0A", "control character"),
        ("redis://h?identity=" + "x" * 256, "at most 255"),
        ("redis://h?client=x", "argument of connect()"),
        ("redis://h?ttl=soon", "give a number of seconds"),
        ("redis://h?ttl=none", "give a number of seconds"),
        ("redis://h?ttl=nan", "NaN"),
        ("redis://h?ttl=inf", "finite"),
        ("redis://h?ttl=0", "positive"),
        ("redis://h?ttl=-1", "positive"),
        ("redis://h?outage_timeout=-1", "outage_timeout is -1"),
        ("redis://h?request_timeout=0", "positive"),
    ],
)
def test_the_error_about_a_wrong_url_says_what_to_change(url: str, hint: str) -> None:
    assert hint in _refused(url)


def test_the_error_about_a_wrong_url_in_the_environment_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MULTILOCK_URL", "memory://?ttl=x")
    assert _refused().startswith("$MULTILOCK_URL: ")


@pytest.mark.parametrize(
    "options",
    [{"ttl": 0}, {"ttl": float("nan")}, {"ttl": float("inf")}, {"outage_timeout": -1}, {"request_timeout": 0},
     {"identity": ""}, {"identity": "x\n"}, {"prefix": "\x00"}],
)  # fmt: skip
def test_a_keyword_with_a_wrong_value_is_a_value_error(options: dict[str, object]) -> None:
    assert next(iter(options)) in _refused("memory://", options=options)


@pytest.mark.parametrize(
    "arguments",
    [
        {"url": b"memory://"},
        {"url": 3},
        {"url": Path("/x")},
        {"url": {3: "memory://"}},
        {"url": {"url": 3}},
        {"url": "memory://", "profile": 3},
        {"url": "memory://", "config": 3},
        {"url": "memory://", "requires": "fencing"},
        {"url": "memory://", "requires": 3},
        {"url": "memory://", "options": {"ttl": "15"}},
        {"url": "memory://", "options": {"ttl": True}},
        {"url": "memory://", "options": {"outage_timeout": False}},
        {"url": "memory://", "options": {"request_timeout": "1"}},
        {"url": "memory://", "options": {"identity": b"me"}},
        {"url": "memory://", "options": {"prefix": 3}},
    ],
)
def test_an_argument_of_the_wrong_type_is_a_type_error(arguments: dict[str, object]) -> None:
    with pytest.raises(TypeError):
        resolve(**arguments)  # type: ignore[arg-type]


def test_an_unknown_capability_lists_the_known_ones() -> None:
    message = _refused("memory://", requires={"fenced"})
    assert "'fenced'" in message
    assert "cross_host, fair, fencing, hold_at_least, push_loss, push_wait" in message
    assert "read_write, semaphore, survives_failover" in message


def test_a_backend_that_lacks_a_required_capability_is_refused_by_name() -> None:
    with pytest.raises(CapabilityMissing, match=r"memory://.* lacks cross_host, survives_failover") as caught:
        open_configured(resolve("memory://", requires={"cross_host", "fencing", "read_write", "survives_failover"}))
    assert caught.value.backend == "memory"


def test_a_backend_with_the_required_capabilities_is_opened() -> None:
    backend: Backend = open_configured(resolve("memory://", requires={"fencing"}))
    assert backend.scheme == "memory"


def test_an_unknown_option_lists_the_backends_own_and_the_common_ones() -> None:
    with pytest.raises(ConfigurationError, match="tll") as caught:
        open_configured(resolve("memory://", options={"tll": 3}))
    for known in ("ttl", "prefix", "identity", "outage_timeout", "request_timeout"):
        assert known in str(caught.value)


def test_a_ttl_that_the_backend_cannot_grant_is_an_error_of_connect() -> None:
    with pytest.raises(ConfigurationError, match=r"ttl is 1e\+09 s: memory:// grants 31536000 s at most"):
        open_configured(resolve("memory://", options={"ttl": 1e9}))


def test_reject_unknown_accepts_known_and_common_options() -> None:
    reject_unknown(resolve("redis://h?db=1").backend_options(), ("db",), "redis")
    with pytest.raises(ConfigurationError, match=r"'db' for redis://: known are .*username"):
        reject_unknown({"db": 1}, ("username",), "redis")


def test_a_client_made_from_a_backend_object_has_only_the_kernels_settings() -> None:
    assert settings_for("mine", {"ttl": 3, "outage_timeout": None}).outage_timeout is None
    with pytest.raises(ConfigurationError, match=r"'prefix'.*known are identity, outage_timeout, request_timeout, ttl"):
        settings_for("mine", {"prefix": "x"})
    with pytest.raises(TypeError):
        settings_for("mine", {"ttl": "3"})


@pytest.mark.parametrize("make", [Client, AsyncClient])
@pytest.mark.parametrize("thing", ["redis://h", None, object(), {"url": "memory://"}])
def test_an_object_that_is_not_a_backend_is_refused_with_the_call_for_a_url(
    make: Callable[..., object], thing: object
) -> None:
    with pytest.raises(TypeError, match=rf"backend object, not {type(thing).__name__}: use multilock\.connect"):
        make(thing)


def test_an_unreadable_file_is_an_error_even_if_it_was_not_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("builtins.open", refuse)
    assert resolve("memory://").scheme == "memory", "for a user who may not look into the directory there is no file"
    Path("multilock.toml").touch()
    with pytest.raises(ConfigurationError, match="cannot be read"):
        resolve("memory://")


@pytest.mark.parametrize(
    ("text", "profile", "where"),
    [
        ('url = "memory://"\ncolour = 3', None, "multilock.toml: unknown option 'colour' for memory://"),
        (
            '[profiles.a]\nurl = "memory://"\ncolour = 3',
            "a",
            "profile 'a' of multilock.toml: unknown option 'colour' for memory://",
        ),
        ('url = "memory://?colour=3"', None, "the url in multilock.toml: unknown option 'colour'"),
    ],
)
def test_an_unknown_option_is_reported_with_its_source(
    file: WriteFile, text: str, profile: str | None, where: str
) -> None:
    file(text)
    with pytest.raises(ConfigurationError) as caught:
        open_configured(resolve(profile=profile))
    assert str(caught.value).startswith(where)
    assert caught.value.backend == "memory"


def test_an_unknown_keyword_is_reported_without_a_source() -> None:
    with pytest.raises(ConfigurationError, match=r"^unknown option 'colour' for memory://"):
        open_configured(resolve("memory://", options={"colour": 3}))


# ---- secrets


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (f"redis://user:{SECRET}@h:1/0", "redis://***@h:1/0"),
        (f"redis://:{SECRET}@h", "redis://***@h"),
        (f"redis://{SECRET}@h", "redis://***@h"),
        (f"redis://user:a/{SECRET}@b@h/0", "redis://***@h/0"),
        (f"redis://user:a?#{SECRET}@h", "redis://***@h"),
        (f"redis://h/0?ttl=3&password={SECRET}&prefix=a/", "redis://h/0?ttl=3&password=***&prefix=a/"),
        (f"redis://h?token=a&{SECRET}", "redis://h?token=***&***"),
        (f"redis://h?token=a#{SECRET}", "redis://h?token=***#***"),
        (f"user:{SECRET}@h", "***@h"),
        (f"redis:/user:{SECRET}@h", "***@h"),
        ("sqlite:///home/me@corp/x.db", "sqlite:///home/me@corp/x.db"),
        (f"unix://user:{SECRET}@/run/redis.sock?db=0", "unix://***@/run/redis.sock?db=***"),
        ("memory://", "memory://"),
    ],
)
def test_a_url_is_shown_without_its_secrets(url: str, shown: str) -> None:
    assert redact(url) == shown


@pytest.mark.parametrize(
    "start", ["redis://u:ab/{}@h:1/0", "redis://:ab?{}@h", "redis://u:ab/c?{}@h:1", "consul://u:a:b/{}@h/"]
)
def test_a_password_with_a_reserved_character_is_reported_with_the_remedy_and_not_shown(start: str) -> None:
    with pytest.raises(ConfigurationError, match="%2F for a '/'") as caught:
        resolve(start.format(SECRET))
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "etcd://h1:2379,h2:2379?password=a@b",
        "redis://[::1]?password=a@b",
        "redis://h:1?password=a@b",
        "redis://h:/0?password=a@b",
        "redis://u:a%2Fb@h:1/0",
        "etcd://h1:2379,h2?identity=me@host",
        "zookeeper://h1:2181,h2,h3/chroot?identity=me@host",
        "memory://team:ci?identity=me@h",
        "sqlite:///home/me:x@corp/x.db",
    ],
)
def test_an_at_sign_after_the_host_does_not_cut_a_password(url: str) -> None:
    assert resolve(url).url == url.partition("?")[0]


@pytest.mark.parametrize("url", ["REDISS://h:1/0", "Rediss://H:1/0?db=3", "ETCDS://h", "UNIX:///run/X.sock"])
def test_the_backend_receives_a_scheme_in_lower_case(url: str) -> None:
    settings = resolve(url)
    scheme, _, rest = url.partition("?")[0].partition("://")
    assert (settings.scheme, settings.url) == (scheme.lower(), f"{scheme.lower()}://{rest}")


def test_a_repr_of_settings_has_no_secret() -> None:
    settings = resolve(f"redis://user:{SECRET}@h?password={SECRET}", options={"token": SECRET})
    assert SECRET not in repr(settings)
    assert "redis://***@h" in repr(settings)


BROKEN = ["", " ", "#f", "%", "?ttl=", "?ttl", "?ttl=0", "?ttl=x", "?a=1&a=2", "/[", "\x00", f"?password={SECRET}&x"]


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("start", [f"redis://me:{SECRET}@h", f"me:{SECRET}@h", f"redis:me:{SECRET}@h", f"://{SECRET}@"])
def test_no_error_about_a_url_shows_its_password(start: str, broken: str) -> None:
    try:
        shown = repr(resolve(start + broken))
    except ConfigurationError as error:
        shown = f"{error} {error.__cause__} {error.__context__}"
    assert SECRET not in shown


@given(st.text(max_size=30))
def test_any_text_is_a_url_or_a_configuration_error(text: str) -> None:
    try:
        settings = resolve(text)
    except ConfigurationError:
        return
    assert settings.scheme == text.partition("://")[0].lower()


# ---- cost


def test_a_url_needs_neither_tomllib_nor_entry_points() -> None:
    program = "import sys; from multilock.config import resolve; resolve('redis://h?ttl=3'); print(*sys.modules)"
    run = [sys.executable, "-c", program]
    environment = {"PYTHONPATH": os.pathsep.join(sys.path)}
    loaded = subprocess.run(run, env=environment, capture_output=True, text=True, check=True).stdout.split()
    assert "multilock.config" in loaded
    for late in ("tomllib", "importlib.metadata", "asyncio", "difflib", "redis", "multilock_redis", "multilock_memory"):
        assert late not in loaded


# ---- variables of the environment, pyproject.toml, requirements


def test_the_file_may_refer_to_environment_variables(file: WriteFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCK_HOST", "h7")
    monkeypatch.setenv("LOCK_PASSWORD", "s3cr$t${x}")
    file('url = "redis://${LOCK_HOST}:6379/0"\npassword = "${LOCK_PASSWORD}"\nprefix = "a$$b$c${LOCK_HOST}/"\nttl = 5')
    settings = resolve()
    assert (settings.url, settings.prefix, settings.ttl) == ("redis://h7:6379/0", "a$b$ch7/", 5.0)
    assert settings.options == {"password": "s3cr$t${x}"}


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('url = "redis://${LOCK_NOWHERE}"', "url in multilock.toml: the environment has no variable LOCK_NOWHERE"),
        ('url = "redis://${}"', "url in multilock.toml: after '${'"),
        ('url = "redis://${LOCK"', "url in multilock.toml: after '${'"),
    ],
)
def test_a_missing_variable_is_an_error_that_names_it(file: WriteFile, text: str, error: str) -> None:
    file(text)
    with pytest.raises(ConfigurationError) as caught:
        resolve()
    assert str(caught.value).startswith(error)


def test_a_variable_of_another_profile_may_be_missing(file: WriteFile) -> None:
    file('[profiles.a]\nurl = "memory://"\n[profiles.b]\nurl = "${LOCK_NOWHERE}"')
    assert resolve(profile="a").scheme == "memory"


@pytest.mark.parametrize(
    "text",
    [
        'url = "memory://"\nttl = "${LOCK_PASSWORD}"',
        'url = "memory://"\nrequires = ["${LOCK_PASSWORD}"]',
        'url = "${LOCK_PASSWORD}"',
        'url = "redis://h"\ndb = "${LOCK_PASSWORD}"',
        'url = "redis://h"\nca = "${LOCK_PASSWORD}"',
        'url = "zookeeper://h"\nnode_style = "${LOCK_PASSWORD}"',
    ],
)
def test_no_error_shows_the_value_of_a_variable_or_hides_the_file(
    file: WriteFile, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("LOCK_PASSWORD", "hunter2")
    file(text)
    with pytest.raises(ConfigurationError) as caught:
        open_configured(resolve())
    assert "hunter2" not in str(caught.value)
    assert "multilock.toml" in str(caught.value)
    assert "hunter2" not in repr(caught.value)


def test_a_table_of_pyproject_toml_is_a_config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    project = tmp_path / "pyproject.toml"
    project.write_text('dependencies = ["multilock"]')
    with pytest.raises(ConfigurationError, match="no backend is configured"):
        resolve()
    with pytest.raises(ConfigurationError, match=r"\[tool.multilock\] of pyproject.toml is not there"):
        resolve(config="pyproject.toml")
    project.write_text('tool = "multilock"')
    with pytest.raises(ConfigurationError, match=r"pyproject.toml: tool must be a table"):
        resolve()
    project.write_text('[tool.multilock]\ndefault = "a"\n[tool.multilock.profiles.a]\nurl = "memory://n"\nttl = 7')
    assert resolve().ttl == 7.0
    assert resolve(config=project).url == "memory://n"
    with pytest.raises(ConfigurationError, match=r"unknown profile 'b': \[tool.multilock\] of pyproject.toml has a"):
        resolve(profile="b")
    (tmp_path / "multilock.toml").write_text('url = "memory://other"')
    assert resolve().url == "memory://other"


def test_the_environment_may_require_capabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MULTILOCK_REQUIRES", "cross_host, fencing")
    with pytest.raises(CapabilityMissing, match=r"lacks cross_host: .*remove it from \$MULTILOCK_REQUIRES"):
        open_configured(resolve("memory://", requires={"fencing"}))
    monkeypatch.setenv("MULTILOCK_REQUIRES", "fencing")
    assert open_configured(resolve("memory://")).scheme == "memory"
    monkeypatch.setenv("MULTILOCK_REQUIRES", "colour")
    with pytest.raises(ConfigurationError, match=r"\$MULTILOCK_REQUIRES: unknown capability 'colour'"):
        resolve("memory://")


def test_type_checkers_know_every_option_of_our_backends() -> None:
    known: set[str] = set()
    for scheme in OURS:
        with pytest.raises(ConfigurationError) as caught:
            open_backend(scheme, f"{scheme}://", {"colour": 1})
        known |= set(str(caught.value).partition("known are ")[2].split(", "))
    assert set(ConnectOptions.__annotations__) == known - {"client", ""}
