r"""Text that is safe and easy to read: names escaped, sizes and counts as people say them.

A tensor's name is data from a stranger. Printed raw it could move the cursor, hide behind right-to-left marks, or
start a command of a CI log; so everything that reaches a terminal or a page goes through `escape` (JSON keeps the
exact text).

    >>> escape("a\x1b[31mb")
    'a\\x1b[31mb'
    >>> size(13_476_839_424), count(92_000), ranges([0, 1, 2, 5])
    ('13.5 GB', '92,000', '0-2,5')
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable

CLIP = 240  # characters of one name that are shown
_COMMAND_STARTS = ("::", "##[", "##vso")  # log commands of GitHub Actions and Azure


def escape(text: str) -> str:
    """`text` on one line without a control character, a bidi or zero-width mark or a surrogate.

    They appear as `\\x1b`, `\\u202e`, and a byte of a file's name that is no UTF-8 as `\\xff`, as a shell takes it
    (`$'a\\xff'`); printable text of any script stays as it is.
    """
    if not text.isprintable():
        text = "".join(char if char.isprintable() else _escape_char(char) for char in text)
    if text.lstrip().startswith(_COMMAND_STARTS):
        head = len(text) - len(text.lstrip())
        text = text[:head] + f"\\x{ord(text[head]):02x}" + text[head + 1 :]
    return text


def _escape_char(char: str) -> str:
    code = ord(char)
    if char in "\n\r\t":
        return {"\n": "\\n", "\r": "\\r", "\t": "\\t"}[char]
    if 0xDC80 <= code <= 0xDCFF:  # of `os.fsdecode`
        code -= 0xDC00
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def clip(text: str, limit: int = CLIP) -> str:
    """`text` cut in its middle when longer than `limit` characters, with its real length."""
    if len(text) <= limit:
        return text
    note = f" ...({len(text)} characters)... "
    head = (limit - len(note)) * 2 // 3
    return text[:head] + note + text[len(text) - (limit - len(note) - head) :]


def show_text(text: str, limit: int = CLIP) -> str:
    """`text` as a terminal may show it: clipped first, so that a name of megabytes costs nothing, then escaped."""
    return escape(clip(text, limit))


def cells(text: str) -> int:
    """Terminal columns that `text` takes: wide (CJK) characters count two, combining marks none."""
    if text.isascii():
        return len(text)
    return sum(map(_char_cells, text))


def _char_cells(char: str) -> int:
    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def size(nbytes: float) -> str:
    """Bytes in decimal units with three digits: `262 MB`, `13.5 GB`, `96 B`."""
    value = float(nbytes)
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if value < 999.5 or unit == "PB":
            break
        value /= 1000
    if unit == "B":
        return f"{int(value)} B"
    return f"{_three_digits(value)} {unit}"


def _three_digits(value: float) -> str:
    """A number from 1 to 999 to three digits: 123, 12.3, 1.23."""
    if value >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def count(number: int) -> str:
    """A whole number with its thousands marked."""
    return f"{number:,}"


def parameters(number: int) -> str:
    """Parameters as the field counts them: `6.74 B`, `125 M`."""
    value = float(number)
    unit = ""
    for bigger in ("K", "M", "B", "T"):
        if value < 999.5:
            break
        value = value / 1000
        unit = bigger
    if not unit:
        return str(number)
    return f"{_three_digits(value)} {unit}"


def duration(seconds: float) -> str:
    """`0.8 s`, `12 s`, `3 min 05 s`, `2 h 07 min`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    rounded = round(seconds)
    if rounded < 60:
        return f"{rounded} s"
    if rounded < 3600:
        return f"{rounded // 60} min {rounded % 60:02d} s"
    return f"{rounded // 3600} h {rounded % 3600 // 60:02d} min"


def plural(number: int, noun: str) -> str:
    """`1 tensor`, `291 tensors`, `2 copies`."""
    if number == 1:
        return f"1 {noun}"
    return f"{count(number)} {noun[:-1]}ies" if noun.endswith("y") else f"{count(number)} {noun}s"


def more(hidden: int, noun: str) -> str:
    """The closing line of a list that was cut: `... 12 more files; -v lists all`; "" when nothing is hidden."""
    return f"... {count(hidden)} more {plural(hidden, noun).partition(' ')[2]}; -v lists all" if hidden else ""


def shape(extents: Iterable[int]) -> str:
    """`[4096, 11008]`; `[]` for a scalar."""
    return f"[{', '.join(map(str, extents))}]"


def ranges(numbers: Iterable[int], *, most: int = 4) -> str:
    """Ascending numbers as ranges: `0-2,5`. Regular gaps of two runs and more read `0-30 step 2`; `most` runs are
    named."""
    ordered = sorted(set(numbers))
    if len(ordered) > 2:
        step = ordered[1] - ordered[0]
        if step > 1 and all(b - a == step for a, b in zip(ordered, ordered[1:], strict=False)):
            return f"{ordered[0]}-{ordered[-1]} step {step}"
    runs: list[list[int]] = []
    for number in ordered:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    named = [str(a) if a == b else f"{a}-{b}" for a, b in runs]
    return ",".join(named if len(named) <= most else [*named[: most - 1], "...", named[-1]])
