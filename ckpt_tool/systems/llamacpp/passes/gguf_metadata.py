"""The metadata of a GGUF output: what it states about the model and its tokenizer.

    gguf -> gguf        the source's pairs, except those of its split and of the types that were asked for
    hub, ... -> gguf    the config (`systems.llamacpp.config`), and the tokenizer of the files next to the model
    gguf -> hub, ...    the tokenizer's files (`systems.llamacpp.gguf.tokenizer_files`)

What can't be derived is named in the report. Cost: the pairs of the source, or its config and tokenizer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.core.hints import Stated
from ckpt_tool.core.tensor import MODEL, TensorKey
from ckpt_tool.errors import UsageError
from ckpt_tool.sources.chosen import Chosen, Conversion, with_computed
from ckpt_tool.sources.opening import Opened
from ckpt_tool.storage.texts.strict_json import parse
from ckpt_tool.systems.llamacpp.config import ROPE_FREQS as ROPE
from ckpt_tool.systems.llamacpp.config import metadata, rope_factors
from ckpt_tool.systems.llamacpp.gguf.files import SPLIT_KEYS, chosen_model
from ckpt_tool.systems.llamacpp.gguf.header import ALIGNMENT, ARRAY, name_of, raw, read_header, value_of
from ckpt_tool.systems.llamacpp.gguf.target import Pairs, pair
from ckpt_tool.systems.llamacpp.gguf.tokenizer import TokenizerFiles, tokenizer_pairs
from ckpt_tool.systems.llamacpp.gguf.tokenizer_files import PREFIX, tokenizer_files
from ckpt_tool.systems.llamacpp.options import GgufOptions
from ckpt_tool.weight_schemes.ggml_types import FILE_TYPES

FILE_TYPE = "general.file_type"
TOKENIZER_LIMIT = 128 << 20  # bytes: the largest have 40 MB
_LAYER = re.compile(r"(?:^|\.)(?:blk|layers|h|blocks)\.(\d{1,6})\.")


def with_metadata(chosen: Chosen, job: Conversion) -> Chosen:
    """`chosen` with the metadata to write. Raises UsageError and InputError as the readers do."""
    notes: list[str] = []
    # GGUF to GGUF under its own names: pairs are copied as bytes, also those that are not known here.
    if chosen.sources[0].catalog.format == job.fmt.name and chosen.hints is None:
        found, notes = _pairs_of_source(chosen)
    elif chosen.all_hints.dialect == job.fmt.holds.dialect and chosen.config is not None:
        found, notes = _pairs_of_config(chosen.config, chosen)
        found |= {FILE_TYPE: b""}
        chosen = _add_rope(chosen, job)
    else:
        return chosen
    if FILE_TYPE in found and (job.writing.of(GgufOptions).gguf_type or not found[FILE_TYPE]):
        found[FILE_TYPE] = pair("UINT32", _file_type(chosen, job))
    return replace(chosen, hints=chosen.all_hints.having(Pairs(found))).noted(*notes) if found else chosen


def _file_type(chosen: Chosen, job: Conversion) -> int:
    """llama.cpp's label `general.file_type`: the type that most elements of the matrices have."""
    gguf_type = job.writing.of(GgufOptions).gguf_type
    if gguf_type:
        return FILE_TYPES[gguf_type.upper()]
    sizes: dict[str, int] = {}
    for row in chosen.stored:
        name = chosen.casts.get(row.tensor.key, row.tensor.dtype).name
        asked = job.writing.dtypes.get(MODEL) or job.writing.dtypes.get("")
        name = asked or name if row.tensor.key not in chosen.casts else name
        if len(row.tensor.shape) > 1:
            sizes[name] = sizes.get(name, 0) + row.tensor.numel
    return FILE_TYPES.get(max(sizes, key=lambda name: sizes[name], default=""), 0)


def _pairs_of_config(config: Mapping[str, Any], chosen: Chosen) -> tuple[dict[str, bytes], list[str]]:
    pairs, notes = metadata(config)
    more, lost = tokenizer_pairs(_tokenizer(config, chosen.sources[0]), pairs[0][2])
    fewer = _fewer_layers(chosen, {key: value for key, _, value in pairs})
    found = {key: pair(kind, _cut(key, value, fewer)) for key, kind, value in (*pairs, *more)}
    return found, [*notes, *lost, *_describe_fewer(fewer)]


def _tokenizer(config: Mapping[str, Any], opened: Opened) -> TokenizerFiles:
    """The tokenizer's files next to the model; those that are missing are None."""
    from ckpt_tool.sources.config import tree_of

    def raw(name: str) -> bytes | None:
        tree = tree_of(opened, name)
        return tree.read_whole(name, limit=TOKENIZER_LIMIT) if tree is not None and tree.single is None else None

    def read(name: str) -> Mapping[str, Any] | None:
        found = raw(name)
        value = parse(found, path=name) if found is not None else None
        return value if isinstance(value, Mapping) else None

    template = raw("chat_template.jinja")
    return TokenizerFiles(
        read("tokenizer.json"),
        read("tokenizer_config.json"),
        raw("tokenizer.model"),
        read("added_tokens.json") or {},
        template.decode("utf-8", "replace") if template is not None else None,
        config,
    )


def hub_tokenizer(opened: Opened) -> tuple[dict[str, bytes], list[str]]:
    """The tokenizer of a GGUF source as hub files: ({file name: bytes}, lines for the report)."""
    found: dict[str, Any] = {}
    for path in chosen_model(opened.tree).files:
        header = read_header(opened.tree, path)
        for key in header.entries:
            if key.startswith(PREFIX):
                found.setdefault(key, value_of(opened.tree, header, key))
    return tokenizer_files(found)


def _add_rope(chosen: Chosen, job: Conversion) -> Chosen:
    """`chosen` with the tensor `rope_freqs.weight`, from which llama.cpp reads Llama 3's rope scaling."""
    factors = rope_factors(chosen.config or {})
    if factors is None or ROPE in {row.tensor.key.name for row in chosen.stored}:
        return chosen
    from ckpt_tool.run.recipes import Constant

    recipe = Constant(TensorKey(ROPE), (len(factors),), (chosen.input(chosen.stored[0]),), f"{factors}", tuple(factors))
    shown = f"{chosen.sources[0].path} (rope)"
    note = f"{ROPE} is made of the config's rope"
    out = with_computed(chosen, [recipe], shown, job.writing, option="Llama 3's rope", dtypes={}, notes=(note,))
    return replace(out, casts={**out.casts, TensorKey(ROPE): DTYPES["F32"]})


def _pairs_of_source(chosen: Chosen) -> tuple[dict[str, bytes], list[str]]:
    """The pairs of a GGUF source as stored, without its split and alignment, adapted if layers are removed."""
    tree = chosen.sources[0].tree
    headers = [read_header(tree, path) for path in chosen_model(tree).files]
    stated = chosen.sources[0].catalog.hints.get(Stated)
    fewer = _fewer_layers(chosen, stated.values if stated is not None else {})
    found = {}
    for header in headers:
        for key, entry in header.entries.items():
            if key in SPLIT_KEYS or key == ALIGNMENT:
                continue
            long = entry.length if entry.kind == ARRAY else 0
            if not header.big and not (fewer and (key == fewer.key or fewer.of_layers(key, long))):
                found[key] = raw(tree, header, key)
            elif entry.inner != ARRAY:  # big-endian or adapted values are encoded again; no program nests arrays
                kind = entry.inner if entry.kind == ARRAY else entry.kind
                found[key] = pair(name_of(kind), _cut(key, value_of(tree, header, key), fewer))
    return found, _describe_fewer(fewer)


# -- layers that were removed ------------------------------------------------------------------------------------------


class _Fewer(NamedTuple):
    """A smaller number of layers, where `--remove-keys` leaves out the last ones."""

    key: str  # of the metadata, which counts the layers
    before: int
    after: int

    def of_layers(self, key: str, length: int) -> bool:
        """Whether a list of `length` values under `key` has one value for each layer."""
        return length == self.before and key.partition(".")[0] == self.key.partition(".")[0]


def _fewer_layers(chosen: Chosen, stated: Mapping[str, Any]) -> _Fewer | None:
    """The layers that `--remove-keys` leaves of those in the metadata, None if it removes no whole layer.

    Raises UsageError E2820 if the remaining layers are not the first ones: llama.cpp numbers them without gaps.
    """
    key = f"{stated.get('general.architecture')}.block_count"
    have = _layers(row.tensor.key.name for row in chosen.stored)
    gone = _layers(tensor.key.name for tensor in chosen.removed) - have
    before = stated.get(key)
    if not gone or type(before) is not int:
        return None
    if have != set(range(len(have))) or len(have) + len(gone) != before:
        shown = ", ".join(map(str, sorted(gone)[:8]))
        raise UsageError(
            f"layers {shown} of {before} would be gone, and llama.cpp numbers layers from 0 without gaps",
            code="E2820",
            hint="remove the last layers only; slices of a merge's config (ckpt help merging) renumber what stays",
        )
    return _Fewer(key, before, len(have))


def _layers(names: Iterable[str]) -> set[int]:
    return {int(match[1]) for match in map(_LAYER.search, names) if match}


def _cut(key: str, value: Any, fewer: _Fewer | None) -> Any:
    """A metadata value, cut to the layers that remain if it has one entry for each layer."""
    if fewer is None:
        return value
    if key == fewer.key:
        return fewer.after
    return value[: fewer.after] if isinstance(value, list | tuple) and fewer.of_layers(key, len(value)) else value


def _describe_fewer(fewer: _Fewer | None) -> list[str]:
    return [f"{fewer.key} is {fewer.after}, not {fewer.before}: the last layers are removed"] if fewer else []
