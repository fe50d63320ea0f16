"""Writing: every rank's files of a DeepSpeed checkpoint, for any number of data ranks, expert ranks and ZeRO stage.

The one idea: what `deepspeed.zero.layout` settled is written down file by file: a `_ZeroWriter` knows every wanted
tensor once, by kind (parameter, frozen, buffer, expert, layer), and each file takes its part; a flat tensor is a
storage with parts of many parameters in it, which the job states.

    --dp 3, ZeRO 1   latest, global_step3/mp_rank_00_model_states.pt: module, param_shapes, counters, client state
                     global_step3/bf16_zero_pp_rank_{0,1,2}_mp_rank_00_optim_states.pt
    --dp 3, ZeRO 3   zero_pp_rank_{0,1,2}_mp_rank_00_model_states.pt: placeholders, buffers, a share of each frozen
                     parameter

As DeepSpeed 0.19.8 writes, keys in its order (`runtime/engine.py` `_common_checkpoint_state`,
`runtime/zero/stage_1_and_2.py` and `stage3.py` `state_dict`, `runtime/bf16_optimizer.py`): `partition_count`,
`group_paddings` of the rank, `param_alignment_paddings`, `param_slice_mappings` with the rank's own names, fp32
partitions cut by the padding (whole under BF16_Optimizer), frozen parameters and fragments, `shared_params` on the
first rank alone, `latest`; its own classes (loss scaler, enum, fragment_address) are written from values.
`DeepSpeedEngine.load_checkpoint` resumes from it. Counters, scheduler and client state come from the extras; what a
source does not say is DeepSpeed's default, or missing and named in a note (an optimizer's options). RNG states of other
degrees are kept under `ckpt_unused`, where nobody takes them for those of the new ranks. Cost: a few microseconds a
parameter and rank that holds a part of it. What it does not do: tensor parallel ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckpt_tool.core.box import whole
from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.core.extras import Opaque, Symbol
from ckpt_tool.core.flat_line import FlatLine
from ckpt_tool.core.target import Target, TargetFile, Wanted, whole_file
from ckpt_tool.core.tensor import EMA, EXTRAS, MASTER, MODEL, STEP, Path, TensorKey
from ckpt_tool.formats.state_dict.composer import StoragePart, TorchComposer
from ckpt_tool.formats.state_dict.nesting import ordered
from ckpt_tool.formats.state_dict.tree import join
from ckpt_tool.storage.pickles.pickle_values import OrderedMap, TensorRef
from ckpt_tool.storage.pickles.pickle_writer import TorchSize
from ckpt_tool.systems.deepspeed import files
from ckpt_tool.systems.deepspeed.described import HOME, OPTIMIZER, UNUSED, WRAPPER, Options, ZeroGroup
from ckpt_tool.systems.deepspeed.job import FlatArray, ZeroJob, shares
from ckpt_tool.systems.deepspeed.stored_names import counts, expert_name_of, first_rank, global_names, layer_and_local
from ckpt_tool.systems.deepspeed.zero.layout import ZeroLayout, is_random, settle

VERSION = "0.19.8"  # the DeepSpeed whose layout is written
STAGE = "deepspeed.runtime.zero.config.ZeroStageEnum"
LOSS_SCALER = "deepspeed.runtime.fp16.loss_scaler.LossScaler"
_FRAGMENT = "deepspeed.utils.tensor_fragment.fragment_address"
_KNOWN = ("lr_scheduler", "data_sampler", "random_ltd")  # None where the source does not say
_COUNTERS = ("skipped_steps", "global_steps")


def target(wanted: Wanted) -> Target:
    """The whole output. Raises UsageError E0286 (states), E0287 (degrees), E0288 (pipeline stages)."""
    layout = settle(wanted)
    steps = layout.extras.get("global_steps")
    folder = f"global_step{steps if type(steps) is int and 0 <= steps < 1 << 62 else 0}"
    placed = [
        TargetFile(f"{folder}/{file.path}", file.size, file.literals, file.arrays, file.patches)
        for file in _ZeroWriter(layout).files()
    ]
    copies = list(wanted.side_file_copies())
    latest = whole_file("latest", folder.encode())
    return Target("deepspeed", (latest, *placed, *copies), notes=tuple(dict.fromkeys(layout.notes)))


class _ZeroWriter:
    """The tensors of what is laid out, by kind. layers: prefixes of the MoE layers in the order of their numbers."""

    def __init__(self, layout: ZeroLayout) -> None:
        self.layout = layout
        self.model = [t.key.name for t in layout.wanted.tensors if t.key.state == MODEL]
        self.options = Options.from_extras(layout.extras)
        described = layout.described
        have = set(self.model)
        self.trained = {t.key.name for t in layout.wanted.tensors if t.key.state == MASTER}
        self.shared = {a: k for a, k in described.shared.items() if k in self.trained or k in have}
        self.buffers = [name for name in described.buffers if name in have]
        self.experts = counts(self.model)
        self.layers = [*dict.fromkeys([*(prefix for prefix in described.moe if prefix in self.experts), *self.experts])]
        held = set(self.buffers) | self.trained | self.shared.keys()
        self.frozen = [name for name in self.model if name not in held and expert_name_of(name) is None]

    def files(self) -> Iterator[TargetFile]:
        """Every file below the step's folder."""
        layout = self.layout
        names = files.rank_files(layout.stage, layout.described.prefix, layout.dp, layout.pp)
        for (data, model), name in names.modules.items():
            yield self._module_file(name, data, model)
        if layout.described.stages:
            yield from self._layer_files()
        yield from self._expert_files()
        if layout.job is not None:
            for (data, model), name in names.optimizers.items():
                yield self._optimizer_file(name, layout.job, data, model)
        elif any(group.ep for group in layout.stages[0]):
            for expert in range(layout.ep):
                composer = TorchComposer()
                optimizer = self._plain_optimizer(composer, 0, expert)
                yield composer.file(files.PLAIN_EXPERTS.format(expert=expert, model=0), {"optimizer": optimizer})

    def _whole(self, composer: TorchComposer, name: str, state: str) -> TensorRef:
        row = self.layout.rows[TensorKey(name, state)]
        tensor = self.layout.wanted.tensors[row]
        return composer.tensor(tensor.shape, tensor.dtype, [StoragePart(row, whole(tensor.shape), 0)])

    # -- the module ----------------------------------------------------------------------------------------------------

    def _module_file(self, name: str, data: int, model: int) -> TargetFile:
        layout = self.layout
        composer = TorchComposer()
        pipeline = bool(layout.described.stages)
        refs = {} if pipeline else self._refs(composer)
        shared = dict(self.shared) if data == model == 0 else {}
        skeleton: dict[str, Any] = {
            "module": None if pipeline else self._module(composer, refs),
            "buffer_names": [] if pipeline else list(self.buffers),
            "optimizer": None if layout.stage else self._plain_optimizer(composer, model),
            "param_shapes": self._param_shapes(layout.job, model) if layout.job else None,
            "frozen_param_shapes": None,
            "shared_params": shared if layout.stage else dict(self.shared) or None,
            "frozen_param_fragments": None,
        }
        if layout.stage >= 2:
            skeleton["frozen_param_shapes"] = OrderedMap((name, TorchSize(self._shape(name))) for name in self.frozen)
        if layout.stage == 2:
            skeleton["frozen_param_fragments"] = OrderedMap((name, refs[name]) for name in self.frozen if name in refs)
        if layout.stage == 3:
            skeleton["frozen_param_fragments"] = OrderedMap((n, self._fragment(composer, n, data)) for n in self.frozen)
        left = layout.extras.get("module")
        if isinstance(left, Mapping) and skeleton["module"] is not None:
            skeleton["module"] |= {key: item for key, item in left.items() if key not in skeleton["module"]}
        skeleton |= join(self._values(), self._client(composer))
        return composer.file(name, skeleton)

    def _shape(self, name: str) -> tuple[int, ...]:
        return self.layout.wanted.tensors[self.layout.rows[TensorKey(name, MODEL)]].shape

    def _refs(self, composer: TorchComposer) -> dict[str, TensorRef]:
        """What lies whole in the module: everything but experts; at stage 3 buffers alone."""
        names = [name for name in self.model if expert_name_of(name) is None]
        if self.layout.stage == 3:
            frozen = set(self.frozen)
            names = [name for name in names if name not in frozen]
        return {name: self._whole(composer, name, MODEL) for name in names}

    def _module(self, composer: TorchComposer, refs: Mapping[str, TensorRef]) -> OrderedMap:
        """`module` in the module's own order, with placeholders at stage 3."""
        layout = self.layout
        out = OrderedMap()
        without = {*self.trained, *self.frozen} if layout.stage == 3 else set()
        empty: TensorRef | None = None  # one for all placeholders
        in_order = (t.key.name for t in layout.wanted.tensors if t.key.name in refs or t.key.name in without)
        for name in dict.fromkeys([*layout.described.module, *in_order]):
            if name in refs:
                out[name] = refs[name]
            elif name in without or (layout.stage == 3 and name in self.shared):
                empty = empty or composer.value((0,), DTYPES.get(layout.described.dtype) or DTYPES["BF16"], b"")
                out[name] = empty
        for attributes in (item for path, item in ordered(layout.wanted.hints) if path == ("module",)):
            out.attributes = attributes
        return out

    def _param_shapes(self, job: ZeroJob, model: int) -> list[OrderedMap]:
        kind = tuple if any(group.ep for group in self.layout.stages[model]) else TorchSize
        return [OrderedMap((name, kind(shape)) for name, shape in group.shapes.items()) for group in job.stages[model]]

    def _fragment(self, composer: TorchComposer, name: str, data: int) -> TensorRef:
        """A rank's share of a frozen parameter."""
        row = self.layout.rows[TensorKey(name, MODEL)]
        line, size = shares({name: self._shape(name)}, self.layout.dp, data)
        return composer.tensor((size,), self.layout.wanted.tensors[row].dtype, self._parts(line, MODEL))

    def _values(self) -> dict[str, Any]:
        """Counters, sizes, configuration, then the client's state."""
        layout = self.layout
        extras = self.layout.extras
        out: dict[str, Any] = {key: extras.get(key) for key in _KNOWN}
        out |= {key: extras.get(key, 0) for key in _COUNTERS}
        if "global_samples" in extras:
            out["global_samples"] = extras["global_samples"]
        out["dp_world_size"] = layout.dp
        out["mp_world_size"] = layout.pp
        out["checkpoint_parallel_dimensions"] = {"pp_degree": layout.pp, "tp_degree": 1}
        out["ds_config"] = self._config()
        out["ds_version"] = extras.get("ds_version", VERSION)
        if self.experts and "num_experts" not in extras:
            out["num_experts"] = [self.experts[layer] for layer in self.layers]
        taken = (*out, HOME, OPTIMIZER, "module")
        return out | {key: item for key, item in extras.items() if key not in taken}

    def _config(self) -> dict[str, Any]:
        """The source's configuration with the stage that is written."""
        config = self.layout.extras.get("ds_config")
        config = config if isinstance(config, Mapping) else {}
        zero = config.get("zero_optimization")
        zero = zero if isinstance(zero, Mapping) else {}
        return {**config, "zero_optimization": {**zero, "stage": self.layout.stage}}

    def _client(self, composer: TorchComposer) -> Iterator[tuple[Path, TensorRef]]:
        """Tensors of the client's state, where they hung; averages under `ema`."""
        layout = self.layout
        own = layout.wanted.source_format == "deepspeed"
        kept = layout.extras.get(UNUSED)
        unused = {*(kept if isinstance(kept, Mapping) else ()), *files.LAYOUT_KEYS}
        for tensor in layout.wanted.tensors:
            if tensor.key.state == EMA:
                yield (EMA, tensor.key.name), self._whole(composer, tensor.key.name, EMA)
            elif tensor.key.state == EXTRAS:
                path = tensor.path if own and tensor.path else (tensor.key.name,)
                aside = path[0] in unused or (layout.moved and path[0] != UNUSED and is_random(str(path[0])))
                yield ((UNUSED,) if aside else ()) + path, self._whole(composer, tensor.key.name, EXTRAS)

    def _layer_files(self) -> Iterator[TargetFile]:
        """Layer files: their names are global, so every stage finds its own."""
        described = self.layout.described
        have = set(self.model)
        layers: dict[int, list[tuple[str, str]]] = {}
        for name in dict.fromkeys([*(n for n in described.module if n in have), *self.model]):
            index, local = layer_and_local(name, described.tied)
            layers.setdefault(index, []).append((name, local))
        for index, names in sorted(layers.items()):
            composer = TorchComposer()
            state = OrderedMap((local, self._whole(composer, name, MODEL)) for name, local in names)
            yield composer.file(files.LAYER.format(layer=index), state)

    def _expert_files(self) -> Iterator[TargetFile]:
        """A file for each expert of each MoE layer."""
        experts: dict[tuple[int, int], list[str]] = {}
        numbers = {prefix: number for number, prefix in enumerate(self.layers)}
        for name in self.model:
            if found := expert_name_of(name):
                experts.setdefault((numbers[found.layer], found.number), []).append(name)
        for (layer, number), names in sorted(experts.items()):
            composer = TorchComposer()
            held = {name: self._whole(composer, name, MODEL) for name in names}
            yield composer.file(files.EXPERT.format(layer=layer, expert=number, model=0), held)

    # -- the optimizer -------------------------------------------------------------------------------------------------

    def _plain_optimizer(self, composer: TorchComposer, model: int, expert: int = 0) -> dict[str, Any] | None:
        """Without ZeRO: the optimizer of a stage and expert rank as torch has it, with the parameters' names beside
        their numbers; in DeepSpeed's 16-bit wrapper where the source had one."""
        layout = self.layout
        numbers: dict[str, int] = {}
        groups = []
        masters = []
        for group in layout.stages[model]:
            names = global_names(first_rank(group.names, group.ep), expert) if group.ep else group.names
            mine = [numbers.setdefault(name, len(numbers)) for name in names]
            groups.append({**group.options, "params": mine, "param_names": list(names)})
            held = [name for name in names if layout.row(name, MASTER) is not None]
            masters.append([self._whole(composer, name, MASTER)._replace(requires_grad=True) for name in held])
        if not numbers:
            return None
        state: dict[int, dict[str, TensorRef]] = {number: {} for number in numbers.values()}
        for tensor in layout.wanted.tensors:
            if tensor.key.state in layout.states and tensor.key.name in numbers:
                state[numbers[tensor.key.name]][tensor.key.state] = self._whole(composer, *tensor.key)
        inner = {"state": state, "param_groups": groups}
        wrapper = self.options.wrapper
        if wrapper is None and not any(masters):
            return inner
        return {**(wrapper or {}), "optimizer_state_dict": inner, "fp32_groups": masters}

    def _optimizer_file(self, name: str, job: ZeroJob, data: int, model: int) -> TargetFile:
        """A rank's fp32 weights and moments as flat tensors, with what DeepSpeed says of them."""
        layout = self.layout
        composer = TorchComposer()
        groups = layout.stages[model]
        arrays = job.arrays(data, model)
        flat: list[TensorRef] = []
        states: dict[int, Any] = {}
        options = [{**group.options, "params": list[int]()} for group in groups]
        for number, array in enumerate(arrays):
            options[array.group]["params"].append(number)
            if layout.stage == 3:
                states[number] = self._moments(composer, groups[array.group], array)
            size = array.size if layout.plain_bf16 else array.size - array.spare
            flat.append(self._flat(composer, array, MASTER, size)._replace(requires_grad=True))
            if layout.stage != 3:
                states[number] = self._moments(composer, groups[array.group], array)
        base = {"state": {n: state for n, state in states.items() if state}, "param_groups": options}
        version = layout.extras.get("ds_version", VERSION)
        state = self._state(base, flat, arrays, version)
        return composer.file(name, {"optimizer_state_dict": state, "ds_config": self._config(), "ds_version": version})

    def _state(
        self, base: dict[str, Any], flat: list[TensorRef], arrays: Sequence[FlatArray], version: Any
    ) -> dict[str, Any]:
        """`optimizer_state_dict`, with its keys in the order of each optimizer."""
        stage = {"zero_stage": Symbol(STAGE, (self.layout.stage,))}
        if self.layout.stage == 3:
            return {
                **stage,
                **self._rest("loss_scaler", "dynamic_loss_scale", "overflow"),
                "partition_count": self.layout.dp,
                "optimizer_state_dict": base,
                "fp32_flat_groups": flat,
            }
        plain = self.layout.plain_bf16
        scaling = () if plain else ("loss_scaler", "dynamic_loss_scale", "overflow")
        return {
            **self._rest(*scaling, "clip_grad"),
            "base_optimizer_state": base,
            "single_partition_of_fp32_groups": flat,
            **({} if plain else stage),
            "group_paddings": [array.spare for array in arrays],
            **({} if plain else {"param_alignment_paddings": [list(array.gaps) for array in arrays]}),
            "partition_count": [array.partitions for array in arrays],
            "ds_version": version,
            "param_slice_mappings": [
                OrderedMap((name, Opaque(_FRAGMENT, (), {"numel": numel, "start": at})) for name, (numel, at) in held)
                for held in (array.slices().items() for array in arrays)
            ],
        }

    def _rest(self, *keys: str) -> dict[str, Any]:
        """Scalars of the whole optimizer, as the source has them or DeepSpeed's defaults."""
        stated = {key: item for key, item in self.options.rest.items() if key not in ("state", "ds_version", WRAPPER)}
        defaults = {"loss_scaler": None, "dynamic_loss_scale": False, "overflow": False}
        given = {key: stated.get(key, defaults.get(key)) for key in keys if key in stated or self.layout.stage == 3}
        given |= {key: item for key, item in stated.items() if key not in keys}
        scaler = given.get("loss_scaler")
        if "loss_scaler" in given and not isinstance(scaler, Opaque):
            state = scaler if isinstance(scaler, Mapping) else {"cur_scale": 1.0, "dynamic": False}
            given["loss_scaler"] = files.opaque({"class": LOSS_SCALER, **state})
        return given

    def _moments(self, composer: TorchComposer, group: ZeroGroup, array: FlatArray) -> dict[str, Any]:
        """The states of one flat group: scalars first, as torch's optimizers make them."""
        layout = self.layout
        out: dict[str, Any] = {}
        folded = f"group.{group.number}"
        if layout.row(folded, STEP) is not None:
            out[STEP] = self._whole(composer, folded, STEP)
        for key, value in group.scalars.items():
            dtype = self.options.dtypes.get(key, "")
            raw = files.scalar_bytes(value, dtype)
            if key not in out:
                out[key] = composer.value((), DTYPES[dtype], raw) if raw is not None else value
        first = next(iter(array.names), "")
        for state in layout.states:
            if layout.row(first, state) is not None:
                out[state] = self._flat(composer, array, state, array.size)
        return out

    def _flat(self, composer: TorchComposer, array: FlatArray, state: str, size: int) -> TensorRef:
        """A flat tensor of `size` elements with the parts of the parameters in it, zeros between."""
        layout = self.layout
        row = next((layout.rows[TensorKey(name, state)] for name in array.names), None)
        dtype = DTYPES["F32"] if row is None else layout.wanted.tensors[row].dtype
        return composer.tensor((size,), dtype, self._parts(array.line, state))

    def _parts(self, line: FlatLine[str], state: str) -> list[StoragePart]:
        rows = self.layout.rows
        return [StoragePart(rows[TensorKey(part.of, state)], part.box, part.at) for part in line.parts()]
