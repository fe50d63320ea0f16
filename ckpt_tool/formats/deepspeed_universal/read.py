"""A universal checkpoint of DeepSpeed as a catalog. Layout and names: `deepspeed_universal`.

Three steps: the module file (names, shapes, the 16-bit model, client state), the folders below `zero/`, the optimizer's
options. Cost: a pickle a file.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckpt_tool.core.catalog import Catalog, Note
from ckpt_tool.core.extras import Symbol
from ckpt_tool.core.faults import by_file
from ckpt_tool.core.tensor import MASTER, MODEL, STEP, LogicalTensor, StoredArray, TensorKey
from ckpt_tool.errors import Incomplete, InconsistentCheckpoint, UnknownFormat
from ckpt_tool.formats import checksums
from ckpt_tool.formats.deepspeed.described import HOME, OPTIMIZER, Described
from ckpt_tool.formats.deepspeed.files import sort_files
from ckpt_tool.formats.deepspeed.rank import plain
from ckpt_tool.formats.deepspeed_universal.module import DISAGREE, MISSING, Modules, malformed, shaped
from ckpt_tool.formats.deepspeed_universal.record import CUTS, KEY, OWN_KEYS, Recorded
from ckpt_tool.formats.torch.content import TorchContent, read_content
from ckpt_tool.storage.records import read_array
from ckpt_tool.storage.source import Tree

_SCALARS = {"F32": "<f", "F64": "<d", "I64": "<q", "I32": "<i"}
# Keys of optimizer_state.pt that hold partitions of rank 0, or lay them out.
_PARTITIONS = frozenset(
    {
        "fp32_flat_groups",
        "optimizer_state_dict",
        "base_optimizer_state",
        "single_partition_of_fp32_groups",
        "zero_stage",
        "group_paddings",
        "param_alignment_paddings",
        "partition_count",
        "param_slice_mappings",
        "param_groups",
        KEY,
        "ds_zero_partition_groups",
    }
)


@dataclass(slots=True)
class _Param:
    """A folder below `zero/`. arrays: state -> where it lies. facts: what stands beside the tensor of how tensor
    parallel ranks cut it, None where it is nothing but `cat_dim: 0`. states: of which there is a file. step: its
    number."""

    arrays: dict[str, StoredArray] = field(default_factory=dict)
    facts: dict[str, Any] | None = None
    states: set[str] = field(default_factory=set)
    step: float | int | None = None


class Reader:
    """One universal checkpoint and what was found in it so far."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.notes: list[Note] = []
        self.unsafe: list[str] = []
        self.globals: dict[str, None] = {}
        self.files: list[str] = []
        self.tensors: dict[TensorKey, LogicalTensor] = {}
        self.module = Modules(tree, self._open)
        self.params: dict[str, _Param] = {}

    def catalog(self, *, required: bool) -> Catalog:
        """Everything. required: refuse files without CRCs."""
        folders = self._folders()
        files = sort_files(self.tree.names())
        state = self._optimizer_state()
        record = Recorded.from_value(state.extras.get(KEY)) if isinstance(state.extras, dict) else None
        self.module.read(files, record)
        self.tensors |= self.module.tensors
        self.notes += self.module.notes
        opened = by_file((path for found in folders.values() for path in found.values()), self._open)
        for name, found in folders.items():
            self.params[name] = self._param(name, {state: opened[path] for state, path in found.items()}, found)
        self._whole(record)
        self._states(record)
        groups, steps = self._groups(state)
        extras = self._extras(state, record, groups, steps)
        checked = checksums.missing(self.tree, self.tensors.values(), required=required)
        hints = dict(record.hints) if record is not None else {}
        return Catalog(
            "deepspeed-universal",
            self.tensors,
            extras,
            files=tuple(self.files),
            notes=(*self.notes, *checked),
            unsafe=tuple(dict.fromkeys(self.unsafe)),
            hints={**hints, "globals": list(self.globals)},
        )

    # -- which files ---------------------------------------------------------------------------------------------------

    def _folders(self) -> dict[str, dict[str, str]]:
        """Parameter -> state -> file. Raises UnknownFormat E0393."""
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
        self.files.append(path)
        self.unsafe += content.unsafe
        self.globals.update(dict.fromkeys(content.globals))
        return content

    def _optimizer_state(self) -> TorchContent:
        path = "zero/optimizer_state.pt"
        if not self.tree.exists(path):
            raise Incomplete(
                "zero/optimizer_state.pt is missing: it is written last, so the conversion was not finished",
                code=MISSING,
                path=self.tree.display(),
                hint="run the conversion again; its --input_folder is the whole checkpoint",
            )
        return self._open(path)

    # -- the folders ---------------------------------------------------------------------------------------------------

    def _param(self, name: str, contents: Mapping[str, TorchContent], files: Mapping[str, str]) -> _Param:
        """A folder's files."""
        out = _Param(states=set(files))
        for state, content in contents.items():
            shown = self.tree.display(files[state])
            extras = content.extras if isinstance(content.extras, dict) else {}
            if len(content.leaves) > 1 or content.leaves and str(content.leaves[0][0][0]) not in ("param", "value"):
                raise malformed(f"{len(content.leaves)} tensors, want one, under param", shown, name)
            if state == STEP:
                out.step = self._step(content, extras, shown, name)
            if content.leaves:
                out.arrays[state] = content.leaves[0][1]
            elif state != STEP:
                raise malformed("no tensor, want one, under param", shown, name)
            if state == "fp32" and content.leaves[0][0] == ("param",) and extras != {"cat_dim": 0}:
                out.facts = dict(extras)
        return out

    def _step(self, content: TorchContent, extras: Mapping[str, Any], shown: str, name: str) -> float | int:
        if content.leaves:
            array = content.leaves[0][1]
            code = _SCALARS.get(array.dtype.name)
            if code is not None and array.numel == 1:
                value: float | int = struct.unpack(code, read_array(self.tree, array))[0]
                return value
        value = extras.get("value")  # type: ignore[assignment]
        if content.leaves or type(value) not in (int, float):
            raise malformed("step is no number", shown, name)
        return value

    def _whole(self, record: Recorded | None) -> None:
        """Raise Incomplete unless every parameter has its folder, and the states that its group has."""
        if record is not None:
            wanted = {name: set(states) for states, names in record.folders for name in names}
        else:
            usual = {state for param in self.params.values() for state in param.states} - {"fp32"}
            wanted = {name: {"fp32"} for group in self.module.shapes for name in group}
            for name, param in self.params.items():  # with fp32.pt alone it never had a gradient
                wanted.setdefault(name, {"fp32"}).update(usual if param.states & usual else ())
        for name, states in wanted.items():
            if name not in self.params:
                raise Incomplete(
                    "it has no folder below zero/",
                    code=MISSING,
                    path=self.tree.display("zero"),
                    key=name,
                    hint="a part was lost, or the conversion was not finished: run it again",
                )
            lacks = sorted(states - self.params[name].states)
            if lacks:
                raise Incomplete(
                    f"its folder lacks {', '.join(f'{state}.pt' for state in lacks)}",
                    code=MISSING,
                    key=name,
                    path=self.tree.display(f"zero/{name}"),
                    hint="a part was lost: run the conversion again",
                )

    def _states(self, record: Recorded | None) -> None:
        """The folders' tensors, state by state, in the order of the flat groups."""
        shapes = {name: shape for group in self.module.shapes for name, shape in group.items()}
        order = [name for name in shapes if name in self.params]
        order += [name for name in self.params if name not in shapes]
        copies = []
        for state in dict.fromkeys(["fp32", *(s for name in order for s in self.params[name].arrays)]):
            for name in order:
                array = self.params[name].arrays.get(state)
                if array is None or state == STEP and record is not None and record.step == "group":
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
                self.tensors[key] = shaped(key, array, shape if shape is not None else self._own_shape(name, array))
        if copies:
            self.notes.append(
                Note(
                    "N-copies",
                    f"{len(copies)} folders hold an fp32 copy of the module's value alone (buffers, frozen parameters, "
                    f"aliases), no state of their own: {', '.join(copies[:8])}",
                )
            )

    def _own_shape(self, name: str, array: StoredArray) -> tuple[int, ...]:
        """The tensor's shape where param_shapes does not list it: its own, or its model's where it lies flat."""
        model = self.tensors.get(TensorKey(name))
        return (
            model.shape if model is not None and len(array.shape) == 1 and model.numel == array.numel else array.shape
        )

    # -- options -------------------------------------------------------------------------------------------------------

    def _groups(self, state: TorchContent) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """(parameter groups with names, their scalars). Raises InconsistentCheckpoint where a group's steps differ."""
        extras = state.extras if isinstance(state.extras, dict) else {}
        groups = [dict(group) for group in extras.get("param_groups") or () if isinstance(group, Mapping)]
        steps: list[dict[str, Any]] = []
        for i, group in enumerate(groups):
            flat = group.get("params") if isinstance(group.get("params"), list) else [i]
            numbers = [n for n in flat or () if type(n) is int and 0 <= n < len(self.module.shapes)] or [i]
            names = [name for n in numbers if n < len(self.module.shapes) for name in self.module.shapes[n]]
            group["params"] = names
            known = [(name, self.params[name].step) for name in names if self.params[name].step is not None]
            for name, step in known:
                if step != known[0][1]:
                    raise InconsistentCheckpoint(
                        f"step {step}, but {known[0][1]} for {known[0][0]} of the same group",
                        code=DISAGREE,
                        key=name,
                        path=self.tree.display(f"zero/{name}/step.pt"),
                        hint="the folders come from two steps",
                    )
            value = known[0][1] if known else self._step_of_group(state, numbers)
            steps.append({} if value is None else {STEP: value})
        return groups, steps

    def _step_of_group(self, state: TorchContent, numbers: Sequence[int]) -> float | int | None:
        """Stage 3: the step in the first rank's optimizer state."""
        for path, array in state.leaves:
            if path[:2] == ("optimizer_state_dict", "state") and path[2] in numbers and path[-1] == STEP:
                code = _SCALARS.get(array.dtype.name)
                if code is not None and array.numel == 1:
                    found: float | int = struct.unpack(code, read_array(self.tree, array))[0]
                    return found
        return None

    def _extras(
        self, state: TorchContent, record: Recorded | None, groups: list[dict[str, Any]], steps: list[dict[str, Any]]
    ) -> dict[str, Any]:
        values = {key: item for key, item in self.module.values.items() if key not in OWN_KEYS}
        if record is not None:
            values = {key: item for key, item in values.items() if key not in record.made}
            return {**values, **record.extras}
        said = state.extras if isinstance(state.extras, dict) else {}
        rest = {key: plain(item) for key, item in said.items() if key not in _PARTITIONS}
        if rest.get("ds_version") == values.get("ds_version"):
            rest.pop("ds_version", None)
        stage = said.get("zero_stage")
        number = stage.args[0] if isinstance(stage, Symbol) and stage.args else stage
        trained = {name for group in self.module.shapes for name in group}
        model = [key.name for key in self.tensors if key.state == MODEL]
        described = Described(
            zero_stage=number if type(number) is int and number in (0, 1, 2, 3) else 1,
            plain_bf16="zero_stage" not in said,
            dtype=next(
                (t.dtype.name for t in self.tensors.values() if t.key.state == MODEL and t.key.name in trained), ""
            ),
            module=tuple(model),
            buffers=tuple(self.module.buffers),
            shared=self.module.shared,
            frozen=tuple(
                n
                for n in model
                if n not in trained and n not in self.module.buffers and self.module.shared.get(n) not in trained
            ),
        )
        dtypes = {STEP: "F32"} if any(steps) else {}
        optimizer = {"param_groups": groups, "scalars": steps, "scalar_dtypes": dtypes, **rest}
        cuts = {name: param.facts for name, param in self.params.items() if param.facts is not None}
        home = {**described.to_extras(), **({CUTS: cuts} if cuts else {})}
        return {**values, OPTIMIZER: optimizer, HOME: home}
