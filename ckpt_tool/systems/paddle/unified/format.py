"""Format `paddle-unified`: the unified checkpoint of PaddleFormers and PaddleNLP, whole tensors whatever the degrees.

Specification
-------------
A folder `checkpoint-STEP/` with up to three kinds of safetensors files, each with an index
(`systems.paddle.unified.files`):

    model-00001-of-00002.safetensors            weights, bf16, NAME              (LoRA: peft_model-*, index type "lora")
    master_weights-00001-of-00002.safetensors   fp32 master weights, NAME; weights that are fp32 anyway, copied
    optimizer-00001-of-00002.safetensors        NAME/moment1_0, /moment2_0, /beta1_pow_acc_0, /beta2_pow_acc_0

* Every tensor is whole: tensor ranks are merged before writing (fused gate and up to plain [gate | up]), stages and
  expert ranks write their own keys under global names, sharding ranks whole tensors. The numbers in the names mean
  nothing; the index is the authority. Names are structured names; Linear weights are [in, out].
* The model file alone may be in the Hugging Face layout, [out, in], and says so: `__metadata__.format` is "pt", else
  "np". Which weights: a list a model class. See `systems.paddle.unified.read` for how that is settled.
* Options of the job: skip_save_model_weight (the master weights are the model files), remove_master_weight, async_save
  (marks `.model_weight.done.RANK`), ignore_merge_optimizer (a rank's own files, `systems.paddle.unified.ranks`),
  quantised moments (`weight_schemes.paddle_states`). PaddleNLP 3.0 wrote bf16 as U16.
* Tied embeddings: a job of one process stores the optimizer's states under the last name (lm_head.weight), one of
  several under both. Either is shown as it is stored. Written from another format: under both, which either job loads.
* Also: config.json, tokenizer, scheduler.pdparams, scaler.pdparams (`systems.paddle.extras`); pickles of the job
  (training_args.bin, trainer_state.bin, rng_state*.pth), which nothing here opens.

Source: paddleformers 1.2.0 and 0.4.0 `trainer/unified_checkpoint/*.py`, paddlenlp 3.0.0b4, and checkpoints that they
wrote.

Shown: names and shapes of Paddle, states model, master, exp_avg, exp_avg_sq, beta1_pow_acc, beta2_pow_acc, ...; a model
file in the Hugging Face layout through swapped strides. So model, master and moments of a name have one shape:

    file model gate_proj BF16 [48, 32], "pt"     ->  gate_proj          (32, 48) BF16
    file master_weights gate_proj F32 [32, 48]   ->  gate_proj master   (32, 48) F32

Written: merged, whatever the source was (`systems.paddle.unified.target`). Weights that exist as fp32 masters alone get
their 16-bit weight by rounding, as Paddle makes it on loading; the report says so. EMA, for which Paddle's
have no place, is stored in `ckpt_ema-*` of ours. Cost: two preads a file, 2 us a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckpt_tool.core.catalog import Catalog
from ckpt_tool.core.hints import Hints
from ckpt_tool.core.tensor import LogicalTensor
from ckpt_tool.formats.base import AS_IS, Evidence, Fitted, Holds, ReadOptions, Specificity
from ckpt_tool.storage.source import Tree
from ckpt_tool.systems.paddle.unified import files as files_of

if TYPE_CHECKING:  # reading needs none of these
    from ckpt_tool.core.layout import Layout
    from ckpt_tool.core.target import LayoutWish, Target, Wanted


class PaddleUnified:
    """The format object. Options of `read`: `config` (mapping), `family` (str): the model, where config.json is missing
    or wrong; `lenient` (bool): tensors that no index names, weights without a state, are reported in notes instead of
    refused."""

    name = "paddle-unified"
    holds = Holds(
        dialect="paddle",
        markers=files_of.SIGNALS,
        uses_options=frozenset({"max-shard-size"}),
        dtypes=frozenset({"C128", "U16"}),  # 16-bit integers mean bf16 to Paddle
        all_experts=True,
    )

    def detect(self, tree: Tree) -> Evidence | None:
        """By the names in a folder; a model alone by the first bytes of a file."""
        why = files_of.why(tree)
        return Evidence(why, Specificity.OWN, files_of.claimed(tree.names())) if why else None

    def read(self, tree: Tree, options: ReadOptions = AS_IS) -> Catalog:
        """The catalog from indexes and headers. Raises InputError / UnsafeInput."""
        from ckpt_tool.systems.paddle.unified.read import read_catalog

        return read_catalog(tree, self.name, options)

    def fit(
        self, tensors: Sequence[LogicalTensor], extras: Mapping[str, Any], hints: Hints, wish: LayoutWish
    ) -> Fitted:
        """The tensors, and 16-bit weights for those that have a master alone (`sharding_io` of a bf16 job)."""
        from ckpt_tool.systems.paddle.unified.target import fit

        return fit(tensors, hints, wish)

    def rank_of(self, path: str, mesh: Mapping[str, int]) -> Mapping[str, int] | None:
        """The coordinates of the name."""
        return files_of.rank_in(path)

    def target(self, wanted: Wanted, layout: Layout) -> Target:
        """The whole output. Raises UsageError E1271, E1272, E1273."""
        from ckpt_tool.systems.paddle.unified.target import unified_target

        return unified_target(wanted, self.name)


FORMAT = PaddleUnified()
