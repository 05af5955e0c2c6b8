"""The site, by `tox run -e docs`: guides in Markdown that reads well in the repository too, and the docstrings."""

import argparse
import inspect
import os
import re
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
sys.path.insert(0, ROOT)

from docutils import nodes  # noqa: E402
from sphinx.util.inspect import stringify_signature  # noqa: E402

import accum  # noqa: E402
import accum.__main__ as command_line  # noqa: E402

project = "accum"
author = "The accum developers"
copyright = "2026, " + author
version = release = accum.__version__
html_title = "accum " + release

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
html_theme = "furo"
html_copy_source = False
html_show_sphinx = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
highlight_language = "text"
myst_heading_anchors = 3
default_role = "code"  # docstrings quote code with single backquotes, as Markdown does
pygments_style = "friendly"

toc_object_entries_show_parents = "hide"
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
autodoc_preserve_defaults = True
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 80
python_use_unqualified_type_names = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_param = False
# TensorFlow has no inventory of its names; the parts of a report are told in its own text.
nitpick_ignore_regex = [("py:class", r"(tensorflow|keras)\..*|accum\.(testing|convert)\._.*")]
napoleon_custom_sections = [("Call arguments", "params_style"), "What people ask", "Source"]

# Pages outside docs/. A link to any of them stays within the site.
PAGES = {
    "benchmarks": "benchmarks/README.md",
    "matrix": "MATRIX.md",
    "changelog": "CHANGELOG.md",
    "contributing": "CONTRIBUTING.md",
    "security": "SECURITY.md",
}
SITE = {
    "../CONTRIBUTING.md": "contributing.md",
    "CONTRIBUTING.md": "contributing.md",
    "../SECURITY.md": "security.md",
    "../CHANGELOG.md": "changelog.md",
    "CHANGELOG.md": "changelog.md",
    "../MATRIX.md": "matrix.md",
    "MATRIX.md": "matrix.md",
    "docs/": "",
    "../docs/": "",
    "../benchmarks/README.md": "benchmarks.md",
    "benchmarks/README.md": "benchmarks.md",
}


def read_page(app, docname, content):
    """Put the page of the repository where `{page}` stands, and let links find what the site has."""
    if docname in PAGES:
        with open(os.path.join(ROOT, *PAGES[docname].split("/")), encoding="utf-8") as file:
            content[0] = content[0].replace("{page}", file.read())
    for target, within in SITE.items():
        content[0] = content[0].replace("](" + target, "](" + within)
    content[0] = re.sub(r"\[([^]]*)\]\((?:accum|tests|constraints)/[^)]*\)", r"\1", content[0])


def show_commands(app, docname, content):
    """Put the help of every command where `{commands}` stands, as the parser of this version prints it."""
    if docname != "cli":
        return
    os.environ["COLUMNS"] = "100"
    parser = command_line._parser(is_doctor=False, prog="accum")
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    shown = [f"## {name}\n\n```text\n{each.format_help().rstrip()}\n```\n" for name, each in commands.choices.items()]
    content[0] = content[0].replace("{commands}", "\n".join(shown))


def draw_within_page(app, doctree):
    """Put diagrams into the page itself, where they follow its light or dark theme."""
    for image in list(doctree.findall(nodes.image)):
        if "_static/diagrams/" in image["uri"]:
            with open(os.path.join(HERE, *image["uri"].split("/")), encoding="utf-8") as file:
                drawing = nodes.raw("", '<div class="drawing">' + file.read() + "</div>", format="html")
            image.parent.replace(image, drawing)


def show_formulas(app, what, name, obj, options, lines):
    """An indented block after a blank line is a formula or code; reStructuredText would take it for a quotation.

    Nor does |w| refer to anything, and what a property's first line says before a colon is no type.
    """
    shown, before = [], ""
    if what in ("property", "attribute") and lines:
        lines[0] = lines[0].replace(": ", " – ")
    for line in lines:
        if not line.startswith("    "):
            quoted = re.split("(`[^`]*`)", line)
            line = "".join(part if part.startswith("`") else part.replace("|", r"\|") for part in quoted)
        if line.startswith("    ") and shown and not shown[-1].strip() and before and not before.startswith(" "):
            shown += ["::", ""]
        shown.append(line)
        before = line if line.strip() else before
    lines[:] = shown


def show_arguments(app, what, name, obj, options, signature, returns):
    """Of a class with a `__new__` too, what its `__init__` takes."""
    if what != "class" or "__init__" not in vars(obj):
        return None
    taken = inspect.signature(obj.__init__)
    shown = list(taken.parameters.values())[1:]
    return (
        stringify_signature(taken.replace(parameters=shown, return_annotation=taken.empty), unqualified_typehints=True),
        returns,
    )


def list_pages(app, exception):
    """Write `llms.txt`, an index of the pages with the first paragraph of each, for programs that read the site."""
    if exception is not None or app.builder.format != "html":
        return
    lines = [f"# {project}", "", "> " + accum.__doc__.strip().split("\n\n")[0].replace("\n", " "), ""]
    for docname in sorted(app.env.found_docs):
        doctree = app.env.get_doctree(docname)
        first = next((part.astext() for part in doctree.findall(nodes.paragraph)), "")
        title, told = app.env.titles[docname].astext(), " ".join(first.split())
        lines.append(f"- [{title}]({docname}.html): {told}")
    with open(os.path.join(app.outdir, "llms.txt"), "w", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")


def setup(app):
    app.connect("build-finished", list_pages)
    app.connect("source-read", read_page)
    app.connect("source-read", show_commands)
    app.connect("doctree-read", draw_within_page)
    app.connect("autodoc-process-docstring", show_formulas, priority=400)
    app.connect("autodoc-process-signature", show_arguments)
