"""Reads a universal checkpoint of DeepSpeed into a catalog. Layout and names: `deepspeed.universal`.

Three steps: the module files (names, shapes and ties, the 16-bit model, frozen parameters, client state), the folders
below `zero/`, the optimizer's options. The module files are copies of the checkpoint's own (`deepspeed.files`), or
ours (`deepspeed.universal.target`). Cost: a pickle for each file; of ZeRO 3's many module files only the first is read,
and the others if frozen parameters are stored in shares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from ckpt_tool.core.box import whole
from ckpt_tool.core.catalog import Catalog, Note
from ckpt_tool.core.extras import Symbol
from ckpt_tool.core.faults import read_by_file, read_each
from ckpt_tool.core.hints import Globals, Hints
from ckpt_tool.core.missing import report_missing
from ckpt_tool.core.tensor import (
    EXTRAS,
    MASTER,
    MODEL,
    STEP,
    Chunk,
    LogicalTensor,
    StoredArray,
    TensorKey,
    simple_tensor,
)
from ckpt_tool.errors import InputError, UnknownFormat
from ckpt_tool.formats import checksums
from ckpt_tool.formats.state_dict.content import TorchContent, read_content
from ckpt_tool.formats.state_dict.tree import dotted
from ckpt_tool.formats.state_dict.unread import is_shapeless, notes_of, set_apart
from ckpt_tool.storage.source import Tree
from ckpt_tool.systems.deepspeed.described import HOME, OPTIMIZER, Described, Options
from ckpt_tool.systems.deepspeed.files import (
    MODEL3,
    OPTIMIZER_LAYOUT,
    ModuleFile,
    ZeroFiles,
    disagree,
    lost,
    malformed,
    number_of,
    plain,
    read_module,
    sort_files,
)
from ckpt_tool.systems.deepspeed.job import Shape, shares
from ckpt_tool.systems.deepspeed.universal.record import CUTS, KEY, OWN_KEYS, STATES, TENSORS, Recorded
from ckpt_tool.systems.deepspeed.zero.read import COUNTERS, same


@dataclass(slots=True)
class _Param:
    """The content of a parameter's folder below `zero/`."""

    arrays: dict[str, StoredArray] = field(default_factory=dict)  # state -> its stored array
    # the values next to the tensor (how tensor parallel ranks cut it), None if that is only `cat_dim: 0`
    facts: dict[str, Any] | None = None
    states: set[str] = field(default_factory=set)  # states that have a file
    step: float | int | None = None  # the value in `step.pt`


class UniversalReader:
    """One universal checkpoint and what was read of it so far.

    values, buffers: of the first module file. shapes: for each group (stage 3: sub-group), name -> shape. shared: alias
    -> kept name.
    """

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.notes: list[Note] = []
        self.unsafe: list[str] = []
        self.globals: dict[str, None] = {}
        self.files: list[str] = []
        self.tensors: dict[TensorKey, LogicalTensor] = {}
        self.params: dict[str, _Param] = {}
        self.values: Mapping[str, Any] = {}
        self.buffers: Sequence[str] = ()
        self.shapes: list[dict[str, Shape]] = []
        self.shared: dict[str, str] = {}

    def catalog(self, *, required: bool) -> Catalog:
        """Return the catalog of the whole checkpoint. required: refuse files without CRCs."""
        folders = self._folders()
        files = sort_files(self.tree.names())
        state = self._optimizer_state()
        record = Recorded.from_value(state.extras.get(KEY)) if isinstance(state.extras, dict) else None
        self._module_files(files, record)
        opened = read_by_file((path for found in folders.values() for path in found.values()), self._open)
        for name, found in folders.items():
            self.params[name] = self._param(name, {state: opened[path] for state, path in found.items()}, found)

        self._whole(record)
        self._states(record)
        groups, steps = self._groups(state)
        extras = self._extras(state, record, groups, steps)
        tensors, unread = set_apart(self.tensors)
        checked = checksums.missing(self.tree, tensors.values(), required=required)
        unopened = [*files.model.values(), *files.model3.values()]  # a stage's own, without tensors, or a copy

        return Catalog(
            "deepspeed-universal",
            tensors=tensors,
            extras=extras,
            files=tuple(dict.fromkeys((*self.files, *unopened))),
            notes=(*self.notes, *notes_of(unread), *checked),
            unsafe=tuple(dict.fromkeys(self.unsafe)),
            hints=Hints(record.hints if record else {}).having(Globals.each(self.globals)),
            unread=unread,
        )

    # -- which files ---------------------------------------------------------------------------------------------------

    def _folders(self) -> dict[str, dict[str, str]]:
        """Return {parameter: {state: file}}. Raises UnknownFormat E0393 if there is no parameter."""
        out: dict[str, dict[str, str]] = {}
        for path in self.tree.listing():
            top, _, rest = path.partition("/")
            name, _, file = rest.rpartition("/")
            if top == "zero" and name and file.endswith(".pt"):
                out.setdefault(name, {})[file.removesuffix(".pt")] = path
        if not out:
            raise UnknownFormat(
                "no parameter below zero/",
                code="E0393",
                path=self.tree.display(),
                hint="pass the folder that holds zero/, or the one above it with the file latest_universal",
            )
        return out

    def _open(self, path: str) -> TorchContent:
        content = read_content(self.tree, path)
        self._note(path, content)
        return content

    def _note(self, path: str, file: TorchContent | ModuleFile) -> None:
        self.files.append(path)
        self.unsafe += file.unsafe
        self.globals.update(dict.fromkeys(file.globals))

    def _optimizer_state(self) -> TorchContent:
        path = "zero/optimizer_state.pt"
        if not self.tree.exists(path):
            raise lost(
                "zero/optimizer_state.pt is missing: it is written last, so the conversion was not finished",
                self.tree.display(),
                "run the conversion again; its --input_folder is the whole checkpoint",
            )
        return self._open(path)

    # -- the module files ----------------------------------------------------------------------------------------------

    def _module_files(self, files: ZeroFiles, record: Recorded | None) -> None:
        """Read the module files that are needed: one for each model rank, and those with shares of frozen parameters.

        Raises Incomplete E0302, InconsistentCheckpoint E0359 (shares of frozen parameters).
        """
        names = [files.model[rank] for rank in sorted(files.model)]
        of_rank = {data: name for (data, model), name in sorted(files.model3.items()) if model == 0}
        if not names:
            names = [name for (data, _), name in sorted(files.model3.items()) if data == 0]

        if not names or (record is not None and not files.model):  # in ours the stage 3 file has no tensors
            raise lost(
                f"no {'mp_rank_00' if names else '*'}_model_states.pt is next to zero/",
                self.tree.display(),
                "copy the module files of the checkpoint into this folder: DeepSpeed reads its counters from them",
            )

        try:
            first, *others = modules = read_each(names, self._module_file)
        except InputError:
            read_each(
                dict.fromkeys((*names, *of_rank.values())), self._module_file
            )  # names those of the other ranks too
            raise

        self._check_one_save(first, others)
        for file in modules:
            self.shapes += [{} for _ in range(len(self.shapes), len(file.shapes or ()))]
            for mine, group in zip(self.shapes, file.shapes or (), strict=False):
                mine |= group
            self.shared |= file.shared

        self.values = first.values
        self.buffers = first.buffers
        sliced = len(names) > 1 and any(file.module for file in modules)
        if sliced:
            self.notes.append(
                Note(
                    "N-sliced-module",
                    f"the 16-bit modules of {len(names)} tensor parallel ranks are not read: the fp32 weights "
                    "below zero/ are whole (write them as the model with --as-model master)",
                )
            )

        self._module(first, sliced=sliced)
        if of_rank and first.frozen and first.fragments:
            self._frozen_shares(first, of_rank)

        for name, array in (
            first.fragments.items() if not of_rank else ()
        ):  # stage 2 keeps them whole, in the module too
            if name in first.frozen and TensorKey(name) not in self.tensors:
                self.tensors[TensorKey(name)] = _shape_tensor(TensorKey(name), array, first.frozen[name])

    def _module_file(self, name: str) -> ModuleFile:
        file = read_module(self.tree, name)
        self._note(name, file)
        return file

    def _check_one_save(self, first: ModuleFile, others: Sequence[ModuleFile], *, alike: bool = False) -> None:
        """Raise InconsistentCheckpoint E0359 if module files belong to different steps.

        alike: whether the files must list the same parameters, too.
        """
        faults = []
        for file in others:
            mine = {key: file.values.get(key) for key in sorted(COUNTERS)}
            theirs = {key: first.values.get(key) for key in sorted(COUNTERS)}
            if alike:
                mine |= {"param_shapes": file.shapes, "frozen_param_shapes": file.frozen}
                theirs |= {"param_shapes": first.shapes, "frozen_param_shapes": first.frozen}
            name, its = (f.path.rpartition("/")[2] for f in (first, file))
            faults += [
                (f"{its} has {key} {str(mine[key])[:80]}, but {name} {str(theirs[key])[:80]}", file.path)
                for key in mine
                if not same(mine[key], theirs[key])
            ]
        if faults:
            raise disagree(*faults[0], faults=[what for what, _ in faults[1:]])

    def _module(self, file: ModuleFile, *, sliced: bool) -> None:
        """Add the tensors of the first module file: the model, buffers, and those of the client's state."""
        known = {name: shape for group in (*self.shapes, file.frozen) for name, shape in group.items()}
        module: dict[str, StoredArray] = {}
        for name, array in file.module.items():
            shape = known.get(name, known.get(self.shared.get(name, name)))
            if not sliced and (array.numel or shape is None or not prod(shape)):  # at stage 3 there are placeholders
                module[name] = array
        for path, array in (*file.optimizer, *file.others):
            if path[0] == STATES and len(path) == 3:
                key = TensorKey(str(path[2]), str(path[1]))
            else:
                key = TensorKey(str(path[1]) if path[0] == TENSORS and len(path) == 2 else dotted(path), EXTRAS)
            self.tensors[key] = simple_tensor(key, array)
        for name, array in module.items():
            other = module.get(self.shared.get(name, name))
            box = whole(array.shape)
            tied = [Chunk(box, other, box, 1)] if other is not None and _differ(array, other) else []
            key = TensorKey(name)
            self.tensors[key] = LogicalTensor(key, array.shape, array.dtype, (Chunk(box, array, box), *tied))

    def _frozen_shares(self, first: ModuleFile, of_rank: Mapping[int, str]) -> None:
        """Add the frozen parameters of ZeRO 3, of which each rank's file holds a share."""
        ranks = self.values.get("dp_world_size")
        count = ranks if type(ranks) is int and 0 < ranks < 1 << 20 else 1
        gone = [MODEL3.format(data=rank, model=0) for rank in range(count) if rank not in of_rank]
        if gone:
            raise lost(
                f"{len(gone)} files with shares of the frozen parameters are missing: {', '.join(gone[:8])}",
                self.tree.display(),
                "copy every rank's model states into this folder",
                faults=gone[8:],
            )
        files = [first, *read_each([of_rank[rank] for rank in range(1, count)], self._module_file)]
        self._check_one_save(first, files[1:], alike=True)
        for name, shape in first.frozen.items():
            chunks: list[Chunk] = []
            for rank, file in enumerate(files):
                array = file.fragments.get(name)
                line, length = shares({name: shape}, count, rank)
                if array is None or array.numel != length:
                    raise disagree(f"rank {rank} holds no share of {length} elements", file.path, name)
                chunks += (chunk for _, chunk in line.chunks(array))
                dtype = array.dtype
            self.tensors[TensorKey(name)] = LogicalTensor(TensorKey(name), shape, dtype, tuple(chunks))

    # -- the folders ---------------------------------------------------------------------------------------------------

    def _param(self, name: str, contents: Mapping[str, TorchContent], files: Mapping[str, str]) -> _Param:
        """Return the content of a parameter's folder. contents, files: by state."""
        out = _Param(states=set(files))
        hidden = dict[str, StoredArray]()  # arrays that are stored without a shape; the folder's other states have it
        for state, content in contents.items():
            shown = self.tree.display(files[state])
            extras = content.extras if isinstance(content.extras, dict) else {}
            if len(content.leaves) > 1 or (content.leaves and str(content.leaves[0][0][0]) not in ("param", "value")):
                raise malformed(f"{len(content.leaves)} tensors, want one, under param", shown, name)
            if state == STEP:
                out.step = self._step(content, extras, shown, name)
            if content.leaves and not is_shapeless(content.leaves[0][1]):
                out.arrays[state] = content.leaves[0][1]
            elif content.leaves:
                hidden[state] = content.leaves[0][1]
            elif state != STEP:
                raise malformed("no tensor, want one, under param", shown, name)
            if state == "fp32" and content.leaves[0][0] == ("param",) and extras != {"cat_dim": 0}:
                out.facts = dict(extras)
        shape = next((array.shape for state, array in out.arrays.items() if state != STEP), ())
        out.arrays |= {state: array._replace(shape=shape) for state, array in hidden.items()}
        return out

    def _step(self, content: TorchContent, extras: Mapping[str, Any], shown: str, name: str) -> float | int:
        found: float | int | None = extras.get("value")
        if content.leaves:
            found = number_of(self.tree, content.leaves[0][1])
        if found is None or type(found) not in (int, float):
            raise malformed("step is no number", shown, name)
        return found

    def _whole(self, record: Recorded | None) -> None:
        """Raise Incomplete unless every parameter has a folder with all states.

        Without our record, a parameter that has any state of the optimizer must have all states that occur.
        """
        if record is not None:
            wanted = {name: set(states) for states, names in record.folders for name in names}
        else:
            usual = {state for param in self.params.values() for state in param.states} - {"fp32"}
            wanted = {name: {"fp32"} for group in self.shapes for name in group}
            for name, param in self.params.items():  # with fp32.pt alone it never had a gradient
                wanted.setdefault(name, {"fp32"}).update(usual if param.states & usual else ())
        for name, states in wanted.items():
            if name not in self.params:
                hint = "a part was lost, or the conversion was not finished: run it again"
                fault = lost("it has no folder below zero/", self.tree.display("zero"), hint, name)
                report_missing(fault, files=[f"zero/{name}/{state}.pt" for state in sorted(states)])
                continue
            lacks = sorted(states - self.params[name].states)
            if lacks:
                what = ", ".join(f"{state}.pt" for state in lacks)
                hint = "a part was lost: run the conversion again"
                fault = lost(f"its folder lacks {what}", self.tree.display(f"zero/{name}"), hint, name)
                report_missing(fault, files=[f"zero/{name}/{state}.pt" for state in lacks])

    def _states(self, record: Recorded | None) -> None:
        """Add the tensors in the folders, state by state, in the order of the flat groups."""
        shapes = {name: shape for group in self.shapes for name, shape in group.items()}
        order = [name for name in shapes if name in self.params]
        order += [name for name in self.params if name not in shapes]
        copies = []

        for state in dict.fromkeys(["fp32", *(s for name in order for s in self.params[name].arrays)]):
            for name in order:
                array = self.params[name].arrays.get(state)
                if array is None or (state == STEP and record is not None and record.step == "group"):
                    continue
                alone = set(self.params[name].arrays) == {"fp32"}
                if state == "fp32" and alone and name not in shapes and TensorKey(name) in self.tensors:
                    copies.append(name)
                    self.params[name].facts = None
                    continue
                if state == "fp32" and record is not None and name in record.repeats:
                    continue
                key = TensorKey(name, MASTER if state == "fp32" else state)
                shape = shapes.get(name) if state != STEP else None
                self.tensors[key] = _shape_tensor(
                    key, array, shape if shape is not None else self._own_shape(name, array)
                )

        if copies:
            self.notes.append(
                Note(
                    "N-copies",
                    f"{len(copies)} folders hold an fp32 copy of the module's value alone (buffers, frozen parameters, "
                    f"aliases), no state of their own: {', '.join(copies[:8])}",
                )
            )

    def _own_shape(self, name: str, array: StoredArray) -> tuple[int, ...]:
        """Return the shape of a tensor that `param_shapes` does not list: its own, or its model's if it is stored
        flat."""
        model = self.tensors.get(TensorKey(name))
        return (
            model.shape if model is not None and len(array.shape) == 1 and model.numel == array.numel else array.shape
        )

    # -- options -------------------------------------------------------------------------------------------------------

    def _groups(self, state: TorchContent) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return (parameter groups with names, their scalars).

        Raises InconsistentCheckpoint E0359 if the steps in a group differ.
        """
        extras = state.extras if isinstance(state.extras, dict) else {}
        groups = [dict(group) for group in extras.get("param_groups") or () if isinstance(group, Mapping)]
        steps: list[dict[str, Any]] = []
        for i, group in enumerate(groups):
            flat = group.get("params") if isinstance(group.get("params"), list) else [i]
            numbers = [n for n in flat or () if type(n) is int and 0 <= n < len(self.shapes)] or [i]
            names = [name for n in numbers if n < len(self.shapes) for name in self.shapes[n]]
            group["params"] = names
            # A parameter without a folder was reported as missing, where the checkpoint is only looked at.
            params = [(name, self.params[name]) for name in names if name in self.params]
            known = [(name, param.step) for name, param in params if param.step is not None]
            for name, step in known:
                if step != known[0][1]:
                    what = f"step {step}, but {known[0][1]} for {known[0][0]} of the same group"
                    shown = self.tree.display(f"zero/{name}/step.pt")
                    raise disagree(what, shown, name, "the folders come from two steps")
            value = known[0][1] if known else self._step_of_group(state, numbers)
            steps.append({} if value is None else {STEP: value})
        return groups, steps

    def _step_of_group(self, state: TorchContent, numbers: Sequence[int]) -> float | int | None:
        """Return the step in the first rank's optimizer state, which only stage 3 has; None if there is none."""
        for path, array in state.leaves:
            if path[:2] == ("optimizer_state_dict", "state") and path[2] in numbers and path[-1] == STEP:
                found: float | int | None = number_of(self.tree, array)
                if found is not None:
                    return found
        return None

    def _extras(
        self, state: TorchContent, record: Recorded | None, groups: list[dict[str, Any]], steps: list[dict[str, Any]]
    ) -> dict[str, Any]:
        values = {key: item for key, item in self.values.items() if key not in OWN_KEYS}
        if record is not None:
            values = {key: item for key, item in values.items() if key not in record.made}
            return {**values, **record.extras}

        stated = state.extras if isinstance(state.extras, dict) else {}
        rest = {key: plain(item) for key, item in stated.items() if key not in OPTIMIZER_LAYOUT | {"param_groups", KEY}}
        if rest.get("ds_version") == values.get("ds_version"):
            rest.pop("ds_version", None)

        stage = stated.get("zero_stage")
        number = stage.args[0] if isinstance(stage, Symbol) and stage.args else stage
        trained = {name for group in self.shapes for name in group}
        model = [key.name for key in self.tensors if key.state == MODEL]

        described = Described(
            zero_stage=number if type(number) is int and number in (0, 1, 2, 3) else 1,
            plain_bf16="zero_stage" not in stated,
            dtype=next(
                (t.dtype.name for t in self.tensors.values() if t.key.state == MODEL and t.key.name in trained), ""
            ),
            module=tuple(model),
            buffers=tuple(self.buffers),
            shared=self.shared,
            frozen=tuple(
                n for n in model if n not in trained and n not in self.buffers and self.shared.get(n) not in trained
            ),
        )
        dtypes = {STEP: "F32"} if any(steps) else {}
        optimizer = Options(groups, steps, dtypes, rest).to_extras()
        cuts = {name: param.facts for name, param in self.params.items() if param.facts is not None}
        home = {**described.to_extras(), **({CUTS: cuts} if cuts else {})}
        return {**values, OPTIMIZER: optimizer, HOME: home}


def _differ(a: StoredArray, b: StoredArray) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and (a.path, a.offset) != (b.path, b.offset)


def _shape_tensor(key: TensorKey, array: StoredArray, shape: Shape) -> LogicalTensor:
    """Return a tensor of `shape` whose array has that shape or is flat. Raises InconsistentCheckpoint E0359
    otherwise."""
    if array.shape != shape and (len(array.shape) != 1 or array.numel != prod(shape)):
        what = f"{key.state} has shape {list(array.shape)}, the parameter {list(shape)}"
        hint = "the file comes from another run: fetch the whole checkpoint again"
        raise disagree(what, array.path, str(key), hint)
    return LogicalTensor(key, shape, array.dtype, (Chunk(whole(shape), array, whole(array.shape)),))
