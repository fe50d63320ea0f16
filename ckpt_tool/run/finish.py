"""The end of a run: everything between the last moved value and the commit.

Record checksums of the sources are verified, side files copied, holes filled (CRCs, digests), every file fsynced.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain

from ckpt_tool.core.target import DIGEST_CHARS
from ckpt_tool.errors import CkptError, StorageError, wrap_os_error
from ckpt_tool.plan.plan import Plan
from ckpt_tool.run.blocks import BlockReader, Sources
from ckpt_tool.run.checksum import ChecksummedRange, join
from ckpt_tool.run.records import ALONE, raise_all, record_faults, within
from ckpt_tool.storage.descriptors import close_read, close_written, stat_of
from ckpt_tool.storage.output.staging import Staging


def check_records(plan: Plan, sources: Sources, pieces: Mapping[int, Sequence[ChecksummedRange]]) -> None:
    """Raise CorruptFile naming every damaged record that the plan reads, whether moved or computed from."""
    raise_all(chain(record_faults(plan.records, sources, pieces), sources.late_faults()))


def copy_sidefiles(plan: Plan, sources: Sources, staging: Staging) -> None:
    """Copy the files that the target takes over byte for byte."""
    # Reversed, so that the first source wins if two have the same path.
    numbers = {file.path: number for number, file in reversed(list(enumerate(plan.sources)))}
    for file in plan.outputs:
        if file.copy_of is None:
            continue
        reader = BlockReader(sources, 1, {})
        fd = staging.open(file.path)
        try:
            offset = 0
            for data in reader.chunks(numbers[file.copy_of], 0, file.size):
                write_all(fd, data, offset, file.path)
                offset += len(data)
        finally:
            reader.close()
            close_written(fd, staging.path / file.path)


def fill_patches(
    plan: Plan, staging: Staging, pieces: Mapping[int, Sequence[ChecksummedRange]], digests: Sequence[str] | None
) -> None:
    """Fill the holes of the outputs: CRCs of written records, digests of tensors, hashes of files. Files that contain
    hashes of other files come last.

    Args:
        pieces: output file -> the CRCs of the runs written; what is missing (a resumed run) is read back.
        digests: those of the moves, None if they were not computed: the holes are then filled with dashes.
    """
    patched = [(number, file) for number, file in enumerate(plan.outputs) if file.patches]
    for number, file in sorted(patched, key=lambda row: any(patch.kind == "sha256" for patch in row[1].patches)):
        arrays = plan.arrays[number]
        fd = staging.open(file.path)
        written = sorted(pieces.get(number, ()))
        try:
            # A zip stores a CRC twice, after the record and in the directory, so one span may fill several holes.
            spans = dict[tuple[int, int], list[int]]()  # (offset, length) -> where its CRC goes
            for patch in file.patches:
                if patch.kind == "digest":
                    text = digests[patch.of] if digests is not None else "-" * DIGEST_CHARS
                    write_all(fd, text.encode(), patch.offset, file.path)
                elif patch.kind == "sha256":
                    write_all(fd, _sha256(staging, plan.outputs[patch.of].path), patch.offset, file.path)
                else:
                    spans.setdefault(patch.span or arrays[patch.of][:2], []).append(patch.offset)
            for offsets, crc in zip(spans.values(), _checksums(fd, spans, written), strict=True):
                for offset in offsets:
                    write_all(fd, crc.to_bytes(4, "little"), offset, file.path)
        finally:
            close_written(fd, staging.path / file.path)


def _checksums(fd: int, spans: Collection[tuple[int, int]], written: Sequence[ChecksummedRange]) -> list[int]:
    """The CRC-32 of each (offset, length) of a file; on several threads if much of it has to be read back."""

    def crc(span: tuple[int, int]) -> int:
        """The CRC-32 of one (offset, length)."""
        offset = span[0]
        stop = sum(span)
        return join(offset, stop, within(written, offset, stop), partial(read_chunks, fd))

    seen = sum(piece.stop - piece.start for piece in written)
    if sum(nbytes for _, nbytes in spans) - seen < ALONE:
        return list(map(crc, spans))
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:  # strips of transposed arrays were not hashed
        return list(pool.map(crc, spans))


def _sha256(staging: Staging, path: str) -> bytes:
    """The hash of a finished output file, in hex."""
    digest = hashlib.sha256()
    fd = staging.open(path)
    try:
        for data in read_chunks(fd, 0, stat_of(fd, staging.path / path).st_size):
            digest.update(data)
    finally:
        close_read(fd)
    return digest.hexdigest().encode()


def sync_all(staging: Staging, names: Sequence[str], done: Callable[[str], None] = lambda name: None) -> None:
    """fsync every file, on a few threads, since a disk handles several flushes at once. The first failure is raised.

    done: called with the name of each file that is on disk.
    """
    left = list(names)
    failures = list[CkptError]()

    def sync_some() -> None:
        """fsync files until none is left or one thread has failed."""
        while left and not failures:
            try:
                name = left.pop()
                staging.sync(name)
                done(name)
            except IndexError:
                return
            except CkptError as e:
                failures.append(e)

    threads = [threading.Thread(target=sync_some) for _ in range(min(4, len(names)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def read_chunks(fd: int, offset: int, nbytes: int) -> Iterator[bytes]:
    """Bytes of a staged file, in pieces of at most 256 KiB. Raises StorageError E0713 where it ends before."""
    while nbytes:
        data = os.pread(fd, min(nbytes, 256 << 10), offset)
        if not data:
            raise StorageError(
                f"a staged file ends at byte {offset}, {nbytes} bytes early",
                code="E0713",
                hint="something else wrote into the staging folder: run the command again",
            )
        yield data
        offset += len(data)
        nbytes -= len(data)


def write_all(fd: int, data: bytes, offset: int, name: str) -> None:
    """pwrite until all is written. Raises StorageError naming the file and the byte."""
    view = memoryview(data)
    while view:
        try:
            n = os.pwrite(fd, view, offset)
        except OSError as e:
            raise wrap_os_error(e, name, "writing", offset=offset) from e
        view = view[n:]
        offset = offset + n
