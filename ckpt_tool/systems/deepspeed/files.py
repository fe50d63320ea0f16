"""The files of a DeepSpeed checkpoint: their names, and each rank's module or optimizer file, parsed and checked.

    bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt   optimizer of data rank 2, model rank 0 ("pp_rank" is the DATA rank)
    mp_rank_00_model_states.pt                       module of model rank 0 (ZeRO 0-2)
    zero_pp_rank_2_mp_rank_00_model_states.pt        data rank 2's part of the module (ZeRO 3)
    layer_03-model_states.pt                         a layer of a PipelineModule
    layer_1_expert_3_mp_rank_00_model_states.pt      expert 3 (global number) of MoE layer 1

The one idea: the differences between the files of ZeRO 1, 2, BF16_Optimizer and ZeRO 3 end here: an `OptimizerFile` has
flat groups, each with its fp32 partition, its 1-d states and its scalars (`step`), under whatever keys they are stored.

Source: DeepSpeed 0.19.8 `runtime/engine.py` (`_get_ckpt_name`, `_get_zero_ckpt_name`, `_get_expert_ckpt_name`,
`_common_checkpoint_state`), `runtime/pipe/module.py` (`ckpt_layer_path`), `runtime/zero/stage_1_and_2.py` and
`stage3.py` (`state_dict`), `runtime/bf16_optimizer.py`, `checkpoint/constants.py`. The model rank of a pipeline is
stage * tp + tp rank. Refused with a message that names the kind: elastic checkpoints (`base_optimizer_state` is a
list), states swapped to NVMe (no `fp32_flat_groups`), AutoEP. Cost: the listing; each file's pickle and directory, and
4 bytes for each scalar tensor.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ckpt_tool.core.extras import Opaque, Symbol
from ckpt_tool.core.tensor import Path, StoredArray
from ckpt_tool.errors import CorruptFile, Incomplete, InconsistentCheckpoint, InputError
from ckpt_tool.formats.state_dict.content import TorchContent, read_content
from ckpt_tool.formats.state_dict.tree import SLOT, dotted
from ckpt_tool.formats.state_dict.unread import is_shapeless
from ckpt_tool.storage.records import read_array
from ckpt_tool.storage.source import Tree

MALFORMED = "E0355"
REFUSED = "E0356"
DISAGREE = "E0359"
MISSING = "E0302"
SHOWN = 100  # at most so many faults in one error
TWO_RUNS = "the files come from two runs or two steps: fetch one save whole"


def malformed(message: str, path: str, key: str = "") -> CorruptFile:
    """Return the error for a file whose structure is not DeepSpeed's."""
    hint = "the file is damaged, or of a version of DeepSpeed that is not known here"
    return CorruptFile(message, code=MALFORMED, path=path, key=key, hint=hint)


def refused(
    what: str,
    path: str,
    hint: str = "load it with DeepSpeed, and save it as a universal checkpoint or without this",
    faults: Sequence[str] = (),
) -> InputError:
    """Return the error for a kind of checkpoint that is not supported."""
    return InputError(what, code=REFUSED, path=path, hint=hint, faults=faults)


def disagree(
    message: str, path: str, key: str = "", hint: str = TWO_RUNS, faults: Sequence[str] = ()
) -> InconsistentCheckpoint:
    """Return the error for files, or parts of a file, that contradict each other."""
    return InconsistentCheckpoint(message, code=DISAGREE, path=path, key=key, hint=hint, faults=faults[:SHOWN])


def lost(message: str, path: str, hint: str, key: str = "", faults: Sequence[str] = ()) -> Incomplete:
    """Return the error for a missing part of the checkpoint."""
    return Incomplete(message, code=MISSING, path=path, key=key, hint=hint, faults=faults[:SHOWN])


# -- names -------------------------------------------------------------------------------------------------------------

OPTIM = "{prefix}zero_pp_rank_{data}_mp_rank_{model:02}_optim_states.pt"
MODEL = "mp_rank_{model:02}_model_states.pt"
MODEL3 = "zero_pp_rank_{data}_mp_rank_{model:02}_model_states.pt"
LAYER = "layer_{layer:02}-model_states.pt"
EXPERT = "layer_{layer}_expert_{expert}_mp_rank_{model:02}_model_states.pt"
PLAIN_EXPERTS = "expp_rank_{expert}_mp_rank_{model:02}_optim_states.pt"  # the optimizer of an expert rank without ZeRO
_REFUSED = {
    "layer_{layer:02}-model_{model:02}-model_states.pt": "layers of tensor parallel ranks: how each weight is cut "
    "is stated nowhere in them",
    "expert_{expert}_mp_rank_{model:02}_model_states.pt": "experts without their layer's number (DeepSpeed before 0.6)",
}


def _pattern(name: str) -> re.Pattern[str]:
    """Return the expression that matches all file names of a kind.

    The prefix of optimizer files is optional, and so is the underscore before `optim`.
    """
    name = re.sub(r"{(\w+)}", r"(?P<\1>\\d{1,6})", re.sub(r"{(\w+):02}", r"(?P<\1>\\d{2,6})", name.replace(".", r"\.")))
    return re.compile(name.replace(r"(?P<prefix>\d{1,6})", "(?P<prefix>bf16_|fp16_|)").replace("_optim", "_?optim"))


_KINDS = {name: _pattern(name) for name in (OPTIM, MODEL, MODEL3, LAYER, EXPERT, PLAIN_EXPERTS, *_REFUSED)}


def rank_in(path: str) -> dict[str, int] | None:
    """Return the rank that wrote the file: `mp`, the model rank, and `dp`, the data rank, if the name has one.

    None for files that belong to no single rank, such as those of experts and pipeline layers.
    """
    for kind in (OPTIM, MODEL, MODEL3):
        if found := _KINDS[kind].fullmatch(path.rpartition("/")[2]):
            return {
                dim: int(found[name]) for dim, name in (("dp", "data"), ("mp", "model")) if name in found.re.groupindex
            }
    return None


@dataclass(slots=True)
class ZeroFiles:
    """The files of one checkpoint by kind."""

    optim: dict[tuple[int, int], str] = field(default_factory=dict)  # (data rank, model rank) -> name
    model: dict[int, str] = field(default_factory=dict)  # model rank -> name, ZeRO 0 to 2
    model3: dict[tuple[int, int], str] = field(default_factory=dict)  # (data rank, model rank) -> name, ZeRO 3
    layers: dict[int, str] = field(default_factory=dict)  # layer index -> name
    experts: dict[tuple[int, int], str] = field(default_factory=dict)  # (MoE layer, expert) -> name
    expp: dict[int, str] = field(default_factory=dict)  # expert rank -> name of its optimizer without ZeRO
    refused: list[tuple[str, str]] = field(default_factory=list)  # (name, why) of kinds that are not read
    prefixes: set[str] = field(default_factory=set)  # of the optimizer files: `bf16_` or ""

    def __bool__(self) -> bool:
        return bool(self.optim or self.model or self.model3)

    def all(self) -> tuple[str, ...]:
        """Return the names of all files, the module files of ZeRO 0 to 2 first."""
        numbered = [kind[number] for kind in (self.model, self.layers, self.expp) for number in sorted(kind)]
        paired = [kind[pair] for kind in (self.model3, self.experts, self.optim) for pair in sorted(kind)]
        return (*numbered, *paired)


def sort_files(names: Iterable[str]) -> ZeroFiles:
    """Return the files directly in a checkpoint's folder, sorted by kind; other names are ignored."""
    out = ZeroFiles()
    for name in names:
        for kind, pattern in _KINDS.items():
            if match := pattern.fullmatch(name):
                _sort(out, kind, name, match.groupdict())
                break
    return out


def _sort(out: ZeroFiles, kind: str, name: str, parts: Mapping[str, str]) -> None:
    at = {part: int(number) for part, number in parts.items() if part != "prefix"}
    if kind == OPTIM:
        out.optim[at["data"], at["model"]] = name
        out.prefixes.add(parts["prefix"])
    elif kind == MODEL:
        out.model[at["model"]] = name
    elif kind == MODEL3:
        out.model3[at["data"], at["model"]] = name
    elif kind == LAYER:
        out.layers[at["layer"]] = name
    elif kind == EXPERT:
        out.experts[at["layer"], at["expert"]] = name
        if at["model"]:
            out.refused.append((name, "experts of tensor parallel ranks"))
    elif kind == PLAIN_EXPERTS:
        out.expp[at["expert"]] = name
    else:
        out.refused.append((name, _REFUSED[kind]))


class RankFiles(NamedTuple):
    """The names of the files that each rank writes: (data rank, model rank) -> name."""

    modules: dict[tuple[int, int], str]
    optimizers: dict[tuple[int, int], str]


def rank_files(stage: int, prefix: str, dp: int, pp: int) -> RankFiles:
    """Return the files of a job of `dp` data ranks and `pp` pipeline stages.

    At ZeRO 3 every data rank writes a module file, at the other stages only data rank 0.
    """
    ranks = [(data, model) for model in range(pp) for data in range(dp)]
    kind, writers = (MODEL3, ranks) if stage == 3 else (MODEL, [(0, model) for model in range(pp)])
    modules = {(data, model): kind.format(data=data, model=model) for data, model in writers}
    optimizers = {(data, model): OPTIM.format(prefix=prefix, data=data, model=model) for data, model in ranks}
    return RankFiles(modules, optimizers if stage else {})


# -- what a file holds -------------------------------------------------------------------------------------------------

OPTIMIZER = "optimizer_state_dict"
BASE = "base_optimizer_state"
MASTERS = "single_partition_of_fp32_groups"
FLAT3 = "fp32_flat_groups"
_SCALARS = {"F32": "<f", "F64": "<d", "I64": "<q", "I32": "<i", "BOOL": "<?"}
# Keys of a module file that describe its layout: a writer makes them again for the new layout.
LAYOUT_KEYS = frozenset(
    {
        "module",
        "buffer_names",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "shared_params",
        "frozen_param_fragments",
        "dp_world_size",
        "mp_world_size",
        "checkpoint_parallel_dimensions",
    }
)
# The same for `optimizer_state_dict` in an optimizer file.
OPTIMIZER_LAYOUT = frozenset(
    {
        BASE,
        MASTERS,
        FLAT3,
        OPTIMIZER,
        "zero_stage",
        "group_paddings",
        "param_alignment_paddings",
        "partition_count",
        "param_slice_mappings",
        "ds_zero_partition_groups",
    }
)


@dataclass(slots=True)
class ModuleFile:
    """The content of a module file."""

    path: str
    module: dict[str, StoredArray]  # name -> array, in the module's order
    buffers: list[str]
    # for each flat group (sub-group at stage 3), name -> shape in flat order; None without ZeRO
    shapes: list[dict[str, tuple[int, ...]]] | None
    frozen: dict[str, tuple[int, ...]]  # shapes of frozen parameters (stage 2 and 3)
    fragments: dict[str, StoredArray]  # name -> frozen parameter (stage 2) or this rank's share of it (stage 3)
    shared: dict[str, str]  # alias -> kept name
    values: dict[str, Any]  # all values that are no tensors, without the keys that describe the layout
    # (path, array) of the optimizer's tensors, which are in this file without ZeRO
    optimizer: list[tuple[Path, StoredArray]] = field(default_factory=list)
    # tensors of the client's state, at their paths
    others: list[tuple[Path, StoredArray]] = field(default_factory=list)
    unsafe: list[str] = field(default_factory=list)
    globals: list[str] = field(default_factory=list)

    def count(self, name: str, default: int = 1) -> int:
        """Return a world size that the file states. Raises CorruptFile E0355 if it is not a count."""
        value = self.values.get(name, default)
        if type(value) is not int or not 1 <= value < 1 << 24:
            raise malformed(f"{name} is {value!r}, want a count", self.path)
        return value


@dataclass(slots=True)
class FlatTensor:
    """A flat group in the optimizer file of one rank: its fp32 weights and their states."""

    master: StoredArray
    options: int  # number of its parameter group
    count: int  # ranks that share the group
    gaps: tuple[int, ...]  # elements of padding after each parameter, () if the file does not state it
    mapping: dict[str, tuple[int, int]] | None  # name -> (elements, start), None if the file does not state it
    states: dict[str, StoredArray] = field(default_factory=dict)  # 1-d arrays as long as the partition
    scalars: dict[str, Any] = field(default_factory=dict)  # one value for the whole group
    dtypes: dict[str, str] = field(default_factory=dict)  # of the scalars that were stored as tensors


@dataclass(slots=True)
class OptimizerFile:
    """The content of an optimizer file."""

    path: str
    stage: int  # 1, 2 or 3
    plain_bf16: bool  # written by BF16_Optimizer
    groups: list[FlatTensor]
    param_groups: list[dict[str, Any]]  # options without `params`
    rest: dict[str, Any]  # scalars of the whole optimizer (loss scaler, clip_grad, ...)
    unsafe: list[str]
    globals: list[str]


def read_module(tree: Tree, name: str) -> ModuleFile:
    """Return the content of a `*_model_states.pt` file; tensor data is not read.

    Raises CorruptFile E0355 if its structure is not DeepSpeed's, and what containers and pickles raise.
    """
    content = read_content(tree, name)
    shown = tree.display(name)
    values = dict(_mapping(content.extras, "the file", shown))
    out = ModuleFile(
        shown,
        {},
        _names(values.get("buffer_names") or [], "buffer_names", shown),
        _shapes(values, shown),
        _shape_map(values.get("frozen_param_shapes") or {}, "frozen_param_shapes", shown),
        {},
        _parse_shared(values.get("shared_params") or {}, shown),
        {key: item for key, item in values.items() if key not in LAYOUT_KEYS or key.endswith("world_size")},
        unsafe=content.unsafe,
        globals=content.globals,
    )
    if isinstance(values.get("checkpoint_parallel_dimensions"), dict):
        out.values["checkpoint_parallel_dimensions"] = values["checkpoint_parallel_dimensions"]

    # `values` has no tensors, so what is left under `module` are entries of another type.
    left = values.get("module")
    if isinstance(left, dict) and left:
        out.values["module"] = left
    if values.get("optimizer") is not None:
        out.values["optimizer"] = values["optimizer"]

    for path, array in content.leaves:
        if path[0] == "module" and len(path) == 2:
            out.module[str(path[1])] = array
        elif path[0] == "frozen_param_fragments" and len(path) == 2:
            out.fragments[str(path[1])] = array
        elif path[0] == "optimizer":
            out.optimizer.append((path, array))
        elif path[0] in LAYOUT_KEYS:
            raise malformed(f"a tensor at {dotted(path)[:200]}, where DeepSpeed keeps none", shown)
        else:
            out.others.append((path, array))

    return out


def read_tensors(tree: Tree, name: str) -> tuple[dict[str, StoredArray], TorchContent]:
    """Return the tensors of a file that holds only named tensors (a pipeline layer, an expert), and its content.

    Raises CorruptFile E0355 for anything else.
    """
    content = read_content(tree, name)
    out = {}
    for path, array in content.leaves:
        if len(path) != 1:
            raise malformed(f"a tensor is at {dotted(path)[:200]}, want names and tensors alone", tree.display(name))
        out[str(path[0])] = array
    return out, content


def read_optimizer(tree: Tree, name: str) -> OptimizerFile:
    """Return the content of an `*_optim_states.pt` file; of tensor data only scalars are read.

    Raises CorruptFile E0355, InputError E0356 (elastic, NVMe, AutoEP), and what containers and pickles raise.
    """
    content = read_content(tree, name)
    parts = _OptimizerParts(tree, content, tree.display(name))
    groups = parts.groups()
    rest = {key: plain(item) for key, item in parts.state.items() if key not in OPTIMIZER_LAYOUT} | parts.rest
    options: list[dict[str, Any]] = []
    for group in parts.options:
        options.append({key: item for key, item in group.items() if key != "params"})
    plain_bf16 = parts.stage != 3 and "zero_stage" not in parts.state
    return OptimizerFile(parts.shown, parts.stage, plain_bf16, groups, options, rest, content.unsafe, content.globals)


def plain(value: Any) -> Any:
    """Return a loss scaler as a dict of its state and its `class`, any other value unchanged.

    Only DeepSpeed's formats can store the object itself; a plain dict passes through every format.
    """
    if isinstance(value, Opaque) and value.name.startswith("deepspeed.") and isinstance(value.state, dict):
        return {"class": value.name, **value.state}
    return value


def opaque(value: Any) -> Any:
    """Return the loss scaler that `plain` made a dict of, any other value unchanged."""
    name = value.get("class") if isinstance(value, Mapping) else None
    if isinstance(name, str) and name.startswith("deepspeed."):
        return Opaque(name, (), {key: item for key, item in value.items() if key != "class"})
    return value


def scalar_bytes(value: Any, dtype: str) -> bytes | None:
    """Return the bytes of a scalar tensor of dtype `dtype`; None if the value has to be stored as a plain number."""
    code = _SCALARS.get(dtype)
    if code is None or type(value) not in (int, float):
        return None
    try:
        return struct.pack(code, float(value) if dtype in ("F32", "F64") else int(value))
    except (struct.error, OverflowError, ValueError):  # out of the dtype's range
        return None


# -- parts of an optimizer file ----------------------------------------------------------------------------------------


class _OptimizerParts:
    """The content of an optimizer file while it is parsed.

    state: all values that are no tensors. stage: of ZeRO. options: `param_groups`. masters: number of a flat group ->
    its fp32 weights. states: number of a flat group -> state -> array. rest: numbers of the whole optimizer that are
    stored as tensors.
    """

    def __init__(self, tree: Tree, content: TorchContent, shown: str) -> None:
        self.tree = tree
        self.shown = shown
        self.state = _mapping(_mapping(content.extras, "the file", shown).get(OPTIMIZER), OPTIMIZER, shown)
        if isinstance(self.state.get(BASE), list):
            older = "its states are laid out in an older way"
            raise refused(f"an elastic checkpoint (zero_optimization.elastic_checkpoint): {older}", shown)

        if self.state.get("ds_zero_partition_groups") is not None:
            raise refused("AutoEP at ZeRO 3 (ds_zero_partition_groups)", shown)

        self.stage = _stage(self.state.get("zero_stage"), shown)
        flat, inner = (FLAT3, OPTIMIZER) if self.stage == 3 else (MASTERS, BASE)
        self.inner = inner
        base = _mapping(self.state.get(inner), "the optimizer's state", shown)
        options = numbered(base.get("param_groups"))
        if options is None:
            raise malformed("param_groups is no list of groups with the numbers of their params", shown)

        self.options = options
        self.values = _mapping(base.get("state") or {}, "state", shown)
        self.masters: dict[int, StoredArray] = {}
        self.states: dict[int, dict[str, StoredArray]] = {}
        self.rest: dict[str, Any] = {}

        for path, array in content.leaves:
            if path[:2] == (OPTIMIZER, flat) and len(path) == 3 and type(path[2]) is int:
                self.masters[path[2]] = array
            elif path[:3] == (OPTIMIZER, inner, "state") and len(path) == 5 and type(path[3]) is int:
                self.states.setdefault(path[3], {})[str(path[4])] = array
            elif path[0] == OPTIMIZER and len(path) == 2 and array.numel == 1 and path[1] not in OPTIMIZER_LAYOUT:
                self.rest[str(path[1])] = self._scalar(array, str(path[1]))
            else:  # a tensor that is not understood is an error, because no state may be dropped silently
                raise refused(f"the optimizer keeps a tensor at {dotted(path)[:200]}, which is not understood", shown)

        if sorted(self.masters) != list(range(len(self.masters))):
            raise malformed(f"{flat} lacks a tensor in the middle", shown)
        if not self.masters:
            raise refused(f"no fp32 weights ({flat}): they were swapped to NVMe, or this is no ZeRO optimizer", shown)

        for number, array in self.masters.items():
            if len(array.shape) != 1 or array.strides is not None:
                raise malformed(f"{flat}[{number}] has shape {list(array.shape)}, want one dim without gaps", shown)

        for number in self.states.keys() - self.masters.keys():
            raise malformed(f"a state of flat group {number!r}, but there are {len(self.masters)}", shown)

    def groups(self) -> list[FlatTensor]:
        """Return the flat groups in the order of their numbers."""
        owner = {number: group for group, item in enumerate(self.options) for number in item["params"]}
        out = []
        for number, master in sorted(self.masters.items()):
            if number not in owner:
                raise malformed(f"no param_groups entry names flat group {number}", self.shown)
            group = FlatTensor(master, owner[number], self._count(number), self._gaps(number), self._mapping(number))
            for state, array in self.states.get(number, {}).items():
                self._add(group, number, state, array)
            left = self.values.get(number)
            if isinstance(left, dict):
                group.scalars.update({str(key): item for key, item in left.items() if item != SLOT})
            out.append(group)
        return out

    def _add(self, group: FlatTensor, number: int, state: str, array: StoredArray) -> None:
        """Add a state to a flat group: a moment (as long as the weights), or one scalar for the whole group."""
        numel = group.master.numel
        if is_shapeless(array):
            group.states[state] = array._replace(shape=(numel,))
        elif array.numel == 1 and (not array.shape or numel > 1):
            group.scalars[state] = self._scalar(array, state)
            group.dtypes[state] = array.dtype.name
        elif len(array.shape) != 1 or array.strides is not None or array.numel < numel:
            raise InconsistentCheckpoint(
                f"{state} of flat group {number} has shape {list(array.shape)}, its weights have {numel} elements",
                code=DISAGREE,
                path=self.shown,
                place=dotted((OPTIMIZER, self.inner, "state", number, state)),
                hint="optimizer and weights come from two runs: fetch the whole save again",
            )
        else:
            group.states[state] = array

    def _scalar(self, array: StoredArray, state: str) -> Any:
        value = number_of(self.tree, array)
        if value is None:
            raise malformed(f"{state} is a {array.dtype.name} scalar, want F32, F64 or an integer", self.shown)
        return value

    def _entry(self, key: str, number: int, kind: type) -> Any:
        """Return what the file states under `key` for one flat group, None if it is absent or of another type."""
        value = self.state.get(key)
        item = value[number] if isinstance(value, list) and number < len(value) else None
        return item if isinstance(item, kind) else None

    def _count(self, number: int) -> int:
        counts = self.state.get("partition_count")
        count = counts[number] if isinstance(counts, list) and number < len(counts) else counts
        if type(count) is int and count > 0:
            return count
        if self.stage != 3 or counts is not None:
            what = f"partition_count is {counts!r}, want a count for each of {len(self.masters)} groups"
            raise malformed(what, self.shown)
        return 1

    def _gaps(self, number: int) -> tuple[int, ...]:
        gaps = self._entry("param_alignment_paddings", number, list) or ()
        if not all(type(gap) is int and 0 <= gap < 1 << 32 for gap in gaps):
            raise malformed("param_alignment_paddings holds something else than counts", self.shown)
        return tuple(gaps)

    def _mapping(self, number: int) -> dict[str, tuple[int, int]] | None:
        stated = self._entry("param_slice_mappings", number, dict)
        out = {}
        for name, item in (stated or {}).items():
            state = item.state if isinstance(item, Opaque) and isinstance(item.state, dict) else {}
            numel = state.get("numel")
            start = state.get("start")
            if type(numel) is not int or type(start) is not int:
                raise malformed("an entry of param_slice_mappings is no fragment_address", self.shown)
            out[str(name)] = numel, start
        return None if stated is None else out


def number_of(tree: Tree, array: StoredArray) -> Any:
    """Read and return the value of a tensor of one element, None for any other tensor."""
    code = _SCALARS.get(array.dtype.name) if array.numel == 1 else None
    return None if code is None else struct.unpack(code, read_array(tree, array, struct.calcsize(code)))[0]


def numbered(value: Any) -> list[dict[str, Any]] | None:
    """Return `param_groups` (copied) if their `params` are numbers, None for anything else."""
    for group in value if isinstance(value, list) else [None]:
        params = group.get("params") if isinstance(group, dict) else None
        if not isinstance(params, list) or any(type(n) is not int for n in params):
            return None
    return [dict(group) for group in value]


def _stage(value: Any, shown: str) -> int:
    """Return the ZeRO stage; BF16_Optimizer states none and has the layout of stage 1."""
    if value is None:
        return 1
    # The stage is pickled as a number, or as DeepSpeed's enum: a symbol with the number as its argument.
    stage = value.args[0] if isinstance(value, Symbol) and value.args else value
    if type(stage) is not int or stage not in (1, 2, 3):
        raise malformed(f"zero_stage is {stage!r}, want 1, 2 or 3", shown)
    return stage


# -- parts of a module file --------------------------------------------------------------------------------------------


def _shapes(values: Mapping[str, Any], shown: str) -> list[dict[str, tuple[int, ...]]] | None:
    value = values.get("param_shapes")
    if value is None:
        return None
    if not isinstance(value, list):
        raise malformed("param_shapes is no list of groups", shown)
    return [_shape_map(group, f"param_shapes[{i}]", shown) for i, group in enumerate(value)]


def _shape_map(value: Any, what: str, shown: str) -> dict[str, tuple[int, ...]]:
    out = {}
    for name, shape in _mapping(value, what, shown).items():
        if not isinstance(name, str) or not isinstance(shape, tuple | list) or len(shape) > 64:
            raise malformed(f"{what} maps no names to shapes", shown)
        if any(type(n) is not int or not 0 <= n < 1 << 48 for n in shape):
            raise malformed(f"{what} gives {name[:200]} the shape {list(shape)!r}", shown)
        out[name] = tuple(shape)
    return out


def _parse_shared(value: Any, shown: str) -> dict[str, str]:
    found = _mapping(value, "shared_params", shown)
    if not all(isinstance(item, str) for pair in found.items() for item in pair):
        raise malformed("shared_params maps no names to names", shown)
    return dict(found)


def _names(value: Any, what: str, shown: str) -> list[str]:
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise malformed(f"{what} is no list of names", shown)
    return list(value)


def _mapping(value: Any, what: str, shown: str) -> Mapping[Any, Any]:
    if not isinstance(value, dict):
        raise malformed(f"{what} is a {type(value).__name__}, want a dict", shown)
    return value
