"""What the site promises: a page for each public name, each figure once, and the recipes as notebooks."""

import glob
import importlib
import importlib.util
import os
import re
import sys
from unittest import mock

import pytest
import versions

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
DOCS = os.path.join(ROOT, "docs")


def read(path):
    with open(os.path.join(ROOT, *path.split("/")), encoding="utf-8") as file:
        return file.read()


@pytest.mark.slow
@pytest.mark.parametrize("module", ["accum", "accum.compat.v1", "accum.convert", "accum.testing"])
def test_an_overview_lists_each_public_name_for_which_autosummary_then_writes_a_page(module):
    if module != "accum.compat.v1" and not versions.HAS_KERAS_API:
        pytest.skip("TF 1.15 has no Keras API")
    names = [name for name in importlib.import_module(module).__all__ if not name.startswith("__")]
    overviews = {"accum": "keras", "accum.compat.v1": "v1"}
    overview = read(f"docs/api/{overviews.get(module, module.rpartition('.')[2])}.rst")
    assert sorted(names) == sorted(re.findall(r"(?m)^   (\w+)$", overview))


def configuration(monkeypatch, **address):
    """docs/conf.py where a workflow knows this address; what only Sphinx has is left empty."""
    for name in ("docutils", "docutils.nodes", "sphinx", "sphinx.util", "sphinx.util.inspect"):
        monkeypatch.setitem(sys.modules, name, mock.MagicMock())
    for name in ("GITHUB_SERVER_URL", "GITHUB_REPOSITORY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in address.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec = importlib.util.spec_from_file_location("conf", os.path.join(DOCS, "conf.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def as_built(conf, page):
    content = [read(f"docs/{page}.md")]
    conf.read_page(None, page, content)
    return content[0]


@pytest.mark.slow
def test_the_landing_page_links_to_the_repository_where_it_has_an_address(monkeypatch):
    conf = configuration(monkeypatch, GITHUB_SERVER_URL="https://example.org", GITHUB_REPOSITORY="some/accum")
    assert "[the repository](https://example.org/some/accum)" in as_built(conf, "index")
    assert "example.org" not in as_built(conf, "troubleshooting")
    assert conf.html_theme_options["footer_icons"][0]["url"] == "https://example.org/some/accum"


@pytest.mark.slow
@pytest.mark.parametrize("address", [{}, {"GITHUB_SERVER_URL": "https://example.org"}], ids=["none", "half of it"])
def test_the_landing_page_has_no_link_that_leads_nowhere(monkeypatch, address):
    conf = configuration(monkeypatch, **address)
    assert " the repository" in as_built(conf, "index") and "[the repository]" not in as_built(conf, "index")
    assert not hasattr(conf, "html_theme_options")


DRAWINGS = sorted(glob.glob(os.path.join(DOCS, "**", "*.svg"), recursive=True))


@pytest.mark.parametrize("path", DRAWINGS, ids=os.path.basename)
def test_a_drawing_follows_the_system_and_the_theme_that_the_reader_chose(path):
    """Each is part of its page, so its rules may concern nothing else there."""
    with open(path, encoding="utf-8") as file:
        text = file.read()
    of, style = re.search(r'(?s)<svg [^>]*class="([\w-]+)".*?<style>(.*?)</style>', text).groups()
    colours = dict(re.findall(rf"(?m)^(.*?)\.{of} {{ (--[^}}]*) }}", style))
    light, dark = colours[""], colours["@media (prefers-color-scheme: dark) { "]
    assert colours['body[data-theme="light"] '] == light and colours['body[data-theme="dark"] '] == dark != light
    selectors = re.findall(r"([^{}]+){(?! *\.)", style)
    assert len(selectors) > 5 and [selector for selector in selectors if f".{of}" not in selector] == []
    repeated = "".join(re.findall(r'(?s)<g id="[^"]*">(.*?)</g>', text))  # by <use>, where selectors see no ancestors
    assert all(f".{name} {{" in style for name in re.findall('class="([^"]*)"', repeated))
    assert [name for name in re.findall('class="([^"]*)"', repeated) if f".{of} .{name}" in style] == []
    names = [re.findall(r"--([\w-]+):", values) for values in (light, dark)]
    assert names[0] == names[1] and set(re.findall(r"var\(--([\w-]+)\)", style)) <= set(names[0])


def test_no_two_drawings_have_an_id_in_common():
    ids = []
    for path in DRAWINGS:
        with open(path, encoding="utf-8") as file:
            text = file.read()
        own = re.findall(r' id="([^"]*)"', text)
        used = re.findall(r'href="#([^"]*)"|url\(#([^)]*)\)', text)
        assert {one or other for one, other in used} <= set(own), path
        ids += own
    assert len(ids) == len(set(ids)) > 10 and all("-" in id_ for id_ in ids)  # nor has a page's own part


@pytest.mark.parametrize("name", sorted(os.listdir(os.path.join(DOCS, "recipes"))))
def test_a_recipe_hides_no_code_because_its_notebook_would_lack_it(name):
    assert "<!--" not in read("docs/recipes/" + name)
