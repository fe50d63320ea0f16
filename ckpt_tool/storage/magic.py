"""Recognises a file by its first bytes, so that a message can name what was found instead of what was expected.

    >>> what_is(b"version https://git-lfs.github.com/spec/v1\\noid sha256:")
    'a Git LFS pointer, not the file itself'

For messages only: a file is never read, or trusted, because of what is recognised here. Cost: a few comparisons.
"""

from __future__ import annotations

from ckpt_tool.storage.source import Tree

TAIL_LIMIT = 22 + 65_535  # bytes: a zip's end record and its longest comment (APPNOTE 4.3.16)
HEAD = 512  # bytes that identify every kind; 64 are enough for all but tar and some .npz archives
NPZ = "a NumPy .npz archive"
_LEGACY_TORCH = bytes.fromhex("80028a0a6cfc9c46f9206aa85019")  # torch 2.13 serialization.MAGIC_NUMBER as pickled

_LFS = b"version https://git-lfs"
LFS_LIMIT = 1024  # bytes of a pointer, at most

# (first bytes, what it is, what to do)
_STARTS: tuple[tuple[bytes, str, str], ...] = (
    (_LFS, "a Git LFS pointer, not the file itself", "run git lfs pull, or get the file again"),
    (b"PK\x03\x04", "a zip archive (a torch .pt/.bin file?)", "pass --from torch, or give the file its right name"),
    (b"PK\x05\x06", "an empty zip archive", "the file was saved empty: get it again"),
    (_LEGACY_TORCH, "a torch file of the old, pre-1.6 kind", "pass --from torch"),
    (b"\x1f\x8b", "gzip-compressed", "decompress it first (gunzip; a .nemo: tar -xzf FILE -C FOLDER)"),
    (b"\x28\xb5\x2f\xfd", "zstd-compressed", "decompress it first (unzstd)"),
    (b"BZh", "bzip2-compressed", "decompress it first (bunzip2)"),
    (b"\xfd7zXZ\x00", "xz-compressed", "decompress it first (unxz)"),
    (b"GGUF", "a GGUF file", "pass --from gguf, or give the file its right name"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file", "HDF5 is not read: save the model as safetensors"),
    (b"\x93NUMPY", "a NumPy .npy file", "save it as safetensors"),
    (b"Salted__", "encrypted with OpenSSL", "decrypt it first"),
    (b"\x7fELF", "a program, not a checkpoint", "get the file again"),
)


def is_lfs_pointer(head: bytes) -> bool:
    """Is a file that starts with `head` a Git LFS pointer, whose content was not fetched?"""
    return head.startswith(_LFS)


def what_is(head: bytes) -> str | None:
    """What a file that starts with `head` (64 bytes are enough) is; None when nothing is recognised."""
    found = _recognise(head)
    return found[0] if found else None


def advice(head: bytes) -> str | None:
    """What the user can do with a file that starts with `head`; None when nothing is recognised."""
    found = _recognise(head)
    return found[1] if found else None


def _recognise(head: bytes) -> tuple[str, str] | None:
    inner = head[30 : 30 + int.from_bytes(head[26:28], "little")] if head.startswith(b"PK\x03\x04") else b""
    if inner.endswith(b".npy"):
        return NPZ, "save its arrays as safetensors"

    if head[257:262] == b"ustar":
        return (
            "a tar archive (a NeMo .nemo, or a torch file from before 0.1.10)",
            "pass a .nemo itself; unpack any other (tar -xf FILE -C FOLDER) and pass the weights",
        )

    for start, name, remedy in _STARTS:
        if head.startswith(start):
            return name, remedy

    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")[:32].lower()
    if text.startswith((b"<!doctype html", b"<html", b"<head", b"<?xml")):
        return "an HTML or XML page", "the download gave an error page: log in or check the address, then get it again"
    if len(head) > 2 and head[0] == 0x80 and 2 <= head[1] <= 5 and head[2] in b"}]({(cX\x95\x8a\x8c":
        return "a bare pickle", "it is never executed; pass --from torch if it is a torch file"

    if len(head) > 4 and (0x81 <= head[0] <= 0x8F or head[0] in (0xDE, 0xDF)):
        if head[0] < 0xDE:  # the number of pairs is in the first byte, in two more, in four more
            key = head[1:]
        else:
            key = head[3:] if head[0] == 0xDE else head[5:]
        if key and 0xA1 <= key[0] <= 0xBF and key[1 : 1 + (key[0] & 31)].isascii():
            way = "flax.serialization.msgpack_restore reads it: save its arrays as safetensors"
            return "a MessagePack file (Flax?)", way

    if len(head) > 8 and head[0] == 8 and head[1] < 32 and head[2] == 0x12 and head[4 : 4 + min(head[3], 32)].isalnum():
        return "an ONNX model", "ONNX is an inference format that this tool does not read"
    if head[4:8] == b"TFL3":
        return "a TensorFlow Lite model", "it is an inference format that this tool does not read"
    if text.startswith(b"{"):
        return "JSON text", "the file lacks the 8 bytes before its header, or is another file"
    if len(head) >= 32 and not any(head):
        return "zeros", "the download was never filled in, or the disk lost it: get it again"
    return None


def ends_as_zip(tree: Tree, path: str, *, size: int, tail: bytes, anchored: bool) -> bool:
    """Does the file end with a zip's central directory, so that a zip reader opens it too?

    Args:
        size: of the file, bytes. tail: its last bytes, as many as were read.
        anchored: only where the directory states its place from the start of this file (a file made to be both);
            else also where a zip was merely appended.
    """
    at = tail.rfind(b"PK\x05\x06")
    # The signature may occur in the comment too: the record whose comment ends with the file counts.
    while at >= 0:
        if at + 22 <= len(tail) and at + 22 + int.from_bytes(tail[at + 20 : at + 22], "little") == len(tail):
            return _directory_fits(tree, path, size - len(tail) + at, tail[at : at + 22], anchored=anchored)
        at = tail.rfind(b"PK\x05\x06", 0, at)
    return False


def _directory_fits(tree: Tree, path: str, end_at: int, record: bytes, *, anchored: bool) -> bool:
    """Is there a central directory that agrees with the end record? record: its 22 bytes, found at byte `end_at`."""
    entries, nbytes, offset = (int.from_bytes(record[a:b], "little") for a, b in ((10, 12), (12, 16), (16, 20)))
    if 0xFFFFFFFF in (nbytes, offset) or entries == 0xFFFF:  # zip64: the locator is directly before the end record
        locator = tree.read(path, end_at - 20, 20) if end_at >= 20 else b""
        record_at = int.from_bytes(locator[8:16], "little")
        return locator[:4] == b"PK\x06\x07" and (not anchored or record_at + 56 == end_at - 20)
    start = end_at - nbytes
    if start < 0 or offset > start or (anchored and offset != start):
        return False
    return not nbytes or tree.read(path, start, min(4, nbytes)) == b"PK\x01\x02"
