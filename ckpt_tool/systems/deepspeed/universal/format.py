"""`deepspeed-universal`: DeepSpeed's own layout-free checkpoint, with a folder for each parameter and a file for each
state.

    ROOT/latest_universal                                   "global_step3_universal"
    ROOT/global_step3_universal/zero/embed.weight/fp32.pt   {"cat_dim": 0, "param": T (37 x 10)}
                                     .../exp_avg.pt, exp_avg_sq.pt, step.pt
    ROOT/global_step3_universal/zero/optimizer_state.pt     {"param_groups": [...], "loss_scaler": ..., ...}
    ROOT/global_step3_universal/mp_rank_00_model_states.pt  as the checkpoint had it: module, counters, client state

The one idea: every tensor is stored whole, in a folder of its name, so nothing has to be put together. What has to be
found out are shapes (ZeRO 3 writes flat tensors without them), and which files only repeat another tensor.

Specification (DeepSpeed 0.19.8 `checkpoint/ds_to_universal.py`, `checkpoint/universal_checkpoint.py`,
`runtime/base_optimizer.py`, `runtime/zero/stage3.py`, `runtime/engine.py`; checked on files of that version):

* `zero/NAME/STATE.pt`, from stage 1 and 2: a dict of `param` (the tensor in its real shape) and how tensor parallel
  ranks cut it: `cat_dim`, or `param_n_sub_params`, `sub_param_shape`; `vocab_tensor` (its padding is cut off);
  `is_expert_param` and `ep_num_experts` (AutoEP, experts stacked). From stage 3: a bare flat tensor, whose shape is
  only in `param_shapes`. `fp32` is the state `master`. `step.pt`: a bare 0-d tensor or a number, equal in a group;
  stage 3 has none, its step is in `optimizer_state.pt` under `optimizer_state_dict.state`.
* A folder with only `fp32.pt`: a parameter that never had a gradient if `param_shapes` lists it; else a buffer, a
  frozen parameter or an alias, of which the converter copied the module's value: it is no state, and a note reports it.
* `zero/optimizer_state.pt`: the content of the first optimizer file without its partitions, and `param_groups`; from
  stage 3 the whole first optimizer file, flat shards of rank 0 included (repeated values, not read).
* `mp_rank_XX_model_states.pt` (stage 0-2), `zero_pp_rank_D_mp_rank_XX_model_states.pt` (stage 3): copies of the
  checkpoint's (`deepspeed.zero.format`). `module`: state `model`. Several model ranks: of a pipeline none has a module;
  of tensor parallel ranks each has a slice, 16-bit copies of what is whole in `zero/`: not read, a note says so.

States, names, extras: as `deepspeed.zero.format`, so that both formats of one run hold the same; `step` is a tensor a
parameter here.

Writing (`deepspeed.universal.target`): dict form, `step.pt`, one `mp_rank_00_model_states.pt`, and what stage 3 asks
for, so that ZeRO 1, 2, 3 and pipelines of any size resume with `load_universal_checkpoint`. What DeepSpeed has no key
for is stored under `ckpt` in `optimizer_state.pt` (`deepspeed.universal.record`).

Cost: a small pickle for each parameter and state: about 0.3 ms each. What it does not do: cut for tensor parallel
ranks.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from ckpt_tool.core.catalog import Catalog
from ckpt_tool.formats.base import AS_IS, Evidence, Holds, ReadOptions, Specificity
from ckpt_tool.storage.source import Tree
from ckpt_tool.systems.deepspeed.files import sort_files

if TYPE_CHECKING:  # reading needs none of these
    from ckpt_tool.core.layout import Layout
    from ckpt_tool.core.target import Target, Wanted

ZERO = "zero/"
_STATE_FILE = re.compile(r"[A-Za-z_]\w*\.pt")
OPTIMIZER_STATE = f"{ZERO}optimizer_state.pt"


class _Universal:
    """The format. See the module."""

    name = "deepspeed-universal"
    holds = Holds(
        dialect="keep",
        pointers=("latest_universal",),
        dtypes=frozenset(("F4", "F6_E2M3", "F6_E3M2")),
        all_experts=True,
    )

    def detect(self, tree: Tree) -> Evidence | None:
        """Recognise the folder by file names alone: folders below `zero/` with an `fp32.pt`.

        The module files next to `zero/` are part of the checkpoint, the optimizer's partitions are not.
        """
        if tree.single is not None:
            return None
        found = sum(path.startswith(ZERO) and path.endswith("/fp32.pt") for path in tree.listing())
        if not found:
            return None
        below = (path for path in tree.listing() if path.startswith(ZERO) and path.endswith(".pt"))
        modules = sort_files(tree.names())
        modules.optim = {}
        modules.expp = {}
        return Evidence(f"{found} parameters below zero/", Specificity.OWN, frozenset((*modules.all(), *below)))

    def read(self, tree: Tree, options: ReadOptions = AS_IS) -> Catalog:
        """The catalog, from pickles and directories alone. Options: `require_checksums` (bool).

        Raises Incomplete E0302 (files, parameters missing), InconsistentCheckpoint E0359 (parts that contradict each
        other), CorruptFile E0355, UnknownFormat E0393, and what containers and pickles raise.
        """
        from ckpt_tool.systems.deepspeed.universal.read import UniversalReader

        return UniversalReader(tree).catalog(required=options.require_checksums)

    def named(self, tree: Tree) -> frozenset[str]:
        """The module's files, and those below `zero/` whose name half of the parameters' folders have: optimizers may
        call their states as they like, but all parameters have them."""
        modules = sort_files(tree.names())
        modules.optim = {}
        modules.expp = {}
        below = [path for path in tree.listing() if path.startswith(ZERO) and path.count("/") > 1]
        states = Counter(path.rpartition("/")[2] for path in below)
        count = len({path.rpartition("/")[0] for path in below})
        shared = {file for file, number in states.items() if 2 * number >= count and _STATE_FILE.fullmatch(file)}
        ours = {path for path in below if path.rpartition("/")[2] in shared}
        return frozenset({*modules.all(), *ours, *({OPTIMIZER_STATE} & tree.listing().keys())})

    def target(self, wanted: Wanted, layout: Layout) -> Target:
        """The folder that DeepSpeed resumes from, and the pointer to it."""
        from ckpt_tool.systems.deepspeed.universal.target import target

        return target(wanted)


FORMAT = _Universal()
