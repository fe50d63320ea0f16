"""Hints: what a reader remembers of its source, so that a writer of the same kind gives it back as it was.

A hint is a frozen dataclass with a key; a catalog's `Hints` hold them in their plain form, as the index of `sharded`
and the record of a universal checkpoint store them. They are data of a checkpoint, which somebody may have edited: a
value that is not of its field's kind reads as if it were absent.

    >>> hints = Hints.of(Dialect("paddle"), Degrees(tp=2))
    >>> hints.plain
    {'dialect': 'paddle', 'degrees': {'tp': 2}}
    >>> hints.get(Degrees), hints.get(Globals)
    (Degrees(tp=2, pp=None, vpp=None, ep=None, etp=None, dp=None, cp=None), None)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

if TYPE_CHECKING:
    from typing_extensions import Self  # typing has it from Python 3.11 on

_KINDS = {"bool": bool, "int": int, "str": str}


class Hint:
    """One kind of hint. The plain form contains each field without a default, and others if they differ from theirs.
    Types of fields: `bool`, `int`, `str`, `tuple[X, ...]` and `Mapping[str, X]` with these or Any inside, or None."""

    KEY: ClassVar[str]

    def plain(self) -> Any:
        """Plain values, as they are stored."""
        values = {}
        for hint_field in fields(self):  # type: ignore[arg-type]  # every hint is a dataclass
            value = getattr(self, hint_field.name)
            if hint_field.default is MISSING or value != hint_field.default:
                values[hint_field.name] = list(value) if isinstance(value, tuple) else value
        return values

    @classmethod
    def read(cls, plain: Any) -> Self | None:
        """The hint with these plain values; None if they do not form one of this kind."""
        if not isinstance(plain, Mapping):
            return None
        values = {}
        for hint_field in fields(cls):  # type: ignore[arg-type]
            value = _sound(plain.get(hint_field.name), str(hint_field.type))
            if value is not None or hint_field.default is MISSING:
                values[hint_field.name] = value
        return cls(**values)


def _sound(value: Any, kind: str) -> Any:
    """The value if it has the type `kind`; else None, or empty if the type does not allow None."""
    outer, _, inner = kind.removesuffix(" | None").partition("[")
    empty: Any = None if kind.endswith("None") else {"tuple": (), "Mapping": {}, "bool": False}.get(outer)
    if outer == "tuple":
        fits = isinstance(value, list | tuple) and _all(value, inner.partition(",")[0])
        return tuple(value) if fits else empty
    if outer == "Mapping":
        fits = isinstance(value, Mapping) and _all(value, "str") and _all(value.values(), inner[5:].rstrip("]"))
        return value if fits else empty
    return value if type(value) is _KINDS[outer] else empty


def _all(values: Any, kind: str) -> bool:
    return kind == "Any" or all(type(value) is _KINDS[kind] for value in values)


H = TypeVar("H", bound=Hint)


@dataclass(frozen=True, slots=True)
class Hints:
    """The hints of a source."""

    # key -> plain values, also of hints that this version does not know
    plain: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, *hints: Hint) -> Hints:
        """These hints, in this order."""
        return cls().having(*hints)

    def get(self, kind: type[H]) -> H | None:
        """The hint of a kind, None if there is none or its entry is malformed."""
        return kind.read(self.plain[kind.KEY]) if kind.KEY in self.plain else None

    def having(self, *hints: Hint) -> Hints:
        """These and more, which replace those of their kind."""
        return Hints({**self.plain, **{hint.KEY: hint.plain() for hint in hints}})

    def without(self, *kinds: type[Hint]) -> Hints:
        """Those of other kinds."""
        gone = {kind.KEY for kind in kinds}
        return Hints({key: value for key, value in self.plain.items() if key not in gone})

    @property
    def dialect(self) -> str | None:
        """Whose names the tensors have, where that is not the format's own dialect."""
        hint = self.get(Dialect)
        return hint.name if hint else None


@dataclass(frozen=True, slots=True)
class Dialect(Hint):
    """Whose names the tensors have: a dialect of `families`."""

    KEY: ClassVar[str] = "dialect"
    name: str

    def plain(self) -> str:
        """The name of the dialect, as the hint's plain form."""
        return self.name

    @classmethod
    def read(cls, plain: Any) -> Self | None:
        """The hint of a text; None for anything else."""
        return cls(plain) if isinstance(plain, str) else None


@dataclass(frozen=True, slots=True)
class Degrees(Hint):
    """How many ways a job is parallel, as far as anybody states it."""

    KEY: ClassVar[str] = "degrees"
    tp: int | None = None
    pp: int | None = None
    vpp: int | None = None
    ep: int | None = None
    etp: int | None = None
    dp: int | None = None  # all data ranks, those of experts too. `vpp` cuts no tensor.
    cp: int | None = None

    def stated(self) -> dict[str, int]:
        """Mesh dim -> size of those that are stated.

        >>> Degrees(pp=1, tp=2).stated()
        {'tp': 2, 'pp': 1}
        """
        degrees: dict[str, int] = self.plain()
        return degrees

    def at(self, name: str) -> int:
        """The size of a dim, 1 if it is not stated."""
        size = getattr(self, name)
        return 1 if size is None else int(size)

    @property
    def alone(self) -> bool:
        """Is it one rank?"""
        return all(size == 1 for size in self.stated().values())


@dataclass(frozen=True, slots=True)
class NamesHint(Hint):
    """A hint that is a list of names, each once."""

    names: tuple[str, ...] = ()

    @classmethod
    def each(cls, *lists: Iterable[str]) -> Self:
        """The names of all lists, in the order of first sight."""
        return cls(tuple(dict.fromkeys(name for names in lists for name in names)))

    def plain(self) -> list[str]:
        """The names as a list, as the hint's plain form."""
        return list(self.names)

    @classmethod
    def read(cls, plain: Any) -> Self | None:
        """The hint of a list of names; None for anything else."""
        return cls(tuple(map(str, plain))) if isinstance(plain, list | tuple) else None


@dataclass(frozen=True, slots=True)
class Stated(Hint):
    """What the header of a source's files states of the model, in the words of its format; `inspect` shows it."""

    KEY: ClassVar[str] = "stated"
    format: str  # whose words they are
    values: Mapping[str, Any]  # plain ones
    long: Mapping[str, int] = field(default_factory=dict)  # how many values a list has that is not kept


class Globals(NamesHint):
    """The globals that the pickles of a source name, `module.name`."""

    __slots__ = ()
    KEY: ClassVar[str] = "globals"


@dataclass(frozen=True, slots=True)
class FileRanks(Hint):
    """Which rank wrote which file: its coordinates in the mesh."""

    KEY: ClassVar[str] = "ranks"
    coords: Mapping[str, Mapping[str, int]]

    def plain(self) -> dict[str, Any]:
        """The coordinates of each file, as the hint's plain form."""
        return {path: dict(coords) for path, coords in self.coords.items()}

    @classmethod
    def read(cls, plain: Any) -> Self | None:
        """The hint of a mapping from paths to coordinates; None for anything else."""
        fits = isinstance(plain, Mapping) and all(isinstance(coords, Mapping) for coords in plain.values())
        return cls(plain) if fits else None
