"""What a package index shows: the README, whose links work there too, and the addresses beside it."""

import os
import re
import runpy

import pytest

setuptools = pytest.importorskip("setuptools")

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def metadata(monkeypatch, **environment):
    """The arguments of `setup` in a build with these environment variables."""
    arguments = {}
    monkeypatch.setattr(setuptools, "setup", arguments.update)
    for name in ("GITHUB_SERVER_URL", "GITHUB_REPOSITORY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(ROOT)
    runpy.run_path(os.path.join(ROOT, "setup.py"))
    return arguments


def links(text):
    return re.findall(r"\]\(([^)]*)\)", text)


def test_links_of_the_readme_are_absolute_where_the_repository_has_an_address(monkeypatch):
    arguments = metadata(monkeypatch, GITHUB_SERVER_URL="https://example.org", GITHUB_REPOSITORY="some/accum")
    start = "https://example.org/some/accum/{}/v" + arguments["version"] + "/"
    with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as file:
        files = [link for link in links(file.read()) if not link.startswith("http")]
    assert files
    shown = {start.format("raw" if link.endswith(".svg") else "blob") + link for link in files}
    assert shown <= set(links(arguments["long_description"]))
    assert all(link.startswith("https://") for link in links(arguments["long_description"]))
    assert all(os.path.exists(os.path.join(ROOT, *link.split("#")[0].split("/"))) for link in files)


def test_without_an_address_no_link_leads_nowhere(monkeypatch):
    arguments = metadata(monkeypatch)
    assert all(link.startswith("https://") for link in links(arguments["long_description"]))
    assert arguments["project_urls"] == {}


def test_an_index_shows_where_source_and_issues_are(monkeypatch):
    arguments = metadata(monkeypatch, GITHUB_SERVER_URL="https://example.org", GITHUB_REPOSITORY="some/accum")
    assert arguments["project_urls"]["Source"] == "https://example.org/some/accum"
    assert set(arguments["project_urls"]) == {"Source", "Documentation", "Changelog", "Issues"}
    assert arguments["author"]


def test_an_index_does_not_show_what_only_tests_read(monkeypatch):
    assert "<!--" not in metadata(monkeypatch)["long_description"]
