"""Reading a unified checkpoint: indexes, headers, and what they state together, as one catalog.

In order: marks of an asynchronous save; the indexes and every header that they name (all that is missing is named at
once); masters and optimizer states, merged or by ranks, in Paddle's layout; the model, whose weights' layout is settled
with the shapes of those; what 16-bit integers are; what the masters of `skip_save_model_weight` are.

    16-bit integers
          PaddleNLP wrote bfloat16 as U16. A weight that has master weights or moments, or a config.json that says
                      bfloat16, makes it bf16; neither is an error (E1357): nothing is guessed.
    masters as model  skip_save_model_weight writes the fp32 master weights as model-*.safetensors. Seen by: no master
                      files, all model weights F32, a 16-bit dtype in config.json, `master_weights` in the optimizer's
                      index. They are shown as what they are, `master`.

Which weights are stored transposed is decided for each file and each tensor, never guessed: with `save_to_hf` (the
default since PaddleFormers 0.3) the model file holds Linear weights as Hugging Face does, [out, in], and says
`"format": "pt"`; the optimizer and master weights remain in Paddle's [in, out]. A square weight shows nothing by
its shape. What decides, in this order:

    the file says "np"                                            as it is stored
    no matrix, or "lora" in the name                              as it is stored
    a master weight or moment of another shape than [out, in]     its shape settles this weight, and all weights of the
                                                                  module's name: the writer goes by that name alone
    the list of the model type (`paddle.rules.transposed_in_hf`)  settles the rest
    neither                                                       Unexplained E1353 that says what to pass

    model gate_proj BF16 [48, 32], master gate_proj F32 [32, 48]  ->  gate_proj is transposed, of every layer
    file [48, 32] "pt"   ->   shape (32, 48), strides (1, 32): no byte moves for it

Source: PaddleFormers 1.2.0 `transformers/conversion_utils.py` (`convert_transpose_selected_weights`: a list of module
names a model class, two-dimensional tensors alone). Cost: two preads a file, 2 us and 300 bytes a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ckpt_tool.core.catalog import Catalog, CatalogRow, Note
from ckpt_tool.core.dtype import DTYPES, DType
from ckpt_tool.core.hints import Degrees, Dialect, Hints
from ckpt_tool.core.missing import report_missing
from ckpt_tool.core.tensor import EMA, MASTER, MODEL, LogicalTensor, StoredArray, TensorKey, simple_tensor
from ckpt_tool.errors import Incomplete, InconsistentCheckpoint, InputError, Unexplained
from ckpt_tool.formats.base import ReadOptions
from ckpt_tool.formats.hub_folder.model_files import is_sidefile
from ckpt_tool.storage.safetensors_files.safetensors_file import SafetensorsHeader, read_header
from ckpt_tool.storage.source import Tree
from ckpt_tool.systems.paddle.extras import read_config, read_extras
from ckpt_tool.systems.paddle.job import PaddleHints
from ckpt_tool.systems.paddle.rules import is_expert, model_type_of, module_of, transposed_in_hf
from ckpt_tool.systems.paddle.unified import files as files_of
from ckpt_tool.systems.paddle.unified.files import (
    EMA_STEM,
    MASTER_STEM,
    OPTIMIZER_STEM,
    TWICE,
    IndexedFiles,
    PaddleIndex,
    UnifiedFiles,
    optimizer_key,
    read_index,
    read_part,
    refuse_twice,
)
from ckpt_tool.systems.paddle.unified.ranks import ArrayOfRank, join, read_ranks
from ckpt_tool.weight_schemes import paddle_states as quant

# -- which weights are transposed --------------------------------------------------------------------------------------

UNDECIDED = "E1353"
DISAGREE = "E1354"

Shape = tuple[int, ...]


def may_be_transposed(name: str, shape: Shape) -> bool:
    """Whether a weight is one of those that `save_to_hf` may transpose: a matrix, and no LoRA factor."""
    return len(shape) == 2 and "lora" not in name and name.endswith(".weight")


def transposed(
    stored: Mapping[str, Shape],
    trained: Mapping[str, Shape],
    config: Mapping[str, Any],
    *,
    path: str,
    settle: bool = True,
) -> tuple[set[str], list[Note]]:
    """The names of weights that are stored transposed, and notes.

    Args:
        stored: Shapes, as stored, of the weights in files that say `pt`.
        trained: Shapes of master weights and moments, in Paddle's layout.
        config: The model's config.
        path: The folder, for messages.
        settle: False for a first look: weights that can't be decided count as not transposed.

    Raises:
        InconsistentCheckpoint: E1354, weights that contradict each other.
        Unexplained: E1353, weights that can't be decided.
    """
    matrices = {name: shape for name, shape in stored.items() if may_be_transposed(name, shape)}
    seen = _seen(matrices, trained, path)
    flips = set[str]()
    open_ = list[str]()
    odd = set[str]()
    rules: dict[str, bool | None] = {}

    for name in matrices:
        tail = ".".join(name.rsplit(".", 4)[-4:])  # the lists have the last words, and there are few of them
        if tail not in rules:
            rules[tail] = transposed_in_hf(name, 2, config)
        rule = rules[tail]
        shown = seen.get(module_of(name)) if seen else None
        if shown is not None and rule is not None and shown != rule:
            odd.add(module_of(name))
        flip = rule if shown is None else shown  # shapes are evidence, the list only describes the usual writer
        if flip is None:
            open_.append(name)
        elif flip:
            flips.add(name)

    if open_ and settle:
        raise _undecided_error(open_, matrices, config, path)

    notes = []
    if odd:
        modules = ", ".join(sorted(odd)[:20])
        notes.append(
            Note("W-layout", f"by the shapes of their master weights these are stored otherwise than listed: {modules}")
        )

    return flips, notes


def _seen(matrices: Mapping[str, Shape], trained: Mapping[str, Shape], path: str) -> dict[str, bool]:
    """Module -> whether its weights are stored transposed, as the shapes of their master weights and moments show."""
    seen: dict[str, tuple[bool, str]] = {}
    for name, (rows, columns) in matrices.items():
        theirs = trained.get(name)
        # A square weight has the same shape in both layouts.
        if rows == columns or theirs not in ((rows, columns), (columns, rows)):
            continue
        flip = theirs == (columns, rows)
        first, other = seen.setdefault(module_of(name), (flip, name))
        if first != flip:
            raise InconsistentCheckpoint(
                f"{other} and {name} are stored in different layouts by their master weights' shapes",
                code=DISAGREE,
                path=path,
                key=name,
                hint="files of two saves are mixed: fetch one save whole",
            )
    return {module: flip for module, (flip, _) in seen.items()}


def _undecided_error(
    names: list[str], shapes: Mapping[str, Shape], config: Mapping[str, Any], path: str
) -> Unexplained:
    kind = model_type_of(config)
    about = f"the model type {kind!r} is not known" if kind else "nothing says the model type"
    return Unexplained(
        f"{len(names)} weights may or may not be in the Hugging Face layout: {about}, and no master weight of "
        f"another shape shows it; the first: {names[0]} {list(shapes[names[0]])}",
        code=UNDECIDED,
        path=path,
        key=names[0],
        faults=names[1:50],
        hint="pass --config with the model's config.json, or --family: the model type says which weights "
        "are transposed",
    )


# -- the tensors as one mapping ----------------------------------------------------------------------------------------


class Lying(NamedTuple):
    """An unsharded tensor in a file."""

    header: SafetensorsHeader
    row: int  # in the header
    dtype: DType  # the type of its bits: BF16 for a stored U16
    flip: bool = False  # it is stored transposed

    @property
    def shape(self) -> tuple[int, ...]:
        """In Paddle's layout."""
        shape = self.header.kinds[self.row].shape
        return shape[::-1] if self.flip else shape

    def array(self) -> StoredArray:
        """The stored array in Paddle's layout: a transposition costs only other strides."""
        stored = self.header.stored(self.row)
        strides = (1, stored.shape[1]) if self.flip else None
        return stored.view(0, self.shape, strides, dtype=self.dtype)


class UnifiedTable(Mapping[TensorKey, LogicalTensor]):
    """The tensors of a catalog, built from header rows when they are used; in the order given."""

    def __init__(self, entries: Mapping[TensorKey, Lying | LogicalTensor]) -> None:
        self._entries = entries

    def rows(self) -> Iterator[CatalogRow]:
        for (name, state), entry in self._entries.items():
            if isinstance(entry, Lying):
                yield CatalogRow(name, state, entry.dtype, entry.shape, entry.header.kinds[entry.row].nbytes)
            else:
                yield CatalogRow(name, state, entry.dtype, entry.shape, entry.nbytes)

    def parted(self) -> Iterator[LogicalTensor]:
        """The tensors that ranks hold in parts, or several times."""
        return (entry for entry in self._entries.values() if not isinstance(entry, Lying))

    def __getitem__(self, key: TensorKey) -> LogicalTensor:
        entry = self._entries[key]
        return simple_tensor(key, entry.array()) if isinstance(entry, Lying) else entry

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[TensorKey]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


# -- reading -----------------------------------------------------------------------------------------------------------

SIXTEEN_BITS = "E1357"
NO_STATES = "E1358"
LOST_MASTERS = "E1359"
SLICED = "E1361"
SIDEFILES = ("lora_config.json", "vera_config.json", "lokr_config.json", "prefix_config.json", "sft_config.json")
_HALF = {"bfloat16": "BF16", "float16": "F16"}

Entries = dict[TensorKey, Lying | LogicalTensor]


def read_catalog(tree: Tree, name: str, options: ReadOptions) -> Catalog:
    """Read the folder into one catalog. name: of the format. Raises InputError, UnsafeInput."""
    lenient = options.lenient
    files = files_of.classify(tree.names())
    files_of.check_markers(tree, files)
    files_of.check_indexes(tree, files)
    config = read_config(tree, options)
    named = bool(options.config or options.family)
    reading = _UnifiedReading(tree, files, config, lenient=lenient, named=named)
    entries = reading.entries()
    sidefiles = tuple(
        path for path in tree.names() if (is_sidefile(path) or path in SIDEFILES) and tree.listing()[path] >= 0
    )
    beside = read_extras(tree)
    taken = (*reading.taken, *beside.files)
    notes = [*reading.notes, *files_of.notes_of(tree, taken, sidefiles)]
    return Catalog(
        name,
        UnifiedTable({**entries, **beside.tensors}),
        extras=beside.extras,
        files=taken,
        sidefiles=sidefiles,
        notes=tuple(notes),
        unsafe=beside.unsafe,
        hints=reading.hints(),
    )


class _UnifiedReading:
    """Reads one folder; collects the files that it took and the notes."""

    def __init__(
        self, tree: Tree, files: UnifiedFiles, config: Mapping[str, Any], *, lenient: bool, named: bool
    ) -> None:
        self.tree = tree
        self.files = files
        self.config = config
        self.lenient = lenient
        self.named = named  # the user named the model or its config
        self.taken: list[str] = []
        self.notes: list[Note] = []
        self.degrees: dict[str, int] = {}
        self.layout = ""
        self.skipped = False  # skip_save_model_weight
        self.optimizer: PaddleIndex | None = None

    def hints(self) -> Hints:
        """The hints for a writer of Paddle's formats."""
        plain = {
            key: value for key, value in self.config.items() if value is None or type(value) in (bool, int, float, str)
        }
        stated = self.optimizer.stated if self.optimizer is not None else {}

        hints = Hints.of(
            Dialect("paddle"),
            PaddleHints(
                kind="unified",
                layout=self.layout,
                stem=self.files.stem,
                skip_save_model_weight=self.skipped,
                sharding="",
                told=self.named,
                config={**plain, **_lists(self.config)},
            ),
        )

        if self.optimizer is not None and self.optimizer.stage:
            times = stated.get("quant_ckpt_resume_times")
            hints = hints.having(
                quant.QuantisedStates("paddle", self.optimizer.stage, times if type(times) is int else 0)
            )

        if self.degrees:
            degrees = {
                "tp": self.degrees.get("tp", 1),
                "pp": self.degrees.get("pp", 1),
                "dp": self.degrees.get("shard", 1),
            }
            hints = hints.having(Degrees(**{dim: size for dim, size in degrees.items() if size > 1}))

        return hints

    # -- parts --------------------------------------------------------------------------------------------------------

    def entries(self) -> Entries:
        """All tensors. The model's layout is decided last, because it depends on the shapes of the others."""
        model = self._part(self.files.stem)
        masters = self._part(MASTER_STEM)
        averages = self._part(EMA_STEM)
        if OPTIMIZER_STEM in self.files.indexes:
            self.optimizer = read_index(self.tree, self.files.indexes[OPTIMIZER_STEM], merged=False)
        merged = self.optimizer is not None and self.optimizer.weight_map is not None
        optimizer = self._part(OPTIMIZER_STEM) if merged else None
        for part in (model, averages):
            if part is not None:
                refuse_twice(self.tree, part)
        out: Entries = {}
        if averages is not None:
            out |= {TensorKey(name, EMA): _lying(*row) for name, row in averages.rows.items()}
        if masters is not None:
            out |= self._whole(masters, model, lambda name, header, row: TensorKey(name, MASTER))
        if optimizer is not None:
            out |= self._whole(optimizer, model, self._key)
        if not merged and (self.files.ranks or self.optimizer is not None):
            out |= self._ranks(self._shapes(model, out))
        elif self.files.ranks:
            self.notes.append(Note("W-stray", "ranks' own optimizer files next to a merged one: not read"))
        ours = self._model(model, out) if model is not None else {}
        self._check_masters({**ours, **out})
        return {**ours, **out}

    def _part(self, stem: str) -> IndexedFiles | None:
        path = self.files.indexes.get(stem)
        plain = stem + files_of.SUFFIX
        if path is None and stem == self.files.stem and plain in self.tree.names():
            names = list(read_header(self.tree, plain, lenient=self.lenient).names)  # one file needs no index
            listed = PaddleIndex(plain, dict.fromkeys(names, plain), None, {})
        elif path is None:
            return None
        else:
            known = self.optimizer if stem == OPTIMIZER_STEM else None
            listed = known or read_index(self.tree, path)
        part = read_part(self.tree, listed, lenient=self.lenient)
        self.taken += dict.fromkeys([listed.path, *(header.path for header in part.headers)])
        self.notes += part.notes
        return part

    def _key(self, name: str, header: SafetensorsHeader, row: int) -> TensorKey:
        return optimizer_key(name, header.kinds[row].dtype, path=header.path)

    def _whole(
        self, part: IndexedFiles, model: IndexedFiles | None, key_of: Callable[[str, SafetensorsHeader, int], TensorKey]
    ) -> Entries:
        """The tensors of masters or of the optimizer, with slices of sharding v2 joined."""
        keys = {name: key_of(name, *where) for name, where in part.rows.items()}
        if len(set(keys.values())) < len(keys):
            raise InconsistentCheckpoint(
                "two keys of the optimizer mean one state",
                code=TWICE,
                path=self.tree.display(part.listed.path),
                hint="the file was edited: fetch it again",
            )

        shapes = self._shapes(model, {}) if part.again or _may_be_slices(part) else {}
        sliced = [
            name
            for name, (header, row) in (part.rows.items() if shapes else ())
            if _is_slice(keys[name], header.kinds[row].shape, shapes)
        ]
        if not sliced:
            refuse_twice(self.tree, part)
            return {keys[name]: _lying(*where) for name, where in part.rows.items()}

        self._refuse_merged_slices(part, model, sliced[0])
        order = {header.path: number for number, header in enumerate(sorted(part.headers, key=lambda h: h.path))}
        out: Entries = {}

        for name, where in part.rows.items():
            held = [
                ArrayOfRank((0, 0, order[header.path], 0), _lying(header, row).array())
                for header, row in (where, *part.again.get(name, ()))
            ]
            out[keys[name]] = join(keys[name], held, shapes, self.config, 1)

        return out

    def _refuse_merged_slices(self, part: IndexedFiles, model: IndexedFiles | None, name: str) -> None:
        """Raise InputError E1361 for slices of a job with tensor or pipeline parallelism.

        Such a job joined the slices by length alone, and nothing records their order.
        """
        dense = {header.path for key, (header, _) in (model.rows.items() if model else ()) if not is_expert(key)}
        if len(dense) > 1:  # expert ranks write their own experts, and no more
            raise InputError(
                "slices of sharding v2 in merged files, of a job with several tensor or pipeline ranks: "
                "nothing says which",
                code=SLICED,
                path=self.tree.display(part.listed.path),
                key=name,
                hint="PaddleFormers 1.2.0 itself can't resume this: save with ignore_merge_optimizer, with "
                "sharding v1, or"
                " in another format; --drop is no way out, the states are stored in no known order",
            )
        message = (
            "slices of sharding v2 in merged files, joined in the order of the files (PaddleFormers 1.2.0 "
            "can't resume it)"
        )
        self.notes.append(Note("W-slices", message, part.listed.path))

    def _shapes(self, model: IndexedFiles | None, others: Entries) -> dict[str, tuple[int, ...]]:
        """A first look at the model's shapes, in Paddle's layout."""
        if model is None:
            return {}
        return {key.name: row.shape for key, row in self._model(model, others, settle=False).items()}

    def _ranks(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[TensorKey, LogicalTensor]:
        index = self.optimizer
        if index is not None:
            self.taken.append(index.path)
        if index is not None and not self.files.ranks:
            raise Incomplete(
                "the optimizer's index names no files, and there are none of ranks",
                code=NO_STATES,
                path=self.tree.display(index.path),
                hint="fetch the ranks' optimizer.*.safetensors, or remove the index",
            )
        number = index.stated.get("optim_shard_num") if index is not None else 1
        marked = any(".done." in name for name in self.tree.names())
        parts = number if type(number) is int and 0 < number < 10_000 else 1
        found = read_ranks(
            self.tree, self.files.ranks, shapes, self.config, parts=parts, marked=marked, lenient=self.lenient
        )
        self.taken += [header.path for header in found.headers]
        self.degrees = found.degrees
        self._report_untrained(shapes, found.tensors)
        return found.tensors

    def _report_untrained(self, shapes: Mapping[str, Sequence[int]], tensors: Iterable[TensorKey]) -> None:
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
        fault = Incomplete(
            message,
            code=NO_STATES,
            path=self.tree.display(),
            key=alone[0],
            faults=alone[1:50],
            hint="fetch every rank's optimizer file; if these are frozen, --lenient",
        )
        report_missing(fault)

    def _model(self, part: IndexedFiles, others: Entries, *, settle: bool = True) -> Entries:
        """The model's tensors under `model`, or `master` where its files are the master weights. settle: as in
        `paddle.unified.read.transposed`; without it a first look at the shapes."""
        stated = {header.path: header.metadata.get("format", "np") for header in part.headers}
        ours = [
            header.metadata[files_of.MODEL_TYPE] for header in part.headers if files_of.MODEL_TYPE in header.metadata
        ]
        if ours and not self.named:
            self.config = {**self.config, "model_type": ours[0]}
        trained: dict[str, tuple[int, ...]] = {}
        for (name, state), entry in others.items():
            if state == MASTER or state in ("exp_avg", "momentum_buffer", quant.FIRST8, quant.PACKED):
                trained[name] = entry.shape
        pt = {name: header.kinds[row].shape for name, (header, row) in part.rows.items() if stated[header.path] == "pt"}
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

    def _refuse(self, header: SafetensorsHeader, name: str) -> Lying:
        dtype = dtype_of(self.config)
        raise InputError(
            f"16-bit integers that may be bfloat16: config.json {f'says {dtype}' if dtype else 'has no dtype'}, and "
            "the weight has no optimizer state",
            code=SIXTEEN_BITS,
            path=self.tree.display(header.path),
            key=name,
            hint='if it is bf16, pass --config FILE that holds {"dtype": "bfloat16"}',
        )

    def _state_of(self, part: IndexedFiles, others: Entries) -> str:
        index = self.optimizer
        if index is None or index.weight_map is None or not index.stated.get("master_weights"):
            return MODEL

        kinds = {kind.dtype.name for header in part.headers for kind in header.kinds if kind.dtype.is_float}
        if kinds != {"F32"} or any(key.state == MASTER for key in others):
            return MODEL

        wide = dtype_of(self.config)
        if wide in ("BF16", "F16"):
            self.skipped = True
            self.notes.append(
                Note(
                    "W-masters-as-model",
                    "the model files hold the fp32 master weights (skip_save_model_weight): read as master",
                    part.listed.path,
                )
            )
            return MASTER

        if not wide:
            self.notes.append(
                Note(
                    "W-masters-as-model",
                    "fp32 weights and no master weights: a run in fp32, or"
                    " skip_save_model_weight; nothing says which, read as the model",
                    part.listed.path,
                )
            )

        return MODEL

    def _check_masters(self, entries: Entries) -> None:
        """The index of a job of one process says truly whether there are master weights."""
        index = self.optimizer
        if index is None or index.weight_map is None or any(key.state == MASTER for key in entries):
            return
        if index.stated.get("master_weights") is True and "quant_ckpt_resume_times" not in index.stated:
            fault = Incomplete(
                "the optimizer's index says master_weights, and there are none",
                code=LOST_MASTERS,
                path=self.tree.display(MASTER_STEM + files_of.INDEX_SUFFIX),
                hint="fetch master_weights*.safetensors and their index; to do without them, set "
                "master_weights to false",
            )
            report_missing(fault)


# -- small -------------------------------------------------------------------------------------------------------------


def _may_be_slices(part: IndexedFiles) -> bool:
    """Nothing but vectors: whole matrices show themselves."""
    return all(len(header.kinds[row].shape) == 1 for header, row in part.rows.values()) and bool(part.rows)


def _is_slice(key: TensorKey, stored: tuple[int, ...], shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Is it a slice of the tensor's line (padding and all), not the tensor?"""
    full = shapes.get(key.name)
    return full is not None and len(stored) == 1 and stored != full and not key.state.endswith("pow_acc")


def _lying(header: SafetensorsHeader, row: int, *, flip: bool = False, bf16: bool = True) -> Lying:
    dtype = header.kinds[row].dtype
    return Lying(header, row, DTYPES["BF16"] if dtype.name == "U16" and bf16 else dtype, flip)


def dtype_of(config: Mapping[str, Any]) -> str:
    """The model's dtype as its config has it: `BF16`, `F16`, `F32`, "" where it has none."""
    for key in ("dtype", "torch_dtype"):
        stated = config.get(key)
        if isinstance(stated, str):
            return _HALF.get(stated.removeprefix("paddle.").removeprefix("torch."), "F32" if "32" in stated else "")
    return ""


def _lists(config: Mapping[str, Any]) -> dict[str, Any]:
    stated = config.get("architectures")
    plain = isinstance(stated, list) and all(isinstance(each, str) for each in stated)
    return {"architectures": stated} if plain else {}
