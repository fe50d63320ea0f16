"""URLs without their secrets: everything that is printed, written or kept has this form of a URL.

    hide_secrets("https://ann:pw@host/a.safetensors?sig=9f&exp=1")   "https://***@host/a.safetensors?***"
    full_url("https://***@host/a.safetensors?***")                   the URL again, for the code that opens it

A user name, a password and the values of a query are secrets: a signed URL is a key to the file. `hide_secrets`
remembers what it took off as long as the process lives, so the program passes the form without secrets around, and only
the code that opens a store asks for the other. A plan that another process runs holds the form without secrets too;
there the whole URLs come from the variable CKPT_SOURCE_URLS, separated by blanks.

Two URLs that differ in their secrets alone may be two files (`?id=1`, `?id=2`), so the second one's mark has a number.
What it does not do: find secrets in paths, or URLs without a scheme.
"""

from __future__ import annotations

import os
import re

from ckpt_tool.errors import UsageError

MARK = "***"
VARIABLE = "CKPT_SOURCE_URLS"
NO_SECRETS = "E2873"
_URL = re.compile(
    r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://"
    # A password may have slashes (those of S3 do); `host:8080/` is no user's.
    r"(?P<user>(?:[^/?#\s'\"<>]*|[^/?#@:\s'\"<>]+:(?!\d+/)[^?#@\s'\"<>]*)@)?"
    r"(?P<path>[^?#\s'\"<>]*)(?P<query>[?#][^\s'\"<>]*)?"
)
# Between URLs of a chain, where the next scheme begins; `::` of an address (`[::1]`) is part of its URL.
_CHAIN = re.compile(r"::(?=[A-Za-z][A-Za-z0-9+.-]*://)")
# In these the text before @ is a container, a repository or a model with its revision.
_NO_USER = frozenset(("hf", "abfs", "abfss", "wasb", "wasbs", "git", "github"))
_HIDDEN = re.compile(rf"://{re.escape(MARK)}\d*@|[?#]{re.escape(MARK)}\d*")
_MARKED_USER = re.compile(rf"{re.escape(MARK)}\d*@")

_full_urls: dict[str, str] = {}  # URL without secrets -> the URL


def hide_secrets(text: str) -> str:
    """The text with every URL in it without secrets.

    >>> hide_secrets("s3://bucket/run"), hide_secrets("hf://gpt2@main")
    ('s3://bucket/run', 'hf://gpt2@main')
    >>> hide_secrets("--base=https://ann:pw@host/a?sig=9f")
    '--base=https://***@host/a?***'
    """
    if "://" not in text:
        return text
    return "::".join(_URL.sub(_hide_in_url, part) for part in _CHAIN.split(text))


def has_hidden_secrets(url: str) -> bool:
    """Were secrets taken off this URL?"""
    return _HIDDEN.search(url) is not None


def full_url(url: str) -> str:
    """The URL with its secrets, of one that has the form without them. Raises UsageError E2873 where nobody gave them:
    a plan of another process, say."""
    if not has_hidden_secrets(url):
        return url
    for given in os.environ.get(VARIABLE, "").split():
        hide_secrets(given)
    return "::".join(_restore(part, url) for part in _CHAIN.split(url))


def _restore(part: str, whole: str) -> str:
    if not has_hidden_secrets(part):
        return part
    if part in _full_urls:
        return _full_urls[part]
    raise UsageError(
        "the user name, password or signature of the URL is not here: no plan and no report holds it",
        code=NO_SECRETS,
        path=whole,
        hint=f"pass the whole URL; for `ckpt apply`, set {VARIABLE} to the whole URLs of the sources, separated by "
        "blanks (a signed URL that has expired can be a new one of the same file)",
    )


def _hide_in_url(found: re.Match[str]) -> str:
    user, path, query = found["user"] or "", found["path"], found["query"] or ""
    is_secret = bool(user) and not _MARKED_USER.fullmatch(user)
    hides_user = is_secret and (":" in user or found["scheme"].lower() not in _NO_USER)
    hides_query = "=" in query
    if not hides_user and not hides_query:
        return found[0]
    if found[0] in _full_urls:
        return found[0]

    number = 1
    while True:
        mark = MARK if number == 1 else f"{MARK}{number}"
        shown_user = f"{mark}@" if hides_user else user
        shown_query = f"{query[0]}{mark}" if hides_query else query
        shown = f"{found['scheme']}://{shown_user}{path}{shown_query}"
        if _full_urls.setdefault(shown, found[0]) == found[0]:
            return shown
        number += 1
