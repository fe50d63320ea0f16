"""Opens a source: turns the user's path into a tree, a format and a catalog.

If a folder contains several checkpoints, its pointer file decides which one is opened; the report names it.

Of a Hugging Face cache folder (`models--ORG--NAME`) one of the snapshots is taken:

    blobs/HASH...   refs/main ("5f0b02c7...")   snapshots/5f0b02c7.../model.safetensors -> ../../blobs/HASH

`refs/main` says which commit was fetched last; a folder fetched by a commit's hash has no refs. Source: huggingface_hub
2.4.0 `file_download.py`, `utils/_cache_manager.py`. Cost: the listing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpt_tool.core.catalog import Catalog, Note, Unread
from ckpt_tool.core.extras import names_in
from ckpt_tool.core.gc_pause import gc_paused
from ckpt_tool.core.report_data import keep_for_report
from ckpt_tool.core.tensor import EXTRAS, MODEL, TensorKey
from ckpt_tool.errors import CorruptFile, Incomplete, InputError, UnknownFormat, UnsafeInput, several_steps
from ckpt_tool.formats import checksums, registry
from ckpt_tool.formats.base import Format, ReadOptions, Specificity, WalkedModel, ranks_of
from ckpt_tool.formats.beside import RECIPE_OF_RUN, has_recipe
from ckpt_tool.formats.copies import look_for_copies
from ckpt_tool.formats.entry import offered
from ckpt_tool.formats.lookalikes import part_of
from ckpt_tool.formats.run_pointer import RELEASE
from ckpt_tool.options.reading import Reading
from ckpt_tool.sources.config import read_config
from ckpt_tool.sources.steps import POINTERS, pointed, run_below, runs_in, steps_in, top_folders
from ckpt_tool.storage.pickles.pickle_globals import class_of, users_own
from ckpt_tool.storage.source import Tree, safe_relative, unchanged

if TYPE_CHECKING:
    from ckpt_tool.report.holdings import Checkpoint

FOLLOW = "--follow-symlinks follows links that leave it, where you trust them"
LINKS = 20  # links that a message lists one by one
ROLES = ("actor", "critic", "reward")  # models of a step, each with a checkpoint of its own
NAME_LIMIT = 4096  # characters; those of real checkpoints have some hundred
LFS_POINTER = "W-lfs-pointer"  # a note, and a finding of verify and audit


def _none(state: str) -> bool:
    """Default of `leaves`: no state is dropped."""
    return False


def _all(state: str) -> bool:
    """Default of `held`: the target can store every state."""
    return True


class Opened(NamedTuple):
    """An open source."""

    tree: Tree
    format: Format
    catalog: Catalog
    resolved: str = ""  # why another folder than the given one was taken, "" where it was not
    # then the given folder, whose side files are next to its pointer file; if the checkpoint is in both folders, the
    # one that was taken
    outer: Tree | None = None

    @property
    def trees(self) -> tuple[Tree, ...]:
        """All trees of which something may have been read."""
        return (self.tree,) if self.outer is None else (self.tree, self.outer)

    @property
    def markers(self) -> list[str]:
        """The files that say only that a rank is done, in the tree."""
        pattern = self.format.holds.markers
        return [name for name in self.tree.names() if re.fullmatch(pattern, name)] if pattern else []

    @property
    def path(self) -> str:
        return self.tree.shown

    def refuse_unsafe(
        self,
        leaves: Callable[[str], bool] = _none,
        held: Callable[[str], bool] = _all,
        removed: Container[TensorKey] = (),
    ) -> Opened:
        """Return self, or raise if a requested tensor cannot be read without executing code or at all.

        Args:
            leaves: is a state dropped at the user's request (`sources.select.left_by_word`)? If the extras are dropped,
                custom classes in them do not matter. Otherwise a class does not matter if only dropped objects use it;
                a tensor inside a custom object is listed on its own.
            held: can the target store a state? If not, an unreadable tensor of it that needs no code is dropped.
            removed: tensors dropped by name.

        Raises UnsafeInput E0420 for pickles that name code, else the fault of the first unreadable tensor.
        """
        unread = [one for one in self.catalog.unread if not leaves(one.key.state) and one.key not in removed]
        gone = {line for one in self.catalog.unread for line in one.lines} - {
            line for one in unread for line in one.lines
        }
        own = leaves(EXTRAS)
        left = self._left_with(unread) if gone and not own else frozenset()
        unsafe = [
            line
            for line in self.catalog.unsafe
            if line not in gone and not (users_own(line) and (own or class_of(line) in left))
        ]
        if unsafe:
            raise _asks_for_code(self.path, unsafe, [one for one in self.catalog.unread if one.lines])
        faults = [one.fault for one in unread if one.fault is not None and held(one.key.state)]
        if faults:
            fault = faults[0]
            fault.faults = (f"in {len(faults)} tensors, which ckpt inspect names",) if faults[1:] else ()
            raise fault
        return self

    def _left_with(self, unread: Sequence[Unread]) -> frozenset[str]:
        """The classes of tensor-holding objects that are used neither by `unread` nor in the extras."""
        kinds = {one.kind for one in self.catalog.unread} - {one.kind for one in unread}
        return frozenset(kinds.difference(names_in(self.catalog.extras)))

    def own_objects(self) -> list[str]:
        """A line for the report on objects of the job's own classes that are left out; [] if there are none."""
        own = _once_a_class(filter(users_own, self.catalog.unsafe))
        shown = ", ".join(own[:5]) + (f" and {len(own) - 5} more" if len(own) > 5 else "")
        return [f"objects of the job's own classes are left out, and were never created: {shown}"] if own else []


def open_source(src: str, reading: Reading, *, hidden: frozenset[str] = frozenset()) -> Opened:
    """The checkpoint at `src`. Raises UnknownFormat, InputError (E0397: no checksum where one is required),
    UnsafeInput, StorageError.

    hidden: files, as messages show them, that count as missing.
    """
    from ckpt_tool.storage.opening import open_tree

    given = open_tree(src, follow_symlinks=reading.follow_symlinks)
    given.hidden = hidden
    try:
        opened = _opened(given, reading)
        keep_for_report("checkpoint", partial(_checkpoint, opened))
        return opened
    except InputError as e:
        e.path = e.path or given.shown
        links = _odd_links(given)
        if links:
            e.faults = (*e.faults, *links)
            e.hint = f"{FOLLOW}; {e.hint}" if e.hint else FOLLOW
        raise


def _checkpoint(opened: Opened) -> Checkpoint:
    from ckpt_tool.report.holdings import Checkpoint

    return Checkpoint(opened.path, opened.catalog, ranks_of(opened.format, opened.catalog.mesh.to_json()))


def _opened(given: Tree, reading: Reading) -> Opened:
    tree = given
    resolved = ""
    try:
        tree, resolved = resolve(given, reading)
        fmt = registry.by_name(reading.from_format) if reading.from_format else registry.detect(tree)[0]
        catalog = _read(fmt, tree, reading)
    except InputError as fault:
        # Code in a pickle matters more than the fault that was met first: this raises if there is any.
        _refuse_code(tree, reading, fault)
        raise
    if not hasattr(catalog.tensors, "rows"):  # (tables of safetensors have asked)
        _check_names(catalog)
    if not catalog.tensors and not catalog.unsafe and not catalog.unread:
        raise no_tensors(tree, fmt.name)
    if not catalog.unsafe:  # code is refused first
        notes = look_for_copies(tree, catalog, lenient=reading.lenient)
        catalog = replace(catalog, notes=(*catalog.notes, *notes)) if notes else catalog
    if reading.require_checksums:  # checked here again, because not every format's reader checks it
        unproved = (tensor for key, tensor in catalog.tensors.items() if key not in catalog.digests)
        checksums.missing(tree, unproved, required=True)
    if fmt.holds.single:
        from ckpt_tool.formats.adapters.lone import is_adapter, note_of

        notes = [note_of(tree)] if is_adapter(catalog.tensors) else []
        catalog = replace(catalog, notes=(*catalog.notes, *notes)) if notes else catalog
    pointers = _pointer_notes(tree, catalog)
    if pointers:
        catalog = replace(catalog, notes=(*catalog.notes, *pointers))
    if given.odd_links or tree.odd_links:
        note = Note("W-links", f"not read: {'; '.join(_odd_links(given, tree))} ({FOLLOW})")
        catalog = replace(catalog, notes=(*catalog.notes, note))
    if tree is not given and has_recipe(given):  # checked first: its reader imports the pickle modules
        for join_state in offered("run_state"):
            catalog, is_whole = join_state(given, tree, catalog, reading)
            if is_whole:
                return Opened(given, fmt, catalog, resolved, tree)
    return Opened(tree, fmt, catalog, resolved, None if tree is given else given)


def _pointer_notes(tree: Tree, catalog: Catalog) -> list[Note]:
    """A note for each side file (tokenizer.json, config.json, ...) that is only a Git LFS pointer. A conversion would
    copy the pointer, and the tokenizer would not load."""
    notes: list[Note] = []
    if not catalog.sidefiles or tree.single is not None:
        return notes
    from ckpt_tool.storage.magic import LFS_LIMIT, is_lfs_pointer

    there = tree.listing()
    for path in catalog.sidefiles:
        if 0 < there.get(path, 0) <= LFS_LIMIT and is_lfs_pointer(tree.head(path, 64)):
            what = f"{path} is a Git LFS pointer, not the file itself: run git lfs pull, or get the file again"
            notes.append(Note(LFS_POINTER, what, path))
    return notes


def _read(fmt: Format, tree: Tree, reading: Reading) -> Catalog:
    options = ReadOptions(
        reading.lenient,
        reading.prefer,
        reading.require_checksums,
        reading.family,
        read_config(reading.config) if reading.config else None,
        reading.from_format is not None,
        reading.lora_alpha,
        _find_in_memory,
    )
    with gc_paused():
        return fmt.read(tree, options)


def _find_in_memory(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> WalkedModel | None:
    """As `sources.in_memory.in_memory`, which readers of an optimizer next to a model ask."""
    from ckpt_tool.sources.in_memory import in_memory

    return in_memory(config, shapes)


def _refuse_code(tree: Tree, reading: Reading, fault: InputError) -> None:
    """Raise UnsafeInput E0420 instead of `fault` if a pickle of the checkpoint names code, because that is the more
    important of the two faults.

    It examines the files that formats claim, or the single file. A single file that is only a part of a checkpoint is
    skipped: opening its folder reports the code that it names, and what can be dropped.
    """
    from ckpt_tool.storage.pickles.survey import unsafe_names

    if tree.single is not None and part_of(tree.single) and reading.from_format is None:
        return
    if reading.from_format is None:
        evidence = [claim.evidence for claim in registry.claims(tree)]
    else:
        evidence = list(filter(None, (registry.by_name(reading.from_format).detect(tree),)))
    claimed = {file for each in evidence for file in each.files}
    unsafe = unsafe_names(tree, sorted(claimed) or filter(None, (tree.single,)))
    if unsafe:
        raise _asks_for_code(tree.display(), unsafe[:100]) from fault


def _asks_for_code(path: str, unsafe: Sequence[str], unread: Sequence[Unread] = ()) -> UnsafeInput:
    """The error (E0420) for pickles that name code. unread: the tensors inside objects of custom classes."""
    shown = _once_a_class(unsafe)
    lines = {line for one in unread for line in one.lines}
    hint = "nothing was run; look with ckpt inspect --security, and get the file from someone you trust"
    if all(users_own(line) or line in lines for line in unsafe):
        if not unread:
            hint += "; classes of your own code: --drop extras leaves their objects out"
        elif not any(one.key.state == MODEL for one in unread):
            hint += "; --state model leaves out the tensors that objects hold"
    return UnsafeInput(
        f"the checkpoint asks for code: {shown[0]}", code="E0420", path=path, faults=shown[1:], hint=hint
    )


def _once_a_class(lines: Iterable[str]) -> list[str]:
    """The lines, with one line for each class, which counts the further places."""
    places: dict[str, list[str]] = {}
    for line in lines:
        places.setdefault(class_of(line).partition(" (")[0], []).append(line)
    return [
        first[0] if len(first) == 1 else f"{first[0]}, and {len(first) - 1} more places" for first in places.values()
    ]


@contextmanager
def unchanged_sources(*sources: Opened) -> Iterator[None]:
    """Context in which the files of these sources must not change (`storage.source.unchanged`): the files that are
    read, the pointer files that led to them, and the markers of finished ranks. Raises SourceChanged E0604.

    A verdict on the given folder would be wrong if its pointer file changed meanwhile. Writing the values of a step
    does not depend on that, so it uses `unchanged` without `pointers`."""
    for opened in sources:
        opened.tree.watch(opened.markers)
    with unchanged(*(tree for opened in sources for tree in opened.trees)):
        yield


def no_tensors(tree: Tree, name: str) -> InputError:
    """The error (E1642) for a source in which the reader of format `name` finds no tensor."""
    below = registry.components(tree)
    return InputError(
        f"read as {name}, it holds no tensor in any state",
        code="E1642",
        path=tree.display(),
        hint=f"its folders are checkpoints, pass one of them: {', '.join(below)}"
        if below
        else "pass the checkpoint itself; what is here are settings or a job's own records",
    )


def _odd_links(*trees: Tree) -> list[str]:
    """A line for each link that was not followed: `mp_rank_01 is a link that leaves the folder`."""
    shown = {tree.display(path): why for tree in trees for path, why in tree.odd_links.items()}
    lines = [f"{path} is a link that {why}" for path, why in shown.items()]
    return lines if len(lines) <= LINKS else [*lines[:LINKS], f"and {len(lines) - LINKS} more links"]


def _check_names(catalog: Catalog) -> None:
    """Raise CorruptFile E0323 for a name longer than any real one: parsing the numbers in it could take very long."""
    for key in catalog.tensors:
        if len(key.name) > NAME_LIMIT:
            raise CorruptFile(
                f"a tensor's name has {len(key.name)} characters, want at most {NAME_LIMIT}",
                code="E0323",
                path=catalog.tensors[key].chunks[0].array.file if catalog.tensors[key].chunks else None,
                key=key.name[:80],
                hint="no trainer writes such names: fetch the file again",
            )


def resolve(tree: Tree, reading: Reading) -> tuple[Tree, str]:
    """(tree of the checkpoint, reason): the tree itself with "", or the folder in it that is meant, with the reason."""
    if tree.single is not None:
        return tree, ""
    # A folder of the Hugging Face cache, of which one snapshot is opened (see the module's docstring).
    cached = snapshot(tree)
    if cached is not None:
        inner, why = resolve(tree.below(cached[0]), reading)
        return inner, ", ".join(filter(None, (cached[1], why)))
    # Pointer files of the format given by --from come before those that several formats share.
    own = registry.by_name(reading.from_format).holds.pointers if reading.from_format else ()
    for pointer in (*own, *POINTERS):
        if not tree.exists(pointer):
            continue
        text = tree.read_whole(pointer, limit=4096).decode("utf-8", "replace").strip()
        if any(ord(c) < 32 for c in text):
            raise UnsafeInput(
                "the pointer file holds more than one line",
                code="E0414",
                path=tree.display(pointer),
                hint="it should hold one folder name",
            )
        if not text:
            raise _blank_pointer(tree, pointer, steps_in(tree))
        name = pointed(text, lambda name: any(path.startswith(f"{name}/") for path in tree.listing()))
        safe_relative(name, named_in=tree.display(pointer))
        other = " (latest_universal: another, --from deepspeed-universal)" if _two(tree, pointer) else ""
        if not any(path == name or path.startswith(f"{name}/") for path in tree.listing()):
            raise Incomplete(
                f"the pointer file names {name}, which is not there or empty",
                code="E2601",
                path=tree.display(pointer),
                hint=f"the save did not finish, or the folder was moved{_steps(tree)}",
            )
        below = tree.below(name)
        beside = [claim for claim in registry.settle(registry.claims(tree)) if _lies_here(claim)]
        if reading.from_format is None:  # an adapter without elements is no second checkpoint (see below)
            beside = [claim for claim in beside if not _is_empty_adapter(tree, claim)]
        if any(claim.name == reading.from_format for claim in beside):
            return tree, ""
        if beside and reading.from_format is None:
            raise _here_and_there(tree, below, beside, f"{name}, which {pointer} points to")
        inner, why = _role(below, reading)
        return inner, ", ".join(filter(None, (f"{pointer} points to {name}{other}", why)))
    steps = steps_in(tree)
    if not steps:
        return _of_run(tree, reading) or _role(tree, reading)
    numberless = RELEASE.rstrip("/")
    if any(path.startswith(RELEASE) for path in tree.listing()):
        # Weights without an iteration next to steps that have one: without a pointer file either may be meant.
        if not _claimed_beside(tree, [*steps, numberless]) and registry.claims(tree.below(numberless)):
            raise _several(tree, [*steps, numberless])
    if _claimed_beside(tree, steps):
        return tree, ""
    if len(steps) == 1:
        below = tree.below(steps[0])
        only = f"{steps[0]} is the only checkpoint in the folder"
        if any(below.exists(pointer) for pointer in POINTERS):  # a Trainer's step that contains DeepSpeed's folder
            inner, why = resolve(below, reading)
            return inner, f"{only}, {why}"
        return below, only
    if has_recipe(tree):
        for find_newest in offered("newest_step"):
            newest = find_newest(tree, steps)
            if newest:
                return tree.below(newest), f"{RECIPE_OF_RUN} goes on from {newest}"
    raise _several(tree, steps)


def _blank_pointer(tree: Tree, pointer: str, folders: Sequence[str]) -> Incomplete:
    """The error (E3062) for a blank pointer file, which remains if a job was killed while writing it."""
    return Incomplete(
        "the pointer file is blank, and should name a folder",
        code="E3062",
        path=tree.display(pointer),
        hint=f"pass one of those that are there: {', '.join(map(tree.display, folders[-20:]))}"
        if folders
        else "no step is next to it: pass the checkpoint itself",
    )


def _is_empty_adapter(tree: Tree, claim: registry.Claim) -> bool:
    """Is it an adapter whose tensors have no elements? A Trainer with ZeRO 3 saves one next to the job's checkpoint,
    which contains the values."""
    fmt = registry.by_name(claim.name)
    if not fmt.holds.adapter:
        return False
    try:
        catalog = fmt.read(tree)
    except InputError:
        return False
    return bool(catalog.tensors) and all(tensor.numel == 0 for tensor in catalog.tensors.values())


def _several(tree: Tree, steps: Sequence[str]) -> UnknownFormat:
    """The error for a folder of several steps without a pointer file. steps: the oldest first."""
    return several_steps(tree.display(), list(map(tree.display, steps)))


def _in_steps(claim: registry.Claim, steps: Collection[str]) -> bool:
    """Are all files of the claim in the steps' folders? (DCP also claims folders below the root.)"""
    files = claim.evidence.files
    return bool(files) and all(path.split("/")[0] in steps and "/" in path for path in files)


def _of_run(tree: Tree, reading: Reading) -> tuple[Tree, str] | None:
    """Resolve a run's folder whose steps are in a subfolder (`sources.steps`); None if the folder is no such run."""
    if reading.from_format or _claimed_beside(tree, runs_in(tree)):
        return None
    held = run_below(tree, tree.shown)
    if not held or _claimed_beside(tree, held):
        return None
    ((name, run),) = held.items()
    below = tree.below(name)
    why = f"the run's steps are in {name}"
    # `steps_in` does not list steps whose names are bare numbers, nor steps that are files.
    if not registry.claims(below) and not steps_in(below) and not run.pointers:
        if len(run.steps) > 1:
            raise _several(below, [step.name for step in run.steps])
        below = below.below(run.steps[0].name)
        why = f"{why}, {run.steps[0].name} is the only checkpoint there"
    inner, further = resolve(below, reading)
    return inner, ", ".join(filter(None, (why, further)))


def _claimed_beside(tree: Tree, folders: Collection[str]) -> bool:
    """Does a format claim files outside these folders? Without folders the answer is True and no format is loaded."""
    return not folders or any(not _in_steps(claim, folders) for claim in registry.claims(tree))


def _role(tree: Tree, reading: Reading) -> tuple[Tree, str]:
    """The tree itself, or the one model that a step of reinforcement learning holds (verl's `global_step_N/actor`)."""
    tops = top_folders(tree)
    there = [role for role in ROLES if role in tops]
    if not there or reading.from_format or any(map(_lies_here, registry.claims(tree))):
        return tree, ""
    if len(there) > 1:
        raise UnknownFormat(
            f"the step holds {len(there)} models: {', '.join(there)}",
            code="E0392",
            path=tree.display(),
            hint=f"pass one of them: {', '.join(map(tree.display, there))}",
        )
    inner, why = resolve(tree.below(there[0]), reading)
    return inner, ", ".join(filter(None, (f"{there[0]} is the only model in the step", why)))


def _lies_here(claim: registry.Claim) -> bool:
    """Is it a claim on files directly in the folder, with better evidence than their container?"""
    evidence = claim.evidence
    return evidence.specificity > Specificity.CONTAINER and any("/" not in file for file in evidence.files)


def _here_and_there(tree: Tree, below: Tree, here: list[registry.Claim], there: str) -> UnknownFormat:
    """The error for a folder that contains a checkpoint and, in a step's folder, another: a Trainer's
    `model.safetensors` next to DeepSpeed's `global_step500`. there: the step's folder, in words."""
    inner = " and ".join(claim.name for claim in registry.settle(registry.claims(below))) or "another checkpoint"
    return UnknownFormat(
        f"two checkpoints: {here[0].name} ({here[0].evidence.why}) and {inner} in {there}",
        code="E0391",
        path=tree.display(),
        hint=f"--from {here[0].name} takes the one here; for the other pass {below.shown}",
    )


def _steps(tree: Tree) -> str:
    """What a hint says of the steps that are there."""
    present = steps_in(tree)
    if not present:
        return ": get it from where the checkpoint comes from"
    return f"; pass one of those that are there: {', '.join(present[-3:])}"


def _two(tree: Tree, pointer: str) -> bool:
    """Does the folder hold a DeepSpeed checkpoint and its universal twin?"""
    return pointer == "latest" and tree.exists("latest_universal")


# -- Hugging Face's cache ----------------------------------------------------------------------------------------------


MAIN = "refs/main"
SNAPSHOTS = "snapshots/"
UNKNOWN_SNAPSHOT = "E1641"


def snapshot(tree: Tree) -> tuple[str, str] | None:
    """(the snapshot's folder below `tree`, why that one), None where the tree is no cache folder.

    Raises UnknownFormat E1641 when `refs/main` names a snapshot that is not there, or is not there itself and there are
    several; UnsafeInput E0410 when it names a path.
    """
    paths = [path for path in tree.listing() if path.startswith((SNAPSHOTS, "refs/", "blobs/"))]
    there = list(
        dict.fromkeys(path.split("/")[1] for path in paths if path.startswith(SNAPSHOTS) and path.count("/") > 1)
    )
    if not there or all(path.startswith(SNAPSHOTS) for path in paths):
        return None
    if MAIN not in paths:
        if len(there) == 1:
            return SNAPSHOTS + there[0], f"{there[0]} is the only snapshot in the cache"
        raise _unknown(tree, f"the cache holds {len(there)} snapshots and no {MAIN}", there)
    commit = tree.read_whole(MAIN, limit=4096).decode("utf-8", "replace").strip()
    if not commit:
        raise _blank_pointer(tree, MAIN, [SNAPSHOTS + name for name in there])
    safe_relative(commit, named_in=tree.display(MAIN))
    if commit not in there:
        raise _unknown(tree, f"{MAIN} names the snapshot {commit[:80]}, which is not there", there)
    return SNAPSHOTS + commit, f"{MAIN} names the snapshot {commit}"


def _unknown(tree: Tree, message: str, there: list[str]) -> UnknownFormat:
    return UnknownFormat(
        message,
        code=UNKNOWN_SNAPSHOT,
        path=tree.display(),
        hint=f"pass one of them: {', '.join(SNAPSHOTS + name for name in there[:20])}",
    )
