"""`gguf`: llama.cpp's files: metadata, a table of tensors, and their values, in one file or a split of several.

    GGUF | version 3 | tensors 291 | pairs 24 | general.architecture = "llama" ... | token_embd.weight Q4_K ... | values
    ->  token_embd.weight Q4_K (32000, 16): rows of 16 blocks, each 144 bytes for 256 elements

Specification (gguf 0.19.0 `gguf_writer.py`, `gguf_reader.py`; llama.cpp of October 2026 `ggml/src/gguf.cpp`):

* `GGUF`, u32 version (2 or 3), u64 tensors, u64 pairs. Pairs: key (u64 length, UTF-8), u32 type, value; a string has a
  u64 length, an array u32 type, u64 count, values. Tensors: name, u32 dims, u64 each, **fastest first**, u32 type, u64
  offset from where the values begin. Values begin at the next multiple of `general.alignment` (32), and so does each.
* Values are packed: each tensor begins where the previous one in the table ends, padded by zeros to the alignment, and
  nothing is stored after the last one (`gguf_init_from_file`, which refuses any other offset).
* A file of big-endian numbers (s390x) has the bytes of its version swapped, and all numbers, those of blocks too.
* Types (`types`): F32, F16, BF16, F64, I8 to I64, and blocks of a row: this many elements in so many bytes.
* ggml drops trailing dims of 1: a matrix of one row has two dims as llama.cpp's converter writes it, but one dim after
  its quantiser. Of the models known here that is the gate of a shared expert (`_ONE_ROW`).
* Splits: `NAME-00001-of-00003.gguf`, each with a header, tensors and `split.no`, `split.count`,
  `split.tensors.count`; the first one alone has the rest of the metadata.

In a catalog the elements of a quantised tensor are its blocks (`DType.block`): it is copied as it is, GGUF to GGUF, and
any other conversion needs `--dequantize`, which decodes it to floats (`quantised.codecs.gguf_blocks`); so do big-endian
values. Names are llama.cpp's (dialect `gguf` of the families); the model's metadata is read as its config.json
(`systems.llamacpp.config`), and written from it.

Written: version 3, alignment 32, gguf-py's own order and padding; what stays F32 is llama.cpp's rule (`fit`). Cost: the
header, some 60 ms where the vocabulary has 128,000 tokens. What it does not do: GGUF's adapters and `mmproj` files
under the hub's names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from typing import TYPE_CHECKING, Any

from ckpt_tool.core.catalog import Catalog
from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.core.faults import read_each
from ckpt_tool.core.hints import Hints, Stated
from ckpt_tool.core.missing import is_collecting
from ckpt_tool.core.tensor import LogicalTensor, TensorKey, simple_tensor
from ckpt_tool.errors import CkptError, InconsistentCheckpoint
from ckpt_tool.formats.base import AS_IS, Evidence, Fitted, Holds, ReadOptions, Specificity
from ckpt_tool.formats.hub_folder.model_files import side_files
from ckpt_tool.storage.records import plain_array
from ckpt_tool.storage.source import Tree
from ckpt_tool.systems.llamacpp.gguf.files import SPLIT_KEYS, check_split, chosen_model, models
from ckpt_tool.systems.llamacpp.gguf.header import TWICE, Header, find_padding_faults, read_header
from ckpt_tool.weight_schemes.ggml_types import KINDS

if TYPE_CHECKING:  # reading needs none of these
    from ckpt_tool.core.layout import Layout
    from ckpt_tool.core.target import LayoutWish, Target, Wanted

_ONE_ROW = re.compile(r"blk\.\d+\.ffn_gate_inp_shexp\.weight")
_PLAIN = frozenset(kind.name for kind in KINDS if kind.elements == 1)


class _Gguf:
    """The format. See the module."""

    name = "gguf"
    holds = Holds(
        all_states=False,
        extras=False,
        single=(".gguf",),
        dialect="gguf",
        dtypes=frozenset(DTYPES) - _PLAIN,
        uses_options=frozenset({"max-shard-size", "gguf-type", "gguf-only"}),
        blocks=True,
        own_header=True,
        config="",
    )

    def detect(self, tree: Tree) -> Evidence | None:
        """Claim files by their first four bytes; in a folder only those whose names end in .gguf."""
        found = models(tree)
        files = frozenset(name for model in found for name in model.files)
        return Evidence(f"{found[0].files[0]} begins as GGUF does", Specificity.OWN, files) if found else None

    def read(self, tree: Tree, options: ReadOptions = AS_IS) -> Catalog:
        """The catalog, from headers alone. Raises UnknownFormat E0393, E1704; Incomplete E1703; CorruptFile E1700;
        InconsistentCheckpoint E1701, E1702, E1705; CorruptFile E2870."""
        headers = read_each(chosen_model(tree).files, lambda path: read_header(tree, path))
        if not is_collecting():
            check_split(tree, headers)
        tensors: dict[TensorKey, LogicalTensor] = {}

        for header in headers:
            for info in header.tensors:
                key = TensorKey(info.name)
                # The quantiser drops this matrix' dim of 1, which the family's rules expect.
                shape = (1, *info.shape) if len(info.shape) == 1 and _ONE_ROW.fullmatch(info.name) else info.shape
                array = plain_array(tree, header.path, info.offset, info.dtype, shape)
                if key in tensors:
                    raise InconsistentCheckpoint(
                        f"the tensor {info.name[:200]!r} is in two files of the split",
                        code=TWICE,
                        path=tree.display(header.path),
                        key=info.name[:200],
                        hint="the files come from two splits: fetch all of one",
                    )
                tensors[key] = simple_tensor(key, array)

        return Catalog(
            self.name,
            tensors,
            files=tuple(header.path for header in headers),
            sidefiles=side_files(tree) if tree.single is None else (),
            hints=Hints.of(_merge_metadata(headers)),
        )

    def hashed(self, tree: Tree) -> frozenset[str]:
        """None: GGUF has no checksums."""
        return frozenset()

    def late_faults(self, tree: Tree) -> Iterator[CkptError]:
        """Padding that is not zeros (CorruptFile E2870). Only `ckpt verify` asks: it costs a read for each tensor."""
        for path in chosen_model(tree).files:
            yield from find_padding_faults(tree, read_header(tree, path))

    def fit(
        self, tensors: Sequence[LogicalTensor], extras: Mapping[str, Any], hints: Hints, wish: LayoutWish
    ) -> Fitted:
        """The tensors in the types that llama.cpp wants them in; see `systems.llamacpp.gguf.fit`."""
        from ckpt_tool.systems.llamacpp.gguf.fit import fit_types

        return fit_types(tensors, wish, renamed=hints.dialect == self.holds.dialect)

    def target(self, wanted: Wanted, layout: Layout) -> Target:
        """The plan of the output; see `systems.llamacpp.gguf.target`."""
        from ckpt_tool.systems.llamacpp.gguf.target import gguf_target

        return gguf_target(wanted)


FORMAT = _Gguf()


def _merge_metadata(headers: Sequence[Header]) -> Stated:
    """The metadata of all files, without that of the split. As a rule the first file has all of it."""
    values: dict[str, Any] = {}
    long: dict[str, int] = {}
    for header in headers:
        for key, entry in header.entries.items():
            if key in SPLIT_KEYS or key in values or key in long:
                continue
            if entry.value is None:
                long[key] = entry.length
            else:
                values[key] = _plain(entry.value)
    return Stated("gguf", values, long)


def _plain(value: Any) -> Any:
    """The value as JSON can hold it: infinities and NaN become text."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, float) and not isfinite(value) else value
