"""What a format is: it tells whether a tree is one of its own, reads headers into a Catalog, lays out a Target.

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
PLACED = frozenset({"zero", "pp-split", "layout", "on-indivisible"})  # of formats that `plan.placing` lays out


class Specificity(IntEnum):
    """What a claim rests on. Of two claims on the same files the more specific one counts (`formats.registry`)."""

    CONTAINER = 0  # files of a container that many formats use, under no particular names
    NAMES = 1  # names that the format's own writers give
    OWN = 2  # names, or words inside the files, that only this format has
    SIGNED = 3  # a file of the checkpoint says which format it is


class Evidence(NamedTuple):
    """Why a tree is of a format: `why`, in words for a person."""

    why: str
    specificity: Specificity = Specificity.NAMES
    # every file of the checkpoint, as far as names tell; side files are left out
    files: frozenset[str] = frozenset()
    # loader, turn: the software that opens such a folder and, where the folder holds one model in several forms, takes
    # the form of the lowest turn (`transformers` takes model.safetensors, and pytorch_model.bin only without it); ""
    # where there is no such rule
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
    dialect: str = "keep"  # the names that are at home here
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
    # extras that its loader wants beside Megatron's arguments
    with_args: Mapping[str, Any] = MappingProxyType({})
    # one file of several is read as a checkpoint, so states without their parameters are no fault
    lone_shards: bool = False
    all_experts: bool = False  # its ranks hold all, so a gap in their numbers is one
    run_config: bool = False  # it has a place for what a Megatron run says of its adapter
    blocks: bool = False  # it holds GGUF's types of blocks
    # its files state the model and its tokenizer themselves, in its own words, in place of side files
    own_header: bool = False
    # names of files beside it that only its own loaders read, copied from and to this format alone
    own_sidefiles: frozenset[str] = frozenset()
    # a regular expression of the names of files that say only that a rank is done, "" where there are none
    markers: str = ""

    def has(self, group: str) -> bool:
        """Is there a place for this group of states: `model`, `optimizer`, `master`, `ema`?"""
        return group == "model" or (self.all_states and group not in self.lacks)


class WalkedModel(NamedTuple):
    """A model's parameters as the trainer had them, where it saves them under other names or in other tensors."""

    shapes: Mapping[str, tuple[int, ...]]  # {parameter: elements}
    # the tensors of an optimizer under these names as those of the parameters that lie in the files, and which these
    # are of each: {parameter: what is stored of it}. Raises InputError.
    stored: Callable[[Sequence[LogicalTensor]], tuple[list[LogicalTensor], Mapping[str, tuple[str, ...]]]]


def _as_stored(config: object, shapes: object) -> None:
    """Of a model that the trainer had under the names of its files."""


class ReadOptions(NamedTuple):
    """What a user may say of a source beside its path, and what formats, which know no families, are told."""

    lenient: bool = False  # faults that leave the values sound are notes
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
        """Evidence that `tree` is of this format, from names and at most 64 KiB; None otherwise. Never raises for
        a tree of another format."""
        ...

    def read(self, tree: Tree, options: ReadOptions = AS_IS) -> Catalog:
        """The catalog, from headers alone. Raises InputError / UnsafeInput with file and place."""
        ...

    def target(self, wanted: Wanted, layout: Layout) -> Target:
        """The whole output, no tensor bytes."""
        ...


@runtime_checkable
class Naming(Protocol):
    """A format whose claim takes in more files than its writers name: whatever is in its folders."""

    def named(self, tree: Tree) -> frozenset[str]:
        """The files that its writers would have named so, whether the checkpoint can be read or not."""
        ...


@runtime_checkable
class Hashing(Protocol):
    """A format whose files state hashes, of others or their own, of which some are left to `ckpt verify`."""

    def hashed(self, tree: Tree) -> frozenset[str]:
        """The files whose hash is stated and covers all of them."""
        ...

    def late_faults(self, tree: Tree) -> Iterator[CkptError]:
        """Every file that was not hashed when the folder was opened and differs from its hash. Reads them."""
        ...


@runtime_checkable
class Ranked(Protocol):
    """A format whose files are those of ranks, as their names say."""

    def rank_of(self, path: str, mesh: Mapping[str, int]) -> Mapping[str, int] | None:
        """The coordinates of the rank whose file it is, under the words of its name; None for a file of no rank, or of
        all."""
        ...


def ranks_of(fmt: Format, mesh: Mapping[str, int]) -> Callable[[str], Mapping[str, int] | None]:
    """Whose the files of a checkpoint of this format are. mesh: the checkpoint's."""
    return partial(fmt.rank_of, mesh=mesh) if isinstance(fmt, Ranked) else _of_nobody


def _of_nobody(path: str) -> None:
    """Of a format whose files are no rank's."""


class FileContent(NamedTuple):
    """What files say by themselves, without those that tie them to the rest of their checkpoint."""

    path: str  # the file, or the folder of an item; relative to the tree
    rows: tuple[CatalogRow, ...]
    unsafe: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@runtime_checkable
class ReadsAlone(Protocol):
    """A format some of whose files say what they hold even where its reader can't read the checkpoint."""

    def find_lone_files(self, tree: Tree) -> Mapping[str, Callable[[], FileContent]]:
        """What reads each of them, by path. Files that another format reads by themselves (a safetensors file) are not
        among them. The readers raise CkptError."""
        ...


class Fitted(NamedTuple):
    """What a format keeps of the tensors it was offered."""

    # (number of the offered tensor that it is made of, the tensor)
    tensors: tuple[tuple[int, LogicalTensor], ...]
    casts: Mapping[TensorKey, DType] = {}  # dtypes of those that are rounded
    dropped: tuple[dict[str, Any], ...] = ()  # entries of the report, one for each thing left out or made
    # those that its reader gives back as plain values, not as tensors (a step counter)
    unlisted: tuple[TensorKey, ...] = ()


@runtime_checkable
class Fitting(Protocol):
    """A format that keeps the same state with other tensors in some of its kinds (DeepSpeed's ZeRO stages)."""

    def fit(
        self, tensors: Sequence[LogicalTensor], extras: Mapping[str, Any], hints: Hints, wish: LayoutWish
    ) -> Fitted:
        """The tensors to write, exact and reported. The rest: as in `Wanted`."""
        ...
