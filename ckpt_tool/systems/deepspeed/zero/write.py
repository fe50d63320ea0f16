"""Plans every rank's files of a DeepSpeed checkpoint, for any number of data ranks, expert ranks and any ZeRO stage.

The decisions of `deepspeed.zero.layout` are turned into files: a `_ZeroWriter` sorts the wanted tensors by kind
(parameter, frozen, buffer, expert, layer), and each file takes its part; a flat tensor is a storage with parts of many
parameters, which the job determines.

    --dp 3, ZeRO 1   latest, global_step3/mp_rank_00_model_states.pt: module, param_shapes, counters, client state
                     global_step3/bf16_zero_pp_rank_{0,1,2}_mp_rank_00_optim_states.pt
    --dp 3, ZeRO 3   zero_pp_rank_{0,1,2}_mp_rank_00_model_states.pt: placeholders, buffers, a share of each frozen
                     parameter

As DeepSpeed 0.19.8 writes, keys in its order (`runtime/engine.py` `_common_checkpoint_state`,
`runtime/zero/stage_1_and_2.py` and `stage3.py` `state_dict`, `runtime/bf16_optimizer.py`): `partition_count`,
`group_paddings` of the rank, `param_alignment_paddings`, `param_slice_mappings` with the rank's own names, fp32
partitions cut by the padding (whole under BF16_Optimizer), frozen parameters and fragments, `shared_params` on the
first rank alone, `latest`; its own classes (loss scaler, enum, fragment_address) are written from values.
`DeepSpeedEngine.load_checkpoint` resumes from it. Counters, scheduler and client state come from the extras; values
that the source lacks are DeepSpeed's defaults, or missing and named in a note (an optimizer's options). RNG states of
other degrees are kept under `ckpt_unused`, which DeepSpeed ignores. Tensor parallel ranks are not written. Cost: a few
microseconds a parameter and rank that holds a part of it.
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
from ckpt_tool.systems.deepspeed.stored_names import (
    counts,
    expert_name_of,
    global_names,
    layer_and_local,
    select_first_rank,
)
from ckpt_tool.systems.deepspeed.zero.layout import ZeroLayout, is_random, settle

VERSION = "0.19.8"  # the DeepSpeed whose layout is written
STAGE = "deepspeed.runtime.zero.config.ZeroStageEnum"
LOSS_SCALER = "deepspeed.runtime.fp16.loss_scaler.LossScaler"
_FRAGMENT = "deepspeed.utils.tensor_fragment.fragment_address"
_KNOWN = ("lr_scheduler", "data_sampler", "random_ltd")  # keys that DeepSpeed expects; None if the source lacks them
_COUNTERS = ("skipped_steps", "global_steps")


def target(wanted: Wanted) -> Target:
    """Return all files of the output. Raises UsageError E0286 (states), E0287 (degrees), E0288 (pipeline stages)."""
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
    """The wanted tensors by kind, and the files made of them."""

    def __init__(self, layout: ZeroLayout) -> None:
        self.layout = layout
        self.model = [t.key.name for t in layout.wanted.tensors if t.key.state == MODEL]
        self.options = Options.from_extras(layout.extras)
        described = layout.described
        model_names = set(self.model)
        self.trained = {t.key.name for t in layout.wanted.tensors if t.key.state == MASTER}
        self.shared: dict[str, str] = {}  # alias -> the name that is kept
        for alias, kept in described.shared.items():
            if kept in self.trained or kept in model_names:
                self.shared[alias] = kept
        self.buffers = [name for name in described.buffers if name in model_names]

        # Prefixes of the MoE layers in the order of their numbers: the source's first.
        self.experts = counts(self.model)
        listed_layers = [prefix for prefix in described.moe if prefix in self.experts]
        self.layers = [*dict.fromkeys([*listed_layers, *self.experts])]

        not_frozen = set(self.buffers) | self.trained | self.shared.keys()
        self.frozen = [name for name in self.model if name not in not_frozen and expert_name_of(name) is None]

    def files(self) -> Iterator[TargetFile]:
        """Yield every file below the step's folder."""
        layout = self.layout
        names = files.rank_files(layout.stage, layout.described.prefix, layout.dp, layout.pp)
        for (data, model), name in names.modules.items():
            yield self._module_file(name, data, model)

        if layout.described.stages:
            yield from self._layer_files()
        yield from self._expert_files()

        # With ZeRO each rank has an optimizer file; without, only optimizers with experts are in files of their own.
        if layout.job is not None:
            for (data, model), name in names.optimizers.items():
                yield self._optimizer_file(name, layout.job, data, model)
        elif any(group.ep for group in layout.stages[0]):
            for expert in range(layout.ep):
                composer = TorchComposer()
                optimizer = self._plain_optimizer(composer, 0, expert)
                yield composer.file(files.PLAIN_EXPERTS.format(expert=expert, model=0), {"optimizer": optimizer})

    def _compose_whole(self, composer: TorchComposer, name: str, state: str) -> TensorRef:
        row = self.layout.rows[TensorKey(name, state)]
        tensor = self.layout.wanted.tensors[row]
        return composer.tensor(tensor.shape, tensor.dtype, [StoragePart(row, whole(tensor.shape), 0)])

    # -- the module ----------------------------------------------------------------------------------------------------

    def _module_file(self, name: str, data: int, model: int) -> TargetFile:
        layout = self.layout
        composer = TorchComposer()
        pipeline = bool(layout.described.stages)
        refs = {} if pipeline else self._compose_module_tensors(composer)

        shared = dict(self.shared) if data == model == 0 else {}
        skeleton: dict[str, Any] = {
            "module": None if pipeline else self._order_module(composer, refs),
            "buffer_names": [] if pipeline else list(self.buffers),
            "optimizer": None if layout.stage else self._plain_optimizer(composer, model),
            "param_shapes": self._list_shapes(layout.job, model) if layout.job else None,
            "frozen_param_shapes": None,
            "shared_params": shared if layout.stage else dict(self.shared) or None,
            "frozen_param_fragments": None,
        }

        # Frozen parameters depend on the stage: 0, 1 list none; 2 stores them whole; 3 a share on each rank.
        if layout.stage >= 2:
            skeleton["frozen_param_shapes"] = OrderedMap((name, TorchSize(self._shape(name))) for name in self.frozen)
        if layout.stage == 2:
            skeleton["frozen_param_fragments"] = OrderedMap((name, refs[name]) for name in self.frozen if name in refs)
        if layout.stage == 3:
            fragments = ((name, self._compose_fragment(composer, name, data)) for name in self.frozen)
            skeleton["frozen_param_fragments"] = OrderedMap(fragments)

        # Other values of the source's module (extra states) are kept.
        source_module = layout.extras.get("module")
        if isinstance(source_module, Mapping) and skeleton["module"] is not None:
            skeleton["module"] |= {key: item for key, item in source_module.items() if key not in skeleton["module"]}
        skeleton |= join(self._plain_values(), self._compose_client_state(composer))
        return composer.file(name, skeleton)

    def _shape(self, name: str) -> tuple[int, ...]:
        return self.layout.wanted.tensors[self.layout.rows[TensorKey(name, MODEL)]].shape

    def _compose_module_tensors(self, composer: TorchComposer) -> dict[str, TensorRef]:
        """Return the tensors that the module stores whole: all except experts, and at stage 3 except frozen parameters.

        Trained parameters are no part of the model at stage 3.
        """
        names = [name for name in self.model if expert_name_of(name) is None]
        if self.layout.stage == 3:
            frozen = set(self.frozen)
            names = [name for name in names if name not in frozen]
        return {name: self._compose_whole(composer, name, MODEL) for name in names}

    def _order_module(self, composer: TorchComposer, refs: Mapping[str, TensorRef]) -> OrderedMap:
        """Return `module` in the module's own order, with placeholders at stage 3."""
        layout = self.layout
        module = OrderedMap()
        placeholder_names = {*self.trained, *self.frozen} if layout.stage == 3 else set()
        placeholder: TensorRef | None = None  # one for all placeholders
        source_order = (
            t.key.name for t in layout.wanted.tensors if t.key.name in refs or t.key.name in placeholder_names
        )
        for name in dict.fromkeys([*layout.described.module, *source_order]):
            if name in refs:
                module[name] = refs[name]
            elif name in placeholder_names or (layout.stage == 3 and name in self.shared):
                placeholder = placeholder or composer.value(
                    (0,), DTYPES.get(layout.described.dtype) or DTYPES["BF16"], b""
                )
                module[name] = placeholder

        # torch's own mark on a state dict (`_metadata`), if the source had one.
        for path, attributes in ordered(layout.wanted.hints):
            if path == ("module",):
                module.attributes = attributes
        return module

    def _list_shapes(self, job: ZeroJob, model: int) -> list[OrderedMap]:
        kind = tuple if any(group.ep for group in self.layout.stages[model]) else TorchSize
        shapes: list[OrderedMap] = []
        for group in job.stages[model]:
            shapes.append(OrderedMap((name, kind(shape)) for name, shape in group.shapes.items()))
        return shapes

    def _compose_fragment(self, composer: TorchComposer, name: str, data: int) -> TensorRef:
        """Return a rank's share of a frozen parameter."""
        row = self.layout.rows[TensorKey(name, MODEL)]
        line, size = shares({name: self._shape(name)}, self.layout.dp, data)
        return composer.tensor((size,), self.layout.wanted.tensors[row].dtype, self._storage_parts(line, MODEL))

    def _plain_values(self) -> dict[str, Any]:
        """Return the values of the module file: counters, sizes and configuration, then the client's state."""
        layout = self.layout
        extras = self.layout.extras
        values: dict[str, Any] = {key: extras.get(key) for key in _KNOWN}
        values |= {key: extras.get(key, 0) for key in _COUNTERS}
        if "global_samples" in extras:
            values["global_samples"] = extras["global_samples"]

        values["dp_world_size"] = layout.dp
        values["mp_world_size"] = layout.pp
        values["checkpoint_parallel_dimensions"] = {"pp_degree": layout.pp, "tp_degree": 1}
        values["ds_config"] = self._update_config()
        values["ds_version"] = extras.get("ds_version", VERSION)
        if self.experts and "num_experts" not in extras:
            values["num_experts"] = [self.experts[layer] for layer in self.layers]

        reserved_keys = (*values, HOME, OPTIMIZER, "module")
        return values | {key: item for key, item in extras.items() if key not in reserved_keys}

    def _update_config(self) -> dict[str, Any]:
        """Return the source's configuration with the new ZeRO stage."""
        config = self.layout.extras.get("ds_config")
        config = config if isinstance(config, Mapping) else {}
        zero = config.get("zero_optimization")
        zero = zero if isinstance(zero, Mapping) else {}
        return {**config, "zero_optimization": {**zero, "stage": self.layout.stage}}

    def _compose_client_state(self, composer: TorchComposer) -> Iterator[tuple[Path, TensorRef]]:
        """Yield (path, tensor) of the client's state; averages are under `ema`.

        Tensors that DeepSpeed must not load (random states of other ranks) are put under a key that it ignores.
        """
        layout = self.layout
        is_deepspeed = layout.wanted.source_format == "deepspeed"
        source_unused = layout.extras.get(UNUSED)
        unused = {*(source_unused if isinstance(source_unused, Mapping) else ()), *files.LAYOUT_KEYS}
        for tensor in layout.wanted.tensors:
            if tensor.key.state == EMA:
                yield (EMA, tensor.key.name), self._compose_whole(composer, tensor.key.name, EMA)
            elif tensor.key.state == EXTRAS:
                path = tensor.path if is_deepspeed and tensor.path else (tensor.key.name,)
                is_stale = layout.moved and path[0] != UNUSED and is_random(str(path[0]))
                if is_stale or path[0] in unused:
                    path = (UNUSED, *path)
                yield path, self._compose_whole(composer, tensor.key.name, EXTRAS)

    def _layer_files(self) -> Iterator[TargetFile]:
        """Yield the layer files, which do not depend on the stages: each stage reads the files of its layers."""
        described = self.layout.described
        model_names = set(self.model)
        names_by_layer: dict[int, list[tuple[str, str]]] = {}
        for name in dict.fromkeys([*(n for n in described.module if n in model_names), *self.model]):
            index, local = layer_and_local(name, described.tied)
            names_by_layer.setdefault(index, []).append((name, local))
        for index, names in sorted(names_by_layer.items()):
            composer = TorchComposer()
            state = OrderedMap((local, self._compose_whole(composer, name, MODEL)) for name, local in names)
            yield composer.file(files.LAYER.format(layer=index), state)

    def _expert_files(self) -> Iterator[TargetFile]:
        """Yield a file for each expert of each MoE layer."""
        names_by_expert: dict[tuple[int, int], list[str]] = {}
        numbers = {prefix: number for number, prefix in enumerate(self.layers)}
        for name in self.model:
            expert = expert_name_of(name)
            if expert:
                names_by_expert.setdefault((numbers[expert.layer], expert.number), []).append(name)
        for (layer, number), names in sorted(names_by_expert.items()):
            composer = TorchComposer()
            tensors = {name: self._compose_whole(composer, name, MODEL) for name in names}
            yield composer.file(files.EXPERT.format(layer=layer, expert=number, model=0), tensors)

    # -- the optimizer -------------------------------------------------------------------------------------------------

    def _plain_optimizer(self, composer: TorchComposer, model: int, expert: int = 0) -> dict[str, Any] | None:
        """Return the optimizer of a stage and expert rank without ZeRO, as torch stores it; None without parameters.

        Groups list the parameters' names in addition to their numbers. If the source had DeepSpeed's 16-bit wrapper, or
        there are fp32 masters, the optimizer is put into that wrapper.
        """
        layout = self.layout
        numbers: dict[str, int] = {}
        groups = []
        masters = []

        # Parameters are numbered through all groups, as torch does.
        for group in layout.stages[model]:
            names = global_names(select_first_rank(group.names, group.ep), expert) if group.ep else group.names
            group_numbers = [numbers.setdefault(name, len(numbers)) for name in names]
            groups.append({**group.options, "params": group_numbers, "param_names": list(names)})
            with_master = [name for name in names if layout.row(name, MASTER) is not None]
            masters.append(
                [self._compose_whole(composer, name, MASTER)._replace(requires_grad=True) for name in with_master]
            )
        if not numbers:
            return None

        state: dict[int, dict[str, TensorRef]] = {number: {} for number in numbers.values()}
        for tensor in layout.wanted.tensors:
            if tensor.key.state in layout.states and tensor.key.name in numbers:
                state[numbers[tensor.key.name]][tensor.key.state] = self._compose_whole(composer, *tensor.key)
        inner = {"state": state, "param_groups": groups}

        wrapper = self.options.wrapper
        if wrapper is None and not any(masters):
            return inner
        return {**(wrapper or {}), "optimizer_state_dict": inner, "fp32_groups": masters}

    def _optimizer_file(self, name: str, job: ZeroJob, data: int, model: int) -> TargetFile:
        """Return a rank's optimizer file: fp32 weights and moments as flat tensors, with DeepSpeed's values about
        them."""
        layout = self.layout
        composer = TorchComposer()
        groups = layout.stages[model]
        arrays = job.arrays(data, model)

        # The order in which tensors are composed is that of the storages in the file: stage 3 has moments first.
        flat: list[TensorRef] = []
        states: dict[int, Any] = {}
        options = [{**group.options, "params": list[int]()} for group in groups]
        for number, array in enumerate(arrays):
            options[array.group]["params"].append(number)
            if layout.stage == 3:
                states[number] = self._compose_moments(composer, groups[array.group], array)
            size = array.size if layout.plain_bf16 else array.size - array.spare
            flat.append(self._compose_flat(composer, array, MASTER, size)._replace(requires_grad=True))
            if layout.stage != 3:
                states[number] = self._compose_moments(composer, groups[array.group], array)

        base = {"state": {n: state for n, state in states.items() if state}, "param_groups": options}
        version = layout.extras.get("ds_version", VERSION)
        state = self._arrange_state(base, flat, arrays, version)
        return composer.file(
            name, {"optimizer_state_dict": state, "ds_config": self._update_config(), "ds_version": version}
        )

    def _arrange_state(
        self, base: dict[str, Any], flat: list[TensorRef], arrays: Sequence[FlatArray], version: Any
    ) -> dict[str, Any]:
        """Return `optimizer_state_dict`, with the keys in the order in which each of DeepSpeed's optimizers writes
        them."""
        stage = {"zero_stage": Symbol(STAGE, (self.layout.stage,))}
        if self.layout.stage == 3:
            return {
                **stage,
                **self._other_scalars("loss_scaler", "dynamic_loss_scale", "overflow"),
                "partition_count": self.layout.dp,
                "optimizer_state_dict": base,
                "fp32_flat_groups": flat,
            }
        is_plain_bf16 = self.layout.plain_bf16
        scaling = () if is_plain_bf16 else ("loss_scaler", "dynamic_loss_scale", "overflow")
        alignment = {} if is_plain_bf16 else {"param_alignment_paddings": [list(array.gaps) for array in arrays]}
        return {
            **self._other_scalars(*scaling, "clip_grad"),
            "base_optimizer_state": base,
            "single_partition_of_fp32_groups": flat,
            **({} if is_plain_bf16 else stage),
            "group_paddings": [array.spare for array in arrays],
            **alignment,
            "partition_count": [array.partitions for array in arrays],
            "ds_version": version,
            "param_slice_mappings": [_map_slices(array) for array in arrays],
        }

    def _other_scalars(self, *keys: str) -> dict[str, Any]:
        """Return the scalars of the whole optimizer: the source's, or DeepSpeed's defaults."""
        stated = {key: item for key, item in self.options.rest.items() if key not in ("state", "ds_version", WRAPPER)}
        defaults = {"loss_scaler": None, "dynamic_loss_scale": False, "overflow": False}
        scalars = {key: stated.get(key, defaults.get(key)) for key in keys if key in stated or self.layout.stage == 3}
        scalars |= {key: item for key, item in stated.items() if key not in keys}
        scaler = scalars.get("loss_scaler")
        if "loss_scaler" in scalars and not isinstance(scaler, Opaque):
            state = scaler if isinstance(scaler, Mapping) else {"cur_scale": 1.0, "dynamic": False}
            scalars["loss_scaler"] = files.opaque({"class": LOSS_SCALER, **state})
        return scalars

    def _compose_moments(self, composer: TorchComposer, group: ZeroGroup, array: FlatArray) -> dict[str, Any]:
        """Return the states of one flat group: scalars first, in the order of torch's optimizers."""
        layout = self.layout
        moments: dict[str, Any] = {}

        # One step a group: folded from the source's step tensors, or a number among its scalars.
        step_name = f"group.{group.number}"
        if layout.row(step_name, STEP) is not None:
            moments[STEP] = self._compose_whole(composer, step_name, STEP)
        for key, value in group.scalars.items():
            dtype = self.options.dtypes.get(key, "")
            raw = files.scalar_bytes(value, dtype)
            if key not in moments:
                moments[key] = composer.value((), DTYPES[dtype], raw) if raw is not None else value

        first = next(iter(array.names), "")
        for state in layout.states:
            if layout.row(first, state) is not None:
                moments[state] = self._compose_flat(composer, array, state, array.size)
        return moments

    def _compose_flat(self, composer: TorchComposer, array: FlatArray, state: str, size: int) -> TensorRef:
        """Return a flat tensor of `size` elements with the parts of its parameters, and zeros between them."""
        layout = self.layout
        row = next((layout.rows[TensorKey(name, state)] for name in array.names), None)
        dtype = DTYPES["F32"] if row is None else layout.wanted.tensors[row].dtype
        return composer.tensor((size,), dtype, self._storage_parts(array.line, state))

    def _storage_parts(self, line: FlatLine[str], state: str) -> list[StoragePart]:
        rows = self.layout.rows
        return [StoragePart(rows[TensorKey(part.of, state)], part.box, part.at) for part in line.parts()]


def _map_slices(array: FlatArray) -> OrderedMap:
    """Return `param_slice_mappings` of a flat tensor: DeepSpeed's record of where each parameter begins."""
    addresses = []
    for name, (numel, start) in array.slices().items():
        addresses.append((name, Opaque(_FRAGMENT, (), {"numel": numel, "start": start})))
    return OrderedMap(addresses)
