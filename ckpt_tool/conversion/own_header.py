"""What a format's own files state of the model and its tokenizer, where they do (`Holds.own_header`): GGUF's metadata.

    gguf -> gguf          as the source has it, but for what it says of its split, and of the types that were asked for
    hub, ... -> gguf      the config by the family (`families.config.gguf`), the tokenizer by the files beside the model

What can't be derived is named in the report. Cost: the pairs of the source, or its config and tokenizer.
"""

from __future__ import annotations

from dataclasses import replace

from ckpt_tool.formats.gguf.files import SPLIT_KEYS, chosen_model
from ckpt_tool.formats.gguf.header import ALIGNMENT, ARRAY, name_of, raw, read_header, value_of
from ckpt_tool.formats.gguf.target import Pairs, pair
from ckpt_tool.formats.gguf.types import FILE_TYPES
from ckpt_tool.sources.chosen import Chosen, Conversion

FILE_TYPE = "general.file_type"


def with_header(chosen: Chosen, job: Conversion) -> Chosen:
    """`chosen` with the metadata that its output has. Raises UsageError, InputError as readers do."""
    if not job.fmt.holds.own_header:
        return chosen
    found = _of_source(chosen) if chosen.sources[0].catalog.format == job.fmt.name and chosen.hints is None else {}
    if found and job.writing.gguf_type:
        found[FILE_TYPE] = pair("UINT32", FILE_TYPES[job.writing.gguf_type.upper()])
    return replace(chosen, hints=chosen.all_hints.having(Pairs(found))) if found else chosen


def _of_source(chosen: Chosen) -> dict[str, bytes]:
    """The pairs of a GGUF source as they lie there, but those of its split and alignment."""
    tree = chosen.sources[0].tree
    headers = [read_header(tree, path) for path in chosen_model(tree).files]
    found = {}
    for header in headers:
        for key, entry in header.entries.items():
            if key in SPLIT_KEYS or key == ALIGNMENT:
                continue
            if not header.big:
                found[key] = raw(tree, header, key)
            elif entry.inner != ARRAY:  # nobody writes arrays in arrays
                kind = entry.inner if entry.kind == ARRAY else entry.kind
                found[key] = pair(name_of(kind), value_of(tree, header, key))
    return found
