"""Finds the steps of a training run among the entries of its folder, and sorts them.

    iter_0000100            Megatron          global_step100, global_step_100   DeepSpeed, veRL
    checkpoint-100          Trainers          step-100, step_100                torchtitan, DCP
    epoch_3                 torchtune         epoch=3-step=100(.ckpt)           Lightning
    100                     Orbax, speculators        NAME--val_loss=2.1-step=100-last  NeMo
    whatever `latest` names, if it has no number (DeepSpeed's tags, Megatron's `release`): the newest

A run's folder may keep them one folder down: NeMo, Lightning, accelerate and prime-rl in `checkpoints/`, torchtitan in
`checkpoint/`.

Sources: the formats' own; vllm-project/speculators `train/checkpointer.py` (numbers as names), NeMo
`nemo/lightning/pytorch/callbacks/model_checkpoint.py` (`-unfinished`), torchtitan
`components/checkpoint.py` (`folder`). Cost: a listing. What it does not do: look for steps deeper, or into them
(`sources.judging`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

from ckpt_tool.core.bounds import numeral
from ckpt_tool.errors import UnknownFormat, UsageError, is_failure, wrap_os_error
from ckpt_tool.formats.run_pointer import POINTER, step_name

if TYPE_CHECKING:
    from ckpt_tool.storage.source import Tree

RUNS = ("checkpoints", "checkpoint")  # where a run's folder keeps its steps, if not in itself
POINTERS = (POINTER, "latest", "latest_universal")
MIXED = "E1670"
_SUFFIX = r"(?:\.(?:ckpt|pt|pth|bin|safetensors|pdparams))"  # of a step that is one file
_WORDS = re.compile(
    r"(?P<word>iter|iteration|global_?step|checkpoint|ckpt|step|epoch)[-_=]?(?P<number>\d{1,18})(?P<twin>_universal)?"
    rf"{_SUFFIX}?"
)
_NAMED = re.compile(  # Lightning's and NeMo's step names contain metrics, such as val_loss=0.1
    r"[\w.=+-]*?(?:epoch=(?P<epoch>\d{1,18})-)?(?<![\w])step=(?P<number>\d{1,18})(?:-[\w.=+-]*?)?" rf"{_SUFFIX}?"
)
UNFINISHED = "-unfinished"  # suffix of NeMo's marker next to a step, which is removed when the step is complete


class RunStep(NamedTuple):
    """An entry of a run's folder that has the name of a step."""

    name: str
    number: int | None  # None for what a pointer file alone makes a step
    word: Literal["step", "epoch"] = "step"  # what is counted, `epoch` or `step`
    epoch: int = 0
    twin: bool = False  # DeepSpeed's universal form of the step of that number

    @property
    def order(self) -> tuple[bool, int, int, bool]:
        """The sort key: the oldest step first; a step comes after its universal twin."""
        return self.number is None, self.number or 0, self.epoch, not self.twin


class RunPointer(NamedTuple):
    """A pointer file of a run, and the step's name in it."""

    file: str
    name: str


class Run(NamedTuple):
    """A run's folder: its steps (the oldest first), what its pointer files name, and the other entries in it."""

    path: str
    steps: tuple[RunStep, ...]
    pointers: tuple[RunPointer, ...]
    others: tuple[str, ...] = ()
    blank_pointers: tuple[str, ...] = ()  # pointer files that hold no name: empty ones, and junk

    def of(self, step: RunStep | str) -> str:
        """The path or URL of a step."""
        return f"{self.path.rstrip('/')}/{step if isinstance(step, str) else step.name}"


def step_of(name: str, *, numbers: bool = False) -> RunStep | None:
    """The step that an entry's name denotes, None if it is no step. numbers: does a bare number count as a step?

    >>> step_of("checkpoint-500").order, step_of("tmp-checkpoint-500"), step_of("epoch=3-step=90.ckpt").number
    ((False, 500, 0, True), None, 90)
    """
    if numbers and numeral(name):
        return RunStep(name, int(name))
    found = _WORDS.fullmatch(name)
    if found:
        word: Literal["step", "epoch"] = "epoch" if found["word"] == "epoch" else "step"
        return RunStep(name, int(found["number"]), word, twin=found["twin"] is not None)
    found = _NAMED.fullmatch(name)
    return RunStep(name, int(found["number"]), epoch=int(found["epoch"] or 0)) if found else None


def steps_in(tree: Tree) -> list[str]:
    """The folders directly in the tree that have names of training steps, the oldest first."""
    return [
        step.name
        for step in sorted(filter(None, map(step_of, top_folders(tree))), key=lambda step: (step.order, step.name))
    ]


def runs_in(tree: Tree) -> list[str]:
    """The subfolders of a run that may contain its steps."""
    tops = top_folders(tree)
    return [name for name in RUNS if name in tops]


def top_folders(tree: Tree) -> set[str]:
    """The names of the folders directly below a tree's root that contain a file."""
    return {path.partition("/")[0] for path in tree.listing() if "/" in path}


def pointed(text: str, there: Callable[[str], bool]) -> str:
    """The folder to which a pointer file refers; a number is a step of Megatron or veRL. there: does a folder exist?"""
    if not numeral(text):
        return text
    names = (step_name(int(text)), f"global_step_{int(text)}")
    return next((name for name in names if there(name)), names[0])


def run_at(src: str, *, follow_symlinks: bool = False) -> Run:
    """The run at `src`, a folder or a URL, or in one folder of it (`RUNS`). Raises StorageError, UsageError E1670 for
    steps that have no order, UnknownFormat E0392 for several such folders."""
    from ckpt_tool.storage.opening import open_tree

    tree = open_tree(src, follow_symlinks=follow_symlinks)
    run = _run_in(tree, src)
    if run.steps or run.pointers or tree.single is not None:
        return run
    return next(iter(run_below(tree, src).values()), run)


def run_below(tree: Tree, src: str) -> dict[str, Run]:
    """The folder of a run (`RUNS`) in which its steps are -> the run there; empty where none holds any. src: the path,
    or the URL, of the tree. Raises UsageError E1670, UnknownFormat E0392 for several such folders."""
    found = {name: _run_in(tree.below(name), f"{src.rstrip('/')}/{name}") for name in runs_in(tree)}
    held = {name: run for name, run in found.items() if run.steps}
    if len(held) > 1:
        raise UnknownFormat(
            f"the run keeps steps in {len(held)} folders: {', '.join(held)}",
            code="E0392",
            path=tree.display(),
            hint=f"pass one of them: {', '.join(run.path for run in held.values())}",
        )
    return held


def _run_in(tree: Tree, src: str) -> Run:
    """The run whose steps are directly in the tree."""
    if tree.single is not None:
        return Run(src, (), ())
    entries = entries_of(tree)
    found: dict[str, RunStep] = {}
    for name in entries:
        step = step_of(name, numbers=True)
        if step and _fits(name, entries):
            found[step.name] = step
    texts = _pointer_texts(tree, entries)
    pointers = tuple(RunPointer(file, pointed(text, entries.__contains__)) for file, text in texts.items() if text)
    blank_pointers = tuple(file for file, text in texts.items() if not text)
    for _, name in pointers:
        if entries.get(name) and name not in found:
            found[name] = RunStep(name, None)
    steps = sorted(found.values(), key=lambda step: (step.order, step.name))
    words = {step.word: step.name for step in steps if step.number is not None}
    if len(words) > 1:
        raise UsageError(
            f"the folder holds steps and epochs ({words['step']}, {words['epoch']}), and nothing says which of them is "
            "newer",
            code=MIXED,
            path=src,
            hint="move one kind into a folder of its own",
        )
    return Run(src, tuple(steps), pointers, tuple(name for name in entries if name not in found), blank_pointers)


def _pointer_texts(tree: Tree, entries: Mapping[str, bool]) -> dict[str, str]:
    """What the pointer files of a folder name, "" for no name, and what a link in a pointer's place named when it still
    led there."""
    files = [file for file in POINTERS if entries.get(file) is False]
    return {file: dangling_link(tree, file) or pointer_text(tree, file) for file in files}


def dangling_link(tree: Tree, file: str) -> str:
    """The last part of what a link directly in the tree leads to, where nothing is there; "" for anything else. Raises
    StorageError."""
    path = tree.root / file
    if not tree.local or not path.is_symlink():
        return ""
    try:
        os.stat(path)
    except OSError as e:
        if is_failure(e):
            raise wrap_os_error(e, path, "looking where it leads") from e
        name = os.path.basename(os.readlink(path).rstrip("/"))
        return name if name.isprintable() else file
    return ""


def _fits(name: str, entries: Mapping[str, bool]) -> bool:
    """May this entry be a step? A step that is a file has a suffix, which NeMo's markers have not."""
    return (entries[name] and not name.endswith(UNFINISHED)) or re.search(rf"{_SUFFIX}$", name) is not None


def entries_of(tree: Tree) -> dict[str, bool]:
    """The entries of a folder: name -> is it a folder? Links count as what they point to; hidden entries are left
    out."""
    if not tree.local:
        return {path.split("/")[0]: "/" in path for path in tree.listing() if not path.startswith(".")}
    from ckpt_tool.storage.links import is_folder

    try:
        with os.scandir(tree.root) as found:
            return {entry.name: is_folder(entry) for entry in found if not entry.name.startswith(".")}
    except OSError as e:
        raise wrap_os_error(e, tree.shown, "listing") from e


def pointer_text(tree: Tree, file: str) -> str:
    """The name in a pointer file, "" if its content is no valid name."""
    from ckpt_tool.core.inner_path import unfit

    text = tree.read_whole(file, limit=4096).decode("utf-8", "replace").strip()
    return "" if unfit(text) or "/" in text else text
