"""What mkdocs calls while it builds a page: the switch of languages leads to the same page of the other language, and
options in running text stay on one line."""

from __future__ import annotations

import re
from typing import Any

_CODE = re.compile(r"(?<=<code>)[^<]*--[^<]*(?=</code>)")
_OPTION = re.compile(r"--[a-z][a-z0-9-]*")


def on_page_content(html: str, *, page: Any, config: Any, files: Any) -> str:
    return _CODE.sub(lambda code: _OPTION.sub(r'<span class="option">\g<0></span>', code[0]), html)


def on_page_context(context: dict[str, Any], *, page: Any, config: Any, nav: Any) -> dict[str, Any]:
    """Both languages have the same pages: English at the top of the site, Chinese below zh/."""
    to_top = "../" * page.url.count("/")
    is_english = config.theme["language"] == "en"
    english = f"{to_top if is_english else f'{to_top}../'}{page.url}" or "./"
    chinese = f"{f'{to_top}zh/' if is_english else to_top}{page.url}" or "./"
    context["languages"] = [
        {"name": "English", "code": "en", "link": english},
        {"name": "中文", "code": "zh", "link": chinese},
    ]
    return context
