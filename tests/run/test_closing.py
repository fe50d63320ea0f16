"""What is read back to fill the holes of an output."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckpt_tool.errors import StorageError
from ckpt_tool.run.finish import read_chunks


def test_a_staged_file_that_was_cut_short_is_an_error_and_no_wait(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x" * 300_000)
    fd = os.open(tmp_path / "f", os.O_RDONLY)
    try:
        assert sum(map(len, read_chunks(fd, 10, 299_990))) == 299_990
        with pytest.raises(StorageError, match="100 bytes early"):
            list(read_chunks(fd, 0, 300_100))
    finally:
        os.close(fd)
