"""`paddle`: what `paddle.save` writes a rank: `.pdparams` and `.pdopt`, with and without `model_meta.json`
(sharding_io).

The one idea: a rank's file is a flat dict under the model's global (single-card) names, holding the rank's parts;
coordinates (from the file names), rules by name (`paddle.rules`) and the sharding strategy turn parts into boxes of
logical tensors, and tables of names map the optimizer's accumulators to parameters. No pickle is executed.

    model_state.tp01.pdparams   {"model.layers.0.mlp.up_proj.weight": (32, 24) uint16, ...}
    optimizer.tp01.pdopt        {"linear_5.w_0_fp32_master_0_moment1_0": (32, 24) float32, "master_weights": {...}, ...}
    -> model.layers.0.mlp.up_proj.weight (32, 48) BF16, columns 24..48; its [master], [exp_avg], ... likewise

Specification (PaddleFormers 1.2.0, PaddleNLP 3.0.0b4, paddlepaddle 3.3.1; files of one: `paddle.pickle_file`):

* File names and coordinates: `paddle.ranks`. Layout as Paddle's: Linear weights [in, out].
* Model file: {structured name: a tensor rank's part} and the table {structured name: static name}. In a sharded job
  saved with `sharding_io` each sharding rank has its own: parameters that it owns, and of a bf16 job only those without
  master weight.
* Optimizer: `<static>[_fp32_master_0]_<accumulator>_0`, `master_weights` {static: array}, `LR_Scheduler`
  (`paddle.stored_names`). Sharding v1: whole parts at their owner; v2: flat slices with padding
  (`paddle.pdparams.gather`).
* `ema.*.pdopt`: {structured name: fp32 parameter's average}, `master_weights` {static: average}: state `ema`.
* `model_meta.json` states degrees, owners, names, shapes and dtypes (`paddle.ranks`).
* Experts under expert parallelism: whole, one by one, on their rank (`paddle.pdparams.gather`); everything else there
  is a
    copy.
* bfloat16 is stored as uint16 without a mark. Paddle has no uint16, so a tensor with a name is one; of a bare array
  master weights, the meta or config.json say it, else the user must say it (E1314).
* If a rule needs sizes and there is no config, the ranks' values decide between parts and copies
  (`paddle.pdparams.gather`).
* Tied embeddings have two structured names and one static name: the optimizer's tensors get the first structured name
  of the table.
* `scheduler.pdparams`, `scaler.pdparams`: plain values, extras `scheduler`, `scaler`. `training_args.bin`,
  `trainer_state.*`, `rng_state_*.pth` are pickles of the job's own classes: named in a note, neither read nor carried.
* One file alone: a state dict, an optimizer (names by the model file next to it, else static), or anything nested
    (`state_dict.paths`).

States: model, master, exp_avg, exp_avg_sq, beta1_pow_acc, beta2_pow_acc ([1]), momentum_buffer, max_exp_avg_sq, ema;
others under their own name. Errors: see `read`. Cost: a pickle a file. What it does not do: change of names between
pipeline classes (`paddlefleet`), grouped experts in one tensor, the C++ dump of `use_binary_format`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckpt_tool.core.catalog import Catalog
from ckpt_tool.core.hints import Hints
from ckpt_tool.core.tensor import LogicalTensor
from ckpt_tool.formats.base import AS_IS, Evidence, Fitted, Holds, ReadOptions
from ckpt_tool.storage.source import Tree
from ckpt_tool.systems.paddle.ranks import EXTENSIONS, SIGNAL, rank_file, rank_files

if TYPE_CHECKING:  # reading needs none of these
    from ckpt_tool.core.layout import Layout
    from ckpt_tool.core.target import LayoutWish, Target, Wanted


class _Paddle:
    """The format. See the module."""

    name = "paddle"
    holds = Holds(
        all_states=True,
        extras=True,
        mesh=("tp", "pp", "ep", "dp"),
        replicas=True,
        zero=1,
        markers=SIGNAL,
        dialect="paddle",
        own_layout=True,
        uses_options=frozenset({"zero", "sharding", "pp-split"}),
        dtypes=frozenset(  # none of NumPy's, or bits that are stored without a mark and would be read as another's
            ("F4", "F6_E2M3", "F6_E3M2", "F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ", "F8_E8M0", "U16")
        ),
        all_experts=True,
    )

    def detect(self, tree: Tree) -> Evidence | None:
        """Claim a folder by file names; a single file also by its first bytes."""
        if tree.single is not None:
            if not tree.single.endswith(EXTENSIONS) or tree.head(tree.single, 2)[:1] != b"\x80":
                return None
            why = f"a pickle called {tree.single[tree.single.rindex('.') :]}"
            return Evidence(why, files=frozenset((tree.single,)))
        names = tree.names()
        files = rank_files(names)
        weights = any(name.endswith(".safetensors") for name in names)
        if not files or (weights and not any(file.kind == "model" for file in files)):
            return None
        return Evidence(
            f"{len(files)} files of paddle.save, {files[0].name} first", files=frozenset(file.name for file in files)
        )

    def read(self, tree: Tree, options: ReadOptions = AS_IS) -> Catalog:
        """The catalog, from the pickles and metas. Options: `config` (mapping), `family`, `prefer` (the model files'
        stem).

        Raises Incomplete E0302 (files, parameters), E0309 (boxes), InconsistentCheckpoint E0305 (ranks that differ),
        E1312 (the meta), E1316 (slices), E1317 (two tensors for one key), InputError E1310 (no rule), E1313 (no name),
        E1314 (bf16 or not), CorruptFile E1311 (the meta), and what files raise.
        """
        from ckpt_tool.systems.paddle.pdparams.read import read_tree

        return read_tree(tree, options)

    def fit(
        self, tensors: Sequence[LogicalTensor], extras: Mapping[str, Any], hints: Hints, wish: LayoutWish
    ) -> Fitted:
        """The tensors as Paddle's files hold them; see `systems.paddle.pdparams.target`."""
        from ckpt_tool.systems.paddle.pdparams.target import fit

        return fit(tensors, extras, hints, wish)

    def rank_of(self, path: str, mesh: Mapping[str, int]) -> Mapping[str, int] | None:
        """The coordinates in a file's name, None for any other file."""
        file = rank_file(path.rpartition("/")[2])
        return file.at if file is not None else None

    def target(self, wanted: Wanted, layout: Layout) -> Target:
        """The plan of the output; see `systems.paddle.pdparams.target`."""
        from ckpt_tool.systems.paddle.pdparams.target import paddle_target

        return paddle_target(wanted)


FORMAT = _Paddle()
