"""The compiled readers of a pickle's rows and of twins, and the compiled blocks, under ASan and UBSan: clean on damaged
bytes, red where a fault is planted."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

build = pytest.importorskip("ckpt_tool.compiled.build", reason="an installed copy has no sources")
sources = pytest.importorskip("ckpt_tool.compiled.sources")

ROOT = Path(__file__).resolve().parents[2]
REPORT = 66  # the exit code of a sanitizer that found something
FLAGS = ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")

# Rows that are cut anywhere and changed anywhere: the window ends where its allocation does.
ROWS = """
import ctypes, random, sys
from ckpt_tool.compiled import rows
from ckpt_tool.compiled.rows import SYMBOL, RowStep
shelf = rows.RowsShelf()
calls = shelf.load(ctypes.CDLL(sys.argv[1]), "")
assert shelf.trial(calls) == ""
rng = random.Random(1)
row = b"h\\0)\\x81\\x94}\\x94(h\\2h\\1K\\7M\\1\\2\\x86\\x94\\x85\\x94R\\x94\\x8c\\1a\\x94\\x8a\\5\\1\\0\\0\\1\\0ub"
for case in range(600):
    reader = rows.RowReader(calls)
    keys = [reader.intern(text) for text in (SYMBOL + b"Row", SYMBOL + b"Size", b"where")]
    for index, key in enumerate(keys):
        reader.remember(index, key)
    program = [(RowStep.NAME, keys[0]), (RowStep.OPEN, 0), (RowStep.NAME, keys[2]), (RowStep.SIZE, keys[1])]
    program += [(RowStep.TEXT, 0), (RowStep.INT, 0), (RowStep.CLOSE, 0)]
    window = bytearray(row * rng.randrange(1, 40))
    for _ in range(rng.randrange(3)):
        window[rng.randrange(len(window))] = rng.choice([*b"(tKMJhjR", 0x8A, 0x8C, 0x94, 0x95, rng.randrange(256)])
    raw = bytes(window[: rng.randrange(len(window)) + 1])
    reader.take(raw, 0, len(raw), 3, 10000, program)
"""

# Items at any byte of a short file, beyond its end too.
TWINS = """
import ctypes, random, sys, tempfile
from ckpt_tool.compiled import twins
shelf = twins.TwinsShelf()
compare = shelf.load(ctypes.CDLL(sys.argv[1]), "")
assert shelf.trial(compare) == ""
rng = random.Random(1)
kind = lambda n, m: twins.TwinKind(b"h" * n, n + 5, b"e" * m, bytes(m), (0, m - 4), (m - 4, 0))
with tempfile.TemporaryFile() as file:
    file.write(b"hhhh.....eeeeeeee" * 20)
    file.flush()
    for case in range(1000):
        kinds = [kind(rng.randrange(1, 40), rng.randrange(4, 40)) for _ in range(3)]
        at = sorted(rng.randrange(400) for _ in range(9))
        compare(file.fileno(), at, [rng.randrange(3) for _ in at], kinds)
"""

# Any bytes as GGUF's blocks, and matrices of any shape turned; all end where their allocation does.
BLOCKS = """
import ctypes, random, sys
import numpy as np
from ckpt_tool.compiled import library
shelf = library.BlocksShelf()
calls = shelf.load(ctypes.CDLL(sys.argv[1]), "")
assert shelf.trial(calls) == ""
from ckpt_tool.weight_schemes.ggml_types import kind_of, of_name
rng = np.random.default_rng(1)
for name in sorted(library.FLOATS):
    kind = kind_of(of_name(name))
    for count in (1, 2, 3, 15, 16, 17, 40):
        blocks = rng.integers(0, 256, (count, kind.nbytes), np.uint8)
        values = np.empty(count * kind.elements, np.float32)
        calls.floats(blocks, name, values, "F32")
        calls.floats(blocks, name, np.empty(values.size, np.uint16), "BF16")
        if name in library.BLOCKS:
            calls.blocks((np.nan_to_num(values), "F32"), name, blocks)
for case in range(300):
    item, rows, columns = 2 ** int(rng.integers(4)), *map(int, rng.integers(2, 70, 2))
    source = rng.integers(0, 256, (rows, columns * item), np.uint8).view(f"u{item}")
    target = np.empty((columns, rows), source.dtype)
    assert calls.turned(source, target.T) and np.array_equal(target, source.T)
"""
CASES = {
    "rows": (("rows.c",), ROWS),
    "twins": (("twins.c",), TWINS),
    "blocks": (("floats.c", "blocks.c"), BLOCKS),
}
FAULTS = {
    "rows": ("if (c->size - c->at < n)", "if (c->size - c->at < n - 8)"),
    "twins": ("size += kinds[kind[i + 1]].head_size;", "size += 2 * kinds[kind[i + 1]].head_size;"),
    "blocks": ("few = blocks - at < every ? (int)(blocks - at) : every;", "few = every;"),
}


def under_sanitizers(folder: Path, name: str, old: str = "", new: str = "") -> subprocess.CompletedProcess[str]:
    """The cases over a library of the sources; in the first of them `old` is `new`."""
    if shutil.which("gcc") is None:
        pytest.skip("no gcc: no sanitizers")
    files, cases = CASES[name]
    for file in (*files, *sources.HEADERS):
        shutil.copy(sources.FOLDER / file, folder)
    text = (folder / files[0]).read_text()
    assert old in text, "plant the fault elsewhere"
    (folder / files[0]).write_text(text.replace(old, new, 1))

    # With fused multiply-adds where the machine has them: the products are among the cases.
    plain = [flag for flag in build.FLAGS if flag != "-O3"]
    command = ["gcc", *plain, *FLAGS, "-march=native", "-shared", *files, "-o", "lib.so"]
    subprocess.run(command, check=True, timeout=120, cwd=folder)
    found = subprocess.run(["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    environment = os.environ | {
        "LD_PRELOAD": found.stdout.strip(),
        "ASAN_OPTIONS": f"exitcode={REPORT}:detect_leaks=0",
        "UBSAN_OPTIONS": f"exitcode={REPORT}",
        "PYTHONMALLOC": "malloc",  # else the bytes that are read lie in an arena of Python's
        "PYTHONPATH": str(ROOT),
    }
    return subprocess.run(
        [sys.executable, "-c", cases, str(folder / "lib.so")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=250,
    )


@pytest.mark.parametrize("name", CASES)
def test_damaged_bytes_are_read_within_bounds(tmp_path: Path, name: str) -> None:
    done = under_sanitizers(tmp_path, name)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", CASES)
def test_a_planted_fault_is_seen(tmp_path: Path, name: str) -> None:
    done = under_sanitizers(tmp_path, name, *FAULTS[name])
    assert done.returncode == REPORT, done.stdout + done.stderr
