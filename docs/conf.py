"""The site: `make docs` builds it into .state/site. docs/decisions/ says why Sphinx."""

import re
from pathlib import Path

import multilock

project = "multilock"
author = "The multilock developers"
copyright = author
version = release = multilock.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
exclude_patterns = ["examples", "comparison", "monitoring/*"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = "multilock"
html_show_copyright = False
html_theme_options = {"top_of_page_buttons": []}

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_default_options = {"members": True, "inherited-members": True}


def add_decisions(_app, page, source):
    """Add the decisions to the contents of the site. Sphinx ignores the list of decisions on their own page, because
    that list is not a toctree."""
    if page == "decisions/README":
        source[0] += "\n```{toctree}\n:hidden:\n:glob:\n\n0*\n```\n"


def show_examples(_app, page, source):
    """Show the programs of each recipe below the recipe. In the repository the links in the recipe lead to these
    programs."""
    if page != "recipes":
        return
    sections = source[0].split("\n## ")
    for n, section in enumerate(sections[1:], 1):
        for path in dict.fromkeys(re.findall(r"\]\((examples/[^)]+)\)", section)):
            kind = {".yaml": "yaml", ".service": "ini"}.get(Path(path).suffix, "python")
            shown = f"```{{literalinclude}} {path}\n:language: {kind}\n```"
            sections[n] += f"\n\n<details><summary>{Path(path).name}</summary>\n\n{shown}\n\n</details>\n"
    source[0] = "\n## ".join(sections)


def write_llms_txt(app, exception):
    """Write llms.txt for programs that read the site: the pages in its contents, each with its text as Markdown."""
    if exception:
        return
    pages = app.env.toctree_includes["index"]
    lines = [f"- [{app.env.titles[page].astext()}](_sources/{page}.md.txt)" for page in pages]
    about = "> Distributed locks for Python, over Redis, PostgreSQL, etcd, Consul, ZooKeeper and SQLite.\n"
    Path(app.outdir, "llms.txt").write_text("\n".join(["# multilock", "", about, *lines, ""]), encoding="utf-8")


def setup(app):
    app.connect("source-read", add_decisions)
    app.connect("source-read", show_examples)
    app.connect("build-finished", write_llms_txt)
