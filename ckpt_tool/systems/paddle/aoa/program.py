"""AOA: Paddle's any-to-any statements, compiled to what each tensor of the other naming is made of.

One statement says how tensors are renamed, cut, joined, turned or cast; a program is a list of them, run in order:

    model.layers.$LAYER_ID.mlp.gate_proj.weight^T, model.layers.$LAYER_ID.mlp.up_proj.weight^T
        -> model.layers.$LAYER_ID.mlp.up_gate_proj.weight, fused_ffn
    lm_head.weight -> _

| statement | meaning |
|---|---|
| `a -> b` | `b` is `a` |
| `a -> _`, `_ -> b` | `a` is dropped; `b` has no source (it is not written) |
| `a -> b, c, axis=1` | equal parts along a dim |
| `a, b -> c, axis=0` | end to end along a dim |
| `a^T -> b` | all dims reversed |
| `a -> b, permute='[2, 0, 1]'` | dim i of `b` is dim `permute[i]` of `a`; `'[]'` reverses all |
| `a -> b, dtype='float32'` | model weights are cast (float16, bfloat16, float32); states keep their dtype |
| `q, k, v -> qkv, fused_qkv, num_heads=H, num_key_value_groups=G` | and `fused_qkv_old`, `fused_ffn`: see `steps` |
| `$LAYER_ID`, `$EXPERT_ID`, `$LAYER_ID_OFFSET`, `*`, `NAME[s:e]` | many names in one: see `aoa_names`, `aoa_statement`
|

Names of parameters are meant; the states of a parameter follow it. What no statement names passes as it is. `reverse`
runs the statements from right to left, the last one first (a cast must then say both dtypes).

Source: PaddlePaddle 3.3.1, `python/paddle/distributed/flex_checkpoint/aoa/`. Where Paddle is silent and a tensor could
be lost or doubled, this is strict; each fault names its statement, and all faults of a pass come at once:

E1200 no statement, E1201 E1202 the file, E1203 attribute, E1204 value, E1205 several names on both sides, E1206 name,
E1207 `A -> B^T`, E1208 a pattern without a match, E1209 unlike placeholders, E1210 numbers that can't be written out,
E1211 form of a fusion, E1212 heads and shards that don't divide, E1213 shards that are not known, E1214 `dtype` in
reverse, E1215 unequal split, E1216 shape, axis or permutation, E1217 casts, E1218 a name that nothing has made, E1219 a
source that is lost, E1220 a wanted tensor without a source, E1221 dropped and read, E1222 made and not wanted, E1223
elements read twice, E1224 another shape than wanted.

Cost: linear in the written-out statements, some 20 us each; no tensor is built. What it does not do: know files.

Run: the steps of a program carried out on slices, and what is left over at its end.

Names hold values as in any small language: the source's tensors at first; a step reads names and assigns others, a name
may be assigned again once its value has been read. At the end the outputs are those of the destination where it is
known, else every value that nothing has read, and a source `x` of `x -> x` if other statements merely rename it
(`x -> head`).

Each element of the source must reach one place: what is overwritten, never read, cut away or read twice is a fault,
unless a statement drops it in words. A whole tensor may be read several times (`embed -> head` for tied weights). What
it does not do: expand patterns of names (`statement`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod

from ckpt_tool.algebra.mapped import Made, Mapped
from ckpt_tool.core.box import first_overlap
from ckpt_tool.errors import UsageError
from ckpt_tool.systems.paddle.aoa.faults import Faults
from ckpt_tool.systems.paddle.aoa.slices import NamedValue, Slice, cast, concat, permute, pieces_of, split, whole
from ckpt_tool.systems.paddle.aoa.statement import AoaText, Forms, Statement, expand, parse, read_aoa
from ckpt_tool.systems.paddle.aoa.steps import TEMPORARY, AoaStep, Shards, shown, steps_of

__all__ = ["AoaText", "Shards", "compile_aoa", "read_aoa", "steps_for"]

Shape = tuple[int, ...]
Wanted = Mapping[str, Shape] | Iterable[str]


def compile_aoa(
    statements: Sequence[str],
    shapes: Mapping[str, Shape],
    *,
    reverse: bool = False,
    shards: Shards | None = None,
    wanted: Wanted | None = None,
    skip_unmatched: bool = False,
) -> Mapped:
    """What the statements make of the tensors of `shapes`.

    Args:
        shapes: name -> shape of every tensor of the source, in its order.
        reverse: run them from right to left; `shapes` is then what the right sides name.
        shards: how many shards the tensors of fusions have in the source and in the destination; 1 if not given.
        wanted: the names of the destination, or name -> shape; None where it is not known: then every value that
            nothing reads is an output, and so is `x` of `x -> x` where others merely rename it.
        skip_unmatched: a pattern that fits no tensor makes nothing, as in Paddle; otherwise it is an error.
    Returns: each output with the pieces that tile it (`src` in the source, `dst` in it; merged where they are regular),
        in the order of `wanted`, else of the source (by the first tensor that each is made of). `dropped`: sources of
        which nothing is left, in their order.
    Raises: UsageError, E1200 to E1224, with all faults of the pass: those of reading and running the statements, then
        those of what is left over.
    """
    faults = Faults(statements)
    goal = None if wanted is None else _goal(wanted)
    steps = _steps(statements, shapes, goal, shards or Shards(), faults, reverse=reverse, skip=skip_unmatched)
    run = AoaRun(shapes, faults, doubtful=bool(faults.found))
    run.steps(steps)
    faults.check()
    outputs = run.outputs(goal)
    faults.check()
    names = list(outputs) if goal is not None else _sort_as_source(outputs, shapes)
    made = [
        Made(name, outputs[name].shape, pieces_of(name, outputs[name], shapes), outputs[name].dtype) for name in names
    ]
    used = {piece.source for value in outputs.values() for piece in value.slices}
    dropped = {piece.source for value in run.left_out for piece in value.slices} - used
    return Mapped(tuple(made), tuple(name for name in shapes if name in dropped), tuple(run.unfilled))


def steps_for(
    statements: Sequence[str],
    shapes: Mapping[str, Shape],
    *,
    reverse: bool = False,
    shards: Shards | None = None,
    wanted: Wanted | None = None,
    skip_unmatched: bool = False,
) -> list[AoaStep]:
    """The steps that the statements expand to, in the order in which they run.

    Arguments and errors are those of `compile_aoa`.
    """
    faults = Faults(statements)
    goal = None if wanted is None else _goal(wanted)
    steps = _steps(statements, shapes, goal, shards or Shards(), faults, reverse=reverse, skip=skip_unmatched)
    faults.check()
    return steps


def _steps(
    statements: Sequence[str],
    shapes: Mapping[str, Shape],
    goal: Mapping[str, Shape | None] | None,
    shards: Shards,
    faults: Faults,
    *,
    reverse: bool,
    skip: bool,
) -> list[AoaStep]:
    parsed: list[Statement] = []
    for number, text in enumerate(statements, start=1):
        for line in filter(str.strip, text.splitlines()):
            try:
                parsed.append(parse(line, number))
            except UsageError as e:
                faults.take(number, e)
    destination = None if goal is None else Forms(goal)
    concrete = expand(parsed, Forms(shapes), destination, faults, reverse=reverse, skip=skip)
    return steps_of(concrete, shards, (shapes, goal or ()), faults, reverse=reverse)


def _goal(wanted: Wanted) -> dict[str, Shape | None]:
    return dict(wanted) if isinstance(wanted, Mapping) else dict.fromkeys(wanted)


def _sort_as_source(outputs: Mapping[str, NamedValue], shapes: Mapping[str, Shape]) -> list[str]:
    order = {name: place for place, name in enumerate(shapes)}
    return sorted(outputs, key=lambda name: min(order[piece.source] for piece in outputs[name].slices))


# -- the run -----------------------------------------------------------------------------------------------------------


class AoaRun:
    """The state of a program while it runs: the value of each name.

    doubtful: earlier statements have failed, so a missing name is not a fault of the statement that reads it.
    """

    def __init__(self, shapes: Mapping[str, Shape], faults: Faults, *, doubtful: bool = False) -> None:
        self.shapes = shapes
        self.faults = faults
        self.doubtful = doubtful
        self.values: dict[str, NamedValue | None] = {name: whole(name, shape) for name, shape in shapes.items()}
        # The dicts of numbers map a name to the statement that ...
        self.maker: dict[str, int] = {}  # assigned its current value
        self.reader: dict[str, int] = {}  # was the first to read its current value
        self.dropped: dict[str, int] = {}  # dropped it
        self.left_out: list[NamedValue] = []  # values of the dropped names
        self.unfilled: dict[str, int] = {}  # declared it to have no source, `_ -> name`
        self.buried: dict[str, int] = {}  # overwrote it, a name of the source, before anything had read it
        # Names of the source that are kept by `x -> x`, and only renamed afterwards.
        self.stated: set[str] = set()

    def steps(self, steps: Iterable[AoaStep]) -> None:
        """Run the steps in order. Faults: E1215 to E1219, E1221."""
        for step in steps:
            if step.kind == "add":
                self._add(step)
            elif step.kind == "drop":
                self._drop(step)
            else:
                read = [self._read(name, step.number) for name in step.left]
                known = [value for value in read if value is not None]
                made: Sequence[NamedValue | None] = [None] * len(step.right)
                if len(known) == len(read):
                    try:
                        made = _apply_step(step, known)
                    except UsageError as e:
                        self.faults.take(step.number, e)
                for name, value in zip(step.right, made, strict=True):
                    self._assign(name, value, step.number)
                if step.kind != "rename":
                    self.stated.difference_update(step.left)
                elif step.left == step.right and step.left[0] in self.shapes:
                    self.stated.update(step.right)

    def _read(self, name: str, number: int) -> NamedValue | None:
        """The value of a name, read by statement `number`; None with a fault if it has none."""
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

    def _assign(self, name: str, value: NamedValue | None, number: int) -> None:
        if name in self.unfilled:
            self._contradiction(name, self.unfilled[name], number)
        if name in self.values and name not in self.reader:
            if name not in self.maker:
                self.buried[name] = number
            else:
                self.faults.add(
                    "E1219",
                    number,
                    f"`{shown(name)}` is made again, and nothing has read what statement {self.maker[name]} made",
                    "give one of the two another name",
                )
        self.values[name] = value
        self.maker[name] = number
        self.reader.pop(name, None)
        self.stated.discard(name)

    def _drop(self, step: AoaStep) -> None:
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

    def _add(self, step: AoaStep) -> None:
        (name,) = step.right
        if name in self.values:
            self._contradiction(name, step.number, self.maker.get(name, 0))
        self.unfilled[name] = step.number

    def _contradiction(self, name: str, adder: int, maker: int) -> None:
        """Add the fault E1221: `_ -> name` of statement `adder`, though `maker` (0: the source) gives it a value."""
        what = f"statement {maker} makes it" if maker else "the source has it"
        self.faults.add(
            "E1221",
            max(adder, maker),
            f"statement {adder} says that `{name}` has no source, but {what}",
            "leave one of the two out" if maker else f"drop it first: `{name} -> _`",
        )

    def outputs(self, wanted: Mapping[str, Shape | None] | None) -> dict[str, NamedValue]:
        """The output tensors by name. Faults: E1219 to E1224."""
        if wanted is None:
            found = {
                name: value
                for name, value in self.values.items()
                if value is not None and (name not in self.reader or name in self.stated)
            }
        else:
            found = self._find_outputs(wanted)
        self._account(found)
        return found

    def _find_outputs(self, wanted: Mapping[str, Shape | None]) -> dict[str, NamedValue]:
        found: dict[str, NamedValue] = {}
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

    def _account(self, outputs: Mapping[str, NamedValue]) -> None:
        """Add a fault for each source tensor of which elements reach no output, or several."""
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
        # After another fault elements are missing anyway; only those that are read twice are worth a message.
        doubtful = self.doubtful or bool(self.faults.found)
        for name, shape in self.shapes.items():
            fault = _misread(name, shape, used[name], left_out.get(name, 0))
            if fault and (fault[0] == "E1223" or not doubtful):
                self.faults.add(fault[0], 0, fault[1], fault[2])


def _apply_step(step: AoaStep, values: Sequence[NamedValue]) -> list[NamedValue]:
    first = values[0]
    name = step.left[0]
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
