"""Every link of a site that was built: pages and anchors that do not exist, and what a page would fetch from elsewhere.

    faults, external = check_links(folder)

External links are listed, not followed. What it does not do: run scripts; that no request leaves was seen in a browser.
"""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urljoin, urlsplit

BASE = "http://site.invalid/"  # stands for the root of the site while links are resolved
FETCHED = {"script": "src", "img": "src", "iframe": "src", "source": "src"}
FETCHED_LINKS = {"stylesheet", "icon", "preload", "preconnect", "modulepreload", "manifest"}


class PageLinks(NamedTuple):
    """What one HTML page says of links."""

    anchors: set[str]
    links: list[str]
    fetched: list[str]  # what a browser loads with the page


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.page = PageLinks(set(), [], [])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.page.anchors.update(values[name] for name in ("id", "name") if name in values)
        if tag == "a" and "href" in values:
            self.page.links.append(values["href"])
        elif tag == "link" and FETCHED_LINKS.intersection(values.get("rel", "").split()):
            self.page.fetched.append(values["href"])
        elif values.get(FETCHED.get(tag, "")):
            self.page.fetched.append(values[FETCHED[tag]])


def check_links(folder: Path) -> tuple[list[str], list[str]]:
    """(what is wrong, one line each; the links to other hosts). 404.html is left out: its links depend on the host."""
    pages: dict[str, PageLinks] = {}
    for path in sorted(folder.rglob("*.html")):
        name = path.relative_to(folder).as_posix()
        if path.name != "404.html":
            reader = _Reader()
            reader.feed(path.read_text(encoding="utf-8"))
            pages[name] = reader.page

    faults: list[str] = []
    external: set[str] = set()
    for name, page in pages.items():
        faults += [f"{name}: loads {link}" for link in page.fetched if not _is_inside(name, link)]
        for link in dict.fromkeys((*page.links, *page.fetched)):
            if not _is_inside(name, link):
                external.add(link)
            elif fault := _fault_of(folder, pages, name, link):
                faults.append(f"{name}: {link}: {fault}")
    return faults, sorted(external)


def _is_inside(name: str, link: str) -> bool:
    return urljoin(BASE + name, link).startswith((BASE, "data:"))


def _fault_of(folder: Path, pages: dict[str, PageLinks], name: str, link: str) -> str:
    """Why a link inside the site leads nowhere, "" where it leads somewhere."""
    target = urlsplit(urljoin(BASE + name, link))
    if target.scheme == "data":
        return ""
    file = unquote(target.path.lstrip("/"))
    if not file or file.endswith("/"):
        file += "index.html"
    if not (folder / file).is_file():
        return f"there is no {file}"
    anchor = unquote(target.fragment)
    if anchor and file in pages and anchor not in pages[file].anchors:
        return f"{file} has no anchor {anchor}"
    return ""
