"""`megatron`: Megatron's checkpoints before torch_dist (`--ckpt-format torch`): a folder for each rank, with its
pickles.

The one idea: a rank's file is a piece of the model under the rank's own names. Coordinates (from the folder), layers
(from the stage) and experts (from the expert rank) turn names and shapes into boxes of logical tensors; the optimizer's
nameless arrays follow the model's order. No code in a pickle is run: `args` is read as data.

    iter_0000002/mp_rank_01_001/model_optim_rng.pt  {"model": {"decoder.layers.0.mlp.linear_fc1.weight": (48, 32)}, ...}
    -> decoder.layers.2.mlp.linear_fc1.weight (96, 32), rows 24..48 and 72..96

Specification (NVIDIA/Megatron-LM, core 0.5 to 0.19; 0.16.1 `training/checkpointing.py` where nothing else is stated):

* `latest_checkpointed_iteration.txt` in the root: a decimal iteration or `release`; the checkpoint is in `iter_%07d` or
  `release`, in folders `mp_rank_TT[_PPP][_EEE]` (`megatron.legacy.folders`).
* `model_optim_rng.pt`, a zip of `torch.save`: `args` (Namespace), `checkpoint_version` 3.0, `iteration`, `model` (or
  `model0`, `model1`, ... of a virtual pipeline), `optimizer`, `opt_param_scheduler`, `rng_state`,
  `num_floating_point_operations_so_far`; other keys are copied unchanged.
* Names and order: `megatron.stored_names`; layers: `megatron.stages`; boxes: `megatron.rules`. `_extra_state` holds
  None, or FP8 scales (`megatron.extra_states`). A tied head on a later stage is a copy of the embedding, as is the
  embedding of an MTP stage.
* Optimizer (`megatron.optimizer`): without the distributed one `{optimizer: {state, param_groups},
  fp32_from_fp16_params}`, or the inner dict alone for fp32 models; with it the groups alone, and `distrib_optim.pt`
  with flat buffers (`megatron.optimizer`). With parallel experts both are lists [dense, experts].
* Muon and Lion are a chain of two optimizers, [matrices, rest]; a layer-wise one distributes the parameters over data
  ranks, in `layer_wise_optimizer_<data rank>.pt`, which is read and written as the plain chain (`megatron.chains`).
* verl's adapters are files without rank folders, `mp_rank_TT[_PPP][_EEE]_adapter.pt` (`megatron.legacy.adapter_files`;
  only read).
* Values that Megatron has no place for (an EMA, states of a foreign optimizer) are stored under a key of ours, `ckpt`,
  which Megatron ignores: {"states": {chunk: {state: {the rank's name: tensor}}}, "tensors": {state: {name: tensor}},
  "extras": {...}, "vocab_rows": N, "vocab_tail": {state: {name: rows}}} (`megatron.wanted` explains the last two).

States: model, master (fp32), exp_avg, exp_avg_sq, step (a tensor a parameter, where torch's Adam wrote one).
RNG states are extras, by folder, as bytes. Cost: a pickle a rank. What it does not do: names of the pre-core classes
(`language_model.encoder...`), buckets of before February 2024; writing the files of
a layer-wise optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckpt_tool.core.catalog import Catalog
from ckpt_tool.formats.base import AS_IS, Evidence, Fitted, Holds, ReadOptions, Specificity
from ckpt_tool.storage.source import Tree
from ckpt_tool.systems.megatron.legacy.folders import rank_folders, rank_in
from ckpt_tool.systems.megatron.legacy.verl_files import adapter_files, states_beside

if TYPE_CHECKING:  # reading needs none of these
    from ckpt_tool.core.hints import Hints
    from ckpt_tool.core.layout import Layout
    from ckpt_tool.core.target import LayoutWish, Target, Wanted
    from ckpt_tool.core.tensor import LogicalTensor


class _Megatron:
    """The format. See the module."""

    name = "megatron"
    holds = Holds(
        all_states=True,
        extras=True,
        mesh=("tp", "pp", "vpp", "ep", "etp", "dp", "cp"),
        replicas=True,
        zero=1,
        dialect="megatron",
        own_layout=True,
        uses_options=frozenset({"spec", "pp-split"}),
        dtypes=frozenset(("F4", "F6_E2M3", "F6_E3M2")),
        all_experts=True,
    )

    def detect(self, tree: Tree) -> Evidence | None:
        """Recognise rank folders, or verl's files of adapters, by their names; verl's `dist_ckpt/` belongs to the
        adapter.
        """
        folders = rank_folders(tree)
        adapters = adapter_files(tree)
        if adapters and not folders:
            why = f"{len(adapters)} files of adapters, {next(iter(adapters))} first"
            return Evidence(why, Specificity.SIGNED, frozenset(adapters) | states_beside(tree))
        if not folders:
            return None
        return Evidence(
            f"{len(folders)} rank folders with model_optim_rng.pt, {next(iter(folders))} first",
            files=frozenset(
                path for path in tree.listing() if path.rpartition("/")[0] in folders and path.endswith(".pt")
            ),
        )

    def read(self, tree: Tree, options: ReadOptions = AS_IS) -> Catalog:
        """The catalog, from the pickles of every rank. Raises Incomplete (E0302 ranks, layers, experts; E0309 boxes),
        InconsistentCheckpoint (E0305 ranks that contradict each other, E2004 an optimizer that does not fit, E0379
        steps), UnmappedTensor E2003, InputError E0303 (forms of other versions), and what the containers raise."""
        if not rank_folders(tree) and adapter_files(tree):
            from ckpt_tool.systems.megatron.legacy.adapter_files import read_files
            from ckpt_tool.systems.megatron.legacy.adapter_states import with_states

            return with_states(tree, read_files(tree, options.lora_alpha), options)
        from ckpt_tool.systems.megatron.legacy.read import read_ranks

        return read_ranks(tree)

    def rank_of(self, path: str, mesh: Mapping[str, int]) -> Mapping[str, int] | None:
        """Return tp, and pp and ep if the folder's name has them."""
        return rank_in(path, mesh)

    def fit(
        self, tensors: Sequence[LogicalTensor], extras: Mapping[str, Any], hints: Hints, wish: LayoutWish
    ) -> Fitted:
        """Split main weights (Megatron-FSDP's model) into master and model. See `megatron.main_weights`."""
        from ckpt_tool.systems.megatron.main_weights import with_masters

        return with_masters(tensors, extras)

    def target(self, wanted: Wanted, layout: Layout) -> Target:
        """Return all files of the output; see `systems.megatron.legacy.target`."""
        from ckpt_tool.systems.megatron.legacy.target import legacy_target

        return legacy_target(wanted)


FORMAT = _Megatron()
