"""`dcp`: PyTorch's distributed checkpoint, as FSDP1, FSDP2, DTensor and DDP jobs, torchtitan and accelerate write it.

The one idea: `.metadata` already lists where each box of each tensor is stored. Reading means translating that list
into a `Catalog` and skipping the few bytes of zip header before each box.

    fsdp2_dp2/.metadata, __0_0.distcp, __1_0.distcp
    model.w : F32 (17, 10)      rows 0-8 in __0_0.distcp at 1577 + 704, rows 9-16 in __1_0.distcp at 704
    optim.state.w.exp_avg       -> w [exp_avg]; optim.param_groups.0.lr -> extras {"optim": {"param_groups": [{"lr": ...

Specification (torch 2.13, `torch/distributed/checkpoint/`):

* Folder (`systems.torch.dcp.folders`): `.metadata`, written last by a rename, and `__{rank}_{n}.distcp`: n counts
  threads or, with `single_file_per_rank=False`, items. A rank with nothing to write has no file. Files of an older,
  larger save are not removed: the metadata decides what counts, never the listing.
* Metadata (`dcp_container.dcp_metadata`): a pickle of `Metadata`; boxes are any boxes: FSDP2's by the ceil rule along
  dim 0 (10 rows over 4: 3, 3, 3, 1), tensor parallel along any dim, `_StridedShard`'s interleaved; each box is stored
  once, however many ranks held it. An empty shard may be listed and has no bytes.
* Items (`dcp_container.dcp_items`): a `torch.save` zip each, root `archive/`, one bare tensor `data/0` or one object;
  strides in the pickle count (channels-last); or a safetensors file a rank.
* Flattening (`_nested_dict.py`, `_traverse.py`): the key is the path joined by dots; dicts always flatten, lists do
  when a tensor, a dict or such a list is in them, tuples never; `planner_data` maps keys back. Empty dicts leave
  nothing.
* Replicated objects (`param_groups`) are stored once, by one of the ranks. Without collectives every rank writes its
  own copy.

Names and states: `formats.state_dict.paths`. Reading: `systems.torch.dcp.read`; writing: `systems.torch.dcp.target`.
Cost: about 0.1 ms a box, 4 us where there are very many. What it does not do: read streams behind extensions (zstd),
ByteCheckpoint's and Megatron's variants.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from ckpt_tool.core.catalog import Catalog
from ckpt_tool.formats.base import AS_IS, PLACED, Evidence, FileContent, Holds, ReadOptions
from ckpt_tool.formats.dcp_container import dcp_items
from ckpt_tool.storage.source import Tree
from ckpt_tool.systems.torch.dcp import folders as dcp_folders

if TYPE_CHECKING:  # reading needs none of these
    from ckpt_tool.core.layout import Layout
    from ckpt_tool.core.target import Target, Wanted


class _Dcp:
    """The format. See the module."""

    name = "dcp"
    holds = Holds(
        own_sidefiles=frozenset({dcp_folders.MARKER}),
        all_states=True,
        extras=True,
        mesh=("tp", "pp", "ep", "dp", "cp"),
        replicas=False,
        zero=3,
        dialect="keep",
        uses_options=PLACED,
        dtypes=frozenset(("F4", "F6_E2M3", "F6_E3M2")),
    )

    def detect(self, tree: Tree) -> Evidence | None:
        """Claim the tree by file names alone; `systems.torch.dcp.folders` has the rules."""
        if tree.single is not None:
            return None
        saves = dcp_folders.find(tree.listing())
        if not saves:
            return None
        return Evidence(dcp_folders.why(saves), files=dcp_folders.files(saves, tree.listing()))

    def find_lone_files(self, tree: Tree) -> Mapping[str, Callable[[], FileContent]]:
        """Readers for `.distcp` files without their `.metadata`, also Megatron's: only dtypes and shapes are known."""
        from ckpt_tool.formats.dcp_container.dcp_lone import is_item_file, read_items

        paths = [path for path in tree.listing() if dcp_items.rank_of(path) is not None]
        return {path: partial(read_items, tree, path) for path in paths if is_item_file(tree, path)}

    def read(self, tree: Tree, options: ReadOptions = AS_IS) -> Catalog:
        """The catalog, from `.metadata` and the zip directories of the items; object items are read in full. Options:
        `require_checksums` (bool) refuses files without CRCs (E0397); `forced` (bool): the user named the format, so
        keys that have another system's meaning are read as they are.

        Raises UnknownFormat (E1640 another system's), Incomplete (E0385 not finished, E0301 files missing, E0309
        boxes), InconsistentCheckpoint (E0308 overlap, E0389, E0394), InputError (E1333, E1334, E0395, E2607), and what
        the containers raise.
        """
        from ckpt_tool.systems.torch.dcp.read import read_tree

        return read_tree(tree, options)

    def rank_of(self, path: str, mesh: Mapping[str, int]) -> Mapping[str, int] | None:
        """The rank in a data file's name; the name does not give its coordinates in the mesh."""
        return dcp_items.rank_of(path)

    def target(self, wanted: Wanted, layout: Layout) -> Target:
        """The plan of the output folder; see `systems.torch.dcp.target`."""
        from ckpt_tool.systems.torch.dcp.target import dcp_target

        return dcp_target(wanted, layout)


FORMAT = _Dcp()
