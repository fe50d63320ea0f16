"""Recognises folders that are not supported, and suggests which of their parts can be read as checkpoints.

    model_index.json                             a diffusers pipeline: unet/, vae/, text_encoder/ are a checkpoint each
    modules.json, 0_Transformer/model.safetensors    a sentence-transformers model with no module at the root
    model_config.yaml, tp_rank_00_pp_rank_000/model_weights.ckpt    NeMo 1, a file a rank (in a .nemo or next to it)
    checkpoint, params.w/.zarray                 Orbax and T5X of 2023, whose trees have no _METADATA
    saved_model.pb; model.ckpt-1.index           TensorFlow
    actor/, critic/                              nothing at the root, checkpoints below: veRL's global_step_N and others

The first four make a claim as formats do (`formats.registry`), so that a folder that a format would read only in part
is refused by name instead; `--from` overrides them. The others are only checked if no format claims the folder.

Sources: diffusers `pipelines/pipeline_utils.py` (model_index.json), sentence-transformers `SentenceTransformer.py`
(modules.json: [{"idx", "name", "path", "type"}]), NeMo of 2025 `collections/nlp/parts/nlp_overrides.py`, veRL
`trainer/ppo/ray_trainer.py`, orbax-checkpoint 0.2.7 `aggregate_handlers.py` and `pytree_checkpoint_handler.py`
(`checkpoint` is a MessagePack of the tree and its texts). Cost: the listing; of a folder that no format claims also
the heads of `LOOKED_AT` files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ckpt_tool.errors import CkptError
from ckpt_tool.formats.base import Evidence, Specificity
from ckpt_tool.formats.hub_folder.modules import module_files
from ckpt_tool.storage.source import Tree

LOOKED_AT = 40  # files whose first bytes are examined
NAMED = 20  # models of a hub cache that a hint lists
_WEIGHTS = (".safetensors", "pytorch_model.bin", ".safetensors.index.json", ".bin.index.json")
_PIPELINE = "model_index.json"
_MODULES = "modules.json"
_NEMO_RANK = re.compile(r"(?:mp_rank_\d+|tp_rank_\d+_pp_rank_\d+)/model_weights\.ckpt")


class Lookalike(NamedTuple):
    """A kind of folder that is not read."""

    name: str  # in words
    find: Callable[[Tree], Evidence | None]  # the evidence that a tree is such a folder, or None
    # (tree, its subfolders that formats claim) -> advice for the user
    hint: Callable[[Tree, Sequence[str]], str]


def _pipeline(tree: Tree) -> Evidence | None:
    if not tree.exists(_PIPELINE):
        return None
    below = (path for path in tree.listing() if path.count("/") == 1 and path.endswith(_WEIGHTS))
    return Evidence(_PIPELINE, Specificity.SIGNED, frozenset((_PIPELINE, *below)))


def _modules(tree: Tree) -> Evidence | None:
    """A claim on a sentence-transformers model with weights in module folders that are not side files of the first
    module (`hub_folder.modules`)."""
    if not tree.exists(_MODULES):
        return None
    weights = [path for path in tree.listing() if path.endswith(_WEIGHTS) and path.count("/") < 2]
    folders = {path.rpartition("/")[0] for path in weights}
    if not {path for path in weights if "/" in path} - ({*module_files(tree)} if "" in folders else set()):
        return None
    why = f"{_MODULES}, and weights in {', '.join(sorted(folder for folder in folders if folder))}"
    return Evidence(why, Specificity.SIGNED, frozenset((_MODULES, *weights)))


def _nemo_ranks(tree: Tree) -> Evidence | None:
    """A claim on NeMo 1 weights with a file per rank (`NLPSaveRestoreConnector`)."""
    ranks = [path for path in tree.listing() if _NEMO_RANK.fullmatch(path)]
    if not ranks or not tree.exists("model_config.yaml"):
        return None
    return Evidence(f"{len(ranks)} files such as {ranks[0]}", Specificity.SIGNED, frozenset(ranks))


def _old_orbax(tree: Tree) -> Evidence | None:
    names = tree.listing() if tree.single is None else {}
    for name in names:
        folder, _, last = name.rpartition("/")
        front = f"{folder}/" if folder else ""
        if last != "checkpoint" or f"{front}_METADATA" in names:
            continue
        arrays = [path for path in names if path.startswith(front) and path.endswith("/.zarray")]
        if arrays or f"{front}manifest.ocdbt" in names:
            return Evidence(name, Specificity.SIGNED, frozenset(path for path in names if path.startswith(front)))
    return None


def _by_newer_orbax(tree: Tree, below: Sequence[str]) -> str:
    return "orbax-checkpoint 0.12 restores it (PyTreeCheckpointer().restore); save it again with that"


def _to_torch_dist(tree: Tree, below: Sequence[str]) -> str:
    return "restore it with NeMo and save it as a distributed checkpoint (dist_ckpt_format: torch_dist)"


def _components(tree: Tree, below: Sequence[str]) -> str:
    return (
        f"pass one of its folders, each a checkpoint: {', '.join(below)}"
        if below
        else "no folder of it is a checkpoint"
    )


def _root_or_modules(tree: Tree, below: Sequence[str]) -> str:
    root = (
        "; --from safetensors reads the first module at the root alone"
        if any("/" not in path and path.endswith(".safetensors") for path in tree.listing())
        else ""
    )
    return _components(tree, below) + root


LOOKALIKES = (
    Lookalike("a diffusers pipeline", _pipeline, _components),
    Lookalike("a sentence-transformers model of several modules", _modules, _root_or_modules),
    Lookalike("weights of NeMo 1, a file a rank", _nemo_ranks, _to_torch_dist),
    Lookalike("a tree of Orbax or T5X of 2023, without _METADATA", _old_orbax, _by_newer_orbax),
)


def part_of(name: str) -> str:
    """What a file of this name is a part of, "" if it may be a checkpoint by itself."""
    if name.endswith((".distcp", ".metadata")):
        from ckpt_tool.formats.dcp_container.dcp_items import DATA
        from ckpt_tool.formats.dcp_container.dcp_metadata import METADATA

        last = name.rpartition("/")[2]
        if DATA.fullmatch(last) or last == METADATA:
            return "one file of a distributed checkpoint (DCP)"
    return ""


def looks_like(tree: Tree, below: Sequence[str]) -> tuple[str, str]:
    """(what the tree holds, advice or "") for a tree that no format claims. below: its subfolders that a format
    claims."""
    from ckpt_tool.storage.magic import HEAD, advice, what_is

    names = list(tree.listing())
    if not names:
        return "the folder is empty", ""

    if tree.single is not None:
        head = tree.head(tree.single, HEAD)
        what = what_is(head)
        return (f"the file is {what}" if what else f"the file begins with {head[:8]!r}"), advice(head) or ""

    tops = {name.partition("/")[0] for name in names}
    cached = sorted(top for top in tops if top.startswith("models--"))
    if cached:
        return "the folder is a cache of the hub", f"pass one of its models: {', '.join(cached[:NAMED])}"

    tensorflow = next(
        (
            name
            for name in names
            if name == "saved_model.pb"
            or name.endswith(".ckpt.index")
            or (name.endswith(".index") and f"{name[:-6]}.data-00000-of-00001" in names)
        ),
        None,
    )
    if tensorflow:
        return f"a TensorFlow checkpoint ({tensorflow})", "save the model as safetensors with TensorFlow's own tools"
    if below:
        return "nothing that is read is at its root", _components(tree, below)

    for path, head in _heads(tree, names):
        what = what_is(head)
        if what is not None and what not in ("JSON text", "an HTML or XML page"):
            return f"the folder holds {what}, {path}", advice(head) or ""

    return f"the folder holds {len(names)} files, among them {', '.join(names[:3])}", ""


def _heads(tree: Tree, names: Iterable[str]) -> Iterable[tuple[str, bytes]]:
    """(path, first bytes) of the largest files, which are the likeliest to be weights."""
    from ckpt_tool.storage.magic import HEAD

    listing = tree.listing()
    for path in sorted(names, key=lambda path: -listing[path])[:LOOKED_AT]:
        try:
            yield path, tree.head(path, HEAD)
        except CkptError:  # a link, or a file that may not be read
            continue
