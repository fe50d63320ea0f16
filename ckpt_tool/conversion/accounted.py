"""Decides what `--force` and `prune` may remove: files that the checkpoint's own reader accounts for, nothing else.

    out/model.safetensors, config.json, tokenizer.json     all accounted for: they go once the new output is in place
    out/train.py, .git/config, run2/model.safetensors      E1604: three files that are no part of the checkpoint there

That a format recognises a folder proves nothing about other files in it. So the checkpoint is opened, and its reader
lists its files (`Catalog.files`; its chunks are stored in no others). Further accounted for are the side files that a
writer would copy, the pointer files that led to it, the markers of finished ranks (`Holds.markers`), and the signature
and attestations of `--sign` and `--attest`. No format is named here. Files of code count only if the model's config
names them. Links and empty folders never count, because no writer creates them.

A step of a run (`find_other_files`) may hold several checkpoints, broken ones too, and what its trainer writes next to
them (`sources.trainer_files`). Where a reader can't open one, the names that its format claims count.

Cost: the headers of what would go, and a listing. What it does not do: remove (`output.replaced`, `output.removal`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from ckpt_tool.core.report_data import collect_report_data
from ckpt_tool.errors import CkptError, InputError, OutputExists, UnsafeInput, failures_met, wrap_os_error
from ckpt_tool.formats import registry
from ckpt_tool.formats.adapters.lone import CONFIG as ADAPTER_CONFIG
from ckpt_tool.formats.base import Naming, Specificity
from ckpt_tool.formats.hub_folder.model_files import is_model_code, is_sidefile
from ckpt_tool.formats.hub_folder.modules import module_files
from ckpt_tool.options.reading import Reading
from ckpt_tool.signing.written import is_statement
from ckpt_tool.sources.judging import parts_of
from ckpt_tool.sources.opening import Opened, open_source
from ckpt_tool.sources.steps import POINTERS, steps_in
from ckpt_tool.sources.trainer_files import is_pretrained_file, written_by_trainers
from ckpt_tool.storage.descriptors import naming
from ckpt_tool.storage.mounts import mounts_below
from ckpt_tool.storage.opening import open_tree
from ckpt_tool.storage.output.destination import Place, RemotePlace, refuse_link, staging_path
from ckpt_tool.storage.output.replaced import RECORD, ReplacedOutput, Stamp, entries_below, some_of
from ckpt_tool.storage.output.set_aside import comes_back
from ckpt_tool.storage.source import Tree
from ckpt_tool.storage.texts import strict_json
from ckpt_tool.weight_schemes.quantised_weights import QUANTISER_FILES

NOT_ALL = "E1604"
HINT = "choose another output; or look at what is there, and move away or remove what is not needed"
LISTED = 200  # names in the error's list of faults
SEALED = 20  # files that are looked into for a signature or an attestation
_STATEMENT_LIMIT = 64 << 20  # bytes of a signature or an attestation
_CODE_LIMIT = 4 << 20  # bytes of a file of code, or of a config that names one
_CONFIGS = ("config.json", "tokenizer_config.json", "processor_config.json", "*preprocessor_config.json")
_MODULE_WEIGHTS = "model.safetensors"
_MODULE = re.compile(r"\d+_\w+/")  # the folder of a module as its library names it: `1_Pooling/`
_IMPORT = re.compile(r"^\s*from\s+\.(\w+)\s+import\b", re.MULTILINE)

# Of a tree that is no checkpoint but another output of ours: its files, or None where it is none.
Reader = Callable[[Tree], "Iterable[str] | None"]


def check_replaced(destination: Place, other: Reader | None = None) -> ReplacedOutput:
    """What `--force` replaces, nothing where nothing is there. other: reads outputs of another kind.

    Raises OutputExists E1603 for a link, E1604 for what is no checkpoint or holds files that are no part of it, E3022
    for a mount point, StorageError for a folder that can't be listed.
    """
    if isinstance(destination, RemotePlace):
        return _check_store(destination.url)
    refuse_link(destination)
    with naming(destination, "looking for an old output that a killed run set aside"):
        # The run puts it back before it begins (`Staging`).
        output = comes_back(destination) if os.path.lexists(staging_path(destination)) else None
    output = output or destination
    _refuse_mounts(output)
    there = entries_below(output)
    refuse_unaccounted(str(output), list(there), _is_nothing(there), other)
    return ReplacedOutput(there)


def _refuse_mounts(output: Path) -> None:
    """Raise OutputExists E3022 where the output is a mount point, or has one in it: the one can't be renamed, and the
    files of the other are stored elsewhere, where others may need them."""
    mounted = mounts_below(output)
    if not mounted:
        return
    is_itself = mounted[0] == str(output)
    raise OutputExists(
        f"{mounted[0]} is a mount point, which can't be replaced",
        code="E3022",
        path=mounted[0],
        hint=f"write to a new folder in it: {output / 'NAME'}" if is_itself else "unmount it, or choose another output",
    )


def _check_store(url: str) -> ReplacedOutput:
    """The same of a place in a store, whose objects are known by their keys. Where a run was killed while it replaced
    what was there, its record says what of it may go, and its own objects say whose they are."""
    from ckpt_tool.run.upload import PLAN
    from ckpt_tool.storage.stores.output_store import output_store, staging_url

    bucket = output_store(url)
    there = bucket.listing().objects
    seen = {key: Stamp.of_object(each.nbytes, each.etag) for key, each in there.items()}
    begun = ReplacedOutput.from_json(bucket.at_url(staging_url(url)).get(RECORD)) if seen else None
    if begun is not None and all(begun.files.get(key) == each or bucket.note(key, PLAN) for key, each in seen.items()):
        return ReplacedOutput(seen)
    refuse_unaccounted(url, list(seen), not seen, None)
    return ReplacedOutput(seen)


def _is_nothing(there: Mapping[str, Stamp]) -> bool:
    """Is nothing there, an empty folder, or an empty file?"""
    alone = there.get("")
    return not there or (alone is not None and alone.is_file and not alone.size)


def refuse_unaccounted(place: str, paths: Iterable[str], empty: bool, other: Reader | None) -> None:
    """Raise OutputExists E1604 unless every path at the place is accounted for, and StorageError if something could not
    be read, because its owner is unknown then."""
    if empty:
        return

    try:
        with failures_met() as failures, collect_report_data(False):  # a report is about the sources, not about this
            given = open_tree(place)
            if given.single is not None:  # it was named itself; its suffix alone does not make it a checkpoint
                open_source(place, Reading(lenient=True))
                return
            kind, known = _accounted_in(given, place, other)
            left = [path for path in paths if path not in known]
            left = [*filter(lambda path: not _is_statement(given, path), left[:SEALED]), *left[SEALED:]]
    except CkptError as e:
        if failures:
            raise failures[0] from e
        raise _not_one(place, e.message) from e
    except OSError as e:
        raise wrap_os_error(e, place, "looking at what would be replaced") from e

    if failures:
        raise failures[0]

    if left:
        number = "1 file that is" if len(left) == 1 else f"{len(left)} files that are"
        raise OutputExists(
            f"--force would remove {number} no part of the {kind} in {place}: {some_of(left)}",
            code=NOT_ALL,
            path=place,
            hint=HINT,
            faults=left[1:LISTED],
        )


def _not_one(place: str, saw: str) -> OutputExists:
    return OutputExists(
        f"--force would delete {place}, which is not one checkpoint: {saw}",
        code=NOT_ALL,
        path=place,
        hint=HINT,
    )


def _accounted_in(given: Tree, place: str, other: Reader | None) -> tuple[str, set[str]]:
    """(what is there, the files that belong to it, relative to the place)."""
    files = other(given) if other is not None else None
    if files is not None:
        return "delta", set(files)
    several = steps_in(given)
    if len(several) > 1:
        raise OutputExists(
            f"the folder holds {len(several)} checkpoints, among them {', '.join(several[-3:])}", code=NOT_ALL
        )
    opened = open_source(place, Reading(lenient=True))
    return f"{opened.format.name} checkpoint", set(_accounted_by(opened, given))


def is_exact_sidefile(name: str) -> bool:
    """Is it a side file by its exact name? `is_sidefile`, which says what is carried along, takes
    `tokenizer_notes.txt` too, which no library writes."""
    return name in QUANTISER_FILES or is_pretrained_file(name)


def _accounted_by(opened: Opened, given: Tree, is_side: Callable[[str], bool] = is_exact_sidefile) -> Iterator[str]:
    """The files that the reader and the writers of the opened checkpoint know, relative to the given tree. is_side: is
    a file of this name one that a library writes next to a checkpoint?"""
    tree = opened.tree
    catalog = opened.catalog
    evidence = opened.format.detect(tree)
    loose = evidence is None or evidence.specificity == Specificity.CONTAINER
    if loose and len(catalog.files) > 1:
        raise OutputExists(
            f"{len(catalog.files)} files of weights that nothing ties together: {some_of(catalog.files)}", code=NOT_ALL
        )

    inside = _prefix_of(tree, given)
    odd = {path for path in module_files(tree) if not _is_of_module(path) or not _is_written_in_module(path)}
    for path in (*catalog.files, *catalog.indexes, *catalog.sidefiles):
        is_odd = path in odd or (is_sidefile(path) and not is_side(path))
        if not _is_code(path) and not is_odd:
            yield inside + path
    yield from (inside + name for name in opened.markers)

    holds_lora = any(".lora_" in key.name for key in catalog.tensors)
    # Side files are next to the checkpoint's files, or next to the pointer file that names its folder.
    for folder in filter(None, (tree, opened.outer, given)):
        prefix = _prefix_of(folder, given)
        names = folder.names()
        if holds_lora and ADAPTER_CONFIG in names:  # written with an adapter's tensors, in whatever format
            yield prefix + ADAPTER_CONFIG
        yield from (prefix + name for name in names if is_side(name) and not _is_code(name))
        yield from (prefix + path for path in module_files(folder) if _is_of_module(path) and path not in odd)
        yield from (prefix + name for name in _code_named(folder, names))

    pointers = {*POINTERS, *opened.format.holds.pointers}
    above = inside.split("/")[:-1]
    for depth in range(len(above)):
        yield from ("/".join([*above[:depth], name]) for name in pointers)


def find_other_files(step: str, reading: Reading) -> list[str]:
    """The paths in a step's folder that belong neither to a checkpoint there nor to a trainer: files, links, and
    anything else that is no folder. [] for a step that is one file, or a link (only the link would be removed).

    Raises StorageError if something could not be read, because it is unknown then to whom the files belong.
    """
    if os.path.islink(step):
        return []
    with failures_met() as failures, collect_report_data(False):
        given = open_tree(step, follow_symlinks=reading.follow_symlinks)
        there = [path for path in entries_below(Path(step)) if not path.endswith("/")]
        if given.single is not None:
            return []
        known = _known_in_step(step, given, there, reading)
        others = [path for path in there if path not in known]
        statements = {path for path in others[:SEALED] if _is_statement(given, path)}
    if failures:
        raise failures[0]
    return [path for path in others if path not in statements]


def _known_in_step(step: str, given: Tree, there: list[str], reading: Reading) -> set[str]:
    """The files of the checkpoints in a step, and those that its trainers write next to them."""
    known: set[str] = set()
    folders = {""}
    for at, name in parts_of(step, reading):
        tree = open_tree(at, follow_symlinks=reading.follow_symlinks)
        inside = _prefix_of(tree, given)
        try:
            opened = open_source(at, replace(reading, lenient=True, from_format=name))
            known.update(_accounted_by(opened, given, _is_trainers_sidefile))
            inside = _prefix_of(opened.tree, given)
        except (InputError, UnsafeInput):  # a broken step: by names
            known.update(inside + path for path in _claimed(tree))
        except OutputExists:  # files that nothing ties together: which of them are the step's is not known
            continue
        parts = inside.rstrip("/").split("/") if inside else []
        folders.update("/".join(parts[:depth]) + "/" for depth in range(1, len(parts) + 1))

    for folder in folders:
        below = [path.removeprefix(folder) for path in there if path.startswith(folder)]
        known.update(folder + path for path in written_by_trainers(below))
    return known


def _claimed(tree: Tree) -> Iterator[str]:
    """The files that the formats of a checkpoint claim by names that only they give."""
    for claim in registry.settle(registry.claims(tree)):
        if claim.evidence.specificity > Specificity.CONTAINER:
            fmt = registry.by_name(claim.name)
            yield from fmt.named(tree) if isinstance(fmt, Naming) else claim.evidence.files


def _is_trainers_sidefile(name: str) -> bool:
    """The same of a step: trainers write a whole model next to what they keep in another format."""
    return name == _MODULE_WEIGHTS or is_exact_sidefile(name)


def _prefix_of(tree: Tree, given: Tree) -> str:
    """Where a tree is below the given one: "" or a path that ends in a slash."""
    inner = tree.shown.removeprefix(given.shown).strip("/")
    return f"{inner}/" if inner else ""


def _is_of_module(path: str) -> bool:
    """Is it in a folder that is called as a module's? `modules.json` may name any folder, a person's too."""
    return "/" not in path or _MODULE.match(path) is not None


def _is_written_in_module(path: str) -> bool:
    """Is the file of a module's folder one that its library writes, and no person's notes?"""
    folder, _, name = path.rpartition("/")
    return not folder or name == _MODULE_WEIGHTS or is_exact_sidefile(name)


def _is_code(path: str) -> bool:
    return path.endswith(".py")


def _code_named(tree: Tree, names: Iterable[str]) -> set[str]:
    """Files of code that a config's `auto_map` names, and those that these import: all others are somebody's own."""
    code = set(filter(is_model_code, names))
    if not code:
        return set()
    waiting = [f"{module}.py" for name in names if _is_config(name) for module in _modules_of(tree, name)]
    found = set[str]()
    while waiting:
        name = waiting.pop()
        if name not in code or name in found:
            continue
        found.add(name)
        text = tree.read_whole(name, limit=_CODE_LIMIT).decode("utf-8", "replace")
        waiting += [f"{module}.py" for module in _IMPORT.findall(text)]
    return found


def _is_config(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in _CONFIGS)


def _modules_of(tree: Tree, name: str) -> Iterator[str]:
    """The modules that an `auto_map` names: `{"AutoModel": "modeling_x.XModel", "AutoTokenizer": ["a.B", null]}`."""
    try:
        config = strict_json.parse(tree.read_whole(name, limit=_CODE_LIMIT), path=tree.display(name))
    except CkptError:
        return
    auto_map = config.get("auto_map") if isinstance(config, dict) else None
    for value in auto_map.values() if isinstance(auto_map, dict) else ():
        for reference in value if isinstance(value, list) else [value]:
            if isinstance(reference, str):
                yield reference.rpartition("--")[2].rpartition(".")[0]


def _is_statement(tree: Tree, path: str) -> bool:
    """Is it a signature or an attestation that was written into the folder?"""
    size = tree.listing().get(path, -1)
    if not 0 < size <= _STATEMENT_LIMIT or tree.head(path, 1) != b"{":
        return False
    return is_statement(tree.read_whole(path, limit=_STATEMENT_LIMIT))
