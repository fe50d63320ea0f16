"""URLs without their secrets: everything that is printed, written or kept has this form of a URL.

    hide_secrets("https://ann:pw@host/a.safetensors?sig=9f&exp=1")   "https://***@host/a.safetensors?***"
    full_url("https://***@host/a.safetensors?***")                   the URL again, for the code that opens it

What is shown is a list of what is harmless, and everything else is hidden: the scheme; a host with its port; the path
up to its first parameter (`;sig=`, `&sig=`, an encoded `?`); and the parameters of `_HARMLESS`. A user name, a password
and a query are secrets, since a signed URL is a key to the file. A URL in another spelling, percent-encoded or with
JSON's escapes, shows its scheme alone.

`hide_secrets` remembers what it took off as long as the process lives, so the program passes the form without secrets
around, and only the code that opens a store asks for the other. A plan that another process runs holds the form without
secrets too; there the whole URLs come from the variable CKPT_SOURCE_URLS, separated by blanks. A library may repeat a
part of a URL in its own words, so `hide_in_message` also looks for the secrets that are remembered.

Two URLs that differ in their secrets alone may be two files (`?id=1`, `?id=2`), so the second one's mark has a number.
What it does not do: find secrets in the segments of a path, or URLs without a scheme.
"""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Callable

from ckpt_tool.errors import UsageError

MARK = "***"
VARIABLE = "CKPT_SOURCE_URLS"
NO_SECRETS = "E2873"

# One slash is enough after these: pathlib makes `https:/host` of `https://host`.
_KNOWN_SCHEMES = "https?|s3a?|gcs|gs|azure|az|abfss?|wasbs?|hf|ftp|sftp|webdavs?"
_PLAIN = rf"(?:(?<![A-Za-z0-9+.-])(?:{_KNOWN_SCHEMES}):/(?!/)|[A-Za-z][A-Za-z0-9+.-]+://)"
_ENCODED_COLON = r"(?::|%(?:25)*3A)"
_ENCODED_SLASH = r"(?:/|\\+/|\\+u002f|\\|%(?:25)*2F|%(?:25)*5C)"
_OTHER_SPELLING = rf"[A-Za-z][A-Za-z0-9+.-]+{_ENCODED_COLON}{_ENCODED_SLASH}{{2}}"
_END = r"\s'\"<>"  # of a URL within a text
_URL_IN_TEXT = re.compile(
    rf"(?P<start>{_PLAIN})"
    # A password may have slashes (those of S3 do); `host:8080/` is no user's.
    rf"(?P<user>(?:[^/?#{_END}]*|[^/?#@:{_END}]+:(?!\d+/)[^?#@{_END}]*)@)?"
    rf"(?P<path>[^?#{_END}]*)"
    # A quote ends a query unless another parameter follows it.
    rf"(?P<query>[?#](?:[^{_END}]|['\"<>](?=\S*[&=]))*)?"
    rf"|(?P<spelled>{_OTHER_SPELLING})[^{_END}]*",
    re.IGNORECASE,
)
# A word of a command line that is a URL as a whole, blanks and quotes included; perhaps behind `--option=`.
_URL_AS_WORD = re.compile(
    rf"(?P<start>{_PLAIN})"
    r"(?P<user>(?:[^/?#]*|[^/?#@:]+:(?!\d+/)[^?#@]*)@)?"
    r"(?P<path>[^?#]*)"
    r"(?P<query>[?#].*)?"
    rf"|(?P<spelled>{_OTHER_SPELLING}).*",
    re.IGNORECASE | re.DOTALL,
)
_BEFORE_URL = re.compile(r"(?:--?[\w-]+=)?")
_MAY_BE_URL = re.compile(rf"(?:{_ENCODED_COLON}){_ENCODED_SLASH}", re.IGNORECASE)
# Between URLs of a chain, where the next scheme begins; `::` of an address (`[::1]`) is part of its URL.
_CHAIN = re.compile(r"::(?=[A-Za-z][A-Za-z0-9+.-]*://)")

_HOST = re.compile(r"(?:[^:@;=&%\\]*|\[[0-9A-Fa-f:.]+\])(?::\d*)?")
# Where the path of a URL may go on with parameters.
_PATH_PARAMETERS = re.compile(r"[;&](?=[\w.~-]+=|\*\*\*)|%(?:25)*(?:3F|23|3B)", re.IGNORECASE)
# In these the text before @ is a repository of the hub's first years, without an owner, or a container.
_HUB_REPOSITORY = re.compile(
    r"(?:gpt2|openai-gpt|bert|distilbert|distilgpt2|distilroberta|roberta|albert|xlm|xlnet|t5|camembert|ctrl)[a-z0-9-]*@"
)
_CONTAINER = re.compile(r"[a-z0-9$-]{3,63}@")
_NO_USER = {
    "hf": _HUB_REPOSITORY,
    "abfs": _CONTAINER,
    "abfss": _CONTAINER,
    "wasb": _CONTAINER,
    "wasbs": _CONTAINER,
}
# Keys of these stores may have a # of their own.
_STORES_OF_KEYS = frozenset(("s3", "s3a", "gs", "gcs", "az", "azure", "abfs", "abfss", "memory", "file", "local"))
# Parameters that select a file or the way it is sent, and grant no access.
_HARMLESS = re.compile(
    r"(?:download|dl|raw)(?:=(?:0|1|true|false)?)?"
    r"|(?:alt=media)"
    r"|(?:ref|rev|revision|version|versionid|generation|region)=[\w./-]{0,64}",
    re.IGNORECASE,
)
_MARKED = re.compile(rf"{re.escape(MARK)}\d*")
_HIDDEN = re.compile(
    rf"(?:[:/]/|\\(?:\\|/|u002f)|%(?:25)*(?:2F|5C|3F|23|3B)|[?#;&]){re.escape(MARK)}\d*", re.IGNORECASE
)
_SHORTEST_SECRET = 8  # characters that are looked for in other texts: a shorter one may be a word of any text

_full_urls: dict[str, str] = {}  # URL without secrets -> the URL
_secrets: set[str] = set()  # texts of those URLs that no message may show


def hide_secrets(text: str) -> str:
    """The text with every URL in it without secrets.

    >>> hide_secrets("s3://bucket/run"), hide_secrets("hf://gpt2@main")
    ('s3://bucket/run', 'hf://gpt2@main')
    >>> hide_secrets("--base=https://ann:pw@host/a?sig=9f")
    '--base=https://***@host/a?***'
    >>> hide_secrets("https://host/a;sig=9f"), hide_secrets("https://host/a?download=true&token")
    ('https://host/a;***', 'https://host/a?download=true&***')
    """
    if not _MAY_BE_URL.search(text):
        return text
    return "::".join(_URL_IN_TEXT.sub(_hide_in_url, part) for part in _CHAIN.split(text))


def hide_in_argument(word: str) -> str:
    """A word that someone typed or passed, without the secrets of its URL. A URL has all of the word, blanks and quotes
    too. The name of a file that exists stays as it is.

    >>> hide_in_argument("https://host/a?x='1'&sig=9 f")
    'https://host/a?***'
    """
    if not _MAY_BE_URL.search(word) or _is_local_file(word):
        return word

    parts: list[str] = []
    for part in _CHAIN.split(word):
        start = _BEFORE_URL.match(part)
        before = start[0] if start else ""
        url = _URL_AS_WORD.fullmatch(part, len(before))
        parts.append(before + _hide_in_url(url) if url else hide_secrets(part))
    return "::".join(parts)


def hide_in_message(text: str) -> str:
    """A text of a library without secrets of URLs: of the URLs in the text, and of the URLs of this process, of which a
    library may show a part or the decoded form."""
    # These first: a blank or a quote in a secret would end the URL in the text.
    for secret in sorted(_secrets, key=len, reverse=True):
        text = text.replace(secret, MARK)
    return hide_secrets(text)


def hide_in_document(value: object) -> object:
    """A JSON document with every text in it as `hide_in_message` gives it."""
    if isinstance(value, str):
        return hide_in_message(value)
    if isinstance(value, dict):
        return {key: hide_in_document(item) for key, item in value.items()}
    if isinstance(value, list):
        return [hide_in_document(item) for item in value]
    return value


def cause_without_secrets(error: BaseException) -> BaseException:
    """What an error of ours names as its cause: the library's exception, or, where its text shows a secret, one of ours
    that has its traceback without it."""
    text = "".join(traceback.format_exception(error))
    hidden = hide_in_message(text)
    return (
        error if hidden == text else RuntimeError(f"an exception of a library, without the secrets of URLs:\n{hidden}")
    )


def has_hidden_secrets(url: str) -> bool:
    """Were secrets taken off this URL?"""
    return _HIDDEN.search(url) is not None


def last_name(url: str) -> str:
    """What the file of a URL is called: the last segment of its path, without what was hidden.

    >>> last_name("https://***@host/b/a.pt?***"), last_name("https://host/b/a.pt;***")
    ('a.pt', 'a.pt')
    """
    hidden = _HIDDEN.search(url, url.find("://") + 3)
    path = url[: hidden.start()] if hidden and hidden.start() > url.find("://") else url
    return path.partition("?")[0].rstrip("/").rpartition("/")[2] or "file"


def full_url(url: str) -> str:
    """The URL with its secrets, for a URL in the form without them. Raises UsageError E2873 if this process never got
    them: the URL is from a plan of another process, say."""
    if not has_hidden_secrets(url):
        return url
    for secret_url in os.environ.get(VARIABLE, "").split():
        hide_in_argument(secret_url)
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


def _is_local_file(word: str) -> bool:
    """Does the word name a file of this machine, and no URL? A cache may call its files as the URLs were called."""
    if re.match(_PLAIN, word, re.IGNORECASE):
        return False
    try:
        return os.path.lexists(word)
    except (OSError, ValueError):
        return False


def _hide_in_url(found: re.Match[str]) -> str:
    """The URL of a match without its secrets. Remembers the URL."""
    url = found[0]
    if found["spelled"] is not None:
        return _remember(url, lambda mark: f"{found['spelled']}{mark}", [url.removeprefix(found["spelled"])])

    start = found["start"]
    user = found["user"] or ""
    query = found["query"] or ""
    authority, path = _split_path(found["path"])
    secrets: list[str] = []

    scheme = start.partition(":")[0].lower()
    no_user = _NO_USER.get(scheme)
    is_user = bool(user) and not _MARKED.fullmatch(user[:-1]) and not (no_user and no_user.fullmatch(user))
    is_no_host = _HOST.fullmatch(authority) is None
    if is_user:
        secrets += [user[:-1], *user[:-1].split(":", 1)]
    if is_no_host:
        secrets += [authority, *authority.split(":", 1)]

    parameters = _PATH_PARAMETERS.search(path)
    shown_path = path if parameters is None else path[: parameters.end()]
    in_path = "" if parameters is None else path[parameters.end() :]
    hides_in_path = bool(in_path) and not _MARKED.fullmatch(in_path)
    if hides_in_path:
        secrets += _secrets_of_query(in_path)
    shown_path = hide_secrets(shown_path)  # a proxy's path may hold another URL

    is_part_of_key = query.startswith("#") and "=" not in query and scheme in _STORES_OF_KEYS
    shown_query, hidden_query = (query, "") if is_part_of_key else _split_query(query)
    secrets += _secrets_of_query(hidden_query)

    def show(mark: str) -> str:
        """The URL with `mark` in place of each secret."""
        shown_user = f"{mark}@" if is_user else user
        shown_host = mark if is_no_host else authority
        shown_parameters = mark if hides_in_path else in_path
        return f"{start}{shown_user}{shown_host}{shown_path}{shown_parameters}{shown_query}{hidden_query and mark}"

    return _remember(url, show, secrets)


def _split_path(text: str) -> tuple[str, str]:
    """(host with port, path with its slash) of what follows the user of a URL."""
    host, slash, path = text.partition("/")
    return host, slash + path


def _split_query(query: str) -> tuple[str, str]:
    """(what is shown of a query with its `?`, what is hidden). What is hidden already is shown."""
    if len(query) < 2 or _MARKED.fullmatch(query[1:]):
        return query, ""
    if query[0] == "#":
        return (query, "") if re.fullmatch(r"#\d{1,6}", query) else ("#", query[1:])

    shown_parts: list[str] = []
    hidden: list[str] = []
    marks: list[str] = []
    for parameter in query[1:].split("&"):
        if _MARKED.fullmatch(parameter):
            marks.append(parameter)
        elif _HARMLESS.fullmatch(parameter):
            shown_parts.append(parameter)
        else:
            hidden.append(parameter)
    if not hidden:
        return "?" + "&".join(shown_parts + marks), ""
    return "?" + "".join(f"{parameter}&" for parameter in shown_parts), "&".join(hidden + marks)


def _secrets_of_query(query: str) -> list[str]:
    """The query and the values of its parameters; of one without a value, its name."""
    values = [parameter.partition("=")[2] or parameter for parameter in re.split(r"[&;#]", query)]
    return [query, *values]


def _remember(whole: str, show: Callable[[str], str], secrets: list[str]) -> str:
    """What is shown of a URL; another number in its mark than any other URL's that would be shown so."""
    number = 1
    while True:
        marked = show(MARK if number == 1 else f"{MARK}{number}")
        if marked == whole:
            return whole
        if _full_urls.setdefault(marked, whole) == whole:
            break
        number += 1

    for secret in secrets:
        decoded = _percent_decode(secret)
        spellings = {secret, decoded, decoded.replace("+", " "), _percent_encode(secret), _percent_encode(secret, "/")}
        _secrets.update(
            spelling for spelling in spellings if len(spelling) >= _SHORTEST_SECRET and not spelling.isalpha()
        )
    return marked


def _percent_decode(text: str) -> str:
    """`a%2Fb` as `a/b`. The standard library has it in a package that opens sockets, which nothing here imports."""
    raw = re.sub(rb"%([0-9A-Fa-f]{2})", lambda found: bytes.fromhex(found[1].decode()), text.encode("utf-8", "replace"))
    return raw.decode("utf-8", "replace")


def _percent_encode(text: str, safe: str = "") -> str:
    """`a/b` as `a%2Fb`. safe: characters that stay, next to letters, digits and `-._~`."""
    unreserved = f"{safe}-._~".encode()
    raw = text.encode("utf-8", "replace")
    return "".join(
        chr(byte) if (chr(byte).isalnum() and byte < 128) or byte in unreserved else f"%{byte:02X}" for byte in raw
    )
