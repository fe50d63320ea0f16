"""The compiled blocks (`blocks.c`, `floats.c`): work on arrays in one pass where NumPy takes several.

    library = ready(nbytes)                # before a block of `nbytes` of work; None: use NumPy
    if library is None or not library.linear(inputs, weights, 1.0, out):
        ...                                # NumPy, the same bits

The library comes with the package (`loading.py`); a run never compiles anything. The caller says how much work it has:
from LEAST bytes on the library is loaded, and it is used only after a trial against NumPy (`_trial`). If anything goes
wrong (a library that is missing or can't be loaded, a trial that fails), NumPy is used and -v shows a note
(`compiled.notes`). That is an error only if CKPT_COMPILED names a path.

Calls release the GIL. Cost of a call: 5 us; of the trial: 10 ms.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Sequence
from ctypes import c_double, c_float, c_int, c_int64, c_void_p
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from ckpt_tool import compiled
from ckpt_tool.compiled import loading
from ckpt_tool.core.integers import ceil_div
from ckpt_tool.errors import UsageError

Array = np.ndarray[Any, np.dtype[Any]]
T = TypeVar("T")

LEAST = 4 << 20  # bytes of work: less is done before a library is loaded and tried
_KINDS = {"F32": 0, "BF16": 1}
KINDS = frozenset(_KINDS)  # dtypes that the calls know
_CODES = {"F8_E4M3": 0, "I8": 1, "I32": 2, "U8": 3}  # by the dtype that holds them: the last two of four bits
GGUF = "Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 MXFP4 TQ2_0 IQ4_NL IQ4_XS Q2_K Q3_K Q4_K Q5_K Q6_K".split()  # in the order of arrays.h
BLOCKS = frozenset(GGUF[:6])  # types of GGUF that `blocks` makes
FLOATS = frozenset(GGUF)  # and whose floats `floats` makes
_SLABS = 64  # of a turn with more than two dims at most: more are NumPy's


class CTerm(NamedTuple):
    """A product that is added: scaling * (left @ right)."""

    left: Array  # (rows, rank), fp32
    right: Array  # of `CompiledLibrary.panels`
    scaling: float


class _Term(ctypes.Structure):
    _fields_ = [
        ("left", c_void_p),
        ("right", c_void_p),
        ("rank", c_int64),
        ("scaling", c_float),
    ]


class CompiledLibrary:
    """The calls. Arrays are C-contiguous unless said otherwise; dtypes go by name, as in `core.dtype`."""

    def __init__(self, library: ctypes.CDLL, path: str = "") -> None:
        """path: one of `loading.PATHS`; "" for a library whose functions have plain names (arrays.h). Raises
        AttributeError where a function is not there."""

        def function(name: str, *arguments: Any) -> Any:
            found = library[f"{name}_{path}" if path else name]
            found.argtypes = arguments
            return found

        self._linear = function("ck_linear", c_int, c_void_p, c_void_p, c_void_p, c_float, c_int64, c_void_p, c_int)
        self._folded = function("ck_folded", c_void_p, c_int, c_void_p, c_int, *[c_int64] * 3, c_int, c_void_p)
        self._largest = function("ck_largest", c_void_p, c_int, *[c_int64] * 4, c_void_p)
        self._codes = function(
            "ck_codes", c_void_p, c_int, *[c_int64] * 4, c_void_p, c_int64, c_int, c_void_p, c_void_p
        )
        self._gguf = function("ck_gguf", c_void_p, c_int, c_int64, c_int, c_void_p)
        self._floats = function("ck_floats", c_void_p, c_int, c_int64, c_void_p, c_int)
        self._turn = function("ck_turn", c_int, c_void_p, c_int64, c_void_p, *[c_int64] * 3)
        self.pair = int(function("ck_pair")())  # columns of a product that are made at a time, 0: none

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
        return not self._linear(
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
        """A matrix (rank, columns) in the form that `folded` needs: panels of a few columns, (panels, rank, columns of
        a panel), fp32, the last one padded with zeros."""
        rank, columns = right.shape
        count = ceil_div(columns, self.pair)
        wide = np.zeros((rank, count * self.pair), np.float32)
        wide[:, :columns] = right
        return np.ascontiguousarray(wide.reshape(rank, count, self.pair).transpose(1, 0, 2))

    def folded(
        self,
        base: tuple[Array, str],
        out: tuple[Array, str],
        where: tuple[int, int, int],
        terms: Sequence[CTerm],
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
        return not self._folded(
            base[0].ctypes.data, _KINDS[base[1]], out[0].ctypes.data, _KINDS[out[1]], *where, len(terms), rows
        )

    def largest(self, values: tuple[Array, str], columns: int, width: int, out: Array) -> bool:
        """out[r, b] = max(out[r, b], the largest magnitude in block b of row r), for blocks of `width` columns.

        values: (1-d, dtype), complete rows. out: (rows, blocks), fp32; an `out` of one row is for all rows together.
        NaN and infinities stay such. False if the dtype is not supported.
        """
        line, dtype = values
        if dtype not in _KINDS:
            return False
        rows = len(line) // columns
        pitch = out.shape[1] if len(out) > 1 else 0
        self._largest(line.ctypes.data, _KINDS[dtype], rows, columns, width, pitch, out.ctypes.data)
        return True

    def codes(
        self, values: tuple[Array, str], where: tuple[int, int, int], divisors: Array, to: str, out: Array
    ) -> tuple[float, float, float] | None:
        """out = nearest code(values / divisors), by the rules of `quantised.nearest_codes`.

        Args:
            where: (columns, columns of the first block to the left of them, columns of a block).
            divisors: (rows, blocks) or one row for all, fp32.
            out: 1-d, bytes.

        Returns: (the largest distance between values and decoded codes, the sum of the squared distances, the sum of
            the squared values); None if a dtype is not supported.
        """
        line, dtype = values
        if dtype not in _KINDS or to not in _CODES:
            return None
        error = (c_double * 3)()
        rows = len(line) // where[0]
        pitch = divisors.shape[1] if len(divisors) > 1 else 0
        self._codes(
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
        return not self._gguf(line.ctypes.data, _KINDS[dtype], len(out), GGUF.index(to), out.ctypes.data)

    def floats(self, blocks: Array, of: str, out: Array, dtype: str) -> bool:
        """out = what gguf's `dequantize` makes of blocks of GGUF's type `of`, rounded to dtype. blocks: (count, bytes
        of one), little-endian. out: 1-d.

        False, and `out` is void, where a type is not known here, or a scale or a value is not finite or becomes so."""
        if dtype not in _KINDS or of not in FLOATS:
            return False
        at = blocks.ctypes.data, GGUF.index(of), len(blocks)
        return not self._floats(*at, out.ctypes.data, _KINDS[dtype])

    def turned(self, source: Array, target: Array) -> bool:
        """target[...] = source, for two views of one shape whose items are contiguous along different axes.

        False, with nothing written, for other views."""
        item = source.itemsize
        shape = source.shape
        along = [d for d in range(len(shape)) if shape[d] > 1 and source.strides[d] == item]
        across = [d for d in range(len(shape)) if shape[d] > 1 and target.strides[d] == item]
        if len(along) != 1 or len(across) != 1 or along == across or item > 8:
            return False
        columns = along[0]
        rows = across[0]
        others = [d for d in range(len(shape)) if d not in (rows, columns)]
        slabs = [1 if d in (rows, columns) else n for d, n in enumerate(shape)]
        if functools.reduce(lambda a, b: a * b, slabs, 1) > _SLABS:
            return False
        read = source.ctypes.data
        write = target.ctypes.data
        for index in np.ndindex(*slabs):
            shift = sum(index[d] * source.strides[d] for d in others)
            to = sum(index[d] * target.strides[d] for d in others)
            self._turn(
                *(item, read + shift, source.strides[rows], write + to, target.strides[columns]),
                *(shape[rows], shape[columns]),
            )
        return True


# -- one for a process -------------------------------------------------------------------------------------------------


class Shelf(Generic[T]):
    """The process's functions of one source, tried before they are used."""

    least = 0  # how much work there must be before the library is loaded

    def __init__(self) -> None:
        self.library: T | None = None
        self._asked = 0
        self._is_decided = False
        self._lock = threading.Lock()

    def load(self, library: ctypes.CDLL, path: str) -> T:
        """The functions of a path. Raises AttributeError if one is missing."""
        raise NotImplementedError

    def trial(self, functions: T) -> str:
        """The difference between their results and those of the fallback, in words; "" if there is none."""
        raise NotImplementedError

    def ready(self, size: int) -> T | None:
        """The functions, None while there are none. size: of the work that the caller is about to do.

        Raises UsageError E3040, E3041 where CKPT_COMPILED names what can't be had."""
        if self._is_decided:
            return self.library
        with self._lock:
            self._asked += size
            if not self._is_decided and compiled.worth_a_look(self._asked, self.least):
                self.decide(loading.chosen())
        return self.library

    def decide(self, choice: loading.Choice) -> None:
        """Use the functions of a choice from now on, or do without. Raises UsageError E3041 where the user wants them
        and they can't be used."""
        refusal = self.find_refusal(choice)
        if refusal and compiled.is_forced():
            raise UsageError(
                f"{compiled.VARIABLE}={choice.path} can't be used: {refusal}",
                code="E3041",
                place=compiled.VARIABLE,
                hint="leave it unset: NumPy does the same work",
            )
        if refusal:
            compiled.notes[:] = [f"compiled loops are not used: {refusal}"]
        self._is_decided = True

    def find_refusal(self, choice: loading.Choice) -> str:
        """Load and try the functions of a choice, and return why they can't be used, "" if they can."""
        if choice.library is None:
            return choice.reason
        try:
            functions = self.load(choice.library, choice.path)
            wrong = self.trial(functions)
        except AttributeError as e:
            return f"the library is not that of this version: {e}"
        if wrong:
            return f"on this machine {wrong}"
        self.library = functions
        return ""


class BlocksShelf(Shelf[CompiledLibrary]):
    """The functions of blocks.c and floats.c."""

    least = LEAST

    def load(self, library: ctypes.CDLL, path: str) -> CompiledLibrary:
        """The functions of a loaded library, in the variant for this processor."""
        return CompiledLibrary(library, path)

    def trial(self, functions: CompiledLibrary) -> str:
        """The functions that differ from NumPy's in a trial run, in words; "" if none do."""
        wrong = _trial(functions)
        return f"{wrong} differ from NumPy's" if wrong else ""


_shelf = BlocksShelf()


def ready(nbytes: int) -> CompiledLibrary | None:
    """The library, None while there is none. nbytes: of work that the caller is about to do."""
    return _shelf.ready(nbytes)


# -- the trial ---------------------------------------------------------------------------------------------------------


def _trial(library: CompiledLibrary) -> str:
    """What differs from NumPy on this machine, "" for nothing. Some 10 ms."""
    rng = np.random.default_rng(1)
    for item in (1, 2, 4, 8):
        source = rng.integers(0, 256, (37, 41 * item), np.uint8).view(f"u{item}")
        target = np.zeros((41, 37), source.dtype)
        if not library.turned(source, target.T) or not np.array_equal(source.T, target):
            return "transposes"
    x, y = rng.standard_normal((2, 1000)).astype(np.float32)
    sums = (x * np.float32(0.3)).astype(np.float64) + y.astype(np.float64) * np.float64(np.float32(0.9))
    want = sums.astype(np.float32) / np.float32(1.2)
    found = np.empty(1000, np.float32)
    pair = [float(np.float32(0.3)), float(np.float32(0.9))]
    if not library.linear([(x, "F32"), (y, "F32")], pair, 1.2, found, "F32") or not np.array_equal(found, want):
        return "sums"
    bits = rng.integers(0, 0x7F7F0000, 1000, np.uint32) & np.uint32(0xFFFF8000)  # half of them ties
    half = (bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype(np.uint16)
    made = np.empty(1000, np.uint16)
    if not library.linear([(bits.view(np.float32), "F32")], [1.0], 1.0, made, "BF16") or not np.array_equal(made, half):
        return "sums in bf16"
    return _products(library, rng) or _codes(library)


def _codes(library: CompiledLibrary) -> str:
    """Codes: every value of F8_E4M3, and the middle between it and the next, which goes to the even one; GGUF's."""
    code = np.arange(127)
    exact = np.ldexp((code % 8 + np.where(code < 8, 0, 8)) / 8.0, np.maximum(code >> 3, 1) - 7)
    middle = (exact[:-1] + exact[1:]) / 2
    values = np.concatenate((exact, middle, -exact)).astype(np.float32) * np.float32(3)
    want = np.concatenate((code, code[:-1] + code[:-1] % 2, code + 128)).astype(np.uint8)
    out = np.empty(len(values), np.uint8)
    sizes = np.zeros((1, 1), np.float32)
    three = np.full((1, 1), 3, np.float32)
    library.largest((values, "F32"), len(values), len(values), sizes)
    library.codes((values, "F32"), (len(values), 0, len(values)), three, "F8_E4M3", out)
    if not np.array_equal(out, want) or sizes[0, 0] != 1344:
        return "codes"
    steps = np.concatenate(([-8.0], np.arange(31) % 16 - 8)).astype(np.float32)  # a scale of 1
    four = np.empty((1, 18), np.uint8)
    eight = np.empty((1, 34), np.uint8)
    back = np.empty(32, np.float32)
    library.blocks((steps, "F32"), "Q4_0", four)
    library.blocks((np.append(steps[1:] + np.float32(0.5), np.float32(127)), "F32"), "Q8_0", eight)  # away from zero
    low = steps.astype(np.int8) + 8
    away = np.append(steps[1:] + (steps[1:] >= 0), 127).astype(np.int8)
    one = np.float16(1).tobytes()
    want_blocks = one + (low[:16] | low[16:] << 4).astype(np.uint8).tobytes() + one + away.tobytes()
    known = library.floats(four, "Q4_0", back, "F32") and np.array_equal(back, steps)
    return "" if known and four.tobytes() + eight.tobytes() == want_blocks else "blocks of GGUF"


def _products(library: CompiledLibrary, rng: np.random.Generator) -> str:
    """The products: integers that fp32 holds to the last bit, and sums that only a fused step gives."""
    if not library.pair:
        return ""
    rank = 19
    width = 64
    left = rng.integers(-99, 99, (5, rank)).astype(np.float32)
    right = rng.integers(-99, 99, (rank, width)).astype(np.float32)
    base = np.zeros(5 * width, np.float32)
    out = np.empty(5 * width, np.float32)
    if not library.folded(
        (base, "F32"), (out, "F32"), (0, 5 * width, width), [CTerm(left, library.panels(right), 2.0)]
    ):
        return "products"
    if not np.array_equal(out.reshape(5, width), 2 * (left @ right)):
        return "products"
    tiny = np.float32(2) ** -12  # (1 + tiny)^2 - (1 + 2 tiny) = tiny^2 with one rounding, 0 with two
    left = np.array([[1 + 2 * tiny, 1 + tiny]], np.float32)
    right = np.stack((np.full(width, -1, np.float32), np.full(width, 1 + tiny, np.float32)))
    terms = [CTerm(left, library.panels(right), 1.0)]
    if not library.folded((base[:width], "F32"), (out[:width], "F32"), (0, width, width), terms):
        return "products"
    return "" if np.array_equal(out[:width], np.full(width, tiny * tiny)) else "products"
