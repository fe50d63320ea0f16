"""`deepspeed`: what `DeepSpeedEngine.save_checkpoint` writes: ZeRO 0 to 3, pipelines, DeepSpeed's own experts.

The one idea: every rank's optimizer file has one flat tensor for each group, and the module files list the parameters
in it in their order. So each parameter's fp32 weight and moments are a few runs of bytes in a few files, whatever the
ranks were, and can be resharded to any other number of ranks.

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
  `fp32_flat_groups`, a nested `optimizer_state_dict`, one flat group for each sub-group. Flat rules: `deepspeed.job`.
* ZeRO off: the optimizer in the module file as torch has it, in DeepSpeed's wrapper for 16 bits, or a file for each
  expert rank (`deepspeed.zero.plain_optimizer`); there `step` is a tensor a parameter.
* Experts: groups with `moe: True`, cut over the ranks that hold the same experts (`deepspeed.job`); names are the
  rank's own (`deepspeed.stored_names`).
* Pipelines: one model rank a stage, layer files, tied modules in several stages (`deepspeed.stored_names`).

Logical names are DeepSpeed's, experts under global numbers. States: `model` (the module: 16-bit weights, buffers,
frozen parameters), `master` (fp32), `exp_avg`, `exp_avg_sq`, ... At stage 3 no 16-bit weights exist: `model` has
buffers and frozen parameters, DeepSpeed rounds the rest from `master` (`--as-model master` makes it the model). `step`
is one number for each group and is stored in the extras (`optimizer.scalars`); ranks and groups that disagree are an
error. Whatever else a writer needs to know is in the extras under `deepspeed` (`deepspeed.described`). Writing:
`deepspeed.zero.write`.

Cost: every file's pickle and directory; a few microseconds a parameter and rank. What it does not do: tensor parallel
ranks, elastic checkpoints, AutoEP, NVMe: each is refused with a message that names it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckpt_tool.core.catalog import Catalog
from ckpt_tool.core.hints import Hints
from ckpt_tool.core.tensor import LogicalTensor
from ckpt_tool.formats.base import AS_IS, Evidence, Fitted, Holds, ReadOptions
from ckpt_tool.storage.source import Tree
from ckpt_tool.systems.deepspeed.files import rank_in, sort_files

if TYPE_CHECKING:  # reading needs none of these
    from ckpt_tool.core.layout import Layout
    from ckpt_tool.core.target import LayoutWish, Target, Wanted


class _DeepSpeed:
    """The format. See the module."""

    name = "deepspeed"
    holds = Holds(
        mesh=("pp", "ep", "dp"),
        zero=1,
        dialect="keep",
        own_layout=True,
        uses_options=frozenset({"zero", "pp-split"}),
        dtypes=frozenset(("F4", "F6_E2M3", "F6_E3M2")),
        all_experts=True,
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

    def read(self, tree: Tree, options: ReadOptions = AS_IS) -> Catalog:
        """The catalog, from pickles and directories alone.

        Raises Incomplete E0302 (files, experts missing), InconsistentCheckpoint E0359 (ranks that contradict each
        other), CorruptFile E0355, InputError E0356 (kinds that are refused by name), and what containers and pickles
        raise.
        """
        from ckpt_tool.systems.deepspeed.zero.read import read

        return read(tree)

    def fit(
        self, tensors: Sequence[LogicalTensor], extras: Mapping[str, Any], hints: Hints, wish: LayoutWish
    ) -> Fitted:
        """The tensors that the ZeRO stage keeps. See `deepspeed.zero.layout`."""
        from ckpt_tool.systems.deepspeed.zero.layout import fit

        return fit(tensors, extras, wish)

    def rank_of(self, path: str, mesh: Mapping[str, int]) -> Mapping[str, int] | None:
        """dp, and mp: the model rank of the names."""
        return rank_in(path)

    def target(self, wanted: Wanted, layout: Layout) -> Target:
        """Every rank's files, for the degrees in `wanted.wish`. See `deepspeed.zero.write`."""
        from ckpt_tool.systems.deepspeed.zero.write import target

        return target(wanted)


FORMAT = _DeepSpeed()
