"""`megatron-fsdp`: what Megatron-LM and Megatron-Bridge save with Megatron-FSDP (`--ckpt-format fsdp_dtensor`).

The one idea: the folder is a plain DCP of nested dicts (`dcp_container.dcp_state`) whose names are those of live
modules: they are prefixed with the wrappers' names, a gated fc1 is cut into its halves, and the weights are the
optimizer's fp32 main weights.

    iter_0000002/.metadata, __R_0.distcp         no metadata.json, no common.pt; latest_checkpointed_iteration.txt above
    model.module.decoder.layers.0.mlp.linear_fc1.weight_w, ..._v                            F32 (20, 24) each
    -> decoder.layers.0.mlp.linear_fc1.weight (40, 24)
    optimizer.state.module.module.module.decoder.layers.0.mlp.linear_fc1.weight_w.exp_avg   -> ... [exp_avg]
    optimizer.param_to_group_meta.module.module.module.decoder...linear_fc1.weight.lr       -> extras: param_groups

Specification (NVIDIA/Megatron-LM core_v0.19.0 and main of August 2026, d98e8a64):

* Keys (`megatron.fsdp_dtensor.keys`): `model.module.`, and `optimizer.state.` with a `module.` for each of three
  wrappers (two where nothing computes in 16 bits); layers and experts have global numbers. Stages of a pipeline number
  theirs from 0 each and share names: such a save has lost layers (E2008). No `_extra_state`
  (`handle_fp8_extra_state_case`).
* Halves `_w` (gate) and `_v` (up) with `--swiglu`, in layers that are gated: weights and biases of dense, shared and
  single experts. Gated by another function (`--quick-geglu`) fc1 is whole. With tensor ranks a tensor that is whole and
  has halves or sections is what the ranks hold, one rank's behind the other's: [gate 0; up 0; gate 1; up 1].
* Sections of a gated delta net (`in_proj.weight.query`, ...) where Megatron-Bridge saved
  (`handle_gdn_in_state_dict` is called there alone), whole else. MLA's fused down projection is stored as its two parts
  since main; MTP's inner layer is `mtp_model_layer` in core 0.19.0 and `transformer_layer` since main.
* Model: float32 under `--bf16`: there is no separate master state. `megatron.main_weights` converts it exactly to and
  from the model and master of Megatron's other formats.
* Optimizer: every state of every parameter, `step` too (a scalar a parameter) with torch's AdamW; Apex's and
  Transformer Engine's count in the groups. `param_to_group_meta`: the hyperparameters of each parameter, an object
  each. One flat list for dense and expert parameters.
* Boxes: FSDP cuts its flat buffer at any row of a tensor, so a rank has any number of whole rows.
* The rest: `args`, `iteration`, `checkpoint_version`, `opt_param_scheduler.*`, `rng_state.(STAGE, TENSOR RANK).*`.
  Megatron-Bridge has no `args`, but a run_config.yaml in the folder.

`megatron-fsdp` alone (the package on PyPI) saves a user's own state dict: that is `dcp`.

Sources: `megatron/training/checkpointing.py` (`save_checkpoint`, `preprocess_fsdp_dtensor_state_dict`,
`_load_base_checkpoint`), `core/transformer/fsdp_dtensor_checkpoint.py`, `core/optimizer/distrib_optimizer.py`
(`sharded_param_state_fsdp_dtensor`), `core/distributed/fsdp/`; NVIDIA-NeMo/Megatron-Bridge main of August 2026
`training/checkpointing.py`. Reading: `megatron.fsdp_dtensor.read`; writing: `megatron.fsdp_dtensor.target`. Cost: as
`dcp`, and 60 us a hyperparameter. What it does not do: split a fused projection that core 0.19.0 stored whole (E2007).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckpt_tool.core.catalog import Catalog
from ckpt_tool.formats.base import AS_IS, Evidence, Fitted, Holds, ReadOptions, Specificity
from ckpt_tool.formats.dcp_container.dcp_items import rank_of
from ckpt_tool.storage.source import Tree
from ckpt_tool.systems.megatron.fsdp_dtensor import folder as fsdp_folder

if TYPE_CHECKING:  # reading needs none of these
    from ckpt_tool.core.hints import Hints
    from ckpt_tool.core.layout import Layout
    from ckpt_tool.core.target import LayoutWish, Target, Wanted
    from ckpt_tool.core.tensor import LogicalTensor


class _MegatronFsdp:
    """The format. See the module."""

    name = "megatron-fsdp"
    holds = Holds(
        all_states=True,
        extras=True,
        mesh=("tp", "ep", "etp", "dp", "cp"),
        replicas=False,
        zero=3,
        dialect="megatron",
        own_layout=True,
        uses_options=frozenset({"spec"}),
        # what `load_args_from_checkpoint` asks for; weights without an iteration have 0
        with_args={"checkpoint_version": 3.0, "iteration": 0},
        dtypes=frozenset(("F4", "F6_E2M3", "F6_E3M2")),
        all_experts=True,
    )

    def detect(self, tree: Tree) -> Evidence | None:
        """Recognise the folder by the keys at the beginning of `.metadata`."""
        found = fsdp_folder.find(tree)
        if found is None:
            return None
        return Evidence(found[1], Specificity.OWN, fsdp_folder.files(tree, found[0]))

    def read(self, tree: Tree, options: ReadOptions = AS_IS) -> Catalog:
        """The catalog, from `.metadata` and the heads of the items; objects and RNG states are read whole. Options:
        `require_checksums`; `lenient`: parameters without any state are a note.

        Raises Incomplete (E0301 files, E0302 states, E0309 boxes and halves, E0385 not finished),
        InconsistentCheckpoint (E0308 overlap, E0389, E2008 stages that share names), InputError (E2007 a fused
        tensor), and what the containers raise.
        """
        from ckpt_tool.systems.megatron.fsdp_dtensor.read import read_tree

        return read_tree(tree, options)

    def rank_of(self, path: str, mesh: Mapping[str, int]) -> Mapping[str, int] | None:
        """Return the global rank, the only one in the names of DCP's files."""
        return rank_of(path)

    def fit(
        self, tensors: Sequence[LogicalTensor], extras: Mapping[str, Any], hints: Hints, wish: LayoutWish
    ) -> Fitted:
        """Make the fp32 main weights the model. See `megatron.main_weights`."""
        from ckpt_tool.systems.megatron.main_weights import as_the_model

        return as_the_model(tensors)

    def target(self, wanted: Wanted, layout: Layout) -> Target:
        """Return all files of the output; see `megatron.fsdp_dtensor.target`."""
        from ckpt_tool.systems.megatron.fsdp_dtensor.target import fsdp_target

        return fsdp_target(wanted)


FORMAT = _MegatronFsdp()
