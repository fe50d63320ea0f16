"""`safetensors`: Hugging Face folders and single files. `format` is the specification."""

from __future__ import annotations

from ckpt_tool.formats.entry import Entry

ENTRY = Entry(
    "safetensors",
    order=10,
    en="Hugging Face: single, sharded with index, and DCP's `shard-*-model-*`",
    zh="Hugging Face：单文件、带索引的分片，以及 DCP 的 `shard-*-model-*`",
)
