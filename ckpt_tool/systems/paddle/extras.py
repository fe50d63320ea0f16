"""The content of a Paddle checkpoint in addition to its tensors: the state of scheduler and scaler, and extras of other
formats.

    scheduler.pdparams       extras["scheduler"] {"last_epoch": 2, "last_lr": 0.001}
    scaler.pdparams          extras["scaler"]; its arrays are tensors of the state `extras`, named scaler.scale
    ckpt_extras.json  ours: plain values of other formats, in the JSON form of `core.extras`; Paddle does not look at it
    ckpt_extras.safetensors  ours: tensors of the state `extras` of other formats

Source: PaddleFormers 1.2.0 `trainer/trainer.py` (`SCHEDULER_NAME`, `SCALER_NAME`: paddle.save of plain dicts).
`training_args.bin`, `trainer_state.bin` and `rng_state*.pth` are pickles of classes: never opened.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpt_tool.core.box import whole
from ckpt_tool.core.extras import from_json, to_json
from ckpt_tool.core.tensor import EXTRAS, LogicalTensor, TensorKey, simple_tensor
from ckpt_tool.errors import CkptError, CorruptFile
from ckpt_tool.formats.base import ReadOptions
from ckpt_tool.formats.state_dict.composer import StoragePart
from ckpt_tool.storage.safetensors_files.safetensors_file import build_header, read_header
from ckpt_tool.storage.source import Tree
from ckpt_tool.storage.texts.strict_json import parse
from ckpt_tool.systems.paddle.pickle_file import PaddleComposer, chunks_of, read_paddle

if TYPE_CHECKING:  # reading needs none of these
    from ckpt_tool.core.target import TargetFile, Wanted, WantedTensor

EXTRAS_FILE = "ckpt_extras.json"
EXTRAS_TENSORS = "ckpt_extras.safetensors"
PICKLED = ("scheduler", "scaler")
LIMIT = 64_000_000  # bytes of a file of plain values
CODE = "E1360"
# bytes
CONFIG = "config.json"
CONFIG_LIMIT = 16 << 20


class Beside(NamedTuple):
    """Extras that are stored in files of their own."""

    extras: dict[str, Any]
    tensors: dict[TensorKey, LogicalTensor]
    files: tuple[str, ...]  # that were read
    unsafe: tuple[str, ...]  # uses of names that only an unpickler would run


def read_extras(tree: Tree) -> Beside:
    """Read the files of extras, if there are any. Raises what pickles, JSON and headers raise."""
    names = tree.names()
    extras: dict[str, Any] = {}
    tensors: dict[TensorKey, LogicalTensor] = {}
    files = list[str]()
    unsafe = list[str]()

    if EXTRAS_FILE in names:
        files.append(EXTRAS_FILE)
        value = from_json(parse(tree.read_whole(EXTRAS_FILE, limit=LIMIT), path=tree.display(EXTRAS_FILE)))
        if not isinstance(value, dict):
            raise CorruptFile("no object", code=CODE, path=tree.display(EXTRAS_FILE), hint="the file was edited")
        extras |= value

    if EXTRAS_TENSORS in names:
        files.append(EXTRAS_TENSORS)
        header = read_header(tree, EXTRAS_TENSORS)
        for row, name in enumerate(header.names):
            key = TensorKey(name, EXTRAS)
            tensors[key] = simple_tensor(key, header.stored(row))

    for what in PICKLED:
        file = f"{what}.pdparams"
        if file not in names:
            continue
        files.append(file)
        content = read_paddle(tree, file)
        unsafe += content.unsafe
        if content.extras:
            extras[what] = content.extras
        for saved in content.leaves:
            key = TensorKey(".".join([what, *map(str, saved.path)]), EXTRAS)
            chunks = chunks_of(saved, whole(saved.shape))
            tensors[key] = LogicalTensor(key, saved.shape, saved.dtype, chunks)

    return Beside(extras, tensors, tuple(files), tuple(unsafe))


def read_config(tree: Tree, options: ReadOptions) -> dict[str, Any]:
    """The model's config: that of `--config`, else config.json next to the files; {} if there is none.

    `--family` overrides the model type.
    """
    config: dict[str, Any] = {}
    if options.config is not None:
        config = dict(options.config)
    elif lies_beside(tree, CONFIG):
        value = parse(tree.read_whole(CONFIG, limit=CONFIG_LIMIT), path=tree.display(CONFIG))
        config = dict(value) if isinstance(value, dict) else {}
    return {**config, "model_type": options.family} if options.family else config


def lies_beside(tree: Tree, name: str) -> bool:
    """Whether a file is in the folder. For a source that is a single file the folder is not listed: it is opened."""
    if tree.single is None:
        return tree.exists(name)
    try:
        tree.fd(name)
    except CkptError:
        return False
    return True


def extras_files(wanted: Wanted, extras: Mapping[str, Any]) -> list[TargetFile]:
    """The files for the plain values `extras` and for the wanted tensors of the state `extras`.

    Schedulers and scalers of a Paddle job are written as Paddle's own files, everything else as ours.
    """
    from ckpt_tool.core.target import TargetArray, TargetFile, whole_file

    paddle = wanted.hints.dialect == "paddle"
    tensors = [(number, tensor) for number, tensor in enumerate(wanted.tensors) if tensor.key.state == EXTRAS]
    out = []
    rest = dict(extras)
    for what in PICKLED if paddle else ():
        mine = [(number, tensor) for number, tensor in tensors if _fits(what, tensor)]
        value = rest.get(what)
        if (not mine and value is None) or (value is not None and not _plain(value)):
            continue
        composer = PaddleComposer()
        state = dict(rest.pop(what, {}))
        for number, tensor in mine:
            name = tensor.key.name.partition(".")[2]
            state[name] = composer.tensor(tensor.shape, tensor.dtype, [StoragePart(number, whole(tensor.shape), 0)])
        out.append(composer.file(f"{what}.pdparams", state, None))
        tensors = [pair for pair in tensors if pair not in mine]
    if rest:
        text = json.dumps(to_json(rest), indent=1, ensure_ascii=True).encode("ascii")
        out.append(whole_file(EXTRAS_FILE, text))
    if tensors:
        named = [(tensor.key.name, tensor.dtype, tensor.shape) for _, tensor in tensors]
        head, offsets, size = build_header(named, {"format": "np"})
        arrays = tuple(
            TargetArray(number, whole(tensor.shape), offset)
            for (number, tensor), offset in zip(tensors, offsets, strict=True)
        )
        out.append(TargetFile(EXTRAS_TENSORS, size, ((0, head),), arrays))
    return out


def _fits(what: str, tensor: WantedTensor) -> bool:
    """Whether a tensor can be stored in the scaler's (or scheduler's) own file: it was an array of that dict.

    Types that a pickle stores without a mark (bf16, float8) can't: they would be read back as integers.
    """
    prefix, found, name = tensor.key.name.partition(".")
    return (
        bool(found)
        and prefix == what
        and "." not in name
        and tensor.dtype.name not in ("BF16", "U16")
        and (tensor.dtype.name[:2] != "F8")
    )


def _plain(value: Any) -> bool:
    """Whether a pickle gives the value back unchanged: a dict with text keys, of numbers, text and lists."""
    plain = isinstance(value, dict) and all(type(key) is str and _simple(item) for key, item in value.items())
    return plain and set(value) != {"value"}  # a lone "value" is how the reader represents a file that is no dict


def _simple(value: Any) -> bool:
    if isinstance(value, list):
        return all(_simple(item) for item in value)
    if isinstance(value, dict):
        return all(type(key) is str and _simple(item) for key, item in value.items())
    return value is None or type(value) in (bool, int, float, str)
