"""Self-contained pages: HTML and SVG from templates, with every value escaped.

Names, messages and addresses come from servers, from other people's adapters and from files. Each is escaped, so that
markup in it is shown as plain text. A page loads nothing from a network and runs no script: its Content-Security-Policy
forbids both.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import lru_cache
from importlib import resources

from multilock import ConfigurationError

try:
    import jinja2
    from markupsafe import Markup
except ModuleNotFoundError as error:  # pragma: no cover
    if error.name not in ("jinja2", "markupsafe"):
        raise
    raise ConfigurationError("the page and the card need jinja2: pip install 'multilock[compare]'") from None

__all__ = ["render"]

TEMPLATES = "multilock.testing"
# Characters that XML forbids, and those that change the direction of the text around them.
UNFIT = re.compile(
    r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)


def render(template: str, **values: object) -> str:
    """Return a page. ``template`` is the name of a file in the folder templates/."""
    return _environment().get_template(template).render(**values)


@lru_cache
def _environment() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.PackageLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_fit,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style = resources.files(TEMPLATES).joinpath("templates", "style.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    made.globals |= {
        "style": Markup(style),  # our own file, so it is not escaped
        "policy": f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'",
    }
    return made


def _fit(value: object) -> object:
    return UNFIT.sub("\ufffd", value) if type(value) is str else value
