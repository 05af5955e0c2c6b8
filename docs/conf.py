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
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
html_theme = "furo"
html_copy_source = False
html_show_sphinx = False
html_static_path = ["_static"]
PARTS = [os.environ.get(name, "") for name in ("GITHUB_SERVER_URL", "GITHUB_REPOSITORY")]
REPOSITORY = "/".join(PARTS) if all(PARTS) else ""
if REPOSITORY:  # a workflow on GitHub knows the address
    html_theme_options = {
        "footer_icons": [{"name": "Repository", "url": REPOSITORY, "html": "Repository", "class": ""}]
    }
html_css_files = ["site.css"]
highlight_language = "text"
myst_heading_anchors = 3
default_role = "code"  # docstrings quote code with single backquotes, as Markdown does
pygments_style = "friendly"

toc_object_entries_show_parents = "hide"
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 80
python_use_unqualified_type_names = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_param = False
# The names in our signatures, in files beside the pages: the site is built without a network, and TensorFlow publishes
# no inventory of its names.
intersphinx_mapping = {
    "numpy": ("https://numpy.org/doc/stable", "inventories/numpy.txt"),
    "python": ("https://docs.python.org/3", "inventories/python.txt"),
    "tensorflow": ("https://www.tensorflow.org/api_docs/python", "inventories/tensorflow.txt"),
}
templates_path = ["_templates"]  # of the page that autosummary writes for each public name
# What differs between versions of TensorFlow, and the parts of a report, which its own text tells.
nitpick_ignore_regex = [("py:class", r"(tensorflow|keras)\..*|accum\.testing\._report\..*")]
napoleon_custom_sections = [("Call arguments", "params_style"), "What people ask", "Source"]

RECIPES = sorted(name[:-3] for name in os.listdir(os.path.join(HERE, "recipes")))

# Pages outside docs/. A link to any of them stays within the site.
PAGES = {
    "benchmarks": "benchmarks/README.md",
    "matrix": "MATRIX.md",
    "changelog": "CHANGELOG.md",
    "contributing": "CONTRIBUTING.md",
}
SITE = {
    "../CONTRIBUTING.md": "contributing.md",
    "CONTRIBUTING.md": "contributing.md",
    "../CHANGELOG.md": "changelog.md",
    "CHANGELOG.md": "changelog.md",
    "../MATRIX.md": "matrix.md",
    "MATRIX.md": "matrix.md",
    "docs/": "",
    "../docs/": "",
    "../../benchmarks/README.md": "../benchmarks.md",
    "../benchmarks/README.md": "benchmarks.md",
    "benchmarks/README.md": "benchmarks.md",
}


def in_repository(link):
    """A link to a file of the repository, where the site knows its address; otherwise its words."""
    path = re.search(r"\]\((?:\.\./)*([^)]*)\)", link.group()).group(1)
    return f"[{link.group(1)}]({REPOSITORY}/blob/main/{path})" if REPOSITORY else link.group(1)


def read_page(app, docname, content):
    """Put the page of the repository where `{page}` stands, and let links find what the site has."""
    if docname in PAGES:
        with open(os.path.join(ROOT, *PAGES[docname].split("/")), encoding="utf-8") as file:
            content[0] = content[0].replace("{page}", file.read())
    for target, within in SITE.items():
        content[0] = content[0].replace("](" + target, "](" + within)
    beside = r"\[([^]]*)\]\((?:\.\./)*(?:accum|tests|constraints|project)/[^)]*\)"
    content[0] = re.sub(beside, in_repository, content[0])
    if docname == "index" and REPOSITORY:
        content[0] = content[0].replace("the repository", f"[the repository]({REPOSITORY})")


def show_commands(app, docname, content):
    """Put the help of every command where `{commands}` stands, as the parser of this version prints it."""
    if docname != "cli":
        return
    os.environ["COLUMNS"] = "100"
    parser = command_line._parser(is_doctor=False, prog="accum")
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    shown = [
        f"## {name}\n\n```text\n{command.format_help().rstrip()}\n```\n" for name, command in commands.choices.items()
    ]
    content[0] = content[0].replace("{commands}", "\n".join(shown))


def link_notebooks(app, docname, content):
    """Link each recipe's notebook below its title, and all of them where `{notebooks}` stands."""
    link = '<a class="notebook" href="{}notebooks/{}.ipynb" download>{}</a>'
    folder, _, name = docname.rpartition("/")
    if folder == "recipes":
        title, text = content[0].split("\n", 1)
        content[0] = f"{title}\n\n{link.format('../', name, 'Download as a notebook')}\n{text}"
    if docname == "notebooks":
        rows = [f"- {link.format('', name, name + '.ipynb')}" for name in RECIPES]
        content[0] = content[0].replace("{notebooks}", "\n".join(rows))


def write_notebooks(app, exception):
    """Write the notebooks beside the pages; `tox run -e docs` then lets nbmake add what their code prints."""
    if exception is not None or app.builder.format != "html":
        return
    import jupytext

    os.makedirs(os.path.join(app.outdir, "notebooks"), exist_ok=True)
    for name in RECIPES:
        book = jupytext.read(os.path.join(HERE, "recipes", name + ".md"))
        for cell in book.cells:
            if cell.cell_type == "markdown":  # links to other pages lead nowhere from a file that was downloaded
                cell.source = re.sub(r"\[([^]]*)\]\((?!https?:)[^)]*\)", r"\1", cell.source)
        jupytext.write(book, os.path.join(app.outdir, "notebooks", name + ".ipynb"))


def draw_within_page(app, doctree):
    """Put drawings into the page itself, where they follow its light or dark theme."""
    for image in list(doctree.findall(nodes.image)):
        if not image["uri"].endswith(".svg"):
            continue
        place = image.parent if len(image.parent.children) == 1 else image
        with open(os.path.join(HERE, *image["uri"].split("/")), encoding="utf-8") as file:
            shown = nodes.raw("", file.read(), format="html")
        place.replace_self(nodes.container("", shown, classes=["drawing"]))


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


class LeftOut:
    """How a signature shows a default that only says that an argument was left out."""

    def __repr__(self):
        return "..."


def show_arguments(app, what, name, obj, options, signature, returns):
    """Of a class with a `__new__` too, what its `__init__` takes."""
    if what != "class" or "__init__" not in vars(obj):
        return None
    taken = inspect.signature(obj.__init__)
    shown = [
        argument.replace(default=LeftOut()) if argument.default is accum._check.LEFT_OUT else argument
        for argument in list(taken.parameters.values())[1:]
    ]
    return (
        stringify_signature(taken.replace(parameters=shown, return_annotation=taken.empty), unqualified_typehints=True),
        returns,
    )


def find_public_name(app, env, node, contnode):
    """Link a class by the name that it is imported by: `accum.testing.Pair`, not `accum.testing._match.Pair`."""
    public = re.sub(r"\._\w+(?=\.)", "", node.get("reftarget") or "")
    if not public.startswith("accum.") or public == node["reftarget"]:
        return None
    domain, kind = env.domains.python_domain, node["reftype"]
    return domain.resolve_xref(env, node["refdoc"], app.builder, kind, public, node, contnode)


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
    app.connect("build-finished", write_notebooks)
    app.connect("missing-reference", find_public_name)
    app.connect("source-read", read_page)
    app.connect("source-read", show_commands)
    app.connect("source-read", link_notebooks)
    app.connect("doctree-read", draw_within_page)
    app.connect("autodoc-process-docstring", show_formulas, priority=400)
    app.connect("autodoc-process-signature", show_arguments)
