"""GGUF, the files of llama.cpp: `format.py` is the specification."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_tool.formats.entry import Entry

if TYPE_CHECKING:
    from ckpt_tool.storage.source import Tree


def _may_be(tree: Tree) -> bool:
    return tree.single is not None or any(name.endswith(".gguf") for name in tree.names())


ENTRY = Entry(
    "gguf",
    order=140,
    called=("llama.cpp", "llamacpp", "ggml", "ollama"),
    en="llama.cpp's files, one or split, little and big-endian, every type that the `gguf` package dequantises; "
    "written as F32, F16, BF16 and what it quantises",
    zh="llama.cpp 的文件，单个或分片，大端与小端，`gguf` 包能反量化的全部类型；写为 F32、F16、BF16 以及它能量化的类型",
    may_be=_may_be,
)
