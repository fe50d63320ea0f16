"""`paddle-flex`: Paddle's flex checkpoints, as `paddle.distributed.save_state_dict` and PaddleFormers' Trainer write
them.

The one idea: every rank writes what it holds into one file, flat and as it is, and one metadata file says which box of
which tensor, or which flat part of which box, is stored in which file; so any job can load it by geometry alone.

    checkpoint-100/model_state/0.metadata, 0_0.distcp, 1_0.distcp       tp 2, bf16, sharding v2
      model.layers.0.mlp.up_gate_proj.weight  BF16 (24, 56)      columns 0-27 in 0_0.distcp, 28-55 in 1_0.distcp
    checkpoint-100/master_weight/                  model.layers.0.mlp.up_gate_proj.weight.w_0, F32, flattened ranges
    checkpoint-100/optimizer_state/                ... .moment1_0, .moment2_0, .beta1_pow_acc_0, .beta2_pow_acc_0
    checkpoint-100/scheduler.pdparams, saved_signal_0, saved_signal_1

Specification (paddlepaddle 3.3.1 `distributed/flex_checkpoint/dcp/`, PaddleFormers 1.2.0 `trainer/`; checked against
runs):

* Folders and files (`paddle.flex.folders`): the Trainer's three, which its loader wants even when one is empty, and
  sometimes `ema_state`; or one plain folder. Metadata (`paddle.flex.metadata`): a pickle, read as data. Data:
  `paddle.save` of a flat dict with a name table (`paddle.pickle_file`), bf16 as uint16 bits; or safetensors. A rank
  with nothing writes 47 bytes.
* A shard is a block at an offset, whole, or a range of the block's row-major line (sharding v2, without its padding).
  Blocks may be uneven (10 over 4: 3, 3, 3, 1) or empty. What several ranks hold is stored once, by the file with the
  least keys; with `replicate_saved_into_local` by all, and then it is compared.
* Fused `[gate | up]` weights of a TP job are recorded rank after rank, and nothing marks them (`paddle.flex.read`):
  here the logical tensor is the plain `[gate | up]` at every degree. In a plain folder, whose job may as well be an
  auto-parallel one, geometry is taken as it is recorded, with a note; one that is called as the Trainer's folders is
  one of them.
* Keys (`paddle.flex.folders`): structured names of one card; a tied weight's states are stored once, under the first
  name in the alphabet. EMA without metadata: `paddle.flex.read`. Degrees are what boxes show (`paddle.flex.read`).
* `scheduler.pdparams`, `scaler.pdparams`: plain values. `training_args.bin`, `trainer_state.*`, `rng_state*.pth` belong
  to the job: pickles of classes are never opened, none is copied.

Writing: `paddle.flex.target`. Cost: some 15 us a shard. What it does not do: load by AOA statements (`--aoa` maps
names).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ckpt_tool.core.catalog import Catalog
from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.core.hints import Hints
from ckpt_tool.core.tensor import LogicalTensor
from ckpt_tool.formats.base import AS_IS, Evidence, FileContent, Fitted, Holds, ReadOptions
from ckpt_tool.storage.source import Tree
from ckpt_tool.systems.paddle.dtypes import DTYPE_NAMES
from ckpt_tool.systems.paddle.flex import folders as paddle_flex_folders
from ckpt_tool.systems.paddle.ranks import SIGNAL

if TYPE_CHECKING:
    from ckpt_tool.core.layout import Layout
    from ckpt_tool.core.target import LayoutWish, Target, Wanted


class _Flex:
    """The format. See the module."""

    name = "paddle-flex"
    holds = Holds(
        all_states=True,
        extras=True,
        mesh=("tp", "pp", "ep", "dp"),
        zero=1,
        markers=SIGNAL,
        dialect="paddle",
        own_layout=True,
        uses_options=frozenset({"zero", "sharding", "pp-split"}),
        dtypes=frozenset(DTYPES) - frozenset(DTYPE_NAMES.values()),
        all_experts=True,
    )

    def detect(self, tree: Tree) -> Evidence | None:
        """Claim a tree by file names alone; `systems.paddle.flex.folders` has the rules."""
        if tree.single is not None:
            return None
        saves = paddle_flex_folders.find(tree.listing())
        if not saves:
            return None
        return Evidence(paddle_flex_folders.why(saves), files=paddle_flex_folders.files(saves, tree.listing()))

    def read(self, tree: Tree, options: ReadOptions = AS_IS) -> Catalog:
        """The catalog, from the metadata and the headers of the data files. Options: `config` (a model's config),
        `require_checksums`.

        Raises Incomplete (E1330 not finished, E1336 files or keys missing, E0309 elements), InconsistentCheckpoint
        (E1332, E1337, E1339, E0308), InputError (E1331, E1333, E1334, E1338), and what pickles and files raise.
        """
        from ckpt_tool.systems.paddle.flex.read import read_tree

        return read_tree(tree, options)

    def find_lone_files(self, tree: Tree) -> Mapping[str, Callable[[], FileContent]]:
        """Readers for data files without their metadata (pickles only): they name the parts of one rank."""
        from ckpt_tool.systems.paddle.flex.read import read_lone_file

        paths = [path for path in tree.listing() if path.endswith(".distcp") and self.rank_of(path, {}) is not None]
        return {path: partial(read_lone_file, tree, path) for path in paths}

    def fit(
        self, tensors: Sequence[LogicalTensor], extras: Mapping[str, Any], hints: Hints, wish: LayoutWish
    ) -> Fitted:
        """The tensors to write; see `systems.paddle.flex.target`."""
        from ckpt_tool.systems.paddle.flex.target import fit

        return fit(tensors, extras, hints, wish)

    def rank_of(self, path: str, mesh: Mapping[str, int]) -> Mapping[str, int] | None:
        """The rank in a data file's name; the name does not give its coordinates."""
        found = paddle_flex_folders.DATA.fullmatch(path.rpartition("/")[2])
        return {"rank": int(found[1])} if found else None

    def target(self, wanted: Wanted, layout: Layout) -> Target:
        """The plan of the output; see `systems.paddle.flex.target`."""
        from ckpt_tool.systems.paddle.flex.target import flex_target

        return flex_target(wanted)


FORMAT = _Flex()
