"""`deepspeed`: what `DeepSpeedEngine.save_checkpoint` writes: ZeRO 0 to 3, pipelines, DeepSpeed's own experts.

The one idea: every rank's optimizer file is one flat line of numbers a group, and the module files say in which order
which parameters stand in that line. So each parameter's fp32 weight and moments are a few runs of bytes in a few files,
whatever the ranks were, and can be laid out for any other number of them.

    2 ranks of ZeRO 1, parameters a (3 x 2) and b (4)      rank 0 [a a a a a a]  ->  a [master] = rank 0, 0..6
    flat line 10, padded to 12, partitions of 6            rank 1 [b b b b 0 0]      b [master] = rank 1, 0..4

Specification (DeepSpeed 0.19.8; `runtime/engine.py`, `runtime/zero/stage_1_and_2.py`, `runtime/zero/stage3.py`,
`runtime/bf16_optimizer.py`, `runtime/pipe/module.py`, `utils/groups.py`; checked on files of that version):

* `ROOT/latest` names the folder of the last save, `global_step3/`; file names: `deepspeed.files`.
* Module file: `module` (name -> tensor; 16-bit at ZeRO 0-2, placeholders without elements at 3, None with a pipeline),
  `buffer_names`, `param_shapes` (for each flat group name -> shape, in flat order), `frozen_param_shapes` and
  `frozen_param_fragments` (stage 2: whole tensors, 3: a share a rank, 1: None, there the module alone has them),
  `shared_params` {alias: kept name}, `lr_scheduler`, counters, world sizes, `ds_config`, `ds_version`, then all that
  the client gave.
* Optimizer file: `optimizer_state_dict` with, at 1 and 2, `single_partition_of_fp32_groups` (fp32, cut by the padding;
  not cut by BF16_Optimizer, which states no `zero_stage`), `base_optimizer_state` {state: {group: {step, exp_avg,
  ...}}, param_groups}, `partition_count`, `group_paddings`, `param_alignment_paddings`, `param_slice_mappings`; at 3
  `fp32_flat_groups`, a nested `optimizer_state_dict`, one flat group for each sub-group. Flat rules: `deepspeed.flat`.
* ZeRO off: the optimizer in the module file as torch has it, in DeepSpeed's wrapper for 16 bits (`deepspeed.off`), or a
  file for each expert rank (`deepspeed.off_experts`); there `step` is a tensor a parameter.
* Experts: groups with `moe: True`, cut over the ranks that hold the same experts (`deepspeed.moe`); names are the
    rank's own.
* Pipelines: one model rank a stage, layer files, tied modules in several stages (`deepspeed.pipe`).

Logical names are DeepSpeed's, experts under global numbers. States: `model` (the module: 16-bit weights, buffers,
frozen parameters), `master` (fp32), `exp_avg`, `exp_avg_sq`, ... At stage 3 no 16-bit weights exist: `model` has
buffers and frozen parameters, DeepSpeed rounds the rest from `master` (`--as-model master` makes it the model). `step`
is one number a group and stands in the extras (`optimizer.scalars`); ranks and groups that disagree are an error. What
a writer needs to know beside the values travels in the extras under `deepspeed` (`deepspeed.described`). Writing:
`deepspeed.target`.

Cost: every file's pickle and directory; a few microseconds a parameter and rank. What it does not do: tensor parallel
ranks, elastic checkpoints, AutoEP, NVMe: each is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckpt_tool.core.catalog import Catalog, Note
from ckpt_tool.core.faults import by_file
from ckpt_tool.core.layout import Layout
from ckpt_tool.core.mesh import Mesh
from ckpt_tool.core.target import Target, Wanted
from ckpt_tool.core.tensor import LogicalTensor, TensorKey
from ckpt_tool.errors import InconsistentCheckpoint, UnknownFormat
from ckpt_tool.formats.base import Evidence, Fitted, Holds
from ckpt_tool.formats.deepspeed.described import HOME, OPTIMIZER, Described
from ckpt_tool.formats.deepspeed.files import sort_files
from ckpt_tool.formats.deepspeed.module import Module
from ckpt_tool.formats.deepspeed.off import Off, optimizer_off
from ckpt_tool.formats.deepspeed.off_experts import optimizer_of_experts
from ckpt_tool.formats.deepspeed.rank import DISAGREE, read_module
from ckpt_tool.formats.deepspeed.read import Reader, same
from ckpt_tool.storage.source import Tree

_LAYOUT = ("dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions")


class _DeepSpeed:
    """The format. See the module."""

    name = "deepspeed"
    holds = Holds(
        mesh=("pp", "ep", "dp"),
        zero=1,
        dialect="keep",
        own_layout=True,
        heeds=frozenset({"zero", "pp-split"}),
        dtypes=frozenset(("F4", "F6_E2M3", "F6_E3M2")),
    )

    def detect(self, tree: Tree) -> Evidence | None:
        """By file names alone."""
        if tree.single is not None:
            return None
        files = sort_files(tree.names())
        if not files:
            return None
        return Evidence(
            f"{len(files.optim)} optimizer files and {len(files.model) + len(files.model3)} module files of DeepSpeed",
            files=frozenset(files.all()),
        )

    def read(self, tree: Tree, options: Mapping[str, object]) -> Catalog:
        """The catalog, from pickles and directories alone.

        Raises Incomplete E0302 (files, experts missing), InconsistentCheckpoint E0359 (ranks that contradict each
        other), CorruptFile E0355, InputError E0356 (kinds that are refused by name), and what containers and pickles
        raise.
        """
        files = sort_files(tree.names())
        if not files:
            raise UnknownFormat(
                "no file of DeepSpeed lies directly in the folder",
                code="E0393",
                path=tree.display(),
                hint="pass the folder that holds mp_rank_00_model_states.pt, or the one above it with the "
                "file `latest`",
            )
        reader = Reader(tree, files)
        reader.open()
        if reader.optimizers:
            reader.flat_tensors()
        module = Module(reader)
        module.read()
        return _catalog(reader, module)

    def fit(self, tensors: Sequence[LogicalTensor], extras: Mapping[str, Any], options: Mapping[str, Any]) -> Fitted:
        """The tensors that the ZeRO stage keeps. See `deepspeed.fit`."""
        from ckpt_tool.formats.deepspeed.fit import fit

        return fit(tensors, extras, options)

    def target(self, wanted: Wanted, layout: Layout) -> Target:
        """Every rank's files, for the degrees in `wanted.options`. See `deepspeed.target`."""
        from ckpt_tool.formats.deepspeed.target import target

        return target(wanted)


FORMAT = _DeepSpeed()


def _catalog(reader: Reader, module: Module) -> Catalog:
    tensors: dict[TensorKey, LogicalTensor] = module.tensors()
    tensors |= reader.flat.tensors(list(reader.states))
    optimizer: dict[str, Any] = {}
    if reader.optimizers:
        optimizer = _optimizer(reader)
    else:
        off = _off(reader, module)
        optimizer, tensors = off.options, tensors | off.tensors
        reader.notes += off.notes
        reader.stages = off.stages
    tensors |= module.clients
    extras = {key: item for key, item in reader.modules[min(reader.modules)].values.items() if key not in _LAYOUT}
    described = _described(reader, module)
    if optimizer:
        extras[OPTIMIZER] = optimizer
    extras[HOME] = described.to_extras()
    degrees = {"tp": 1, "pp": reader.pp, "vpp": 1, "ep": reader.ep, "etp": 1, "dp": reader.dp, "cp": 1}
    notes = [*reader.notes, *_notes(reader, module)]
    return Catalog(
        "deepspeed",
        tensors,
        extras,
        Mesh.of_degrees(degrees),
        files=reader.files.all(),
        notes=tuple(notes),
        unsafe=tuple(reader.unsafe),
        hints={"degrees": degrees, "globals": list(reader.globals)},
    )


def _off(reader: Reader, module: Module) -> Off:
    """The optimizer without ZeRO: in the module files, or one for each expert rank."""
    if not reader.files.expp:
        return optimizer_off([file for _, file in sorted(reader.modules.items())], module.parameters())
    expp = sorted(reader.files.expp.items())
    read = by_file((name for _, name in expp), lambda name: read_module(reader.tree, name))
    files = {rank: read[name] for rank, name in expp}
    for file in files.values():
        reader.unsafe += file.unsafe
        reader.globals.update(dict.fromkeys(file.globals))
    for module_file in reader.modules.values():
        module_file.values.pop("optimizer", None)  # expert rank 0's once more
    off = optimizer_of_experts(files, module.parameters(), module.experts(), reader.tree.display())
    reader.ep = len(files)
    if reader.dp % reader.ep:
        raise InconsistentCheckpoint(
            f"{reader.ep} expert ranks among {reader.dp} data ranks",
            code=DISAGREE,
            path=reader.tree.display(),
            hint="the files come from two runs",
        )
    return off


def _described(reader: Reader, module: Module) -> Described:
    first = next(iter(reader.optimizers.values()), None)
    names = {prefix: number for number, prefix in module.moe.items()}
    return Described(
        zero_stage=reader.stage if first else 0,
        plain_bf16=bool(first and first.plain_bf16),
        prefix=min(reader.files.prefixes, default=""),
        dtype=module.dtypes.most_common(1)[0][0] if module.dtypes else "",
        aligned=bool(reader.zero_config().get("parameter_alignment")),
        round_robin=reader.round_robin(),
        module=tuple(dict.fromkeys(module.order)),
        buffers=tuple(module.buffers),
        shared=module.shared,
        frozen=tuple(module.frozen()) if first else (),
        stages=tuple(tuple(tuple(group) for group in stage) for stage in reader.stages) if reader.files.layers else (),
        tied=module.layers,
        moe=tuple(sorted(names, key=names.__getitem__)),
    )


def _optimizer(reader: Reader) -> dict[str, Any]:
    """The optimizer's options and scalars, once for each parameter group. Raises InconsistentCheckpoint E0359 where
    ranks or sub-groups disagree in a scalar."""
    files = list(reader.optimizers.values())
    scalars: list[dict[str, Any]] = [{} for _ in files[0].param_groups]
    dtypes: dict[str, str] = {}
    for file in files:
        for group in file.groups:
            mine = scalars[group.options]
            dtypes |= group.dtypes
            for key, value in group.scalars.items():
                if not same(mine.setdefault(key, value), value):
                    raise InconsistentCheckpoint(
                        f"{key} is {value!r}, but {mine[key]!r} on another rank",
                        code=DISAGREE,
                        path=file.path,
                        hint="the files come from two steps: fetch one save whole",
                    )
    groups = [{**options, "params": names} for options, names in zip(files[0].param_groups, reader.params, strict=True)]
    version = reader.modules[min(reader.modules)].values.get("ds_version")
    rest = {key: item for key, item in files[0].rest.items() if key != "ds_version" or item != version}
    return {"param_groups": groups, "scalars": scalars, "scalar_dtypes": dtypes, **rest}


def _notes(reader: Reader, module: Module) -> list[Note]:
    notes = []
    if module.shared:
        shown = ", ".join(f"{alias} = {kept}" for alias, kept in list(module.shared.items())[:8])
        notes.append(Note("N-tied", f"{len(module.shared)} names share another parameter: {shown}"))
    if reader.stage == 3:
        notes.append(
            Note(
                "N-zero3",
                "ZeRO 3 keeps no 16-bit weights: DeepSpeed rounds them from the fp32 `master`; the state `model` holds "
                "buffers and frozen parameters alone (write the weights as a model with --as-model master)",
            )
        )
    return notes
