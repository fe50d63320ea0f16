"""The compiled blocks (`blocks.c`): built once on a machine that has a C compiler, never needed.

    library = ready(nbytes)                # before a block of `nbytes` of work; None: go the NumPy road
    if library is None or not library.linear(inputs, weights, 1.0, out):
        ...                                # NumPy, the same bits

Who asks says how much work there is. Once a process has been asked for WORTH bytes, a thread compiles the source (5 s
of one core) while the others go on with NumPy; what it made lies in the cache of kernels (`cache.py`) and is there from
the first block in every later run. The key is the source, the flags and the processor's features, so that machines
which share a home each have their own. A library is believed only after a trial against NumPy (`_trial`). Whatever goes
wrong (no compiler, a folder mounted noexec, a trial that fails) means NumPy and a line with -v (`compiled.notes`), no
failure.

CKPT_COMPILED=off: NumPy alone. CKPT_COMPILED=on: compile at the first call and wait for it (benchmarks, tests).

Calls hold no lock of Python's. Cost of a call: 5 us.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import threading
from collections.abc import Sequence
from ctypes import c_double, c_float, c_int, c_int64, c_void_p
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from ckpt_tool import compiled
from ckpt_tool.compiled import cache
from ckpt_tool.errors import CkptError

Array = np.ndarray[Any, np.dtype[Any]]
T = TypeVar("T")

SOURCE = Path(__file__).with_name("blocks.c")
# No fast-math, no contraction: the bits are stated in the source.
FLAGS = (
    *("-std=gnu11", "-O3", "-march=native", "-shared", "-fPIC", "-fvisibility=hidden"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)
WORTH = 256 << 20  # bytes of work
_KINDS = {"F32": 0, "BF16": 1}
KINDS = frozenset(_KINDS)  # dtypes that the calls know
_CODES = {"F8_E4M3": 0, "I8": 1, "I32": 2, "U8": 3}  # by the dtype that holds them: the last two of four bits
_GGUF = "Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 MXFP4 TQ2_0 IQ4_NL IQ4_XS Q2_K Q3_K Q4_K Q5_K Q6_K".split()  # as blocks.c counts them
BLOCKS = frozenset(_GGUF[:6])  # types of GGUF that `blocks` makes
FLOATS = frozenset(_GGUF)  # and whose floats `floats` makes
_SECONDS = 120
_SLABS = 64  # of a turn with more than two dims at most: more are NumPy's


class Term(NamedTuple):
    """A product that is added: scaling * (left @ right). left: (rows, rank), fp32. right: of `Library.panels`."""

    left: Array
    right: Array
    scaling: float


class _Term(ctypes.Structure):
    _fields_ = [
        ("left", c_void_p),
        ("right", c_void_p),
        ("rank", c_int64),
        ("scaling", c_float),
    ]


class Library:
    """The calls. Arrays are C-contiguous unless said otherwise; dtypes go by name, as in `core.dtype`."""

    def __init__(self, path: Path) -> None:
        """Raises OSError where the loader refuses."""
        self._c = ctypes.CDLL(str(path))
        self._c.ck_linear.argtypes = [
            *(c_int, c_void_p, c_void_p, c_void_p, c_float),
            *(c_int64, c_void_p, c_int),
        ]
        self._c.ck_folded.argtypes = [c_void_p, c_int, c_void_p, c_int, *[c_int64] * 3, c_int, c_void_p]
        self._c.ck_largest.argtypes = [c_void_p, c_int, *[c_int64] * 4, c_void_p]
        self._c.ck_codes.argtypes = [c_void_p, c_int, *[c_int64] * 4, c_void_p, c_int64, c_int, c_void_p, c_void_p]
        self._c.ck_gguf.argtypes = [c_void_p, c_int, c_int64, c_int, c_void_p]
        self._c.ck_floats.argtypes = [c_void_p, c_int, c_int64, c_void_p, c_int]
        self._c.ck_turn.argtypes = [c_int, c_void_p, c_int64, c_void_p, *[c_int64] * 3]
        self.pair = int(self._c.ck_pair())  # columns of a product that are made at a time, 0: none

    def linear(
        self, inputs: Sequence[tuple[Array, str]], weights: Sequence[float], total: float, out: Array, dtype: str
    ) -> bool:
        """out = sum_i weights[i] * inputs[i] / total, as `merging.averages.Linear` has it. inputs: (1-d, dtype).

        False, and `out` is void, where a dtype is not known here, or a value is not finite or becomes so.
        """
        kinds = [_KINDS.get(kind, -1) for _, kind in inputs]
        if min(kinds) < 0 or dtype not in _KINDS:
            return False
        count = len(inputs)
        addresses = (c_void_p * count)(*(values.ctypes.data for values, _ in inputs))
        return not self._c.ck_linear(
            count,
            addresses,
            (c_int * count)(*kinds),
            (c_double * count)(*weights),
            total,
            len(out),
            out.ctypes.data,
            _KINDS[dtype],
        )

    def panels(self, right: Array) -> Array:
        """(rank, columns) as `folded` takes it: panels of a few columns, (panels, rank, columns of a panel), fp32, the
        last one padded by zeros."""
        rank, columns = right.shape
        count = -(-columns // self.pair)
        wide = np.zeros((rank, count * self.pair), np.float32)
        wide[:, :columns] = right
        return np.ascontiguousarray(wide.reshape(rank, count, self.pair).transpose(1, 0, 2))

    def folded(
        self,
        base: tuple[Array, str],
        out: tuple[Array, str],
        where: tuple[int, int, int],
        terms: Sequence[Term],
    ) -> bool:
        """out = base + each term in turn, as `adapters.arithmetic.Folded` has it. where: elements [start, stop) of a
        matrix of `width` columns; base and out hold those.

        False, and `out` is void, where a dtype is not known here, or a value is not finite or becomes so.
        """
        if base[1] not in _KINDS or out[1] not in _KINDS or not self.pair:
            return False
        rows = (_Term * len(terms))(
            *(_Term(t.left.ctypes.data, t.right.ctypes.data, t.left.shape[1], t.scaling) for t in terms)
        )
        return not self._c.ck_folded(
            base[0].ctypes.data, _KINDS[base[1]], out[0].ctypes.data, _KINDS[out[1]], *where, len(terms), rows
        )

    def largest(self, values: tuple[Array, str], columns: int, width: int, out: Array) -> bool:
        """out[r, b] = max(out[r, b], the largest magnitude of block b of row r), blocks of `width` columns; an `out` of
        one row is all rows'. values: (1-d, dtype), whole rows. out: (rows, blocks), fp32. What is no finite number
        stays none. False where the dtype is not known here."""
        line, dtype = values
        if dtype not in _KINDS:
            return False
        rows, pitch = len(line) // columns, out.shape[1] if len(out) > 1 else 0
        self._c.ck_largest(line.ctypes.data, _KINDS[dtype], rows, columns, width, pitch, out.ctypes.data)
        return True

    def codes(
        self, values: tuple[Array, str], where: tuple[int, int, int], divisors: Array, to: str, out: Array
    ) -> tuple[float, float, float] | None:
        """out = nearest code(values / divisors), as `quantised.nearest` has it; (the largest distance of what is made
        of the codes, the sums of squares of the distances and of the values). where: (columns, columns of the first
        block that lie before them, columns of a block). divisors: (rows, blocks) or one row for all, fp32. out: 1-d,
        bytes. None where a dtype is not known here."""
        line, dtype = values
        if dtype not in _KINDS or to not in _CODES:
            return None
        error = (c_double * 3)()
        rows, pitch = len(line) // where[0], divisors.shape[1] if len(divisors) > 1 else 0
        self._c.ck_codes(
            *(line.ctypes.data, _KINDS[dtype], rows, *where, divisors.ctypes.data, pitch),
            *(_CODES[to], out.ctypes.data, error),
        )
        return error[0], error[1], error[2]

    def blocks(self, values: tuple[Array, str], to: str, out: Array) -> bool:
        """out = the blocks of GGUF's type `to` that gguf's `quantize` makes of values. out: (blocks, bytes of one).

        False, and `out` is void, where a type is not known here, or gguf's steps leave fp32 for a block (infinite
        scales, values that are no numbers)."""
        line, dtype = values
        if dtype not in _KINDS or to not in BLOCKS:
            return False
        return not self._c.ck_gguf(line.ctypes.data, _KINDS[dtype], len(out), _GGUF.index(to), out.ctypes.data)

    def floats(self, blocks: Array, of: str, out: Array, dtype: str) -> bool:
        """out = what gguf's `dequantize` makes of blocks of GGUF's type `of`, rounded to dtype. blocks: (count, bytes
        of one), little-endian. out: 1-d.

        False, and `out` is void, where a type is not known here, or a scale or a value is not finite or becomes so."""
        if dtype not in _KINDS or of not in FLOATS:
            return False
        at = blocks.ctypes.data, _GGUF.index(of), len(blocks)
        return not self._c.ck_floats(*at, out.ctypes.data, _KINDS[dtype])

    def turned(self, source: Array, target: Array) -> bool:
        """target[...] = source, two views of one shape whose items lie side by side along one axis each, not the same.

        False, with nothing written, where they are no such views."""
        item, shape = source.itemsize, source.shape
        along = [d for d in range(len(shape)) if shape[d] > 1 and source.strides[d] == item]
        across = [d for d in range(len(shape)) if shape[d] > 1 and target.strides[d] == item]
        if len(along) != 1 or len(across) != 1 or along == across or item > 8:
            return False
        columns, rows = along[0], across[0]
        others = [d for d in range(len(shape)) if d not in (rows, columns)]
        slabs = [1 if d in (rows, columns) else n for d, n in enumerate(shape)]
        if functools.reduce(lambda a, b: a * b, slabs, 1) > _SLABS:
            return False
        read, write = source.ctypes.data, target.ctypes.data
        for index in np.ndindex(*slabs):
            shift = sum(index[d] * source.strides[d] for d in others)
            to = sum(index[d] * target.strides[d] for d in others)
            self._c.ck_turn(
                *(item, read + shift, source.strides[rows], write + to, target.strides[columns]),
                *(shape[rows], shape[columns]),
            )
        return True


# -- one for a process -------------------------------------------------------------------------------------------------


class Shelf(Generic[T]):
    """The process's library of one source, and how it came to it."""

    source: Path
    worth: int  # bytes of work from which a compilation pays for itself within the run

    def __init__(self) -> None:
        self.library: T | None = None
        self._asked = 0
        self._looked = self._building = False
        self._lock = threading.Lock()

    def load(self, path: Path) -> T:
        """The calls. Raises OSError where the loader refuses."""
        raise NotImplementedError

    def trial(self, library: T) -> str:
        """What it makes otherwise than the road beside it, in words, "" for nothing."""
        raise NotImplementedError

    def ready(self, nbytes: int, *, wait: bool = False) -> T | None:
        """The library, None while there is none. nbytes: of work that the caller is about to do. wait: until it is
        compiled, where that pays."""
        if self.library is not None or self._building:
            return self.library
        with self._lock:
            if not self._looked:
                self._looked, self._choice = True, os.environ.get(compiled.VARIABLE, "")
                if self._choice != "off":
                    self._look()
            self._asked += nbytes
            due = self._choice == "on" or self._asked >= self.worth and self._choice != "off"
            if self.library is not None or self._building or not due:
                return self.library
            self._building = True
            # a run that ends first waits for it: not a daemon, as the threads that ask are
            worker = threading.Thread(target=self._build, name="ckpt-compile", daemon=False)
            worker.start()
        if wait or self._choice == "on":
            worker.join()
        return self.library

    def _look(self) -> None:
        try:
            kept = cache.look_up(cache.folder(), key(self.source.read_bytes()))
            if kept is not None:
                self._load(kept)
        except (CkptError, OSError, cache.Refused) as e:
            self._refuse(str(e))

    def _build(self) -> None:
        try:
            self._load(built(self.source))
        except (CkptError, OSError, subprocess.SubprocessError, cache.Refused) as e:
            self._refuse(str(e))

    def _load(self, kept: cache.Kept) -> None:
        try:
            library = self.load(kept.through())
            wrong = self.trial(library)
        except AttributeError as e:  # a function that this version calls is not there
            raise cache.Refused(f"{kept.path} is not the library of this version: {e}") from e
        if wrong:
            self._building = True  # and not built again
            self._refuse(f"on this machine {wrong}")
        else:
            self.library = library

    def _refuse(self, why: str) -> None:
        compiled.notes[:] = [f"compiled blocks are not used: {why}"]


class _Shelf(Shelf[Library]):
    source, worth = SOURCE, WORTH

    def load(self, path: Path) -> Library:
        return Library(path)

    def trial(self, library: Library) -> str:
        wrong = _trial(library)
        return f"{wrong} differ from NumPy's" if wrong else ""


_shelf = _Shelf()


def ready(nbytes: int) -> Library | None:
    """The library, None while there is none. nbytes: of work that the caller is about to do."""
    return _shelf.ready(nbytes)


# -- building ----------------------------------------------------------------------------------------------------------


def key(source: bytes) -> str:
    """What decides the result: the source, the flags, the processor's features."""
    found = hashlib.sha256("\0".join((*FLAGS, platform.machine(), _features())).encode())
    found.update(source)
    return found.hexdigest()


def _features() -> str:
    """What -march=native goes by: model and flags of the first processor, "" where the kernel does not say."""
    try:
        with open("/proc/cpuinfo", "rb") as file:
            text = file.read(16 << 10).decode("utf-8", "replace").split("\n\n")[0]
    except OSError:
        return ""
    names = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU implementer", "CPU part")
    return "\n".join(line for line in text.splitlines() if line.split(":")[0].strip() in names)


def built(path: Path = SOURCE) -> cache.Kept:
    """The library of a source, compiled into the cache unless it is there. Raises CkptError, OSError,
    SubprocessError."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC") or "cc", "gcc", "clang"))), None)
    if compiler is None:
        raise FileNotFoundError("no C compiler on the PATH")
    source = path.read_bytes()  # once: an upgrade may replace it meanwhile
    (place, _), name = cache.place_to_build(), key(source)
    with cache.lock(place, name, _SECONDS):
        try:
            found = cache.look_up(place, name)
        except cache.Refused:
            found = None
        about = {
            "kind": "cpu",
            "architectures": [],
            "sources": hashlib.sha256(source).hexdigest(),
            "compiler": [compiler],
            "flags": list(FLAGS),
        }
        return found or cache.keep(place, name, about, functools.partial(_compile, compiler, source))


def _compile(compiler: str, source: bytes, target: Path) -> None:
    done = subprocess.run(
        [compiler, *FLAGS, "-x", "c", "-", "-o", str(target)],
        input=source.decode(),
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_SECONDS,
        env={**os.environ, "LC_ALL": "C"},
    )
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise OSError(f"{compiler} failed: {said[0] if said else f'exit code {done.returncode}'}")


# -- the trial ---------------------------------------------------------------------------------------------------------


def _trial(library: Library) -> str:
    """What differs from NumPy on this machine, "" for nothing. Some 10 ms."""
    rng = np.random.default_rng(1)
    for item in (1, 2, 4, 8):
        source = rng.integers(0, 256, (37, 41 * item), np.uint8).view(f"u{item}")
        target = np.zeros((41, 37), source.dtype)
        if not library.turned(source, target.T) or not np.array_equal(source.T, target):
            return "transposes"
    x, y = rng.standard_normal((2, 1000)).astype(np.float32)
    sums = (x * np.float32(0.3)).astype(np.float64) + y.astype(np.float64) * np.float64(np.float32(0.9))
    want, found = sums.astype(np.float32) / np.float32(1.2), np.empty(1000, np.float32)
    pair = [float(np.float32(0.3)), float(np.float32(0.9))]
    if not library.linear([(x, "F32"), (y, "F32")], pair, 1.2, found, "F32") or not np.array_equal(found, want):
        return "sums"
    bits = rng.integers(0, 0x7F7F0000, 1000, np.uint32) & np.uint32(0xFFFF8000)  # half of them ties
    half, made = (bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype(np.uint16), np.empty(1000, np.uint16)
    if not library.linear([(bits.view(np.float32), "F32")], [1.0], 1.0, made, "BF16") or not np.array_equal(made, half):
        return "sums in bf16"
    return _products(library, rng) or _codes(library)


def _codes(library: Library) -> str:
    """Codes: every value of F8_E4M3, and the middle between it and the next, which goes to the even one; GGUF's."""
    code = np.arange(127)
    exact = np.ldexp((code % 8 + np.where(code < 8, 0, 8)) / 8.0, np.maximum(code >> 3, 1) - 7)
    middle = (exact[:-1] + exact[1:]) / 2
    values = np.concatenate((exact, middle, -exact)).astype(np.float32) * np.float32(3)
    want = np.concatenate((code, code[:-1] + code[:-1] % 2, code + 128)).astype(np.uint8)
    out, sizes = np.empty(len(values), np.uint8), np.zeros((1, 1), np.float32)
    three = np.full((1, 1), 3, np.float32)
    library.largest((values, "F32"), len(values), len(values), sizes)
    library.codes((values, "F32"), (len(values), 0, len(values)), three, "F8_E4M3", out)
    if not np.array_equal(out, want) or sizes[0, 0] != 1344:
        return "codes"
    steps = np.concatenate(([-8.0], np.arange(31) % 16 - 8)).astype(np.float32)  # a scale of 1
    four, eight, back = np.empty((1, 18), np.uint8), np.empty((1, 34), np.uint8), np.empty(32, np.float32)
    library.blocks((steps, "F32"), "Q4_0", four)
    library.blocks((np.append(steps[1:] + np.float32(0.5), np.float32(127)), "F32"), "Q8_0", eight)  # away from zero
    low, away = steps.astype(np.int8) + 8, np.append(steps[1:] + (steps[1:] >= 0), 127).astype(np.int8)
    one = np.float16(1).tobytes()
    want_blocks = one + (low[:16] | low[16:] << 4).astype(np.uint8).tobytes() + one + away.tobytes()
    known = library.floats(four, "Q4_0", back, "F32") and np.array_equal(back, steps)
    return "" if known and four.tobytes() + eight.tobytes() == want_blocks else "blocks of GGUF"


def _products(library: Library, rng: np.random.Generator) -> str:
    """The products: integers that fp32 holds to the last bit, and sums that only a fused step gives."""
    if not library.pair:
        return ""
    rank, width = 19, 64
    left = rng.integers(-99, 99, (5, rank)).astype(np.float32)
    right = rng.integers(-99, 99, (rank, width)).astype(np.float32)
    base, out = np.zeros(5 * width, np.float32), np.empty(5 * width, np.float32)
    if not library.folded((base, "F32"), (out, "F32"), (0, 5 * width, width), [Term(left, library.panels(right), 2.0)]):
        return "products"
    if not np.array_equal(out.reshape(5, width), 2 * (left @ right)):
        return "products"
    tiny = np.float32(2) ** -12  # (1 + tiny)^2 - (1 + 2 tiny) = tiny^2 with one rounding, 0 with two
    left = np.array([[1 + 2 * tiny, 1 + tiny]], np.float32)
    right = np.stack((np.full(width, -1, np.float32), np.full(width, 1 + tiny, np.float32)))
    terms = [Term(left, library.panels(right), 1.0)]
    if not library.folded((base[:width], "F32"), (out[:width], "F32"), (0, width, width), terms):
        return "products"
    return "" if np.array_equal(out[:width], np.full(width, tiny * tiny)) else "products"
