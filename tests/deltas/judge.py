"""A decoder of deltas written from the specification (slime's docs and SGLang's `local_checkpoint.py`), and a writer of
folders that a test may bend. Shares nothing with ckpt_tool: JSON, struct, xxhash, zstandard's one-shot calls."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any

import xxhash
import zstandard

INDEX = "model.safetensors.index.json"


def tensors(path: Path) -> tuple[dict[str, tuple[dict[str, Any], bytes]], dict[str, str]]:
    """(name -> (its header entry, its bytes), __metadata__) of one safetensors file."""
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    head = json.loads(raw[8 : 8 + size])
    metadata = head.pop("__metadata__", {})
    data = raw[8 + size :]
    return {name: (entry, data[slice(*entry["data_offsets"])]) for name, entry in head.items()}, metadata


def model(folder: Path) -> dict[str, bytes]:
    """name -> bytes of a whole model."""
    paths = [folder] if folder.is_file() else sorted(folder.glob("*.safetensors"))
    return {name: data for path in paths for name, (_, data) in tensors(path)[0].items()}


def digest(name: str, data: bytes) -> str:
    if name == "xxh3-128":
        return xxhash.xxh3_128(data).hexdigest()
    if name == "adler32":
        return f"{zlib.adler32(data):08x}"
    from blake3 import blake3

    return blake3(data).hexdigest()


def apply(old: dict[str, bytes], folder: Path) -> dict[str, bytes]:
    """The model after one delta. Every digest must be right."""
    metadata = json.loads((folder / INDEX).read_text())["metadata"]
    assert metadata["compression_format"] == "zstd"
    out = dict(old)
    for path in sorted(folder.glob("*.safetensors")):  # whatever the index says, as SGLang does
        entries, digests = tensors(path)
        for name, (entry, frame) in entries.items():
            assert entry["dtype"] == "U8" and entry["shape"] == [len(frame)]
            change = zstandard.ZstdDecompressor().decompress(frame)  # by the size that the frame states
            if metadata["delta_encoding"] == "xor":
                assert len(change) == len(old[name])
                new = bytes(a ^ b for a, b in zip(old[name], change, strict=True))
            else:
                (count,) = struct.unpack_from("<I", change)
                positions = struct.unpack_from(f"<{count}I", change, 4)
                values = change[4 + 4 * count :]
                assert len(values) == count and list(positions) == sorted(set(positions))
                edited = bytearray(old[name])
                for position, value in zip(positions, values, strict=True):
                    edited[position] = value
                new = bytes(edited)
            assert digest(metadata["checksum_format"], new) == digests[name], name
            out[name] = new
    return out


def safetensors(path: Path, entries: dict[str, tuple[str, list[int], bytes]], metadata: dict[str, str] | None) -> None:
    """A file of name -> (dtype, shape, bytes)."""
    head: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    at = 0
    for name, (dtype, shape, data) in entries.items():
        head[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in entries.values()))


def delta(folder: Path, frames: dict[str, bytes], digests: dict[str, str], **metadata: Any) -> Path:
    """A delta of these frames, whatever they hold. metadata: in place of what is usual; None leaves a key out."""
    folder.mkdir()
    usual = {"version": "000001", "base_version": "000000", "delta_encoding": "xor"}
    usual |= {"compression_format": "zstd", "checksum_format": "xxh3-128"} | metadata
    file = "model-00000-of-00001.safetensors"
    safetensors(folder / file, {name: ("U8", [len(data)], data) for name, data in frames.items()}, digests)
    kept = {key: value for key, value in usual.items() if value is not None}
    (folder / INDEX).write_text(json.dumps({"metadata": kept, "weight_map": dict.fromkeys(frames, file)}))
    return folder
