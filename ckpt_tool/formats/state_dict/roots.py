"""Where a nested training state keeps its model, its optimizer, its averages: what a writer must know to do the same.

A source's `Roots` travel in its catalog's hints, so that a tensor without a path of its own (renamed, made from others,
come through a format without nesting) finds the place that its kind has in that state. The defaults are the layout of
torch's `get_state_dict`:

    >>> Roots().path(TensorKey("layers.0.w1.weight", "exp_avg"))
    ('optim', 'state', 'layers.0.w1.weight', 'exp_avg')

Hints are data: those of an edited index are refused as a whole, never half believed. Cost: nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ckpt_tool.core.bounds import numeral
from ckpt_tool.core.hints import Hint
from ckpt_tool.core.tensor import EMA, EXTRAS, MASTER, MODEL, Path, TensorKey
from ckpt_tool.formats.state_dict.tree import dotted


@dataclass(frozen=True, slots=True)
class Roots(Hint):
    """Where a source keeps what: the hints by which tensors without a path find a place."""

    KEY: ClassVar[str] = "roots"
    model: Path = ("model",)
    optimizer: Path = ("optim",)
    ema: Path = ("ema",)
    master: Path = ("master",)
    # torchtitan's spelling of optimizer states; then the optimizer's path may end in a key's prefix (`("optim.",)`)
    flat: bool = False
    dotted: bool = False  # the whole path is one key (a DCP without planner_data)
    # path of an optimizer -> its numbers' names, as `{"0": "embed.weight"}`
    ids: Mapping[Path, Mapping[str, str]] = field(default_factory=dict)
    chosen: bool = False  # the user named the model's level (`--prefer`): another model next to it is no contradiction

    def path(self, key: TensorKey) -> Path:
        """Where a tensor of this key belongs."""
        if key.state == MODEL:
            path: Path = (*self.model, key.name)
        elif key.state == EMA:
            path = (*self.ema, key.name)
        elif key.state == MASTER:
            path = (*self.master, key.name)
        elif key.state == EXTRAS:
            path = (EXTRAS, key.name)
        elif self.flat:
            path = (*self.optimizer, f"state.{key.name}.{key.state}")
        else:
            path = (*self.optimizer, "state", key.name, key.state)
        return (dotted(path),) if self.dotted else path

    def plain(self) -> dict[str, Any]:
        """The hint as JSON values, for plan files; `read` is the inverse."""
        return {
            "model": list(self.model),
            "optimizer": list(self.optimizer),
            "ema": list(self.ema),
            "master": list(self.master),
            "flat": self.flat,
            "dotted": self.dotted,
            "ids": [[list(path), dict(names)] for path, names in self.ids.items()],
            **({"chosen": True} if self.chosen else {}),
        }

    @classmethod
    def read(cls, plain: Any) -> Roots | None:
        """The inverse of `plain`; None if any part of the value is malformed."""
        if not isinstance(plain, Mapping):
            return None
        model, optimizer, ema, master = (
            _as_path(plain.get(name, [])) for name in ("model", "optimizer", "ema", "master")
        )
        ids = plain.get("ids", [])
        if model is None or optimizer is None or ema is None or master is None or not isinstance(ids, list | tuple):
            return None
        known: dict[Path, dict[str, str]] = {}
        for pair in ids:
            path = _as_path(pair[0]) if isinstance(pair, list | tuple) and len(pair) == 2 else None
            names = pair[1] if path is not None else None
            if path is None or not isinstance(names, Mapping):
                return None
            known[path] = {str(n): str(name) for n, name in names.items() if numeral(n)}
        flags = (bool(plain.get("flat")), bool(plain.get("dotted")))
        return Roots(model, optimizer, ema, master, *flags, known, chosen=bool(plain.get("chosen")))


@dataclass(frozen=True, slots=True)
class Ordered(Hint):
    """The OrderedDicts of a source that carried attributes (`_metadata` of a module's state): (path, attributes)."""

    KEY: ClassVar[str] = "ordered"
    attributes: tuple[tuple[Path, Mapping[Any, Any]], ...] = ()

    def plain(self) -> list[Any]:
        return [[list(path), attributes] for path, attributes in self.attributes]

    @classmethod
    def read(cls, plain: Any) -> Ordered | None:
        known: list[tuple[Path, Mapping[Any, Any]]] = []
        for row in plain if isinstance(plain, list | tuple) else ():
            if not isinstance(row, list | tuple) or len(row) != 2:
                continue
            path = _as_path(row[0])
            if path is not None and isinstance(row[1], Mapping):
                known.append((path, row[1]))
        return cls(tuple(known)) if known else None


def _as_path(value: Any) -> Path | None:
    fits = isinstance(value, list | tuple) and all(type(step) in (str, int) for step in value)
    return tuple(value) if fits else None
