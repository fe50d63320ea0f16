"""Writing a unified checkpoint: whole tensors in numbered files of each kind, and Paddle's indexes.

The one idea: the line of a tensor is always in Paddle's layout, and a model file in the Hugging Face layout (`pt`) is
the same line written with swapped strides.

Which layout the model file gets: the loader of PaddleFormers 0.4 to 1.2.0 does not look at `format` but transposes
whenever the training argument `convert_from_hf` is on, which it is by default; PaddleNLP 3.0 refuses `pt`. So: the
source's own layout where it was a unified checkpoint; else `pt` where the model type is known (its list says what is
transposed), else `np` with a note that says how to load it. LoRA weights are stored alike in both. If no config.json is
written (or the user named the model), the header has `ckpt_model_type` next to `pt`, so that the file can be read by
itself; the same for a model alone, which otherwise would pass for a Hugging Face folder.

A job of one process reads the first file of each index alone (PaddleFormers 1.2.0 `load_save_single_card.py`): a note
says so where there are more. Scales of a quantised optimizer are stored in the file of the tensor that they scale: each
file is dequantised by itself. Indexes: indent 4, total_size exact, `master_weights` true where there are some.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from ckpt_tool.core.box import whole
from ckpt_tool.core.dtype import DTYPES, DType
from ckpt_tool.core.hints import Hints
from ckpt_tool.core.target import LayoutWish, Target, TargetArray, TargetFile, Wanted, WantedTensor, whole_file
from ckpt_tool.core.tensor import EMA, EXTRAS, MASTER, MODEL, LogicalTensor, TensorKey
from ckpt_tool.errors import UsageError
from ckpt_tool.formats.base import Fitted
from ckpt_tool.formats.hub_folder.packing import pack
from ckpt_tool.storage.safetensors_files.safetensors_file import build_header
from ckpt_tool.systems.paddle.extras import EXTRAS_FILE, EXTRAS_TENSORS, PICKLED, extras_files
from ckpt_tool.systems.paddle.job import PaddleHints
from ckpt_tool.systems.paddle.layout import paddle_hints
from ckpt_tool.systems.paddle.rules import model_type_of, text_config, transposed_in_hf
from ckpt_tool.systems.paddle.unified.files import (
    EMA_STEM,
    INDEX_SUFFIX,
    MASTER_STEM,
    MODEL_STEM,
    MODEL_TYPE,
    OPTIMIZER_STEM,
    PEFT_STEM,
    SUFFIX,
    file_key,
    write_index,
)
from ckpt_tool.systems.paddle.unified.read import dtype_of
from ckpt_tool.weight_schemes import paddle_states as quant

TAKEN = "E1272"
UNFIT = "E1273"
OWN = frozenset((EXTRAS_FILE, EXTRAS_TENSORS, *(f"{what}.pdparams" for what in PICKLED)))

NP = {"format": "np"}
Rows = list[tuple[int, LogicalTensor]]
Numbered = Sequence[tuple[int, WantedTensor]]


def unified_target(wanted: Wanted, name: str) -> Target:
    """The plan of the output.

    Raises UsageError E1271 (a state that Paddle's keys can't name), E1273 (8-bit moments that are not Paddle's).
    """
    hints, config, named = _facts(wanted)
    by_kind: dict[str, list[tuple[int, WantedTensor]]] = {MODEL: [], MASTER: [], EMA: [], "optimizer": [], EXTRAS: []}
    for number, tensor in enumerate(wanted.tensors):
        state = tensor.key.state
        by_kind[state if state in by_kind else "optimizer"].append((number, tensor))

    notes: list[str] = []
    stem = PEFT_STEM if hints.stem == PEFT_STEM or _all_lora(by_kind[MODEL]) else MODEL_STEM
    masters_as_model = hints.skip_save_model_weight is True and not by_kind[MODEL]
    stated: dict[str, Any] = {}

    if by_kind["optimizer"] and by_kind[MASTER]:
        stated["master_weights"] = True
    elif by_kind["optimizer"]:
        stated["master_weights"] = False

    if masters_as_model:
        by_kind[MODEL] = by_kind[MASTER]
        by_kind[MASTER] = []
        layout = "np"
        notes.append("the master weights are written as model files, as skip_save_model_weight does")
    else:
        layout = _layout(by_kind[MODEL], wanted, config, notes)

    files: list[TargetFile] = []
    flips = _flips(by_kind[MODEL], config) if layout == "pt" else frozenset()
    index_said = {"type": "lora"} if stem == PEFT_STEM else {}
    says = {"format": layout}
    alone = not any(by_kind[kind] for kind in (MASTER, "optimizer"))
    if flips and (named or alone or all(path != "config.json" for path, _ in wanted.sidefiles)):
        says[MODEL_TYPE] = _known_type(config)

    files += _kind(stem, by_kind[MODEL], wanted.shard_size, index_said, notes, says=says, flips=flips)
    files += _kind(MASTER_STEM, by_kind[MASTER], wanted.shard_size, {}, notes)
    files += _kind(EMA_STEM, by_kind[EMA], wanted.shard_size, {}, notes)

    if by_kind[EMA]:
        notes.append(
            f"Paddle's unified checkpoints have no place for EMA: {EMA_STEM}-* keep it, and Paddle does not "
            "look at them"
        )

    files += _optimizer(by_kind["optimizer"], wanted, stated, notes)
    _tell_tied(wanted, config, notes)
    files += extras_files(wanted, wanted.extras)
    ours = {file.path for file in files}

    for path, size in wanted.sidefiles:
        if path in ours:
            raise UsageError(
                f"the side file {path} has the name of a file of the format", code=TAKEN, path=path, hint="rename it"
            )
        files.append(TargetFile(path, size, copy_of=path))

    return Target(name, tuple(files), notes=tuple(notes), by_size=True)


def _tell_tied(wanted: Wanted, config: Mapping[str, Any], notes: list[str]) -> None:
    """Add a note if the states of a tied pair are under one name, as a job of one process writes them."""
    if config.get("tie_word_embeddings") is not True:
        return
    models = (tensor.key.name for tensor in wanted.tensors if tensor.key.state == MODEL)
    pair = {name for name in models if name.endswith(("lm_head.weight", "embed_tokens.weight"))}
    trained = {tensor.key.name for tensor in wanted.tensors if tensor.key.state == "exp_avg"}
    if len(pair) == 2 and len(pair & trained) == 1:
        notes.append(
            f"the states of the tied embeddings are under {min(pair & trained)} alone, as a job of one process writes "
            "and reads them; PaddleFormers 1.2.0 with several processes looks for both names"
        )


def _all_lora(tensors: Numbered) -> bool:
    return bool(tensors) and all("lora_" in tensor.key.name for _, tensor in tensors)


# -- the layout of the model file --------------------------------------------------------------------------------------


def _facts(wanted: Wanted) -> tuple[PaddleHints, Mapping[str, Any], bool]:
    """(hints of a Paddle source, the model's config, whether the user gave that config)."""
    own = paddle_hints(wanted)
    given = wanted.wish.config
    for config in (given, own.config):
        if config:
            return own, config, config is given or own.told is True
    return own, {}, False


def _known_type(config: Mapping[str, Any]) -> str:
    """The model type that has a list of transposed weights, "" if there is none."""
    for kind in (model_type_of(config), model_type_of(text_config(config))):
        if transposed_in_hf("q_proj.weight", 2, {"model_type": kind}) is not None:
            return kind
    return ""


def _layout(tensors: Numbered, wanted: Wanted, config: Mapping[str, Any], notes: list[str]) -> str:
    """The layout of the model file, `pt` or `np`; the module's docstring has the rules."""
    hints, _, _ = _facts(wanted)
    own = hints.layout if hints.kind == "unified" else None
    if not any(len(tensor.shape) == 2 and "lora" not in tensor.key.name for _, tensor in tensors):
        return own if own in ("np", "pt") else "np"
    if wanted.hints.dialect != "paddle":
        notes.append(
            "names and layouts are the source's, not Paddle's: the model file states format np, and tensors are stored "
            "as they were; --dialect paddle converts them to Paddle's"
        )
        return "np"
    if own == "np":
        return "np"
    if _known_type(config):
        return "pt"
    notes.append(
        "the model type is not known: the model file is in Paddle's layout (format np); PaddleFormers loads it with"
        " --convert_from_hf 0, its default transposes it"
    )
    return "np"


def _flips(tensors: Numbered, config: Mapping[str, Any]) -> frozenset[int]:
    return frozenset(
        number for number, tensor in tensors if transposed_in_hf(tensor.key.name, len(tensor.shape), config)
    )


# -- files -------------------------------------------------------------------------------------------------------------


def _kind(
    stem: str,
    tensors: Numbered,
    limit: int,
    stated: Mapping[str, Any],
    notes: list[str],
    *,
    says: Mapping[str, str] = NP,
    flips: frozenset[int] = frozenset(),
) -> list[TargetFile]:
    """The files of the model or of the master weights, and their index."""
    if not tensors:
        return []
    bins: list[Numbered] = []
    for rows in pack([tensor.nbytes for _, tensor in tensors], limit):
        bins.append([tensors[row] for row in rows])
    files, names = _files(stem, bins, notes, says=says, flips=flips)
    where = {number: name for name, rows in zip(names, bins, strict=True) for number, _ in rows}
    weight_map = {file_key(tensor.key): where[number] for number, tensor in tensors}
    total = sum(tensor.nbytes for _, tensor in tensors)
    return [*files, whole_file(stem + INDEX_SUFFIX, write_index(weight_map, total, stated))]


def _files(
    stem: str,
    bins: Sequence[Numbered],
    notes: list[str],
    *,
    says: Mapping[str, str] = NP,
    flips: frozenset[int] = frozenset(),
) -> tuple[list[TargetFile], list[str]]:
    """One numbered file for each bin, and the files' names.

    says: metadata of the headers. flips: indexes of tensors that are written transposed.
    """
    names = [f"{stem}-{number:05d}-of-{len(bins):05d}{SUFFIX}" for number in range(1, len(bins) + 1)]
    if len(bins) > 1:
        notes.append(
            f"{stem} takes {len(bins)} files: a job of one process of PaddleFormers 1.2.0 reads the first alone;"
            " pass a larger --max-shard-size for it"
        )
    files = []
    for name, rows in zip(names, bins, strict=True):
        shapes = [tensor.shape[::-1] if number in flips else tensor.shape for number, tensor in rows]
        head, offsets, size = build_header(
            [(file_key(tensor.key), tensor.dtype, shape) for (_, tensor), shape in zip(rows, shapes, strict=True)],
            says,
        )
        arrays = tuple(
            TargetArray(number, whole(tensor.shape), offset, strides=(1, tensor.shape[0]) if number in flips else None)
            for (number, tensor), offset in zip(rows, offsets, strict=True)
        )
        files.append(TargetFile(name, size, ((0, head),), arrays))
    return files, names


def _optimizer(tensors: Numbered, wanted: Wanted, stated: Mapping[str, Any], notes: list[str]) -> list[TargetFile]:
    """The optimizer's files and index. Scales are stored in the file of the tensor that they scale."""
    if not tensors:
        return []

    groups: dict[tuple[str, str], list[tuple[int, WantedTensor]]] = {}
    for number, tensor in tensors:
        name, state = tensor.key
        if state in ("exp_avg", "exp_avg_sq") and tensor.dtype.name in ("I8", "U8"):
            raise UsageError(
                f"a moment in {tensor.dtype.name} that Paddle's quantisation did not make",
                code=UNFIT,
                key=str(tensor.key),
                hint="cast or dequantise it first, or --drop optimizer",
            )
        groups.setdefault((name, "quantised" if state in quant.STATES else state), []).append((number, tensor))

    together = list(groups.values())
    group_sizes = []
    for group in together:
        group_sizes.append(sum(tensor.nbytes for _, tensor in group))
    bins: list[Numbered] = []
    for rows in pack(group_sizes, wanted.shard_size):
        bins.append([pair for row in rows for pair in together[row]])

    files, names = _files(OPTIMIZER_STEM, bins, notes)
    where = {number: name for name, rows in zip(names, bins, strict=True) for number, _ in rows}
    stage, times = _stage(wanted)
    has_quantised = any(tensor.key.state in quant.STATES for _, tensor in tensors)
    weight_map = dict[str, str]()
    total = 0

    for number, tensor in tensors:
        key = file_key(tensor.key)
        state = tensor.key.state
        if key.endswith(quant.SUFFIXES) and state in quant.STATES:
            continue  # scales, which Paddle's index does not list
        weight_map[key] = where[number]
        # Paddle computes the total before it quantises, when moments have 4 bytes an element.
        total += 4 * prod(tensor.shape) if state in quant.STATES else tensor.nbytes
        if state == quant.PACKED:
            weight_map[f"{tensor.key.name}/moment1_0"] = where[number]
            total += 4 * prod(tensor.shape)

    more = {"ckpt_quant_stage": stage, "quant_ckpt_resume_times": times} if has_quantised else {}
    index = write_index(weight_map, total, {**more, **stated})
    return [*files, whole_file(OPTIMIZER_STEM + INDEX_SUFFIX, index)]


def _stage(wanted: Wanted) -> tuple[str, int]:
    stated = wanted.hints.get(quant.QuantisedStates)
    packed = any(tensor.key.state == quant.PACKED for tensor in wanted.tensors)
    return ("O2" if packed else "O1"), stated.resume_times if stated else 0


# -- which tensors -----------------------------------------------------------------------------------------------------


def fit(tensors: Sequence[LogicalTensor], hints: Hints, wish: LayoutWish) -> Fitted:
    """The tensors to write, with two additions.

    Weights that the source lacks are rounded from their fp32 masters, as Paddle does on loading; and states of a tied
    pair are written under both names, as the loader of a job of several processes looks for them. Nothing is added if
    the source was a unified checkpoint of that kind, or if the config states neither dtype nor tie.
    """
    rows = list(enumerate(tensors))
    own = hints.get(PaddleHints) or PaddleHints()
    config = wish.config or own.config or {}
    removed = {key.name for key in wish.removed if key.state == MODEL}
    made, casts = _round_masters(rows, config, removed, masters_alone=own.skip_save_model_weight is True)
    twins = [] if own.kind == "unified" or config.get("tie_word_embeddings") is not True else _twins(rows + made)
    report = []
    if made:
        dtype = next(iter(casts.values())).name
        reason = f"{len(made)} weights are the fp32 master rounded to {dtype}, as Paddle rounds it on loading"
        report.append({"state": MODEL, "tensors": 0, "bytes": 0, "reason": reason})
    for state in dict.fromkeys(tensor.key.state for _, tensor in twins):
        reason = "the tied embeddings have it under both names, as jobs of several processes look for it"
        report.append({"state": state, "tensors": 0, "bytes": 0, "reason": reason})
    return Fitted((*rows, *made, *twins), casts, tuple(report))


def _round_masters(
    rows: Rows, config: Mapping[str, Any], removed: set[str], *, masters_alone: bool
) -> tuple[Rows, dict[TensorKey, DType]]:
    have = {tensor.key.name for _, tensor in rows if tensor.key.state == MODEL}
    alone = [(i, tensor) for i, tensor in rows if tensor.key.state == MASTER and tensor.key.name not in have | removed]
    dtype = dtype_of(config)
    if (masters_alone and not have) or dtype not in ("BF16", "F16"):
        return [], {}
    made = [(i, tensor._replace(key=TensorKey(tensor.key.name, MODEL), path=())) for i, tensor in alone]
    return made, {tensor.key: DTYPES[dtype] for _, tensor in made}


def _twins(rows: Rows) -> Rows:
    """Masters and optimizer states of a tied pair under the name that does not have them yet."""
    pair: dict[str, str] = {}
    shapes = {tensor.key.name: tensor.shape for _, tensor in rows if tensor.key.state == MODEL}
    heads = [name for name in shapes if name.endswith("lm_head.weight")]
    tables = [name for name in shapes if name.endswith("embed_tokens.weight")]
    if len(heads) == len(tables) == 1 and shapes[heads[0]] == shapes[tables[0]]:
        pair = {heads[0]: tables[0], tables[0]: heads[0]}
    have = {tensor.key for _, tensor in rows}
    found = []
    for i, tensor in rows:
        name, state = tensor.key
        key = TensorKey(pair.get(name, name), state)
        if name in pair and key not in have and state not in (MODEL, EMA, EXTRAS):
            found.append((i, tensor._replace(key=key, path=())))
    return found
