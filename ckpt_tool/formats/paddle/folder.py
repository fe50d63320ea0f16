"""What is read of a path that holds files of paddle.save: ranks' files in a folder, or one file alone.

    checkpoint-100/  model_state.tp0{0,1}.pdparams  optimizer.tp0{0,1}.pdopt  scheduler.pdparams  config.json
                     training_args.bin  rng_state_0.pth                              named in a note, never unpickled
    fc.pdparams      a state dict;   train.pd   {"model": {...}, "epoch": 3}: names by where tensors hang

Specification: `formats.paddle.format`. Cost: as the files. What it does not do: gather parts (`formats.paddle.read`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckpt_tool.core.box import whole
from ckpt_tool.core.catalog import Catalog, Note
from ckpt_tool.core.tensor import LogicalTensor, simple_tensor
from ckpt_tool.errors import CkptError, Incomplete, UnknownFormat
from ckpt_tool.formats.hf.files import is_sidefile
from ckpt_tool.formats.paddle.accumulators import MASTER_WEIGHTS, without_master
from ckpt_tool.formats.paddle.extras import read_extras
from ckpt_tool.formats.paddle.file import PaddleContent, chunks_of, read_paddle
from ckpt_tool.formats.paddle.ranks import EMA_FILE, MODEL_FILE, OPTIMIZER_FILE, RankFile, rank_file, rank_files
from ckpt_tool.formats.paddle.read import Reading, element_type, plain_config, says_bf16
from ckpt_tool.formats.state_dict.paths import Leaf, name_leaves
from ckpt_tool.storage.source import Tree
from ckpt_tool.storage.strict_json import parse

MISSING, JOB, UNREAD = "E0302", "N1303", "N1305"
CONFIG = "config.json"
_CONFIG_LIMIT = 16 << 20  # bytes
_JOB_FILES = re.compile(
    r"training_args\.bin|trainer_state\.(?:bin|json)|rng_state.*\.pth|static_name_to_dyg_name\.json|\.saving_info"
)
_SIDE = re.compile(r"(?:lora|vera|lokr|reft|prefix)_config\.json")
_DATA = (".pdparams", ".pdopt", ".pd", ".safetensors", ".distcp")
_SIGNAL = re.compile(r"saved_signal_\d+")
_MODEL_STEM = {"optimizer": "model_state", "ema": "model_state"}


def read_tree(tree: Tree, options: Mapping[str, object]) -> Catalog:
    """The catalog. Raises what `formats.paddle.format` says."""
    config = config_of(tree, options)
    if tree.single is not None:
        return _read_one(tree, tree.single, config, lenient=bool(options.get("lenient")))
    names = tree.names()
    files = rank_files(names, prefer=options.get("prefer"))
    if not files:
        raise UnknownFormat(
            "no model_state*.pdparams or optimizer*.pdopt", code="E0393", path=tree.display(),
            hint="pass the folder of a checkpoint, or a file; of models with different names say which with --prefer STEM",
        )  # fmt: skip
    if not options.get("lenient"):
        _refuse_lost_optimizer(tree, names, files)
    beside = read_extras(tree)
    tensors = {k: t if isinstance(t, LogicalTensor) else simple_tensor(k, t.array()) for k, t in beside.tensors.items()}
    reading = Reading(tree, files, config)
    job = [name for name in names if _JOB_FILES.fullmatch(name)]
    if job:
        message = f"the job's own files, not read and not copied: {', '.join(job[:8])}"
        reading.notes.append(Note(JOB, message + (f" and {len(job) - 8} more" if len(job) > 8 else "")))
    sides = [name for name in names if is_sidefile(name) or _SIDE.fullmatch(name)]
    read = {*(file.name for file in files), *beside.files}
    unread = [name for name in tree.seen(names) if name.endswith(_DATA) and name not in read]
    if unread:
        reading.notes.append(Note(UNREAD, f"not part of the checkpoint, not read: {', '.join(unread[:8])}"))
    catalog = reading.catalog(beside.extras, sides, beside.files)
    if not options.get("lenient") and not catalog.unsafe:  # what asks for code is told first
        _refuse_lost_masters(tree, reading)
    return replace(catalog, tensors={**catalog.tensors, **tensors}, unsafe=(*catalog.unsafe, *beside.unsafe))


def _refuse_lost_optimizer(tree: Tree, names: list[str], files: list[RankFile]) -> None:
    """Raise Incomplete E0302 where ranks noted that they saved their optimizer, and no file of it is there."""
    signals = [name for name in names if _SIGNAL.fullmatch(name)]
    if signals and not any(file.kind == OPTIMIZER_FILE for file in files):
        raise Incomplete(
            f"{signals[0]} says that a rank saved its optimizer, but there is no optimizer*.pdopt", code=MISSING,
            path=tree.display(signals[0]), hint="fetch it; without it, remove the saved_signal files or pass --lenient",
        )  # fmt: skip


def _refuse_lost_masters(tree: Tree, reading: Reading) -> None:
    """Raise Incomplete E0302 where an optimizer's tensors are called after masters that their file lacks."""
    _refuse_lost_averages(tree, reading)
    for file in reading.files:
        if file.kind == OPTIMIZER_FILE:
            leaves = reading.contents[file.name].leaves
            lost = without_master((saved.path, saved.shape) for saved in leaves)
            if lost:
                raise Incomplete(
                    f"moments of {len(lost)} master weights that the file does not hold", code=MISSING,
                    path=tree.display(file.name), key=lost[0][:200], faults=[f"no master: {key[:200]}" for key in lost[1:50]],
                    hint="the file was edited or cut: fetch it again; --lenient takes it as it is",
                )  # fmt: skip


def _refuse_lost_averages(tree: Tree, reading: Reading) -> None:
    """Raise Incomplete E0302 for an average's file that lacks what the optimizer's of the same rank has masters of."""

    def masters(file: RankFile) -> set[str]:
        leaves = reading.contents[file.name].leaves
        return {str(saved.path[1]) for saved in leaves if saved.path[0] == MASTER_WEIGHTS and len(saved.path) == 2}

    if not any(masters(file) for file in reading.files if file.kind == EMA_FILE):
        return  # averages of fp32 parameters alone
    optimizers = {(*sorted(file.at.items()),): masters(file) for file in reading.files if file.kind == OPTIMIZER_FILE}
    for file in reading.files:
        lost = (
            sorted(optimizers.get((*sorted(file.at.items()),), set()) - masters(file)) if file.kind == EMA_FILE else []
        )
        if lost:
            raise Incomplete(
                f"averages of {len(lost)} master weights are not in the file", code=MISSING, path=tree.display(file.name),
                key=lost[0][:200], hint="the file was edited or cut: fetch it again; --lenient takes it as it is",
            )  # fmt: skip


def config_of(tree: Tree, options: Mapping[str, object]) -> dict[str, Any]:
    """What is known of the model: --config, else config.json beside the files; --family says the model type."""
    given = options.get("config")
    config: dict[str, Any] = {}
    if isinstance(given, Mapping):
        config = dict(given)
    elif _beside(tree, CONFIG):
        value = parse(tree.read_whole(CONFIG, limit=_CONFIG_LIMIT), path=tree.display(CONFIG))
        config = dict(value) if isinstance(value, dict) else {}
    family = options.get("family")
    return {**config, "model_type": family} if isinstance(family, str) and family else config


def _beside(tree: Tree, name: str) -> bool:
    """Does a file lie in the folder? A lone file's folder is not listed, so it is tried."""
    if tree.single is None:
        return tree.exists(name)
    try:
        tree.fd(name)
    except CkptError:
        return False
    return True


# -- one file -----------------------------------------------------------------------------------------------------------


def _read_one(tree: Tree, name: str, config: dict[str, Any], *, lenient: bool) -> Catalog:
    file = rank_file(name)
    if file is None or not _is_flat(file, content := read_paddle(tree, name)):
        return _nested(tree, name, config, content if file is not None else read_paddle(tree, name))
    if (file.at or file.of > 1) and not lenient:
        raise Incomplete(
            f"{name} is one rank's file of several", code=MISSING, path=tree.display(name),
            hint="pass the folder: a rank's file alone is a part of every tensor; --lenient shows the parts as they are",
        )  # fmt: skip
    file = file._replace(at={}, part=1, of=1)
    extra = []
    if file.kind != MODEL_FILE:
        model = f"{_MODEL_STEM.get(file.stem, file.stem)}.pdparams"
        extra = [model] if _beside(tree, model) else []
    reading = Reading(tree, [file], config, extra)
    catalog = reading.catalog({}, (), ())
    if not lenient and not catalog.unsafe:
        _refuse_lost_masters(tree, reading)
    return catalog


def _is_flat(file: RankFile, content: PaddleContent) -> bool:
    """Is it a state dict, or an optimizer's?"""
    if file.kind == MODEL_FILE:
        return all(len(saved.path) == 1 for saved in content.leaves)
    return all(len(saved.path) == 1 or saved.path[0] == MASTER_WEIGHTS for saved in content.leaves)


def _nested(tree: Tree, name: str, config: Mapping[str, Any], content: PaddleContent) -> Catalog:
    """Any other state: names and states by where its tensors hang."""
    bf16 = says_bf16(config) or any(MASTER_WEIGHTS in saved.path for saved in content.leaves)
    extras = content.extras if isinstance(content.extras, dict) else {"value": content.extras}
    named = name_leaves([Leaf(saved.path, saved.shape) for saved in content.leaves], extras, path=name)
    tensors = {}
    for key, saved in zip(named.keys, content.leaves, strict=True):
        dtype = element_type(saved, None, bf16=bf16)
        chunks = chunks_of(saved, whole(saved.shape), dtype=dtype)
        tensors[key] = LogicalTensor(key, saved.shape, dtype, chunks, saved.path)
    hints = {
        **named.roots.to_hints(),
        "dialect": "paddle",
        "paddle": {"kind": "nested", "config": plain_config(config)},
    }
    return Catalog(
        "paddle", tensors, extras, files=(name,), notes=tuple(named.notes), unsafe=tuple(content.unsafe), hints=hints
    )  # fmt: skip
