"""The documentation site, in both languages, from the README, the guide, the help and the catalogue of errors.

    pip install '.[docs]'
    python .github/site/build.py              into build/site; open it with `python -m http.server -d build/site`
    python .github/site/build.py FOLDER --url https://example.org/ckpt/

English is at the top, Chinese under zh/; each has its own search. Fails (exit 1) for a warning of mkdocs, a link or
anchor that leads nowhere, and anything that a page would fetch from another host. Links to other hosts are listed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import links  # noqa: E402
import pages  # noqa: E402


def build_language(language: str, site: Path, url: str, scratch: Path) -> bool:
    """Build one language into its place of the site. Returns whether mkdocs had nothing to say."""
    sources = scratch / language
    nav = pages.write_pages(language, sources)
    is_english = language == "en"
    config = {
        "INHERIT": str(HERE / "mkdocs.yml"),
        "docs_dir": str(sources),
        "site_dir": str(site if is_english else site / language),
        "site_url": url if is_english or not url else f"{url}{language}/",
        "theme": {"language": language, "custom_dir": str(HERE / "theme")},
        "plugins": [{"search": {"lang": language}}],
        "hooks": [str(HERE / "hooks.py")],
        "nav": nav,
    }
    file = scratch / f"{language}.yml"  # JSON is YAML
    file.write_text(json.dumps(config, ensure_ascii=False), encoding="utf-8")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--config-file", str(file)]
    # The theme's notice of its successor is no warning of this build; the dictionary of Chinese words is cached here.
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "TMPDIR": str(scratch)}
    return subprocess.run(command, env=environment, check=False).returncode == 0


def build_site(site: Path, url: str = "") -> list[str]:
    """Build both languages into `site`, a folder that is new or was built before. Returns what is wrong."""
    if site.exists() and any(site.iterdir()) and not (site / "zh" / "sitemap.xml").is_file():
        return [f"{site} exists and is no site that was built before: name a new folder"]
    shutil.rmtree(site, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="ckpt-site-") as scratch:
        for language in pages.READMES:  # English first: mkdocs empties the folder that it builds into
            if not build_language(language, site, url, Path(scratch)):
                return [f"mkdocs: the build of {language} failed"]
    faults, external = links.check_links(site)
    print(f"links to other hosts, not followed: {', '.join(external) or 'none'}")
    return faults


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=pages.ROOT / "build" / "site")
    parser.add_argument("--url", default="", help="where the site will be served, with a slash at its end")
    given = parser.parse_args()
    found = build_site(given.folder, given.url)
    for fault in found:
        print(fault, file=sys.stderr)
    count = len(list(given.folder.rglob("*.html")))
    sys.exit(1 if found else print(f"built {count} pages in {given.folder}"))
