"""llama.cpp: GGUF files, their names, metadata and block types."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_tool.formats.entry import Dialect, Entry, System, SystemPass

if TYPE_CHECKING:
    from ckpt_tool.sources.chosen import Chosen, Conversion
    from ckpt_tool.storage.source import Tree


def _may_be_gguf(tree: Tree) -> bool:
    return tree.single is not None or any(name.endswith(".gguf") for name in tree.names())


def _writes_types(chosen: Chosen, job: Conversion) -> bool:
    """--gguf-type"""
    from ckpt_tool.systems.llamacpp.options import GgufOptions

    return job.writing.of(GgufOptions).gguf_type is not None


def _states_model(chosen: Chosen, job: Conversion) -> bool:
    """A format whose files state the model in words of their own."""
    return job.fmt.holds.own_header


SYSTEM = System(
    formats=(
        Entry(
            "gguf",
            "gguf",
            order=140,
            called=("llama.cpp", "llamacpp", "ggml", "ollama"),
            en="llama.cpp's files, one or split, little and big-endian, every type that the `gguf` package dequantises; "
            "written as F32, F16, BF16 and what it quantises",
            zh="llama.cpp 的文件，单个或分片，大端与小端，`gguf` 包能反量化的全部类型；写为 F32、F16、BF16 以及它能量化的类型",
            may_be=_may_be_gguf,
        ),
    ),
    dialects=(Dialect("gguf", order=50),),
    passes=(
        SystemPass(
            "blocks",
            "--gguf-type: values as blocks of a quantised type",
            _writes_types,
            "passes.blocks:as_blocks",
            "after fitting",
        ),
        SystemPass(
            "header",
            "what the files state of the model in their own words (GGUF's metadata)",
            _states_model,
            "passes.gguf_metadata:with_metadata",
            "last",
        ),
    ),
    options="GgufOptions",
    config_reader="source_config:read_metadata",
    tokenizer="passes.gguf_metadata:hub_tokenizer",
)
