"""Parsers that turn the text of an option (or the value of a Python caller) into numbers, sizes, patterns and names.

    >>> size("5GB"), size("64MiB"), words("model, ema")
    (5000000000, 67108864, ('model', 'ema'))

Each function takes the text, or the value itself, and raises BadValue with what was found and what is wanted;
`option_kinds.statement` collects the errors. The annotation of the argument says what Python callers may pass. No
function here knows for which option it is used."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from typing import Any, Literal

from ckpt_tool.errors import UsageError, near_misses

PATTERN_FILE_LIMIT = 16 << 20  # bytes
# Names of quantisation schemes, which people write where a dtype is wanted; they get a hint.
_QUANTISED = re.compile(r"(?i)(mx|nv)?fp[468]|u?int[48]|nf4|[48]-?bit|w[48]a(8|16)|awq|gptq|bnb|q[2-8]_[0-9k].*")
_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
}


class BadValue(ValueError):
    """A value that can't be accepted. The message says what was found and wanted, the hint what to write instead."""

    def __init__(self, message: str, *, hint: str | None = None, path: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint
        self.path = path


def text(value: str | PathLike[str]) -> str:
    """A name or a path, not empty."""
    if not isinstance(value, str) and hasattr(value, "__fspath__"):
        value = value.__fspath__()
    if not isinstance(value, str) or not value:
        raise BadValue(f"found {value!r}, want text")
    return value


def output(value: str | PathLike[str]) -> str:
    """The path of a file or folder to write, no URL."""
    from ckpt_tool.storage.output.destination import url_fault

    path = text(value)
    fault = url_fault(path)
    if fault is not None:
        raise BadValue(fault[0], hint=fault[1])
    return path


def integer(value: int | str) -> int:
    """A whole number."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and re.fullmatch(r"[+-]?[0-9]{1,18}", value.strip()):
        return int(value)
    raise BadValue(f"found {value!r}, want a whole number")


def count(value: int | str) -> int:
    """A whole number, at least 1."""
    number = integer(value)
    if number < 1:
        raise BadValue(f"found {number}, want at least 1")
    return number


def between(low: int, high: int) -> Callable[[Any], int]:
    """A parser of whole numbers from `low` to `high`, both included."""

    def parse(value: int | str) -> int:
        number = integer(value)
        if not low <= number <= high:
            raise BadValue(f"found {number}, want {low} to {high}")
        return number

    return parse


def number(value: float | str) -> float:
    """A finite number."""
    try:
        found = float(value)
    except (TypeError, ValueError):
        raise BadValue(f"found {value!r}, want a number") from None
    if found != found or abs(found) == float("inf"):
        raise BadValue(f"found {value!r}, want a finite number")
    return found


def positive(value: float | str) -> float:
    """A number above 0."""
    found = number(value)
    if found <= 0:
        raise BadValue(f"found {found:g}, want more than 0")
    return found


def tolerance(value: float | str) -> float:
    """A finite number, at least 0."""
    found = number(value)
    if found < 0:
        raise BadValue(f"found {found:g}, want at least 0")
    return found


def size(value: int | str) -> int:
    """A size in bytes: `5GB` (decimal), `64MiB` (binary), `1048576`. At least 1."""
    if isinstance(value, int) and not isinstance(value, bool):
        return count(value)
    match = (
        re.fullmatch(r"\s*([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([a-zA-Z]*)\s*", value) if isinstance(value, str) else None
    )
    if match is None:
        raise BadValue(f"found {value!r}, want a size", hint="write it like 5GB, 512MiB or 1048576")
    digits = match[1]
    unit = match[2].lower()
    if unit not in _UNITS:
        decimal = f"{unit[0]}b" if unit[0] in "kmgt" else ""
        hint = (
            f"{digits}{decimal.upper()} or {digits}{unit[0].upper()}iB"
            if decimal
            else "the units are kB MB GB TB KiB MiB GiB TiB"
        )
        raise BadValue(f"found {value!r}, which has no unit that we know", hint=hint)
    nbytes = int(float(digits) * _UNITS[unit]) if "." in digits else int(digits) * _UNITS[unit]
    return count(nbytes)


def sizes(value: int | str | tuple[int, int]) -> tuple[int, int]:
    """One or two sizes: `256MiB`, `256MiB,4MiB`; the second is 0 if it is not given."""
    parts: list[int | str]
    if isinstance(value, str):
        parts = [*value.split(",")]
    else:
        parts = list(value) if isinstance(value, tuple | list) else [value]
    if not 1 <= len(parts) <= 2:
        raise BadValue(f"found {value!r}, want one or two sizes", hint="large blocks, then small ones: 256MiB,4MiB")
    return size(parts[0]), size(parts[1]) if len(parts) == 2 else 0


def one_of(known: Iterable[str], meant: Mapping[str, str] | None = None) -> Callable[[Any], str]:
    """A parser of one name out of `known`; `_` counts as `-`, upper case as lower. meant: other words for them, which
    are not accepted but lead to a hint."""
    names = tuple(known)
    spelled = {name.replace("_", "-"): name for name in names}

    def parse(value: str) -> str:
        name = text(value).lower().replace("_", "-")
        if name not in spelled:
            translated = (meant or {}).get(name)
            hint = f"{value} is called {translated} here" if translated else near_misses(name, names) or None
            if meant and _QUANTISED.fullmatch(name):
                hint = "quantising is not a format: --to safetensors --quantize SCHEME; --to gguf --gguf-type TYPE"
            raise BadValue(f"found {value!r}, want one of {', '.join(names)}", hint=hint)
        return spelled[name]

    return parse


def only_one_of(known: Iterable[str], hint: str) -> Callable[[Any], str | None]:
    """A parser of one name out of `known`, for an option that may be given once only.

    The option has the kind `values` nevertheless: otherwise the second of two would silently replace the first. hint:
    what to do instead of a second one.
    """
    name_of = one_of(known)

    def parse(value: str | Iterable[str] | None) -> str | None:
        given = several(value) if value is not None else []
        names = [name_of(each) for each in given]
        if len(names) > 1:
            raise BadValue(f"it is given {len(names)} times, {' and '.join(names)}: one holds for all", hint=hint)
        return names[0] if names else None

    parse.__annotations__["value"] = "str"
    return parse


def with_file(known: Iterable[str]) -> Callable[[Any], tuple[str, str]]:
    """A parser of one name out of `known` and a file to write."""
    name_of = one_of(known)

    def parse(value: tuple[str, str]) -> tuple[str, str]:
        try:
            name, path = value
        except (TypeError, ValueError):
            raise BadValue(f"found {value!r}, want a name and a file") from None
        if text(path).startswith("-"):
            raise BadValue(f"found {path!r}, want the name of a file", hint=f"a file of that name is ./{path}")
        return name_of(name), output(path)

    return parse


def several(value: Any) -> list[Any]:
    """One value or several, as a list."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        return [value]
    return list(value)


def paths(value: str | Iterable[str]) -> tuple[str, ...]:
    """One path or several."""
    return tuple(text(each) for each in several(value))


def words(value: str | Iterable[str]) -> tuple[str, ...]:
    """Names, split at commas; a list of such texts counts as one."""
    found = [word.strip() for part in several(value) for word in text(part).split(",")]
    if not all(found):
        raise BadValue(f"found {value!r}, want names with commas between them")
    return tuple(dict.fromkeys(found))


def counts(value: str | Iterable[int]) -> tuple[int, ...]:
    """Whole numbers split at commas, none negative: `8,9,9,6`."""
    numbers = tuple(integer(part) for part in (value.split(",") if isinstance(value, str) else several(value)))
    if not numbers or min(numbers) < 0:
        raise BadValue(f"found {value!r}, want whole numbers with commas between them, like 8,9,9,6")
    return numbers


def numbers(value: float | str | Iterable[float | str]) -> tuple[float, ...]:
    """Finite numbers: one, several, or texts split at commas."""
    return tuple(
        number(word) for part in several(value) for word in (part.split(",") if isinstance(part, str) else (part,))
    )


AUTO: Literal["auto"] = "auto"


def stages(value: str | Iterable[int]) -> tuple[int, ...] | Literal["auto"]:
    """Layers of each pipeline stage, `8,9,9,6`; `auto`: numbers that give all stages about the same size in bytes."""
    return AUTO if value == AUTO else counts(value)


def share(value: str | tuple[int, int]) -> tuple[int, int] | Literal["auto"]:
    """A share `I/N`, counted from 1: `3/8` is the third of eight; `auto`: the share that the launcher assigns."""
    if value == AUTO:
        return AUTO
    first = 0
    of = 0
    if isinstance(value, tuple):
        first, of = value
    elif isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9]{1,9})\s*/\s*([0-9]{1,9})\s*", value)
        if match:
            first = int(match[1])
            of = int(match[2])
    if not 1 <= first <= of:
        raise BadValue(
            f"found {value!r}, want I/N with I from 1 to N, or auto",
            hint="the first of eight parts is 1/8, the last 8/8; auto takes the one that Slurm, torchrun, Open MPI or "
            "Kubernetes name",
        )
    return first, of


def dtypes(value: str | Iterable[str] | Mapping[str, str]) -> dict[str, str]:
    """State ("" for all) -> dtype name: from `bf16`, `optimizer=bf16`, a list of those, or a mapping."""
    from ckpt_tool.core.dtype import DTYPES, from_name

    if isinstance(value, Mapping):
        pairs = [(str(state), text(name)) for state, name in value.items()]
    else:
        pairs = []
        for word in words(value):
            state, equals, name = word.partition("=")
            pairs.append((state.strip(), name.strip()) if equals else ("", word))
    found: dict[str, str] = {}
    for state, name in pairs:
        if _QUANTISED.fullmatch(name):
            raise BadValue(
                f"{name!r} alone would lose the scales that such weights need",
                hint="--quantize SCHEME writes them with their scales: ckpt help quantising lists the schemes"
                + ("; a plain cast is --dtype float8_e4m3fn" if "8" in name else ""),
            )
        dtype = from_name(name)
        if dtype is None:
            raise BadValue(
                f"found the dtype {name!r}, want one of {', '.join(sorted(DTYPES))}",
                hint=near_misses(name.upper(), DTYPES) or "the usual spellings (bf16, float32, half) work too",
            )
        if not dtype.is_float:
            raise BadValue(
                f"found {name!r}, want a dtype of floats: only floats are cast, and integers would lose the fraction",
                hint="bf16, fp16, fp32, fp64, float8_e4m3fn, ...",
            )
        if found.get(state, dtype.name) != dtype.name:
            raise BadValue(f"two dtypes for {state or 'all states'}: {found[state]} and {dtype.name}", hint="give one")
        found[state] = dtype.name
    return found


def patterns(value: str | Iterable[str]) -> tuple[str, ...]:
    """Patterns on tensor names: shell globs, `re:EXPRESSION`, or `@FILE` with one pattern a line (`#`: a comment)."""
    from ckpt_tool.core.patterns import matcher

    found: list[str] = []
    for pattern in several(value):
        found.extend(_pattern_file(pattern[1:]) if text(pattern).startswith("@") else [pattern])
    for pattern in found:
        try:
            matcher(pattern)
        except UsageError as e:
            raise BadValue(e.message, hint=e.hint) from None
    return tuple(dict.fromkeys(found))


def rename_rules(value: str | Iterable[str]) -> tuple[str, ...]:
    """Rules that rename tensors, in their order: `OLD=NEW`, `re:EXPRESSION=REPLACEMENT`, or `@FILE` with one rule per
    line (`#` starts a comment)."""
    from ckpt_tool.core.renaming import BadRule, read_rule

    rules: list[str] = []
    for rule in several(value):
        if text(rule).startswith("@"):
            lines = _pattern_file(rule[1:])
            rules += [re.split(r"\s#", line)[0].rstrip() for line in lines]
        else:
            rules.append(rule)

    for rule in rules:
        try:
            read_rule(rule)
        except BadRule as fault:
            raise BadValue(str(fault), hint=fault.hint) from None
    return tuple(dict.fromkeys(rules))


def _pattern_file(path: str) -> list[str]:
    """The lines of a file of patterns or rules, without comments and empty lines."""
    try:
        with open(path, "rb") as file:
            data = file.read(PATTERN_FILE_LIMIT + 1)
        lines = data.decode("utf-8").splitlines()
    except OSError as e:
        raise BadValue(
            f"the pattern file can't be read: {e.strerror or e}", path=path, hint="@FILE names a text file"
        ) from e
    except UnicodeDecodeError as e:
        raise BadValue(
            f"the pattern file is not UTF-8 at byte {e.start}", path=path, hint="@FILE names a text file"
        ) from e
    if len(data) > PATTERN_FILE_LIMIT:
        raise BadValue(f"the pattern file is longer than {PATTERN_FILE_LIMIT} bytes", path=path)
    found = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not found:
        raise BadValue("the file holds no line but comments", path=path, hint="write one pattern or rule per line")
    return found
