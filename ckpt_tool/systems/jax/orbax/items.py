"""Where the trees of an Orbax checkpoint are stored, and the leaves that `_METADATA` lists.

    7/_CHECKPOINT_METADATA, 7/state/_METADATA, 7/config/metadata
      -> step "7/", items [state], JSON {"config": {...}}; leaves ("params", "w") jax.Array, ("opt_state", 0) None

A tree is an item: a folder with `_METADATA`. A step is a folder of items, or an item itself; a run is a folder of
steps, named by a number or ending in one. Folders of saves that did not finish have `.orbax-checkpoint-tmp` in their
names.

Source: orbax-checkpoint 0.12.8 `_src/metadata/tree.py` (`InternalTreeMetadata`), `_src/path/step.py`,
`_src/handlers/composite_checkpoint_handler.py`. Reads all of `_METADATA` and of JSON items.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ckpt_tool.core.bounds import numeral
from ckpt_tool.core.missing import report_missing
from ckpt_tool.core.tensor import Path
from ckpt_tool.errors import CorruptFile, Incomplete, Unexplained, UnknownFormat, several_steps
from ckpt_tool.formats.hub_folder.model_files import is_sidefile
from ckpt_tool.storage.arrays.ocdbt import MANIFEST
from ckpt_tool.storage.source import Tree
from ckpt_tool.storage.texts import strict_json

METADATA = "_METADATA"
STEP_METADATA = "_CHECKPOINT_METADATA"
STRINGS = "_strings.json"
JSON_ITEM = "metadata"  # the file of a JSON item
METRICS_ITEM = "metrics"  # the same of the item with CheckpointManager's metrics
# Stored next to the arrays of a tree
SHARDING = "_sharding"
ARRAYS = "array_metadatas"
JSON_HANDLER = "JsonCheckpointHandler"
DAMAGED = "E2755"
UNFINISHED = "E2756"
LOST_ITEM = "E2872"
NO_METADATA = "E3031"
TEMPORARY = ".orbax-checkpoint-tmp"
_PROCESS = re.compile(rf"ocdbt\.process_\d+/{re.escape(MANIFEST)}")
_ITEM_MARK = re.compile(rf"((?:[^/]+/){{0,2}}?)(?:{SHARDING}|(?:ocdbt\.process_\d+/)?{re.escape(MANIFEST)})")
_STEP = re.compile(r"(?:.*[_\-])?\d+")
_DONE = "commit_success.txt"
_OWN = re.compile(  # Orbax's own files in the folder of an item, apart from arrays that are folders of zarr
    rf"{METADATA}|{STEP_METADATA}|{re.escape(STRINGS)}|_sharding|{_DONE}|checkpoint|array_metadatas/process_\d{{1,7}}"
    rf"|(?:ocdbt\.process_\d+/)?(?:{re.escape(MANIFEST)}|d/[0-9a-f]{{32}})"
)
_HEADERS = (".zarray", ".zattrs", ".zgroup", "zarr.json")
_ARRAY = ("/.zarray", "/zarr.json")
_CHUNK2 = re.compile(r"\d+(?:\.\d+)*")
_CHUNK3 = re.compile(r"/c(?:/\d+)*$")
_LIMIT = 256 << 20  # bytes of `_METADATA`
_VALUES = 20_000_000  # JSON values in it: a leaf has some 12
_JSON_LIMIT = 16 << 20  # bytes of any other JSON file
STRING = "string"
_KEY = "random_key_impl"
EMPTY = ("None", "Dict", "List", "Tuple", "NamedTuple")  # value types of which nothing is stored
# Types of a key (`KeyType`)
SEQUENCE = 1
DICT = 2
DEEPEST = 64  # keys of a path


class OrbaxLeaf(NamedTuple):
    """A leaf of a source's tree, as `_METADATA` lists it."""

    path: Path  # dict keys as text, positions in sequences as numbers
    kind: str  # its value_type
    write_shape: tuple[int, ...] | None = None  # the part of the array that one device wrote, if stated

    @property
    def stored(self) -> str:
        """The name of its array in the store."""
        return ".".join(map(str, self.path))


class OrbaxItem(NamedTuple):
    """An item that is a tree of arrays."""

    folder: str  # its path in the source, "" or with a slash at its end
    name: str  # "" for an item that is the step itself
    leaves: tuple[OrbaxLeaf, ...]
    ocdbt: bool  # arrays are in an OCDBT database
    zarr3: bool
    sparse: bool | None  # chunks that hold only the fill value were left out; None if no flag states it
    custom: Any  # the user's `custom_metadata`


class OrbaxStep(NamedTuple):
    """A step of a run."""

    folder: str  # its path in the source, "" or with a slash at its end
    items: tuple[str, ...]  # names of its trees; ("",) for a step that is itself a single item


def steps(tree: Tree) -> list[OrbaxStep]:
    """The steps in a tree of files, by names alone: one for a folder that is a step or an item."""
    found: dict[str, list[str]] = {}
    for path in tree.listing() if tree.single is None else ():
        *above, last = path.split("/")
        if last != METADATA or len(above) > 2 or TEMPORARY in path:
            continue
        if len(above) == 1 and not _STEP.fullmatch(above[0]):
            found.setdefault("", []).append(above[0])
        else:
            found.setdefault("".join(f"{name}/" for name in above[:1]), []).append("".join(above[1:]))
    # If the root is itself a step or an item, folders below it are not steps of a run.
    if "" in found:
        found = {"": [""] if "" in found[""] else found[""]}
    return [OrbaxStep(folder, tuple(names)) for folder, names in found.items()]


def lost_items(tree: Tree) -> list[str]:
    """The folders of items whose `_METADATA` is missing, "" or with a slash at their end.

    They are recognised by files that only Orbax items have. Trees of 2023, which never had `_METADATA`, have a file
    `checkpoint` and are not listed.
    """
    folders: list[str] = []
    for path in tree.listing() if tree.single is None else ():
        found = _ITEM_MARK.fullmatch(path)
        folder = found[1] or "" if found else None
        if folder is not None and folder not in folders and TEMPORARY not in path:
            folders.append(folder)
    return [
        folder for folder in folders if not tree.exists(folder + METADATA) and not tree.exists(f"{folder}checkpoint")
    ]


def files(tree: Tree, found: Sequence[OrbaxStep]) -> tuple[str, ...]:
    """All files in the folders of these steps, without the side files next to them."""
    folders = tuple(f"{step.folder}{item}/" if item else step.folder for step in found for item in step.items)
    above = tuple(f"{step.folder}{STEP_METADATA}" for step in found)
    return tuple(
        path
        for path in tree.listing()
        if (path.startswith(folders) and not ("/" not in path and is_sidefile(path))) or path in above
    )


def own_files(tree: Tree, step: OrbaxStep) -> tuple[str, ...]:
    """The files of a step that Orbax wrote, by their names.

    `files`, in contrast, claims everything in the step's folders, where users may have put files of their own.
    """
    folders = [f"{step.folder}{item}/" if item else step.folder for item in step.items]
    jsons = {path for _, path in _json_files(tree, step)}
    arrays = {path.rpartition("/")[0] for path in tree.listing() if path.endswith(_ARRAY)}
    beside = {step.folder + name for name in (STEP_METADATA, _DONE)}
    beside.update(path.rpartition("/")[0] + f"/{_DONE}" for path in jsons)

    def is_own(path: str) -> bool:
        """Whether Orbax gives such a name to a file of this step."""
        if path in jsons or path in beside:
            return True
        holding = [folder for folder in folders if path.startswith(folder)]
        if any(_OWN.fullmatch(path.removeprefix(folder)) for folder in holding):
            return True
        return bool(holding) and _is_of_array(path, arrays)

    return tuple(path for path in tree.listing() if is_own(path))


def _is_of_array(path: str, arrays: Collection[str]) -> bool:
    """Whether a path is the header or a chunk of an array that is a plain folder of zarr."""
    folder, _, name = path.rpartition("/")
    if folder in arrays and (name in _HEADERS or _CHUNK2.fullmatch(name)):
        return True
    chunked = _CHUNK3.search(path)
    return chunked is not None and path[: chunked.start()] in arrays


def processes(tree: Tree, found: Sequence[OrbaxStep]) -> list[str]:
    """The folders of the databases that single processes of the job wrote, before they were merged into the item's."""
    folders = [f"{step.folder}{item}/" if item else step.folder for step in found for item in step.items]
    return [
        path.removesuffix(MANIFEST)
        for path in tree.listing()
        for folder in folders
        if _PROCESS.fullmatch(path.removeprefix(folder)) and path.startswith(folder)
    ]


def chosen_step(tree: Tree) -> OrbaxStep:
    """The only step of a source.

    Raises UnknownFormat E0393 if there is none, E0392 if there are several; Incomplete E2756 if the only save did not
    finish; Unexplained E3031 if only `_METADATA` is missing.
    """
    found = steps(tree)
    if len(found) == 1:
        return found[0]

    if not found and any(TEMPORARY in path for path in tree.listing()):
        raise Incomplete(
            "the save did not finish: its folder still has a temporary name",
            code=UNFINISHED,
            path=tree.display(),
            hint="pass another step; the job that wrote it was stopped on the way",
        )

    lost = lost_items(tree) if not found else []
    if lost:
        raise Unexplained(
            f"{lost[0]}{METADATA} is missing, which lists the arrays of the tree",
            code=NO_METADATA,
            path=tree.display(lost[0] + METADATA),
            faults=[f"{folder}{METADATA} is missing" for folder in lost[1:50]],
            hint="fetch it from where the job wrote it, or take another step",
        )

    if not found:
        raise UnknownFormat(
            f"no {METADATA}: this is no Orbax checkpoint",
            code="E0393",
            path=tree.display(),
            hint=f"pass the folder that holds {METADATA}, or the step that holds it",
        )

    # By number, so that 10 comes after 9.
    names = sorted((step.folder.rstrip("/") for step in found), key=lambda name: (_number(name), name))
    raise several_steps(tree.display(), list(map(tree.display, names)))


def _number(name: str) -> int:
    last = re.split(r"[_\-]", name)[-1]
    return int(last) if numeral(last) else -1


def read_item(tree: Tree, step: OrbaxStep, name: str) -> OrbaxItem:
    """The tree of an item, from its `_METADATA`. Raises CorruptFile E2755 if that is damaged."""
    folder = f"{step.folder}{name}/" if name else step.folder
    path = folder + METADATA
    raw = strict_json.parse(tree.read_whole(path, limit=_LIMIT), path=tree.display(path), limit=_VALUES)
    rows = raw.get("tree_metadata") if isinstance(raw, dict) else None
    if not isinstance(rows, dict):
        raise _damaged_error(tree, path, "it has no tree_metadata")
    leaves = tuple(_leaf(tree, path, key, row) for key, row in rows.items())
    _check_names(tree, path, leaves)
    stores_fill = raw.get("store_array_data_equal_to_fill_value")
    return OrbaxItem(
        folder,
        name,
        leaves,
        tree.exists(folder + MANIFEST),
        raw.get("use_zarr3") is True,
        not stores_fill if isinstance(stores_fill, bool) else None,
        raw.get("custom_metadata"),
    )


def _check_names(tree: Tree, path: str, leaves: Sequence[OrbaxLeaf]) -> None:
    """Raise CorruptFile E2755 for two leaves of one name, and for a leaf below another leaf."""
    seen = set[str]()
    stored = [leaf for leaf in leaves if leaf.kind not in EMPTY]
    for leaf in stored:
        if leaf.stored in seen:
            fault = _damaged_error(tree, path, f"two leaves are called {leaf.stored[:200]!r}")
            fault.hint = "Orbax wrote both into one array, so that one is lost: save it again with keys without dots"
            raise fault
        seen.add(leaf.stored)
    spelled = [tuple(map(str, leaf.path)) for leaf in stored]
    # A leaf and a branch of one name could not both be nested in extras.
    branches = {each[:depth] for each in spelled for depth in range(1, len(each))}
    if (above := next((each for each in spelled if each in branches), None)) is not None:
        raise _damaged_error(tree, path, f"{'.'.join(above)[:200]!r} is a leaf, and others are below it")


def _leaf(tree: Tree, path: str, shown: str, row: Any) -> OrbaxLeaf:
    """A leaf from its row in `_METADATA`. shown: the row's key, for messages. Raises CorruptFile E2755."""
    try:
        keys = [(each["key"], each["key_type"]) for each in row["key_metadata"]]
        kind = row["value_metadata"]["value_type"]
        write_shape = row["value_metadata"].get("write_shape")
    except (KeyError, TypeError, AttributeError):
        raise _damaged_error(tree, path, f"the row of {shown[:200]} lacks a field") from None
    path_keys: list[str | int] = []
    for key, key_type in keys:
        if type(key) is not str or key_type not in (SEQUENCE, DICT) or (key_type == SEQUENCE and not numeral(key)):
            raise _damaged_error(
                tree, path, f"a key of {shown[:200]} is not one: {str(key)[:80]} of type {str(key_type)[:20]}"
            )
        path_keys.append(int(key) if key_type == SEQUENCE else key)
    if not path_keys and type(kind) is str:
        fault = _damaged_error(tree, path, "the row of () names no leaf: the whole tree is one array without a name")
        fault.hint = "save it below a name, as {'params': array}: a tensor of no name has no place in any other format"
        raise fault
    if not 0 < len(path_keys) <= DEEPEST or type(kind) is not str:
        raise _damaged_error(tree, path, f"the row of {shown[:200]} names no leaf")
    is_shape = isinstance(write_shape, list) and all(type(extent) is int and extent >= 0 for extent in write_shape)
    if write_shape is not None and not is_shape:
        raise _damaged_error(tree, path, f"write_shape of {shown[:200]} is no list of sizes")
    return OrbaxLeaf(tuple(path_keys), kind, None if write_shape is None else tuple(write_shape))


def _damaged_error(tree: Tree, path: str, message: str) -> CorruptFile:
    return CorruptFile(message, code=DAMAGED, path=tree.display(path), hint="fetch the checkpoint again")


def strings(tree: Tree, item: OrbaxItem) -> dict[str, str]:
    """The texts of an item, by the names of their leaves. Raises CorruptFile E2755.

    `_strings.json` nests at each slash of a name.
    """
    wanted = [leaf.stored for leaf in item.leaves if leaf.kind == STRING]
    path = item.folder + STRINGS
    if not wanted and not tree.exists(path):
        return {}
    raw = strict_json.parse(tree.read_whole(path, limit=_JSON_LIMIT), path=tree.display(path))
    strays = sorted(set(_names_of_texts(raw)).difference(wanted))
    if strays:
        raise _damaged_error(tree, path, f"the text {strays[0][:200]!r} is stored, and {METADATA} names no such leaf")
    found = {}
    for name in wanted:
        value = raw
        for step in name.split("/"):
            value = value.get(step) if isinstance(value, dict) else None
        if not isinstance(value, str):
            raise _damaged_error(tree, path, f"it has no text for {name[:200]}")
        found[name] = value
    return found


def _names_of_texts(value: Any, above: str = "") -> Iterator[str]:
    """The names of all texts in nested dicts, with a slash between levels."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _names_of_texts(inner, f"{above}/{key}" if above else str(key))
    else:
        yield above


def keys_of_prngs(tree: Tree, item: OrbaxItem) -> dict[str, str]:
    """The arrays that are PRNG keys: {name: kind of PRNG}, from `array_metadatas` of the first process, which has all
    of them."""
    path = f"{item.folder}{ARRAYS}/process_0"
    if not tree.exists(path) or not 0 < tree.size(path) <= _JSON_LIMIT:
        return {}
    raw = tree.read_whole(path, limit=_JSON_LIMIT)
    if _KEY.encode() not in raw:
        return {}
    try:
        rows = [row["array_metadata"] for row in strict_json.parse(raw, path=tree.display(path))["array_metadatas"]]
        found = {row["param_name"]: row["ext_metadata"][_KEY] for row in rows if _KEY in (row["ext_metadata"] or {})}
    except (KeyError, TypeError):
        raise _damaged_error(tree, path, "a row of it lacks a field") from None
    return {str(name): str(kind) for name, kind in found.items()}


def json_items(tree: Tree, step: OrbaxStep) -> Iterator[tuple[str, Any]]:
    """(name, value) of the step's items that are JSON instead of trees."""
    for name, path in _json_files(tree, step):
        raw = tree.read_whole(path, limit=_JSON_LIMIT)
        yield name, strict_json.parse(raw, path=tree.display(path))


def _json_files(tree: Tree, step: OrbaxStep) -> Iterator[tuple[str, str]]:
    """(name, path of the file) of the step's JSON items."""
    if step.items == ("",):
        return
    for path in tree.listing():
        if path.startswith(step.folder) and path.endswith((f"/{JSON_ITEM}", f"/{METRICS_ITEM}")):
            name, _, rest = path[len(step.folder) :].partition("/")
            if rest in (JSON_ITEM, METRICS_ITEM if name == METRICS_ITEM else "") and name not in step.items:
                yield name, path


def step_metadata(tree: Tree, step: OrbaxStep) -> Mapping[str, Any]:
    """The content of `_CHECKPOINT_METADATA`, {} if there is no such file."""
    path = step.folder + STEP_METADATA
    if not tree.exists(path):
        return {}
    raw = strict_json.parse(tree.read_whole(path, limit=_JSON_LIMIT), path=tree.display(path))
    if not isinstance(raw, dict):
        raise _damaged_error(tree, path, "it is no object")
    return raw


def check_items(tree: Tree, step: OrbaxStep) -> None:
    """Raise Incomplete E2872 for items that are missing, Unexplained E3031 if only their `_METADATA` is missing.

    Orbax lists the items that it saved in `_CHECKPOINT_METADATA`; a tree without its `_METADATA` still has the database
    or the list of its arrays. Versions of 2023 wrote `_METADATA` for some handlers of a step and not for others
    (`PyTreeCheckpointHandler(write_tree_metadata=False)`). Folders of other kinds (a data loader's state) are left
    alone.
    """
    if step.items == ("",):
        return

    files_of: dict[str, set[str]] = {}
    for path in tree.listing():
        if path.startswith(step.folder):
            name, slash, rest = path[len(step.folder) :].partition("/")
            if slash:
                files_of.setdefault(name, set()).add(rest)

    handlers = step_metadata(tree, step).get("item_handlers")
    listed = handlers if isinstance(handlers, dict) else {}
    lost: list[str] = []
    unlisted: list[str] = []
    for name in sorted(listed.keys() | files_of.keys()):
        there = files_of.get(name, set())
        is_tree = any(file in (MANIFEST, SHARDING) or file.startswith(f"{ARRAYS}/") for file in there)
        is_json = JSON_HANDLER in str(listed.get(name))
        if name in step.items:
            continue
        if not there:
            lost.append(f"{name}: it has no files")
        elif is_tree:
            unlisted.append(f"{name}: its {METADATA} is missing")
        elif is_json and not there & {JSON_ITEM, METRICS_ITEM}:
            lost.append(f"{name}: its file {JSON_ITEM} is missing")

    faults = [*lost, *unlisted]
    if faults:
        kind = Incomplete if lost else Unexplained
        fault = kind(
            f"an item of the step is incomplete: {faults[0]}",
            code=LOST_ITEM if lost else NO_METADATA,
            path=tree.display(step.folder.rstrip("/")),
            faults=faults[1:50],
            hint="fetch the whole step again",
        )
        report_missing(fault)
