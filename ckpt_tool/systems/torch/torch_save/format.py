"""`torch`: what `torch.save` writes: `.pt`, `.pth`, `.bin`, one file or several with an index.

The one idea: the pickle records where every tensor's elements are in the file (storage, offset, shape, strides), so
locating a tensor in a 100 GB file costs a few hundred bytes of reading, and no pickle is ever executed.

    training.pt  {"model": {"w": T}, "optimizer": {"state": {0: {"exp_avg": T}}, "param_groups": [...]}, "epoch": 3}
    ->  w, w [exp_avg], extras {"optimizer": {"param_groups": [...]}, "epoch": 3}

Specification. Containers: `torch_files.torchzip` (torch >= 1.6: a zip of stored records with `data.pkl`) and
`torch_files.torch_stream` (before). Content, by torch 2.13 `_utils.py`, `serialization.py`, `optim/optimizer.py`:

* A file holds any object; a state dict is an OrderedDict with `_metadata` (module versions), a training state nests
  several. Names and states: `formats.state_dict.paths`; an optimizer's numbers: `formats.state_dict.optimizer_ids`.
* Tensors are views: several may share one storage (tied weights, slices of a flat buffer), with any strides; stride 0
  repeats elements (`expand`). Each name is a tensor of its own here; a note reports that two share bytes.
* Parameters are tensors with a flag, which is not kept. Objects of other classes are carried in the extras as records.
* Hugging Face (transformers 4): `pytorch_model-0000i-of-0000n.bin` and `pytorch_model.bin.index.json` with `weight_map`
  (`formats.hub_folder.index`), flat names.
* One file a rank, of DTensors (`model_world_size_W_rank_R.pt`): `systems.torch.torch_save.ranks`, read only.

Writing: the model alone, without extras, in Hugging Face's layout; anything more as one file (`checkpoint.pt` in a
folder), nested as the source nested it. Each tensor is written unsharded into a storage of its own, row-major: tied
weights become equal copies. `torch.load(weights_only=True)` reads it, with mmap too. Equal input gives equal bytes.
Cost: about 5 us a tensor. What it does not do: TorchScript, sparse and quantised tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from ckpt_tool.core.box import whole
from ckpt_tool.core.catalog import Catalog, Note
from ckpt_tool.core.faults import read_by_file
from ckpt_tool.core.hints import Globals, Hints
from ckpt_tool.core.layout import Layout
from ckpt_tool.core.missing import report_missing
from ckpt_tool.core.target import Patch, Target, TargetArray, TargetFile, Wanted, WantedTensor, whole_file
from ckpt_tool.core.tensor import MODEL, LogicalTensor, TensorKey, simple_tensor
from ckpt_tool.core.wrapper_words import clean
from ckpt_tool.errors import CkptError, Incomplete, InconsistentCheckpoint, UnknownFormat, UsageError
from ckpt_tool.formats import checksums
from ckpt_tool.formats.base import AS_IS, Evidence, Holds, ReadOptions
from ckpt_tool.formats.hub_folder import model_files as hf_files
from ckpt_tool.formats.hub_folder.index import read_index, write_index
from ckpt_tool.formats.hub_folder.modules import module_files
from ckpt_tool.formats.hub_folder.packing import pack
from ckpt_tool.formats.state_dict.averages import refuse_taken_for_averages
from ckpt_tool.formats.state_dict.beside_model import with_optimizer
from ckpt_tool.formats.state_dict.coded import coded_notes
from ckpt_tool.formats.state_dict.content import TorchContent, read_content
from ckpt_tool.formats.state_dict.nesting import nest
from ckpt_tool.formats.state_dict.paths import Leaf, Named, name_leaves
from ckpt_tool.formats.state_dict.roots import Ordered, Roots
from ckpt_tool.formats.state_dict.tree import dotted
from ckpt_tool.formats.state_dict.unread import notes_of, set_apart
from ckpt_tool.formats.state_dict.words import is_average
from ckpt_tool.formats.two_models import refuse_file_next_to_index, refuse_file_next_to_numbered
from ckpt_tool.storage.pickles.pickle_writer import dumps, stored
from ckpt_tool.storage.source import Tree
from ckpt_tool.storage.torch_files.torchzip import plan_zip
from ckpt_tool.systems.torch.torch_save import choice as torch_choice
from ckpt_tool.systems.torch.torch_save.choice import ChosenFiles, TorchRankFile

MISSING = "E0380"
ABSENT = "E0381"
STRANGER = "E0382"
TWICE = "E0383"
FOREIGN = "E0393"
SINGLE = "checkpoint.pt"
ROOT = "archive"  # one name for all, so that a file's bytes do not depend on what it is called
SHOWN = 100


class _Torch:
    """The format. See the module."""

    name = "torch"
    holds = Holds(
        all_states=True,
        extras=True,
        mesh=(),
        single=(".pt", ".pth", ".bin", ".ckpt"),
        dialect="keep",
        uses_options=frozenset({"max-shard-size"}),
        dtypes=frozenset(("F4", "F6_E2M3", "F6_E3M2")),
    )

    def detect(self, tree: Tree) -> Evidence | None:
        """Claim files by their names and first bytes; `systems.torch.torch_save.choice` has the rules."""
        return torch_choice.evidence(tree)

    def read(self, tree: Tree, options: ReadOptions = AS_IS) -> Catalog:
        """The catalog, from pickles and directories alone. Options: `lenient` (bool) allows tensors that the index does
        not name, `require_checksums` (bool) refuses files without CRCs.

        Raises Incomplete (E0380 files, E0381 tensors missing), InconsistentCheckpoint (E0382-E0384), InputError (E0374,
        E0393, E0397, E0399), and what containers and pickles raise.
        """
        prefer = options.prefer
        chosen = torch_choice.choose(tree, prefer)
        if chosen is None and tree.single is not None:  # the user named the format: its reader reports the fault
            chosen = ChosenFiles("asked for", (tree.single,))
        if chosen is None:
            raise UnknownFormat(
                "no torch file, or more than one, is directly in the folder",
                code=FOREIGN,
                path=tree.display(),
                hint="pass the file itself",
            )

        # A sharded model and a single file of the same stem may be of two saves; only the user knows which is meant.
        if chosen.index is not None and tree.single is None and prefer not in torch_choice.names_of_index(chosen.index):
            _refuse_one_beside(tree, chosen.index)
        whole_file = torch_choice.find_one_beside_numbered(chosen)
        if whole_file is not None and tree.single is None and prefer != torch_choice.WITHOUT_INDEX:
            refuse_file_next_to_numbered(tree, whole_file, chosen.files, torch_choice.WITHOUT_INDEX, most=SHOWN)
        torch_choice.check_numbers(chosen.files, tree.display())
        catalog = _read(tree, chosen, options)
        unread = torch_choice.beside_notes(tree, catalog.files) if tree.single is None else ()
        return replace(catalog, notes=(*catalog.notes, *unread)) if unread else catalog

    def rank_of(self, path: str, mesh: Mapping[str, int]) -> Mapping[str, int] | None:
        """The rank in the name of a per-rank file, None for any other file."""
        rank = torch_choice.rank_named(path)
        return {"rank": rank} if rank is not None else None

    def target(self, wanted: Wanted, layout: Layout) -> Target:
        """The plan of the output: Hugging Face's layout for a model alone, one file for anything more."""
        return _target(wanted)


FORMAT = _Torch()


# -- reading -----------------------------------------------------------------------------------------------------------


def _read(tree: Tree, chosen: ChosenFiles, options: ReadOptions) -> Catalog:
    # File -> the names that its index gives it; None without an index, which means that any names are right.
    expected = _expected(tree, chosen.index) if chosen.index else dict.fromkeys(chosen.files)
    required = options.require_checksums
    from ckpt_tool.systems.torch.torch_save import ranks as torch_ranks  # imported here, as few sources need it

    if chosen.ranks:
        return torch_ranks.read(tree, chosen, required=required, prefer=options.prefer)
    files = read_by_file(expected, lambda name: read_content(tree, name, dtensors=True))
    if any(file.wrapped for file in files.values()):  # DTensors, ShardedTensors: per-rank files whatever their names
        own = [(torch_choice.rank_files([n]) or (TorchRankFile(n, "", None, None),))[0]._replace(name=n) for n in files]
        return torch_ranks.read(tree, replace(chosen, ranks=tuple(own)), required=required, prefer=options.prefer)
    notes = [*chosen.notes, *_hold_against(tree, expected, files, lenient=options.lenient)]
    return with_optimizer(tree, _catalog(tree, chosen, files, notes, options), options, in_order=True)


def _refuse_one_beside(tree: Tree, path: str) -> None:
    """Raise InconsistentCheckpoint E2874 if a single file with the index's stem is next to it and not listed in it."""
    one = path.removesuffix(torch_choice.INDEX_SUFFIX) + ".bin"
    if one in tree.names():
        refuse_file_next_to_index(tree, one, path, read_index(tree, path).shards, most=SHOWN)


def _find_numbered(tree: Tree) -> str:
    """A hint for an index that lists missing files, if the numbered files in the folder are a complete set; else ""."""
    others = torch_choice.choose(tree, torch_choice.WITHOUT_INDEX) if tree.single is None else None
    if others is None or not others.files:
        return ""
    try:
        torch_choice.check_numbers(others.files, tree.display())
    except CkptError:
        return ""
    return (
        f"the {len(others.files)} files here are complete by their names, and the index may be that of another save: "
        f"--prefer {torch_choice.WITHOUT_INDEX} reads them without it"
    )


def _expected(tree: Tree, index: str) -> dict[str, Any]:
    """The names of the tensors that the index lists for each file. Raises Incomplete naming every missing file."""
    read = read_index(tree, index)
    have = tree.listing()
    # Every missing file is looked for, so that one message lists all that have to be fetched.
    missing = []
    for file in read.shards:
        if tree.single is None and file not in have:
            missing.append(file)
        elif tree.single is not None:  # a tree of a single file lists only that one, but its neighbours can be opened
            try:
                tree.fd(file)
            except Incomplete:
                missing.append(file)
    if missing:
        fault = Incomplete(
            f"{len(missing)} of {len(read.shards)} files are missing: {', '.join(sorted(missing)[:20])}",
            code=MISSING,
            path=tree.display(index),
            faults=sorted(missing)[20:SHOWN],
            hint=_find_numbered(tree) or "fetch the missing files into this folder",
        )
        tensors = {TensorKey(str(name)): None for file in missing for name in read.shards[file]}
        report_missing(fault, files={file: len(read.shards[file]) for file in missing}, tensors=tensors)
    return {file: set(names) for file, names in sorted(read.shards.items()) if file not in missing}


def _hold_against(
    tree: Tree, expected: Mapping[str, Any], files: Mapping[str, TorchContent], *, lenient: bool
) -> list[Note]:
    """Compare the files' tensors with the index and with each other; returns notes on tensors that are left out.

    Raises Incomplete E0381 (a tensor of the index is missing), InconsistentCheckpoint E0382 (tensors that the index
    lacks, unless `lenient`) and E0383 (a tensor in two files).
    """
    notes = []
    seen: dict[str, str] = {}
    for name, file in files.items():
        names = {dotted(path) for path, _ in file.leaves}
        wanted = expected[name]
        absent = sorted(wanted - names) if wanted is not None else []
        if absent:
            fault = Incomplete(
                f"{len(absent)} tensors of the index are not in {name}; the first: {absent[0][:200]}",
                code=ABSENT,
                path=tree.display(name),
                key=absent[0][:200],
                faults=absent[1:SHOWN],
                hint="index and files come from two saves: fetch both again; or, if the index has a name too many, "
                f"--prefer {torch_choice.WITHOUT_INDEX} reads the files without it",
            )
            report_missing(fault, tensors={TensorKey(tensor): None for tensor in absent})
        strangers = sorted(names - wanted) if wanted is not None else []
        if strangers and not lenient:
            raise InconsistentCheckpoint(
                f"{len(strangers)} tensors are in {name}, but not in the index; the first: {strangers[0][:200]}",
                code=STRANGER,
                path=tree.display(name),
                key=strangers[0][:200],
                faults=strangers[1:SHOWN],
                hint="index and files come from two saves; or pass --lenient to leave these tensors out",
            )
        if strangers:
            file.leaves[:] = [leaf for leaf in file.leaves if dotted(leaf[0]) in wanted]
            notes.append(Note("W-extra-tensors", f"not in the index, not read: {', '.join(strangers[:20])}", name))

        # Nothing shows which of two copies is right.
        for key in names if len(files) > 1 else ():
            other = seen.setdefault(key, name)
            if other != name and (wanted is None or key in wanted):
                raise InconsistentCheckpoint(
                    f"tensor {key[:200]} is in {other} and in {name}",
                    code=TWICE,
                    path=tree.display(name),
                    key=key[:200],
                    hint="files of two saves are mixed: remove those of the older one",
                )

    return notes


def _catalog(
    tree: Tree, chosen: ChosenFiles, files: Mapping[str, TorchContent], notes: list[Note], options: ReadOptions
) -> Catalog:
    found = [leaf for file in files.values() for leaf in file.leaves]
    extras: dict[str, Any] = {}
    for file in files.values():
        extras.update(file.extras if isinstance(file.extras, dict) else {"value": file.extras})

    leaves = [Leaf(path, array.shape, (array.path, array.offset, array.shape, array.strides)) for path, array in found]
    # In a hub model a key such as `model.norm.weight` is a name; in a training state `model` is a level of nesting.
    if _is_hugging_face(chosen, leaves, extras):
        named = Named([TensorKey(clean(str(leaf.path[0]))) for leaf in leaves], [], Roots(model=()))
    else:
        named = name_leaves(leaves, extras, path=tree.display(next(iter(files), "")), prefer=options.prefer)

    tensors, unread = set_apart(
        {key: simple_tensor(key, array, path) for key, (path, array) in zip(named.keys, found, strict=True)},
        named.faults,
    )
    hints = Hints.of(
        named.roots,
        Globals.each(*(file.globals for file in files.values())),
        Ordered(tuple(row for file in files.values() for row in file.ordered)),
    )
    names = tuple(files)
    beside = () if tree.single else hf_files.side_files(tree)
    sidefiles = tuple(dict.fromkeys((*beside, *module_files(tree))))

    notes += [
        *named.notes,
        *notes_of(unread),
        *coded_notes(tensors.values()),
        *_sharing(tensors),
        *checksums.missing(tree, tensors.values(), required=options.require_checksums),
    ]

    return Catalog(
        "torch",
        tensors=tensors,
        extras=extras,
        files=((chosen.index, *names) if chosen.index else names),
        sidefiles=sidefiles,
        notes=tuple(notes),
        unsafe=tuple(line for file in files.values() for line in file.unsafe),
        hints=hints,
        unread=unread,
    )


def _is_hugging_face(chosen: ChosenFiles, leaves: Sequence[Leaf], extras: Mapping[str, Any]) -> bool:
    """Whether this is a flat model of Hugging Face: then each key is a tensor's name and no path of nested states.

    It has Hugging Face's file names, no extras, no nesting and no averages (EMA).
    """
    named = chosen.index is not None or all(name.startswith("pytorch_model") for name in chosen.files)
    names = {clean(str(leaf.path[0])) for leaf in leaves}
    if any(is_average(name.partition(".")[0]) for name in names):
        return False
    return named and not extras and all(len(leaf.path) == 1 for leaf in leaves) and len(names) == len(leaves)


def _sharing(tensors: Mapping[TensorKey, LogicalTensor]) -> list[Note]:
    """Notes on tensors that share bytes (tied weights), and on tensors with repeated elements (stride 0)."""
    by_place: dict[Any, list[TensorKey]] = {}
    repeated = []
    for key, tensor in tensors.items():
        array = tensor.chunks[0].array
        if array.numel:
            by_place.setdefault((array.path, array.offset, array.shape, array.strides, array.dtype), []).append(key)
        if array.strides and any(s == 0 and n > 1 for s, n in zip(array.strides, array.shape, strict=True)):
            repeated.append(key)
    # Only tensors that are equal views count: slices of a common buffer share a storage, but no elements.
    tied = [group for group in by_place.values() if len(group) > 1]
    notes = []
    if tied:
        shown = "; ".join(" = ".join(map(str, group[:4])) for group in tied[:8])
        notes.append(Note("N-tied", f"{len(tied)} groups of tensors share their bytes, each is written whole: {shown}"))
    if repeated:
        shown = ", ".join(map(str, repeated[:8]))
        notes.append(
            Note("N-expanded", f"{len(repeated)} tensors repeat their elements (stride 0), written in full: {shown}")
        )
    return notes


# -- writing -----------------------------------------------------------------------------------------------------------


def _target(wanted: Wanted) -> Target:
    _check_dtypes(wanted.tensors)
    copies = wanted.side_file_copies()
    if wanted.single is None and not wanted.extras and all(tensor.key.state == MODEL for tensor in wanted.tensors):
        refuse_taken_for_averages(wanted.tensors)
        return Target("torch", (*_hugging_face(wanted), *copies), by_size=True)
    places = [stored(str(i), tensor.shape, tensor.dtype) for i, tensor in enumerate(wanted.tensors)]
    if _bare(wanted):  # a flat dict of names, as most loaders expect it
        state: Mapping[Any, Any] = {t.key.name: place for t, place in zip(wanted.tensors, places, strict=True)}
        notes: list[str] = []
    else:
        state, _, notes = nest(wanted, places, whole_numbers=True)
    name = wanted.single or SINGLE
    file = _file(name, dumps(state), wanted.tensors, range(len(wanted.tensors)))
    return Target("torch", (file,) if wanted.single else (file, *copies), single=wanted.single, notes=tuple(notes))


def _bare(wanted: Wanted) -> bool:
    """Whether the output can be a flat dict: a model alone, from a source without nesting, with unambiguous names.

    Names are unambiguous if reading them back as a flat dict gives the same names.
    """
    if wanted.extras or wanted.hints.get(Roots) or any(t.key.state != MODEL for t in wanted.tensors):
        return False
    found = name_leaves([Leaf((t.key.name,), t.shape) for t in wanted.tensors], {})
    return not found.faults and found.keys == [t.key for t in wanted.tensors]


def _hugging_face(wanted: Wanted) -> list[TargetFile]:
    """The files of a hub model: flat names, files of at most `shard_size`, and an index if there are several."""
    bins = pack([tensor.nbytes for tensor in wanted.tensors], wanted.shard_size) or [[]]
    count = len(bins)
    names = [
        f"pytorch_model-{number:05d}-of-{count:05d}.bin" if count > 1 else "pytorch_model.bin"
        for number in range(1, count + 1)
    ]
    files = []
    for name, rows in zip(names, bins, strict=True):
        tensors = [wanted.tensors[row] for row in rows]
        places = {t.key.name: stored(str(i), t.shape, t.dtype) for i, t in enumerate(tensors)}
        files.append(_file(name, dumps(places), tensors, rows))
    if count > 1:
        index = write_index(
            {wanted.tensors[row].key.name: name for name, rows in zip(names, bins, strict=True) for row in rows},
            total_parameters=sum(prod(tensor.shape) for tensor in wanted.tensors),
            total_size=sum(tensor.nbytes for tensor in wanted.tensors),
        )
        files.append(whole_file("pytorch_model" + torch_choice.INDEX_SUFFIX, index))
    return files


def _file(name: str, pickle: bytes, tensors: Sequence[WantedTensor], rows: Sequence[int]) -> TargetFile:
    """The plan of one torch zip. rows: the tensors' indexes in `wanted.tensors`."""
    plan = plan_zip(ROOT, pickle, [(str(i), tensor.nbytes) for i, tensor in enumerate(tensors)])
    arrays: list[TargetArray] = []
    patches: list[Patch] = []
    for row, tensor, offset, holes in zip(rows, tensors, plan.offsets, plan.crcs, strict=True):
        if tensor.nbytes:  # the zip's CRC fields are filled in once the bytes have been written
            patches += [Patch(hole, "crc32", len(arrays)) for hole in holes]
            arrays.append(TargetArray(row, whole(tensor.shape), offset))
    return TargetFile(name, plan.size, plan.literals, tuple(arrays), tuple(patches))


def _check_dtypes(tensors: Sequence[WantedTensor]) -> None:
    without = [tensor for tensor in tensors if tensor.dtype.torch is None]
    if without:
        raise UsageError(
            f"torch has no {without[0].dtype.name}",
            code="E0242",
            key=str(without[0].key),
            faults=[str(tensor.key) for tensor in without[1:SHOWN]],
            hint="cast it with --dtype, or write safetensors",
        )
