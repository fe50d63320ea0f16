"""Puts the repository's address in place of the placeholder, for a release: python project_urls.py ADDRESS.

The project does not state where it is hosted, because a copy or a fork has another address. `.invalid` is a name that
leads nowhere (RFC 2606), so that a wheel built by hand points to nobody's page.
"""

from __future__ import annotations

import sys
from pathlib import Path

PLACEHOLDER = "https://repository.invalid/ckpt"
ROOT = Path(__file__).resolve().parents[2]
FILES = ("pyproject.toml", ".github/CITATION.cff", "CHANGELOG.md")


def fill_in(address: str, root: Path = ROOT) -> int:
    """How many places were filled in."""
    count = 0
    for name in FILES:
        path = root / name
        text = path.read_text(encoding="utf-8")
        count += text.count(PLACEHOLDER)
        path.write_text(text.replace(PLACEHOLDER, address.rstrip("/")), encoding="utf-8")
    return count


if __name__ == "__main__":
    if len(sys.argv) != 2 or not sys.argv[1].startswith("https://"):
        sys.exit(f"usage: {sys.argv[0]} https://HOST/OWNER/REPOSITORY")
    print(f"{fill_in(sys.argv[1])} places have the address {sys.argv[1]}")
