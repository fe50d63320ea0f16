"""`meta`: what Meta and Mistral AI publish: `consolidated.NN.pth`, a file a tensor parallel rank, and `params.json`.

The one idea: the number in a file's name is the rank, the name of a tensor determines along which dim it is sharded,
and params.json gives the full size. So shards can be joined and resharded without running any code of the model.

    consolidated.00.pth {"layers.0.attention.wo.weight": (4096, 2048), ...}, consolidated.01.pth, params.json {"dim":
    4096, ...}
    ->  layers.0.attention.wo.weight (4096, 4096), columns 0..2048 and 2048..4096

Specification (meta-llama/llama, July 2023, and llama-models, July 2025: `model.py`, `generation.py`, `checkpoint.py`):

* Files `consolidated.%02d.pth` from 00, sorted by name; a loader wants as many as it has ranks. Each is a `torch.save`
  of one flat dict (a zip since torch 1.6, the stream before), BF16 or F16, with nothing but tensors. In the same
  folder: `params.json`, a tokenizer, `checklist.chk`.
* Names: `tok_embeddings.weight`, `norm.weight`, `output.weight`, `layers.N.{attention.w{q,k,v,o},
  feed_forward.w{1,2,3}, attention_norm, ffn_norm}.weight`; `rope.freqs` in Llama 1 and 2, a buffer that loaders compute
  themselves.
* Ranks: `systems.meta.consolidated.rules`. Sizes: `systems.meta.consolidated.params`. Norms and `rope.freqs` are stored
  in full in every shard; that the copies are equal is checked while values are copied. With more shards than heads of
  keys, neighbouring shards hold the same head.
* Query and key rows have the two elements of a rotated pair next to each other; the dialect converts them to the order
  of other systems (`systems.meta.names`).
* Mistral AI: the same names, `consolidated.safetensors` (or several with an index) with unsharded tensors and
  `params.json`, in a folder without Hugging Face's files (`mistral_inference` 1.6 `transformer.py`). Read only: what is
  written is `.pth`.

A wrong number of shards, shapes that differ between shards or do not add up to those of params.json, missing layers and
tensors that only some shards have are errors, reported all at once. Without params.json a single shard is read as it
is; several are refused. Cost: a pickle a shard. What it does not do: Llama 4 and multimodal tensors in several shards
(there is no rule for how they are sharded: E1404), quantised releases' scales.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ckpt_tool.core.catalog import Catalog
from ckpt_tool.core.hints import Hints
from ckpt_tool.errors import UnknownFormat
from ckpt_tool.formats.base import AS_IS, Evidence, Holds, ReadOptions, Specificity
from ckpt_tool.storage.source import Tree
from ckpt_tool.systems.meta.consolidated.files import PARAMS, MetaFiles, choose, shard_number
from ckpt_tool.systems.meta.consolidated.params import MetaHints

if TYPE_CHECKING:  # reading needs none of these
    from ckpt_tool.core.layout import Layout
    from ckpt_tool.core.target import Target, Wanted


class _Meta:
    """The format. See the module."""

    name = "meta"
    holds = Holds(
        all_states=False,
        extras=False,
        mesh=("tp",),
        replicas=True,
        dialect="meta",
        own_layout=True,
        config="params.json",
        dtypes=frozenset(("F4", "F6_E2M3", "F6_E3M2")),
    )

    def detect(self, tree: Tree) -> Evidence | None:
        """Claim files by names alone. If a hub folder has the model in both forms, transformers loads its own."""
        chosen = _choose(tree)
        if chosen is None:
            return None
        if chosen.safetensors:
            return Evidence(
                f"params.json, {chosen.safetensors[0]}",
                Specificity.OWN,
                frozenset(chosen.safetensors),
                "transformers",
                1,
            )
        why = f"{len(chosen.shards)} shards consolidated.NN.pth"
        return Evidence(why, Specificity.OWN if PARAMS in tree.names() else Specificity.NAMES, frozenset(chosen.shards))

    def read(self, tree: Tree, options: ReadOptions = AS_IS) -> Catalog:
        """Read the shards into one catalog of unsharded tensors.

        Options: `lenient` (bool) leaves out tensors that no rule can join; `require_checksums` (bool) refuses files
        without checksums.

        Raises Incomplete (E1400 shards, E1402 params.json, E1406 layers, E1407 tensors missing), InconsistentCheckpoint
        (E1401 two saves, E1403 shapes, E1408 shards that differ), UnmappedTensor E1404, CorruptFile E1405
        (params.json), E1409.
        """
        chosen = _choose(tree)
        if chosen is None:
            raise UnknownFormat(
                "no consolidated.NN.pth is directly in the folder",
                code="E0393",
                path=tree.display(),
                hint="pass the folder that holds them and params.json",
            )
        if chosen.safetensors:
            return _safetensors(tree, chosen.safetensors, options)
        from ckpt_tool.systems.meta.consolidated.read import read_shards

        return read_shards(tree, chosen.shards, lenient=options.lenient, required=options.require_checksums)

    def rank_of(self, path: str, mesh: Mapping[str, int]) -> Mapping[str, int] | None:
        """The tensor parallel rank, which is a shard's number."""
        number = shard_number(path)
        return None if number is None else {"tp": number}

    def target(self, wanted: Wanted, layout: Layout) -> Target:
        """The plan of the output; see `systems.meta.consolidated.target`."""
        from ckpt_tool.systems.meta.consolidated.target import meta_target

        return meta_target(wanted)


FORMAT = _Meta()


def _choose(tree: Tree) -> MetaFiles | None:
    return choose(tree.names()) if tree.single is None else None


def _safetensors(tree: Tree, files: Sequence[str], options: ReadOptions = AS_IS) -> Catalog:
    """The catalog of Mistral AI's safetensors, read like Hugging Face's files, with the params.json as a hint."""
    from ckpt_tool.formats.hub_folder.read import read_of
    from ckpt_tool.systems.meta.consolidated.params import read_params, sizes_of

    catalog = read_of(tree, files, FORMAT.name, options)
    params = read_params(tree)
    if params is not None:  # for its errors alone: unsharded tensors need no sizes
        sizes_of(params, tree.display(PARAMS))
    return replace(catalog, extras={}, hints=Hints.of(MetaHints(params, None, params is not None)))
