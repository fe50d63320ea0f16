"""`orbax`: what orbax-checkpoint writes for JAX: trees of arrays in TensorStore's zarr, most often in an OCDBT
database.

    step/_METADATA, manifest.ocdbt, d/..., ocdbt.process_0/d/...
      params.layer_0.q.kernel       -> layer_0.q.kernel F32 (8, 16): 8 chunks of (4, 4)
      opt_state.0.mu.layer_0...     -> layer_0.q.kernel [exp_avg];  step -> extras {"step": 3}

Specification (orbax-checkpoint 0.12.8 `_src/metadata/tree.py`, `_src/serialization/tensorstore_utils.py`,
`type_handlers.py`; tensorstore 0.1.86):

* Items, steps, runs and `_METADATA`: `systems.jax.orbax.items`. Names and states: `systems.jax.orbax.names`.
* An array's name is its path joined by dots, which may be ambiguous, so the path is `_METADATA`'s. With
  `manifest.ocdbt` the arrays are keys of the database (`arrays.ocdbt`), whose B-tree points into `ocdbt.process_N/d/`;
  the manifests and nodes of these folders are not used any more, and only `ckpt verify` checks them. Without
  `manifest.ocdbt` an array is a folder of that name.
* `use_zarr3` says which version of zarr (`arrays.zarr`). Chunks are the shards of the job's devices, cut again for
  what was replicated: any sharding is just a grid, so there is no mesh to read.
* A chunk that is not there is lost, unless `store_array_data_equal_to_fill_value` is false: then it holds the fill
  value. What is stored and no leaf names is an error as well (`systems.jax.orbax.accounts`).
* Value types: `jax.Array`, `np.ndarray`, `scalar` (rank 0) are arrays; a `string` is stored in `_strings.json`; `None`,
  `Dict`, `List`, `Tuple`, `NamedTuple` are empty. Keys of PRNGs are arrays of U32.
* JSON items of a step are extras under their names; so are `metrics` and `custom_metadata`.

Compressed chunks are read through views (`storage.views`), others in place. Written: see `systems.jax.orbax.target`.
Cost: the complete B-tree, 3 us a chunk, and 40 us an array's header; indexes of zarr3's shards when chunks are read.
What it does not do: run code, read `_sharding`; write plain folders, or compressed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckpt_tool.core.catalog import Catalog
from ckpt_tool.errors import CkptError
from ckpt_tool.formats.base import AS_IS, Evidence, FileContent, Fitted, Holds, ReadOptions, Specificity
from ckpt_tool.storage.arrays.ocdbt import MANIFEST, read_keys
from ckpt_tool.storage.source import Tree
from ckpt_tool.systems.jax.orbax.items import METADATA, TEMPORARY, files, lost_items, own_files, processes, steps

if TYPE_CHECKING:  # reading needs none of these
    from ckpt_tool.core.hints import Hints
    from ckpt_tool.core.layout import Layout
    from ckpt_tool.core.target import LayoutWish, Target, Wanted
    from ckpt_tool.core.tensor import LogicalTensor


class _Orbax:
    """The format. See the module."""

    name = "orbax"
    holds = Holds(
        all_states=True,
        extras=True,
        dialect="keep",
        uses_options=frozenset({"max-shard-size"}),
        dtypes=frozenset(("F4", "F6_E2M3", "F6_E3M2")),
    )

    def detect(self, tree: Tree) -> Evidence | None:
        """Claim a tree by `_METADATA`, which no other system has, or by the name of a save that did not finish."""
        found = steps(tree)
        if not found:
            begun = [path for path in tree.listing() if TEMPORARY in path] if tree.single is None else []
            if begun:
                return Evidence(begun[0], Specificity.OWN, frozenset(begun))
            lost = lost_items(tree)
            if not lost:
                return None
            below = frozenset(path for path in tree.listing() if path.startswith(tuple(lost)))
            return Evidence(f"an item without {lost[0]}{METADATA}", Specificity.OWN, below)
        first = f"{found[0].folder}{found[0].items[0]}/_METADATA".replace("//", "/").lstrip("/")
        return Evidence(first, Specificity.OWN, frozenset(files(tree, found)))

    def read(self, tree: Tree, options: ReadOptions = AS_IS) -> Catalog:
        """The catalog, from headers alone.

        Raises UnknownFormat E0393, E0392; Unexplained E3031; Incomplete E2756, E2872, E0301, E0309, E0313; CorruptFile
        E2751, E2753, E2755, E0311; InconsistentCheckpoint E2871; InputError E2752, E2754; UnsafeInput E0410.
        """
        from ckpt_tool.systems.jax.orbax.read import read_tree

        return read_tree(tree, lenient=options.lenient)

    def find_lone_files(self, tree: Tree) -> Mapping[str, Callable[[], FileContent]]:
        """The items, by their folders: see `systems.jax.orbax.lone`."""
        from ckpt_tool.systems.jax.orbax.lone import find_items

        return find_items(tree)

    def named(self, tree: Tree) -> frozenset[str]:
        """The files that Orbax wrote, by their names; `detect` claims everything in their folders."""
        return frozenset(path for step in steps(tree) for path in own_files(tree, step))

    def hashed(self, tree: Tree) -> frozenset[str]:
        """The manifests of processes, which hold a CRC-32C of themselves."""
        return frozenset(f"{folder}{MANIFEST}" for folder in processes(tree, steps(tree)))

    def late_faults(self, tree: Tree) -> Iterator[CkptError]:
        """Damage in the databases of single processes (CorruptFile E2751, Incomplete).

        Reading a checkpoint never needs their manifests and nodes, so only `ckpt verify` looks at them.
        """
        for folder in processes(tree, steps(tree)):
            try:
                read_keys(tree, folder)
            except CkptError as fault:
                yield fault

    def fit(
        self, tensors: Sequence[LogicalTensor], extras: Mapping[str, Any], hints: Hints, wish: LayoutWish
    ) -> Fitted:
        """The tensors with one count of steps; see `systems.jax.orbax.leaves`."""
        from ckpt_tool.systems.jax.orbax.leaves import fitted

        return fitted(tensors, extras, hints)

    def target(self, wanted: Wanted, layout: Layout) -> Target:
        """The plan of the output; see `systems.jax.orbax.target`."""
        from ckpt_tool.systems.jax.orbax.target import orbax_target

        return orbax_target(wanted)


FORMAT = _Orbax()
