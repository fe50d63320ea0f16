"""`megatron-dist`: Megatron's `torch_dist` checkpoints: model, optimizer and job state, without Megatron installed.

The one idea: the folder is a DCP (`systems.torch.dcp.format`) whose keys, shapes and objects follow Megatron's rules;
reading undoes the rules (stacked layers, stacked experts, separate gate and up, flat optimizer buckets), so that every
parameter has one name and one shape, whatever degrees wrote it; writing applies them again.

    decoder.layers.mlp.linear_fc1.weight  BF16 (4, 96, 32)  in boxes (1, 24, 32)    4 layers, TP 2, gate and up
    -> decoder.layers.0.mlp.linear_fc1.weight (96, 32) of 4 chunks, ... decoder.layers.3.mlp.linear_fc1.weight
    optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight                     -> ... [exp_avg]

Specification (NVIDIA/Megatron-LM, core 0.16.1 where nothing else is stated; `megatron/core/`):

* Folder (`megatron.torch_dist.folder`): `.metadata`, `__R_S.distcp`, `common.pt` (core <= 0.18) or an item
  `common_state/shard_0_1` (core >= 0.19), `metadata.json` last. A parent folder's `latest_checkpointed_iteration.txt`
  names the iteration.
* `.metadata`: torch's, with attributes of Megatron's own: `all_local_plans` (0.16), `mcore_data` (0.8-0.15); core 0.15
  pickles a subclass `MCoreMetadata`. `planner_data` is None: keys do not nest.
* Keys (`megatron.torch_dist.keys`), objects (`megatron.torch_dist.state`). Only the first replica
  of a shard is stored. Gate and up of a gated fc1 are boxes of one tensor [gate; up]. Tied weights are stored once.
* Optimizer, by `content_metadata.distrib_optim_sharding_type` of the common state:
  none: `optimizer.state.{fp32_param,exp_avg,exp_avg_sq}.KEY`; one step for all in the common state (`common_step`);
  `fully_reshardable` (0.15-): `optimizer.state.{param,...}.KEY`;
  `fully_sharded_model_space` (0.6-0.15): `optimizer.state.{fp32_param,...}.KEY`, flattened ranges;
  where data ranks hold slices of the last dim of a tensor that is stored flattened: (X, Y) whose ranks hold (x, y) is
  (X/x, Y/y, x*y). So (128, 32) over 2 ranks is (2, 1, 2048), and the piece at (1, 0, 1000) of 1048 elements begins at
  element 1000 of the lower half: rows 95.25-127, at most 2n - 1 boxes. The true shape is in `.metadata`, attribute
  `mcore_data`; one-dimensional tensors are stored so since core 0.11, before that in their own shape. Source: core 0.14
  `dist_checkpointing/strategies/torch.py` (`mcore_data`), removed from core 0.16 (pull request 2126);
  `dp_reshardable` (before 0.15: `fully_sharded_bucket_space`), the default: flat buckets without names
  (`megatron.torch_dist.flat`); `dp_zero_gather_scatter` (core <= 0.14): the same in one object a rank. Hyperparameters
  are in the common state, or with flat buckets in an object for each rank.
* An adapter without its base (a LoRA run of Megatron-Bridge): the same keys below `.adapter.`, see
  `systems.megatron.adapter`.
* Steps are in `param_groups`. RNG states are objects keyed by pipeline and tensor rank.

Reading: `megatron.torch_dist.read`; writing: `megatron.torch_dist.target`. Cost: 0.1 ms a box. What it does not do:
zarr (core <= 0.15 can read it), Megatron-FSDP's `fsdp_dtensor` (`megatron-fsdp`), FP8 scales in extra states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckpt_tool.core.catalog import Catalog
from ckpt_tool.formats.base import AS_IS, Evidence, Fitted, Holds, ReadOptions, Specificity
from ckpt_tool.formats.dcp_container.dcp_items import rank_of
from ckpt_tool.storage.source import Tree
from ckpt_tool.systems.megatron.torch_dist import folder as megatron_dist_folder

if TYPE_CHECKING:  # reading needs none of these
    from ckpt_tool.core.hints import Hints
    from ckpt_tool.core.layout import Layout
    from ckpt_tool.core.target import LayoutWish, Target, Wanted
    from ckpt_tool.core.tensor import LogicalTensor


class _MegatronDist:
    """The format. See the module."""

    name = "megatron-dist"
    holds = Holds(
        all_states=True,
        extras=True,
        mesh=("tp", "pp", "ep", "etp", "dp", "cp", "vpp"),
        replicas=False,
        zero=0,
        dialect="megatron",
        own_layout=True,
        uses_options=frozenset({"spec", "pp-split"}),
        # Megatron's `load_args_from_checkpoint` requires the iteration; weights without one get 0
        with_args={"checkpoint_version": 3.0, "iteration": 0},
        dtypes=frozenset(("F4", "F6_E2M3", "F6_E3M2")),
        all_experts=True,
        run_config=True,
    )

    hashed = staticmethod(megatron_dist_folder.hashed)
    late_faults = staticmethod(megatron_dist_folder.late_faults)

    def detect(self, tree: Tree) -> Evidence | None:
        """Recognise the folder by `metadata.json`, or by `common.pt` next to items."""
        found = megatron_dist_folder.find(tree)
        if found is None:
            return None
        return Evidence(found[1], Specificity.OWN, megatron_dist_folder.files(tree, found[0]))

    def read(self, tree: Tree, options: ReadOptions = AS_IS) -> Catalog:
        """The catalog, from `.metadata`, the common state and the heads of the items; objects are read whole. Options:
        `require_checksums` (bool) refuses files without CRCs (E0397).

        Raises Incomplete (E0385 not finished, E0301 files missing, E0309 boxes),
        InconsistentCheckpoint (E0308 overlap, E0379 steps, E0389), CorruptFile (E2005 `integrity.json`), InputError
        (E0303 zarr), and what the containers raise. Flat buckets that do not fit are `unread` (E2004).
        """
        from ckpt_tool.systems.megatron.torch_dist.read import read_tree

        return read_tree(tree, options)

    def rank_of(self, path: str, mesh: Mapping[str, int]) -> Mapping[str, int] | None:
        """Return the global rank, the only one in the names of DCP's files."""
        return rank_of(path)

    def fit(
        self, tensors: Sequence[LogicalTensor], extras: Mapping[str, Any], hints: Hints, wish: LayoutWish
    ) -> Fitted:
        """Split main weights (Megatron-FSDP's model) into master and model. See `megatron.main_weights`."""
        from ckpt_tool.systems.megatron.main_weights import with_masters

        return with_masters(tensors, extras)

    def target(self, wanted: Wanted, layout: Layout) -> Target:
        """Return all files of the output; see `systems.megatron.torch_dist.target`."""
        from ckpt_tool.systems.megatron.torch_dist.target import dist_target

        return dist_target(wanted)


FORMAT = _MegatronDist()
