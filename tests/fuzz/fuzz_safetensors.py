"""Coverage-guided fuzzing of the safetensors header reader.

    python tests/fuzz/fuzz_safetensors.py -max_total_time=600 [CORPUS]

What must hold for any bytes: our reader raises nothing but CorruptFile; what it accepts the safetensors library
accepts, with the same names, dtypes and shapes; the quick road accepts nothing that the strict one refuses, and both
read it alike; the strict JSON parser's two roads give one verdict.
"""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["ckpt_tool"]):
    from ckpt_tool.errors import CorruptFile
    from ckpt_tool.storage.safetensors_files import safetensors_entries as entries
    from ckpt_tool.storage.safetensors_files.safetensors_file import parse_header
    from ckpt_tool.storage.texts import strict_json

import safetensors

SEEDS = (
    b"@\0\0\0\0\0\0\0" + b'{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}}'.ljust(64) + b"abc",
    b"\x68\0\0\0\0\0\0\0"
    + b'{"__metadata__":{"format":"pt"},"b":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}'.ljust(104)
    + b"wxyz",
    b"\x50\0\0\0\0\0\0\0" + b'{"\\u00e9": {"dtype": "BOOL", "shape": [0, 2], "data_offsets": [0, 0]}}'.ljust(80),
)


def verdict(road: object, raw: bytes) -> str:
    try:
        return repr(road(raw))  # type: ignore[operator]
    except CorruptFile as fault:
        return fault.code


def exact(raw: bytes) -> object:
    parser = strict_json._Exact(raw, "x", 0, "")
    value, end = parser.value(0)
    parser.expect_end(end)
    return value


def one_input(raw: bytes) -> None:
    text = raw[8 : 8 + int.from_bytes(raw[:8], "little")]
    parsed = verdict(lambda each: strict_json.parse(each, path="x"), text)
    assert parsed == verdict(exact, text)
    try:
        quick = entries.quick(text, path="x")
    except CorruptFile:
        quick = None
    if quick is not None:
        strict = entries.strict(text.rstrip(b" \t\r\n"), path="x")
        assert list(quick.names) == list(strict.names) and quick.metadata == strict.metadata
        assert (quick.kinds, quick.begins, quick.filled) == (strict.kinds, strict.begins, strict.filled)
    try:
        header = parse_header(raw, path="x", size=len(raw))
    except CorruptFile:
        return
    theirs = {name: (found["dtype"], tuple(found["shape"])) for name, found in safetensors.deserialize(raw)}
    assert {name: (k.dtype.name, k.shape) for name, k in zip(header.names, header.kinds, strict=True)} == theirs


def main() -> None:
    for seed in SEEDS:
        one_input(seed)
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
