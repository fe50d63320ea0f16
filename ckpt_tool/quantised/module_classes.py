"""Classes of equal modules: the 92,000 tensors of a mixture of experts are judged as a dozen.

The one idea: what `weight_schemes.quantised_weights.find` says of a tensor depends on the tensors of its module alone.
The module is the part of the name before the last dot; a weight and its scales have the same module (bitsandbytes'
`m.weight.absmax` belongs to m). So modules whose tensors have the same endings, dtypes and shapes form a class; one
module of each class is judged, and the result counts once for each module of the class.

    m.0.weight F8 [256, 512], m.0.weight_scale_inv F32 [2, 4]      one class, counted twice
    m.1.weight F8 [256, 512], m.1.weight_scale_inv F32 [2, 4]
    m.2.weight BF16 [256, 512]                                     another

A class is a number that is found tensor by tensor: the class of the module's tensors so far, together with the next
tensor, gives the next class. So a module may be spread over several files, and only its name and a number are kept. The
cost: 0.3 us a tensor, 150 bytes a module.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from itertools import repeat

from ckpt_tool.core.listing import Kind as Listed
from ckpt_tool.core.listing import RowBlock
from ckpt_tool.weight_schemes.quantised_weights import TensorKind

Tail = tuple[bytes, bytes]  # (the last dot, if there is one; what follows it)
Step = tuple[
    int, bytes, bytes, int
]  # (class of the module so far, 0 at first; dot, ending and kind of the next tensor)


class Alike:
    """The tensors of one state, grouped into classes of modules."""

    def __init__(self, blocks: Iterable[RowBlock], listed: Collection[str] | None = None) -> None:
        """listed: the names that `count` counts; None for all."""
        self._blocks = tuple(blocks)
        self._numbers: dict[Listed, int] = {}
        self._classes: dict[bytes, int] = {}  # module -> its class
        steps: dict[Step, int] = {}
        classes = self._classes
        has_absmax = any(
            b".absmax" in b" ".join(names()) for _, names, _ in self._blocks
        )  # in one look, for most have none
        has_absmax = has_absmax and any(name.endswith(b".absmax") for names, _ in self._columns() for name in names)
        self._parted = _above_weight if has_absmax else bytes.rpartition
        for names, numbers in self._columns():
            for (module, dot, ending), number in zip(map(self._parted, names, repeat(b".")), numbers, strict=True):
                classes[module] = steps.setdefault((classes.get(module, 0), dot, ending, number), len(steps) + 1)
        self._steps = list(steps)  # step n - 1 leads to class n
        self._modules = Counter(classes.values())
        self._listed: Counter[tuple[int, Tail]] | None = None
        if listed is not None:
            self._listed = Counter(map(self._place, listed))

    def _columns(self) -> Iterator[tuple[Iterable[bytes], Iterable[int]]]:
        """For each block its names, and for each name the number of its kind."""
        for _, names, kinds in self._blocks:
            objects = dict(zip(map(id, kinds), kinds, strict=True))
            numbers = {key: self._numbers.setdefault(kind, len(self._numbers)) for key, kind in objects.items()}
            yield names(), map(numbers.__getitem__, map(id, kinds))

    def kinds(self) -> list[TensorKind]:
        """The distinct dtypes and shapes, as `TensorKind`s."""
        return [TensorKind(dtype, shape) for dtype, shape, _ in self._numbers]

    def names(self) -> Iterator[str]:
        """All names, in the order of the blocks."""
        return (_text(name) for _, names, _ in self._blocks for name in names())

    def first(self) -> dict[str, TensorKind]:
        """The tensors of the first module of each class."""
        kinds = self.kinds()
        modules = list(self._classes)
        modules.reverse()
        first_modules = dict(zip(map(self._classes.__getitem__, modules), modules, strict=True))
        return {
            _text(module + dot + ending): kinds[kind]
            for number, module in reversed(first_modules.items())
            for dot, ending, kind in self._tensors(number)
        }

    def like(self, names: Iterable[str]) -> dict[str, TensorKind]:
        """All tensors of the modules in the same classes as those of `names`, in the order of the blocks."""
        classes_wanted = {self._place(name)[0] for name in names}
        kinds = self.kinds()
        classes = self._classes
        return {
            _text(name): kinds[number]
            for column, numbers in self._columns()
            for name, number in zip(column, numbers, strict=True)
            if classes[self._parted(name, b".")[0]] in classes_wanted
        }

    def count(self, name: str) -> int:
        """How many of the listed tensors have the role of `name` in a module of the same class."""
        place = self._place(name)
        return self._modules[place[0]] if self._listed is None else self._listed[place]

    def _place(self, name: str) -> tuple[int, Tail]:
        """The class of a tensor's module, and the tail of its name."""
        module, dot, ending = self._parted(name.encode("utf-8", "surrogatepass"), b".")
        return self._classes[module], (dot, ending)

    def _tensors(self, number: int) -> list[tuple[bytes, bytes, int]]:
        """(dot, ending, kind) of the tensors in a module of class `number`, in the order in which they were read."""
        tensors: list[tuple[bytes, bytes, int]] = []
        while number:
            number, dot, ending, kind = self._steps[number - 1]
            tensors.append((dot, ending, kind))
        return tensors[::-1]


def _above_weight(name: bytes, dot: bytes) -> tuple[bytes, bytes, bytes]:
    """(module, dot, the rest), for checkpoints where tensors are stored below a weight's own name."""
    module, found, ending = name.rpartition(b".weight.")
    return (module, dot, found[1:] + ending) if found else name.rpartition(dot)


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogatepass")
