"""The interface of a checkpoint format: it detects its own files, reads headers into a Catalog, and plans a Target.

A format is a folder (`formats.entry`) whose `format.py` has one object `FORMAT` that satisfies `Format`. That module's
docstring is the specification, with its source. Formats know no families, no plan, no execution.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import IntEnum
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from ckpt_tool.core.catalog import Catalog, CatalogRow
from ckpt_tool.core.dtype import DType
from ckpt_tool.core.hints import Hints
from ckpt_tool.core.tensor import LogicalTensor, TensorKey
from ckpt_tool.storage.source import Tree

if TYPE_CHECKING:  # reading needs none of these
    from ckpt_tool.core.layout import Layout
    from ckpt_tool.core.target import LayoutWish, Target, Wanted
    from ckpt_tool.errors import CkptError


# What files of weights are called, whatever their format: a name with one of them promises what is inside.
WEIGHT_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".pdparams", ".pdopt", ".gguf")
# The options of formats whose tensors `plan.placing` distributes over ranks.
PLACED = frozenset({"zero", "pp-split", "layout", "on-indivisible"})


class Specificity(IntEnum):
    """How specific the evidence of a claim is. If two formats claim the same files, the more specific claim wins
    (`formats.registry`)."""

    CONTAINER = 0  # files of a container that many formats use, under no particular names
    NAMES = 1  # names that the format's own writers give
    OWN = 2  # names, or words inside the files, that only this format has
    SIGNED = 3  # a file of the checkpoint says which format it is


class Evidence(NamedTuple):
    """Why a tree belongs to a format. `why` is a phrase for the user."""

    why: str
    specificity: Specificity = Specificity.NAMES
    # every file of the checkpoint, as far as its name shows; side files (tokenizer, config) are left out
    files: frozenset[str] = frozenset()
    # loader: the software that opens such a folder, "" where it has no rule for several forms of one model.
    # turn: of several forms it takes the one with the lowest turn (`transformers` takes model.safetensors, and
    # pytorch_model.bin only without it).
    loader: str = ""
    turn: int = 0


class Holds(NamedTuple):
    """What a format's files can express."""

    all_states: bool = True  # every state, or the model alone
    extras: bool = True  # a place for plain values
    # the mesh dims whose ranks it lays out in files (() for formats that hold whole tensors)
    mesh: tuple[str, ...] = ()
    # does each rank keep its own copy of what is replicated (else only replica 0 is written)?
    replicas: bool = False
    zero: int = 0  # how DP shards by default (0-3)
    single: tuple[str, ...] = ()  # the suffixes under which the output may be one file, () for folders alone
    # of the options that only some formats can use (max-shard-size, zero, sharding, spec, pp-split, layout,
    # on-indivisible) those that change what is written
    uses_options: frozenset[str] = frozenset()
    dialect: str = "keep"  # the tensor names that this format normally uses
    # the system itself fixes which rank holds what (Megatron, DeepSpeed): `target` gets a Layout without placements and
    # takes degrees and wishes from `Wanted.wish`
    own_layout: bool = False
    dtypes: frozenset[str] = frozenset()  # names it can't hold
    # groups of states (`optimizer`, `master`, `ema`) that have no place although others have
    lacks: frozenset[str] = frozenset()
    adapter: bool = False  # its tensors are an adapter's
    safetensors: bool = False  # its weights are files of safetensors
    pointers: tuple[str, ...] = ()  # files that name the step's folder, of this format alone
    config: str = "config.json"  # the file in which it states the model's config
    # extras that its loader expects in addition to Megatron's arguments
    with_args: Mapping[str, Any] = MappingProxyType({})
    # one file of several is read as a checkpoint, so states without their parameters are no fault
    lone_shards: bool = False
    all_experts: bool = False  # its ranks hold all, so a gap in their numbers is one
    run_config: bool = False  # it has a place for what a Megatron run says of its adapter
    blocks: bool = False  # it holds GGUF's types of blocks
    # its files state the model and its tokenizer themselves, in its own words, in place of side files
    own_header: bool = False
    # names of side files that only its own loaders read; they are copied only if source and output have this format
    own_sidefiles: frozenset[str] = frozenset()
    # a regular expression of the names of files that say only that a rank is done, "" where there are none
    markers: str = ""

    def has(self, group: str) -> bool:
        """Is there a place for this group of states: `model`, `optimizer`, `master`, `ema`?"""
        return group == "model" or (self.all_states and group not in self.lacks)


class WalkedModel(NamedTuple):
    """A model's parameters as the trainer had them, where it saves them under other names or in other tensors."""

    shapes: Mapping[str, tuple[int, ...]]  # {parameter: elements}
    # Converts an optimizer's tensors from the trainer's parameter names to the names stored in the files. Returns these
    # and {parameter: the stored tensors that it consists of}. Raises InputError.
    stored: Callable[[Sequence[LogicalTensor]], tuple[list[LogicalTensor], Mapping[str, tuple[str, ...]]]]


def _as_stored(config: object, shapes: object) -> None:
    """Default of `ReadOptions.walked`: the trainer used the names that are in the files, so there is nothing to map."""


class ReadOptions(NamedTuple):
    """How to read a source: the user's options, and facts about the model family that a format cannot know itself."""

    lenient: bool = False  # faults that do not affect the values become notes
    prefer: str | None = None  # which of several kinds of files to read, or which level of a file holds the model
    require_checksums: bool = False  # an error for what no checksum covers
    # family, config: the model type and the config.json, where the files hold none
    family: str | None = None
    config: Mapping[str, Any] | None = None
    forced: bool = False  # `--from` names the format, so nothing else was looked for
    lora_alpha: float | None = None  # of an adapter whose files don't say it
    # a model of that config.json and those shapes as its trainer had it
    walked: Callable[[Mapping[str, Any], Mapping[str, tuple[int, ...]]], WalkedModel | None] = _as_stored


AS_IS = ReadOptions()


class Format(Protocol):
    """One checkpoint format."""

    name: str
    holds: Holds

    def detect(self, tree: Tree) -> Evidence | None:
        """Evidence that `tree` has this format, from file names and at most 64 KiB of content; None otherwise. Never
        raises for a tree of another format."""
        ...

    def read(self, tree: Tree, options: ReadOptions = AS_IS) -> Catalog:
        """The catalog, read from headers alone. Raises InputError / UnsafeInput with the file and the position in
        it."""
        ...

    def target(self, wanted: Wanted, layout: Layout) -> Target:
        """Plan every file of the output, without any tensor bytes."""
        ...


@runtime_checkable
class Naming(Protocol):
    """A format whose claim covers every file in its folders, including files with names that its writers never use."""

    def named(self, tree: Tree) -> frozenset[str]:
        """The files with names that the format's writers use, whether or not the checkpoint can be read."""
        ...


@runtime_checkable
class Hashing(Protocol):
    """A format whose files contain hashes, of themselves or of other files. Opening checks some, `ckpt verify` all."""

    def hashed(self, tree: Tree) -> frozenset[str]:
        """The files whose hash is stated and covers all of them."""
        ...

    def late_faults(self, tree: Tree) -> Iterator[CkptError]:
        """Every file that was not hashed when the folder was opened and differs from its hash. Reads them."""
        ...


@runtime_checkable
class Ranked(Protocol):
    """A format in which a file's name shows which rank wrote it."""

    def rank_of(self, path: str, mesh: Mapping[str, int]) -> Mapping[str, int] | None:
        """The mesh coordinates of the rank that wrote the file, keyed by the words in its name; None for a file that
        belongs to no rank, or to all."""
        ...


def ranks_of(fmt: Format, mesh: Mapping[str, int]) -> Callable[[str], Mapping[str, int] | None]:
    """A function from a file's path to the coordinates of the rank that wrote it. mesh: the checkpoint's mesh."""
    return partial(fmt.rank_of, mesh=mesh) if isinstance(fmt, Ranked) else _of_nobody


def _of_nobody(path: str) -> None:
    """The answer for formats whose files belong to no rank: always None."""


class FileContent(NamedTuple):
    """What a file contains, as far as it can be read without the checkpoint's index or its other files."""

    path: str  # the file, or the folder of an item; relative to the tree
    rows: tuple[CatalogRow, ...]
    unsafe: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@runtime_checkable
class ReadsAlone(Protocol):
    """A format in which some files can be read one by one even when the checkpoint as such cannot be read."""

    def find_lone_files(self, tree: Tree) -> Mapping[str, Callable[[], FileContent]]:
        """A reader for each such file, by path. Files that another format reads on its own (a safetensors file) are not
        included. The readers raise CkptError."""
        ...


class Fitted(NamedTuple):
    """What a format keeps of the tensors it was offered."""

    # (index of the offered tensor that it is made from, the tensor)
    tensors: tuple[tuple[int, LogicalTensor], ...]
    casts: Mapping[TensorKey, DType] = {}  # the new dtype of each tensor that is rounded
    dropped: tuple[dict[str, Any], ...] = ()  # entries of the report, one for each item left out or created
    # tensors that the format's reader returns as plain values, not as tensors (a step counter)
    unlisted: tuple[TensorKey, ...] = ()


@runtime_checkable
class Fitting(Protocol):
    """A format with variants that store the same state in different tensors (DeepSpeed's ZeRO stages)."""

    def fit(
        self, tensors: Sequence[LogicalTensor], extras: Mapping[str, Any], hints: Hints, wish: LayoutWish
    ) -> Fitted:
        """The tensors that this variant of the format stores, with a report entry for every difference.

        The other arguments are described in `Wanted`.
        """
        ...
