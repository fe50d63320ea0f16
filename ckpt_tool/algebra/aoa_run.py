"""Run: the steps of a program carried out on slices, and what is left over at its end.

Names hold values as in any small language: the source's tensors at first; a step reads names and assigns others, a name
may be assigned again once its value has been read. At the end the outputs are those of the destination where it is
known, else every value that nothing has read, and a source `x` of `x -> x` where others merely rename it (`x -> head`).

Each element of the source must reach one place: what is overwritten, never read, cut away or read twice is a fault,
unless a statement drops it in words. A whole tensor may be read several times (`embed -> head` for tied weights). What
it does not do: find out what names stand for (`aoa_names`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod

from ckpt_tool.algebra.aoa_faults import Faults
from ckpt_tool.algebra.aoa_slices import Slice, Value, cast, concat, permute, split, whole
from ckpt_tool.algebra.aoa_steps import TEMPORARY, Step, shown
from ckpt_tool.core.box import first_overlap
from ckpt_tool.errors import UsageError

Shape = tuple[int, ...]


class Run:
    """The names of a program while it runs.

    doubtful: statements before this pass have failed, so a name that is not there is no fault of its reader.
    """

    def __init__(self, shapes: Mapping[str, Shape], faults: Faults, *, doubtful: bool = False) -> None:
        self.shapes, self.faults, self.doubtful = shapes, faults, doubtful
        self.values: dict[str, Value | None] = {name: whole(name, shape) for name, shape in shapes.items()}
        self.maker: dict[str, int] = {}  # assigned names: the statement that made their value
        self.reader: dict[str, int] = {}  # names whose value has been read: the statement that did first
        self.dropped: dict[str, int] = {}  # names: the statement that drops them
        self.left_out: list[Value] = []  # what they held
        self.unfilled: dict[str, int] = {}
        self.buried: dict[str, int] = {}  # sources that were assigned before anything read them: by which statement
        # the source's names that are said to stay, `x -> x`, and are only renamed afterwards
        self.stated: set[str] = set()

    def steps(self, steps: Iterable[Step]) -> None:
        """Carry them out in order. Faults: E1215 to E1219, E1221."""
        for step in steps:
            if step.kind == "add":
                self._add(step)
            elif step.kind == "drop":
                self._drop(step)
            else:
                read = [self._read(name, step.number) for name in step.left]
                known = [value for value in read if value is not None]
                made: Sequence[Value | None] = [None] * len(step.right)
                if len(known) == len(read):
                    try:
                        made = _made(step, known)
                    except UsageError as e:
                        self.faults.take(step.number, e)
                for name, value in zip(step.right, made, strict=True):
                    self._assign(name, value, step.number)
                if step.kind != "rename":
                    self.stated.difference_update(step.left)
                elif step.left == step.right and step.left[0] in self.shapes:
                    self.stated.update(step.right)

    def _read(self, name: str, number: int) -> Value | None:
        if name not in self.values:
            if not self.doubtful:
                gone = self.dropped.get(name)
                near = self.faults.near(name, self.values)
                self.faults.add(
                    "E1218",
                    number,
                    f"`{shown(name)}` is read, but nothing has made it",
                    f"statement {gone} drops it" if gone else near,
                )
            self.values[name] = None
        self.reader.setdefault(name, number)
        return self.values[name]

    def _assign(self, name: str, value: Value | None, number: int) -> None:
        if name in self.unfilled:
            self._contradiction(name, self.unfilled[name], number)
        if name in self.values and name not in self.reader:
            if name not in self.maker:
                self.buried[name] = number
            else:
                self.faults.add(
                    "E1219",
                    number,
                    f"`{shown(name)}` is made anew, and nothing has read what statement {self.maker[name]} made",
                    "give one of the two another name",
                )
        self.values[name] = value
        self.maker[name] = number
        self.reader.pop(name, None)
        self.stated.discard(name)

    def _drop(self, step: Step) -> None:
        (name,) = step.left
        if name in self.reader:
            self.faults.add(
                "E1221",
                step.number,
                f"`{name}` is dropped, but statement {self.reader[name]} reads it",
                "leave one of the two out: what has been read needs no dropping",
            )
            return
        value = self._read(name, step.number)
        del self.values[name]
        self.reader.pop(name, None)
        self.maker.pop(name, None)
        if value is not None:
            self.dropped[name] = step.number
            self.left_out.append(value)

    def _add(self, step: Step) -> None:
        (name,) = step.right
        if name in self.values:
            self._contradiction(name, step.number, self.maker.get(name, 0))
        self.unfilled[name] = step.number

    def _contradiction(self, name: str, adder: int, maker: int) -> None:
        """`_ -> name` of statement `adder`; `maker` makes it, 0 the source has it."""
        what = f"statement {maker} makes it" if maker else "the source has it"
        self.faults.add(
            "E1221",
            max(adder, maker),
            f"statement {adder} says that `{name}` has no source, but {what}",
            "leave one of the two out" if maker else f"drop it first: `{name} -> _`",
        )

    def outputs(self, wanted: Mapping[str, Shape | None] | None) -> dict[str, Value]:
        """The output tensors by name. Faults: E1219 to E1224."""
        if wanted is None:
            found = {
                name: value
                for name, value in self.values.items()
                if value is not None and (name not in self.reader or name in self.stated)
            }
        else:
            found = self._wanted(wanted)
        self._account(found)
        return found

    def _wanted(self, wanted: Mapping[str, Shape | None]) -> dict[str, Value]:
        found: dict[str, Value] = {}
        for name, shape in wanted.items():
            value = self.values.get(name)
            if name in self.unfilled:
                continue
            if value is None:
                gone = self.dropped.get(name)
                hint = f"statement {gone} drops it" if gone else self.faults.near(name, self.values)
                self.faults.add(
                    "E1220",
                    0,
                    f"the destination's `{name}` is made of nothing",
                    hint or f"`_ -> {name}` states that it has no source",
                )
                continue
            if shape is not None and shape != value.shape:
                self.faults.add(
                    "E1224",
                    self.maker.get(name, 0),
                    f"`{name}` comes out as {list(value.shape)}, the destination has {list(shape)}",
                    "is a transpose or an axis wrong?",
                )
            found[name] = value
        for name, number in self.unfilled.items():
            if name not in wanted:
                self.faults.add(
                    "E1222",
                    number,
                    f"`{name}` has no source, and the destination has none of that name",
                    self.faults.near(name, wanted),
                )
        for name, value in self.values.items():
            if name in wanted or name in self.reader or value is None or name.startswith(TEMPORARY):
                continue
            near = self.faults.near(name, wanted)
            if name in self.maker:
                self.faults.add(
                    "E1222",
                    self.maker[name],
                    f"`{name}` is made, but nothing reads it and the destination has none",
                    near or f"`{name} -> _` drops it",
                )
            else:
                self.faults.add(
                    "E1219",
                    0,
                    f"the source's `{name}` is read by no statement, and the destination has none",
                    near or f"`{name} -> _` drops it",
                )
        return found

    def _account(self, outputs: Mapping[str, Value]) -> None:
        """Does every element of the source reach one place?"""
        for name, number in self.buried.items():
            self.faults.add(
                "E1219",
                number,
                f"the source's `{name}` is overwritten before anything reads it",
                f"`{name} -> _` first, if it is to be dropped",
            )
        used: dict[str, dict[str, list[Slice]]] = {name: {} for name in self.shapes}
        for output, value in outputs.items():
            for piece in value.slices:
                used[piece.source].setdefault(output, []).append(piece)
        left_out: dict[str, int] = {}
        for value in self.left_out:
            for piece in value.slices:
                left_out[piece.source] = left_out.get(piece.source, 0) + prod(piece.shape)
        doubtful = self.doubtful or bool(self.faults.found)
        for name, shape in self.shapes.items():
            fault = _misread(name, shape, used[name], left_out.get(name, 0))
            if fault and (fault[0] == "E1223" or not doubtful):
                self.faults.add(fault[0], 0, fault[1], fault[2])


def _made(step: Step, values: Sequence[Value]) -> list[Value]:
    first, name = values[0], step.left[0]
    match step.kind:
        case "split":
            return split(first, len(step.right), step.axis, name, step.why)
        case "concat":
            return [concat(values, step.axis, step.left, even=step.even)]
        case "permute":
            return [permute(first, step.dims, name)]
        case "cast":
            return [cast(first, step.dtype, name)]
        case _:
            return [first]


def _misread(name: str, shape: Shape, used: Mapping[str, list[Slice]], left_out: int) -> tuple[str, str, str] | None:
    """What is wrong with the reading of one source tensor: (code, message, hint), None for nothing."""
    numel = prod(shape)
    wholes = [output for output, slices in used.items() if len(slices) == 1 and prod(slices[0].shape) == numel]
    slices = [(output, piece) for output, some in used.items() for piece in some]
    if wholes and (len(wholes) == len(used) or not numel):
        return None
    pair = first_overlap([piece.box for _, piece in slices])
    if pair is not None:
        names = sorted({slices[i][0] for i in pair})
        return (
            "E1223",
            f"elements of the source's `{name}` are read twice, for {' and for '.join(f'`{n}`' for n in names)}",
            "only a whole tensor may be read more than once",
        )
    lost = numel - sum(prod(piece.shape) for _, piece in slices) - left_out
    if lost > 0:
        return (
            "E1219",
            f"{lost} of {numel} elements of the source's `{name}` reach no tensor",
            f"`{name} -> _`, or the name of its part, drops them",
        )
    return None
