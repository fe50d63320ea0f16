"""Reading a unified checkpoint: indexes, headers, and what they say together, as one catalog.

In order: marks of an asynchronous save; the indexes and every header that they name (all that is missing is told at once);
masters and optimizer states, merged or by ranks, in Paddle's layout; the model, whose weights' layout is settled with the
shapes of those (`paddle_unified_layout`); what 16-bit integers are; what the masters of `skip_save_model_weight` are.

    16-bit integers   PaddleNLP wrote bfloat16 as U16. A weight that has master weights or moments, or a config.json that says
                      bfloat16, makes it bf16; neither is an error (E1357): nothing is guessed.
    masters as model  skip_save_model_weight writes the fp32 master weights as model-*.safetensors. Told by: no master
                      files, all model weights F32, a 16-bit dtype in config.json, `master_weights` in the optimizer's index.
                      They are shown as what they are, `master`.

Cost: two preads a file, 2 us and 300 bytes a tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from ckpt_tool.core.catalog import Catalog, Note
from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.core.tensor import EMA, MASTER, MODEL, LogicalTensor, TensorKey
from ckpt_tool.errors import CkptError, Incomplete, InconsistentCheckpoint, InputError
from ckpt_tool.formats import paddle_quant as quant
from ckpt_tool.formats import paddle_unified_files as files_of
from ckpt_tool.formats.hf_files import is_sidefile
from ckpt_tool.formats.paddle_unified_extras import read_extras
from ckpt_tool.formats.paddle_unified_files import EMA_STEM, MASTER_STEM, OPTIMIZER_STEM, UnifiedFiles
from ckpt_tool.formats.paddle_unified_index import PaddleIndex, read_index
from ckpt_tool.formats.paddle_unified_keys import optimizer_key
from ckpt_tool.formats.paddle_unified_layout import transposed
from ckpt_tool.formats.paddle_unified_ranks import read_ranks
from ckpt_tool.formats.paddle_unified_table import Lying, UnifiedTable
from ckpt_tool.storage.safetensors_file import Header, read_header
from ckpt_tool.storage.source import Tree
from ckpt_tool.storage.strict_json import parse

MISSING_FILES, NOT_IN_FILE, NOT_IN_INDEX, TWICE = "E0380", "E0381", "E0382", "E0383"
SIXTEEN_BITS, NO_STATES, LOST_MASTERS = "E1357", "E1358", "E1359"
CONFIG = "config.json"
CONFIG_LIMIT = 4_000_000  # bytes
SIDEFILES = ("lora_config.json", "vera_config.json", "lokr_config.json", "prefix_config.json", "sft_config.json")
_HALF = {"bfloat16": "BF16", "float16": "F16"}

Entries = dict[TensorKey, Lying | LogicalTensor]


class Part(NamedTuple):
    """What one index names. rows: tensor -> (header, row), in the index's order, scales of a quantised optimizer last."""

    listed: PaddleIndex
    headers: list[Header]
    rows: dict[str, tuple[Header, int]]
    notes: list[Note]


def read_catalog(tree: Tree, name: str, options: Mapping[str, object]) -> Catalog:
    """The catalog of the folder. name: of the format. Raises InputError, UnsafeInput."""
    lenient = bool(options.get("lenient"))
    files = files_of.classify(tree.names())
    files_of.check_markers(tree, files)
    files_of.check_indexes(tree, files)
    config = read_config(tree, options)
    told = bool(options.get("config") or options.get("family"))
    reading = _Reading(tree, files, config, lenient=lenient, told=told)
    entries = reading.entries()
    sidefiles = tuple(
        path for path in tree.names() if (is_sidefile(path) or path in SIDEFILES) and tree.listing()[path] >= 0
    )
    extras, tensors, extra_files, more = read_extras(tree)
    taken = (*reading.taken, *extra_files)
    notes = [*reading.notes, *more, *files_of.notes_of(tree, taken, sidefiles)]
    return Catalog(
        name, UnifiedTable({**entries, **tensors}), extras=extras, files=taken, sidefiles=sidefiles, notes=tuple(notes),
        hints=reading.hints(),
    )  # fmt: skip


def read_config(tree: Tree, options: Mapping[str, object]) -> dict[str, Any]:
    """What the user passed (--config, --family), else config.json, else {}."""
    given = options.get("config")
    if isinstance(given, Mapping):
        found: dict[str, Any] = dict(given)
    elif CONFIG in tree.names():
        value = parse(tree.read_whole(CONFIG, limit=CONFIG_LIMIT), path=tree.display(CONFIG))
        found = value if isinstance(value, dict) else {}
    else:
        found = {}
    family = options.get("family")
    return {**found, "model_type": family} if isinstance(family, str) and family else found


class _Reading:
    """One folder being read. taken: files; notes: in order."""

    def __init__(
        self, tree: Tree, files: UnifiedFiles, config: Mapping[str, Any], *, lenient: bool, told: bool
    ) -> None:
        self.tree, self.files, self.config, self.lenient = tree, files, config, lenient
        self.told = told  # by the user
        self.taken: list[str] = []
        self.notes: list[Note] = []
        self.degrees: dict[str, int] = {}
        self.layout = ""
        self.skipped = False  # skip_save_model_weight
        self.optimizer: PaddleIndex | None = None

    def hints(self) -> dict[str, Any]:
        """What a writer wants to know."""
        plain = {
            key: value for key, value in self.config.items() if value is None or type(value) in (bool, int, float, str)
        }
        said = self.optimizer.said if self.optimizer is not None else {}
        paddle: dict[str, Any] = {
            "kind": "unified", "layout": self.layout, "stem": self.files.stem, "skip_save_model_weight": self.skipped,
            "sharding": "", "told": self.told, "config": {**plain, **_lists(self.config)},
        }  # fmt: skip
        hints: dict[str, Any] = {"dialect": "paddle", "paddle": paddle}
        if self.optimizer is not None and self.optimizer.stage:
            times = said.get("quant_ckpt_resume_times")
            hints["quantised"] = {"kind": "paddle", "stage": self.optimizer.stage,
                                  "resume_times": times if type(times) is int else 0}  # fmt: skip
        if self.degrees:
            degrees = {
                "tp": self.degrees.get("tp", 1),
                "pp": self.degrees.get("pp", 1),
                "dp": self.degrees.get("shard", 1),
            }
            hints["degrees"] = {dim: size for dim, size in degrees.items() if size > 1}
        return hints

    # -- parts --------------------------------------------------------------------------------------------------------

    def entries(self) -> Entries:
        """All tensors. The model's layout is settled last: it leans on the shapes of the others."""
        model = self._part(self.files.stem)
        masters, averages = self._part(MASTER_STEM), self._part(EMA_STEM)
        if OPTIMIZER_STEM in self.files.indexes:
            self.optimizer = read_index(self.tree, self.files.indexes[OPTIMIZER_STEM], merged=False)
        merged = self.optimizer is not None and self.optimizer.weight_map is not None
        optimizer = self._part(OPTIMIZER_STEM) if merged else None
        out: Entries = {}
        if masters is not None:
            out |= {TensorKey(name, MASTER): _lying(*row) for name, row in masters.rows.items()}
        if averages is not None:
            out |= {TensorKey(name, EMA): _lying(*row) for name, row in averages.rows.items()}
        if optimizer is not None:
            out |= self._optimizer(optimizer)
        if not merged and (self.files.ranks or self.optimizer is not None):
            shapes = (
                {}
                if model is None
                else {key.name: row.shape for key, row in self._model(model, out, settle=False).items()}
            )
            out |= self._ranks(shapes)
        elif self.files.ranks:
            self.notes.append(Note("W-stray", "ranks' own optimizer files beside a merged one: not read"))
        ours = self._model(model, out) if model is not None else {}
        self._check_masters({**ours, **out})
        return {**ours, **out}

    def _part(self, stem: str) -> Part | None:
        path = self.files.indexes.get(stem)
        if path is None:
            return None
        part = read_part(self.tree, path, lenient=self.lenient)
        self.taken += [path, *(header.path for header in part.headers)]
        self.notes += part.notes
        return part

    def _optimizer(self, part: Part) -> Entries:
        out: Entries = {}
        for name, (header, row) in part.rows.items():
            key = optimizer_key(name, header.kinds[row].dtype, path=self.tree.display(header.path))
            if key in out:
                raise InconsistentCheckpoint(
                    "two keys of the optimizer mean one state", code=TWICE, path=self.tree.display(header.path),
                    key=str(key), hint="the file was edited: fetch it again",
                )  # fmt: skip
            out[key] = _lying(header, row)
        return out

    def _ranks(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[TensorKey, LogicalTensor]:
        index = self.optimizer
        if index is not None:
            self.taken.append(index.path)
        if index is not None and not self.files.ranks:
            raise Incomplete(
                "the optimizer's index names no files, and there are none of ranks", code=NO_STATES,
                path=self.tree.display(index.path), hint="fetch the ranks' optimizer.*.safetensors, or remove the index",
            )  # fmt: skip
        number = index.said.get("optim_shard_num") if index is not None else 1
        marked = any(".done." in name for name in self.tree.names())
        parts = number if type(number) is int and 0 < number < 10_000 else 1
        found = read_ranks(
            self.tree, self.files.ranks, shapes, self.config, parts=parts, marked=marked, lenient=self.lenient
        )
        self.taken += [header.path for header in found.headers]
        self.degrees = found.degrees
        self._untrained(shapes, found.tensors)
        return found.tensors

    def _untrained(self, shapes: Mapping[str, Sequence[int]], tensors: Iterable[TensorKey]) -> None:
        """Weights without any state, where a rank's file may be lost with nothing else to show it."""
        trained = {key.name for key in tensors}
        alone = [name for name in shapes if name not in trained and not name.endswith("e_score_correction_bias")]
        tied = {name for name in alone if name.endswith(("embed_tokens.weight", "lm_head.weight"))}
        if len(tied) == 1:
            alone = [name for name in alone if name not in tied]
        if not alone or not trained:
            return
        message = (
            f"{len(alone)} weights have no optimizer state: frozen, or a rank's file is missing; the first: {alone[0]}"
        )
        if MASTER_STEM in self.files.ranks or self.lenient:
            self.notes.append(Note("W-untrained", message))
            return
        raise Incomplete(
            message, code=NO_STATES, path=self.tree.display(), key=alone[0], faults=alone[1:50],
            hint="fetch every rank's optimizer file; if these are frozen, --lenient",
        )  # fmt: skip

    def _model(self, part: Part, others: Entries, *, settle: bool = True) -> Entries:
        """The model's tensors under `model`, or `master` where its files are the master weights. settle: as in
        `paddle_unified_layout.transposed`; without it a first look at the shapes."""
        said = {header.path: header.metadata.get("format", "np") for header in part.headers}
        ours = [
            header.metadata[files_of.MODEL_TYPE] for header in part.headers if files_of.MODEL_TYPE in header.metadata
        ]
        if ours and not self.told:
            self.config = {**self.config, "model_type": ours[0]}
        trained: dict[str, tuple[int, ...]] = {}
        for (name, state), entry in others.items():
            if state == MASTER or state in ("exp_avg", "momentum_buffer", quant.FIRST8, quant.PACKED):
                trained[name] = entry.shape
        pt = {name: header.kinds[row].shape for name, (header, row) in part.rows.items() if said[header.path] == "pt"}
        flips, notes = transposed(pt, trained, self.config, path=self.tree.display(), settle=settle)
        if not settle:
            return {TensorKey(name): _lying(*row, flip=name in flips) for name, row in part.rows.items()}
        self.notes += notes
        self.layout = "pt" if pt else "np"
        state = self._state_of(part, others)
        states_of = {key.name for key in others}
        return {
            TensorKey(name, state): _lying(header, row, flip=name in flips, bf16=self._is_bf16(name, states_of))
            if header.kinds[row].dtype.name != "U16" or self._is_bf16(name, states_of)
            else self._refuse(header, name)
            for name, (header, row) in part.rows.items()
        }

    def _is_bf16(self, name: str, trained: set[str]) -> bool:
        """Is a 16-bit integer bfloat16? Paddle has no other use of them for a weight."""
        return name in trained or dtype_of(self.config) == "BF16"

    def _refuse(self, header: Header, name: str) -> Lying:
        said = dtype_of(self.config)
        raise InputError(
            f"16-bit integers that may be bfloat16: config.json {f'says {said}' if said else 'has no dtype'}, and the weight"
            " has no optimizer state", code=SIXTEEN_BITS, path=self.tree.display(header.path), key=name,
            hint='if it is bf16, pass --config FILE that holds {"dtype": "bfloat16"}',
        )  # fmt: skip

    def _state_of(self, part: Part, others: Entries) -> str:
        index = self.optimizer
        if index is None or index.weight_map is None or not index.said.get("master_weights"):
            return MODEL
        kinds = {kind.dtype.name for header in part.headers for kind in header.kinds if kind.dtype.is_float}
        if kinds != {"F32"} or any(key.state == MASTER for key in others):
            return MODEL
        wide = dtype_of(self.config)
        if wide in ("BF16", "F16"):
            self.skipped = True
            self.notes.append(Note("W-masters-as-model", "the model files hold the fp32 master weights"
                                   " (skip_save_model_weight): read as master", part.listed.path))  # fmt: skip
            return MASTER
        if not wide:
            self.notes.append(Note("W-masters-as-model", "fp32 weights and no master weights: a run in fp32, or"
                                   " skip_save_model_weight; nothing says which, read as the model", part.listed.path))  # fmt: skip
        return MODEL

    def _check_masters(self, entries: Entries) -> None:
        """The index of a job of one process says truly whether there are master weights."""
        index = self.optimizer
        if index is None or index.weight_map is None or any(key.state == MASTER for key in entries):
            return
        if index.said.get("master_weights") is True and "quant_ckpt_resume_times" not in index.said:
            raise Incomplete(
                "the optimizer's index says master_weights, and there are none", code=LOST_MASTERS,
                path=self.tree.display(MASTER_STEM + files_of.INDEX_SUFFIX),
                hint="fetch master_weights*.safetensors and their index; to do without them, set master_weights to false",
            )  # fmt: skip


# -- files of an index ---------------------------------------------------------------------------------------------------


def read_part(tree: Tree, path: str, *, lenient: bool) -> Part:
    """The headers of every file that the index names, held against it.

    Raises Incomplete (E0380 files, E0381 tensors), InconsistentCheckpoint (E0383 a tensor in two files, E0382 one that the
    index does not name).
    """
    index = read_index(tree, path)
    named = index.files()
    _refuse_missing(tree, index, named)
    headers, faults = list[Header](), list[CkptError]()
    for file in named:
        try:
            headers.append(read_header(tree, file, lenient=lenient))
        except InputError as fault:
            faults.append(fault)
    if faults:
        first = faults[0]
        first.faults += tuple(f"{fault.message} ({fault.where()})" for fault in faults[1:100])
        raise first
    rows: dict[str, tuple[Header, int]] = {}
    more: dict[str, tuple[Header, int]] = {}
    absent, notes = list[tuple[str, str]](), list[Note]()
    for header in headers:
        where = {name: row for row, name in enumerate(header.names)}
        for name in named[header.path]:
            if name in where:
                rows[name] = (header, where.pop(name))
            else:
                absent.append((name, header.path))
        scales = {name: row for name, row in where.items() if name.endswith(quant.SUFFIXES)}
        more |= {name: (header, row) for name, row in scales.items()}
        notes += _strangers(tree, index, header.path, [name for name in where if name not in scales], lenient=lenient)
    _refuse_absent(tree, index, absent, rows, more)
    order = index.weight_map or {}
    rows = {name: rows[name] for name in order if name in rows} | more
    notes += _total(index, rows)
    notes += [Note("W-header", warning, header.path) for header in headers for warning in header.warnings]
    return Part(index, headers, rows, notes)


def _refuse_missing(tree: Tree, index: PaddleIndex, named: Mapping[str, Sequence[str]]) -> None:
    listing = tree.listing()
    missing = [file for file in named if file not in listing]
    if missing:
        lost = sum(len(named[file]) for file in missing)
        raise Incomplete(
            f"{len(missing)} of {len(named)} files are missing: {', '.join(missing[:20])}; they hold {lost} of"
            f" {len(index.weight_map or ())} tensors",
            code=MISSING_FILES, path=tree.display(index.path), faults=(f"missing: {file}" for file in missing[1:100]),
            hint="fetch the missing files into this folder; of a job on several machines, from all of them",
        )  # fmt: skip


def _strangers(tree: Tree, index: PaddleIndex, path: str, names: Sequence[str], *, lenient: bool) -> list[Note]:
    """Tensors of a file that its index does not place there: an error, or a note with --lenient."""
    if not names:
        return []
    order = index.weight_map or {}
    twice = [name for name in names if name in order]
    name = (twice or names)[0]
    if twice:
        message = f"tensor {name[:200]} lies in {order[name]} and in {path}"
    else:
        message = f"{len(names)} tensors lie in the index's files, but not in the index; the first: {name[:200]}"
    if lenient:
        return [Note("W-extra-tensors", f"{message}; not read", path, name)]
    raise InconsistentCheckpoint(
        message, code=TWICE if twice else NOT_IN_INDEX, path=tree.display(path), key=name[:200],
        hint="index and files come from two saves: fetch both again", faults=[each[:200] for each in (twice or names)[1:50]],
    )  # fmt: skip


def _refuse_absent(
    tree: Tree,
    index: PaddleIndex,
    absent: list[tuple[str, str]],
    rows: Mapping[str, object],
    more: Mapping[str, object],
) -> None:
    """Tensors that the index names and no file holds, but for the first moments that O2 packs into the second."""
    lost = [
        (name, path)
        for name, path in absent
        if not (
            index.stage == "O2"
            and name.endswith("/moment1_0")
            and name + quant.SYMMETRIC in more
            and name.removesuffix("1_0") + "2_0" in rows
        )
    ]
    if lost:
        name, path = lost[0]
        raise Incomplete(
            f"{len(lost)} of {len(index.weight_map or ())} tensors of the index are not in their files; the first:"
            f" {name[:200]} not in {path}",
            code=NOT_IN_FILE, path=tree.display(path), key=name[:200],
            faults=(f"{name[:200]} not in {path}" for name, path in lost[1:100]),
            hint="index and files come from two saves: fetch both again",
        )  # fmt: skip


def _total(index: PaddleIndex, rows: Mapping[str, tuple[Header, int]]) -> list[Note]:
    """A note where the index states another size than its tensors have. A quantised optimizer's is of before."""
    if index.total_size is None or index.stage:
        return []
    actual = sum(header.kinds[row].nbytes for header, row in rows.values())
    bools = sum(prod(h.kinds[r].shape) for h, r in rows.values() if h.kinds[r].dtype.name == "BOOL")
    if index.total_size in (actual, actual - bools + bools // 8):
        return []
    message = f"the index states total_size {index.total_size}, the tensors have {actual} bytes"
    return [Note("W-total-size", message, index.path)]


# -- small ---------------------------------------------------------------------------------------------------------------


def _lying(header: Header, row: int, *, flip: bool = False, bf16: bool = True) -> Lying:
    dtype = header.kinds[row].dtype
    return Lying(header, row, DTYPES["BF16"] if dtype.name == "U16" and bf16 else dtype, flip)


def dtype_of(config: Mapping[str, Any]) -> str:
    """The model's dtype as its config has it: `BF16`, `F16`, `F32`, "" where it has none."""
    for key in ("dtype", "torch_dtype"):
        said = config.get(key)
        if isinstance(said, str):
            return _HALF.get(said.removeprefix("paddle.").removeprefix("torch."), "F32" if "32" in said else "")
    return ""


def _lists(config: Mapping[str, Any]) -> dict[str, Any]:
    said = config.get("architectures")
    plain = isinstance(said, list) and all(isinstance(each, str) for each in said)
    return {"architectures": said} if plain else {}
