"""Mutants that nothing can tell from the original, or that no machine of ours can run far enough to tell.

A line of the table: the file, what is in the line as it stands, the change (both regular expressions), and why.
`mutants.py` asks here about every mutant that survives; one that a test kills all the same is counted as killed.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Alike(NamedTuple):
    file: str
    line: str
    change: str
    why: str


SPEED = "another number of loads in flight, or another share of the work, moves the same bytes"
AGAIN = "the loop's own test is asked again before each access"
NARROW = "a span, a piece or a tile has less than 4 GiB, so 32 bits hold its offsets"
LARGER = "an array larger than what is used of it"
UNUSED = "a value that is not used: what would read it has nothing to do"
TILES = "shows from 2^32 tiles on: lists of 64 TiB"

EQUIVALENT = (
    Alike("box_copy.cu", r"AT_ONCE = !FLAT \? 2 :", r"[28] to |16 to ", SPEED),
    Alike("box_copy.cu", r"for \(uint32_t k = \w+; k < count; k \+= ", r"< to <=", AGAIN),
    Alike("box_copy.cu", r"uint64_t\(k \+ u \* lanes\) \* 16", r"uint64_t to", NARROW),
    Alike("box_copy.cu", r"ck_v16 a\[2\] = \{\}, b\[2\]", r"2 to 3", LARGER),
    Alike(
        "box_copy.cu",
        r"if \(head > count\) head = count",
        r"> to >=",
        "where both are the same, so is what is assigned",
    ),
    Alike("box_copy.cu", r"ck_prefetch", r"", "what is fetched ahead is a matter of speed"),
    Alike("box_copy.cu", r"blocks = ck_fill_grid", r"^1536 to |/ to", SPEED),
    Alike("adamw_ema.cu", r"THREADS = 256", r"256 to 257", "threads come by 32"),
    Alike("adamw_ema.cu", r"alignas\(2 \* N\)", r"2 to 1", "the type's own alignment is no less"),
    Alike("adamw_ema.cu", r"lost = 0", r"0 to 1", UNUSED),
    Alike("adamw_ema.cu", r"blocks = ck_fill_grid", r"6 to|- to|1 to 0|/ to", SPEED),
    Alike("adamw_ema.cu", r"int alignment|wide|narrow", r"uint64_t to uint32_t", "the low bits alone are asked"),
    Alike(
        "adamw_ema.cu",
        r"narrow % 2 \? -1",
        r"1 to 2|0 to 1",
        "any negative number is refused, any but 2 goes by one element",
    ),
    Alike("adamw_ema.cu", r"", r"uint64_t to uint32_t", "shows from 2^32 elements on: 64 GiB of state"),
    Alike("box_transpose.cu", r"SINGLES = 4", r"4 to ", SPEED),
    Alike(
        "box_transpose.cu",
        r"return at >= low && at \+ per <= high",
        r"<= to <",
        "the last whole vector is moved item by item",
    ),
    Alike(
        "box_transpose.cu",
        r"while \(tile < end\)",
        r"< to <=",
        "one record more is looked at, and has no tiles in the range: memcheck and ASan see it where memory ends there",
    ),
    Alike(
        "box_transpose.cu",
        r"if \(t\.wide_\w+ && within\(0, S::EDGE",
        r"0 to 1",
        "what is left to do is looked for, and is nothing",
    ),
    Alike(
        "box_transpose.cu",
        r"int64_t\(sizeof\(T\)\)",
        r"int64_t to int32_t",
        "a factor of 64 bits makes the product one",
    ),
    Alike(
        "box_transpose.cu",
        r"id < S::VECTORS; id \+= ck_nt\(\)\) \{ // 8 vectors",
        r"< to <=",
        "the vector after the last lies beyond the tile, and is not whole",
    ),
    Alike(
        "box_transpose.cu",
        r"const int64_t first_row",
        r"int64_t to int32_t \(1\)",
        "extents up to 2^31 and tiles that begin before the box keep it below 2^31",
    ),
    Alike(
        "box_transpose.cu", r"(id|k) < S::EDGE \* S::EDGE", r"< to <=", "the item after the last lies beyond the tile"
    ),
    Alike("descriptors.py", r"^MOST_EXTENT", r"31 to 30", "a bound that is lower parts a box before it must"),
    Alike(
        "descriptors.py",
        r"tiles = \[batch, rows // edge \+ 2",
        r"2 to 3",
        "a bound that is one too high parts a box before it must",
    ),
    Alike(
        "box_copy.cu",
        r"ck_bid\(\) < more \? ck_bid\(\) : more",
        r"< to <= ",
        "where both are the same, so is what is taken",
    ),
    Alike(
        "box_copy.cu", r"begin < 16 \?|d.run - end < 16 \?", r"< to <= ", "where both are the same, so is what is taken"
    ),
    Alike(
        "box_copy.cu", r"begin < 16 \?|d.run - end < 16 \?", r"16 to 17 \(1\)", "where it is 16, 16 is taken either way"
    ),
    Alike(
        "box_copy.cu",
        r"begin < 16 \?|d.run - end < 16 \?",
        r"16 to 1[57] \(2\)",
        "a shifted vector needs 15 bytes more at most",
    ),
    Alike("box_copy.cu", r"constexpr int THREADS = 256", r"256 to 257", "threads come in warps"),
    Alike("box_copy.cu", r"void box_copy\(const ck_desc", r"uint64_t to", TILES),
    Alike("box_copy.cu", r"row \+= whole \?", r"1 to 2", "the only row of a piece is the first"),
    Alike("box_copy.cu", r"const uint64_t start = d.tile0", r"uint64_t to", TILES),
    Alike(
        "box_copy.cu",
        r"tiles / uint64_t\(blocks\)|tiles % uint64_t\(blocks\)",
        r"uint64_t to",
        "the number of blocks fits 32 bits",
    ),
    Alike(
        "box_copy.cu",
        r"if \(d.ext\[2\] == d.rows\)",
        r"2 to 1",
        "the way for several levels serves one as well, more slowly",
    ),
    Alike("portable.h", r"ck_find\(const ck_desc\* list, uint32_t count, uint64_t tile\)", r"uint64_t to", TILES),
    Alike("descriptors.py", r"^SPANS_FROM = ", r"", "which way moves a run is a matter of speed"),
    Alike(
        "descriptors.py",
        r"sorted\(pieces, key=",
        r"\(2\)|1 to",
        "only dims of one stride in the target are told apart by it: their box would meet itself, which is refused",
    ),
    Alike("descriptors.py", r"if len\(out\) > MOST_ROWS", r"^> to >= \(1\)", "a list of 2^32 boxes has 544 GiB"),
    Alike("descriptors.py", r"^least = ", r"^5 to 6|^- to \+", LARGER),
    Alike(
        "descriptors.py", r"^lanes = ", r"16 to 1[57] \(1\)|1 to [02] \(1\)", UNUSED + ": spans have 64 bytes or more"
    ),
    Alike("descriptors.py", r"^per_tile = ", r"1 to 0 \(2\)", UNUSED + ": a run longer than a tile is cut into pieces"),
    Alike("descriptors.py", r"out\[\"aux\"\] = per_row", r"0 to 1", UNUSED + ": only pieces have a size"),
    Alike("descriptors.py", r"run >> out\[\"vlog\"\]", r"1 to [02]", UNUSED + ": spans divide by nothing"),
    Alike("descriptors.py", r"dims\[0\] if dims else \(1, 0, 0\)", r"^1 to|\([23]\)$", UNUSED),
    Alike("digest.cu", r"LOADS = LANES < 16 \? 4 : 8", r"8 to |4 to |16 to |< to", SPEED),
    Alike(
        "digest.cu",
        r"for \(int mask = LANES; mask < 32; mask \*= 2\)",
        r"2 to 3 ",
        "4 lanes exchange nothing in the loop; of 8 and 16 the same groups meet",
    ),
    Alike(
        "digest.cu",
        r"for \(int mask = 1; mask < 4; mask \*= 2\)",
        r"\*= to \+=",
        "1 and 3 reach the same four threads as 1 and 2",
    ),
    Alike("digest.cu", r"for \(uint64_t base = from", r"< to <=", "the range is empty by then: no thread has a leaf"),
    Alike("digest.cu", r"for \(uint64_t base = from", r"uint64_t to", TILES),
    Alike("digest.cu", r"case (4|8|16): return CK_LAUNCH_SYNC", r"\(1\)", "32 lanes make the same hashes"),
    Alike("digest.cu", r"^t\[i\] = AT_ONCE > 1", r"0 to 1", UNUSED),
    Alike("digest.cu", r"last_edge = shift", r"> to >=", "a block that could go the quick way goes the careful one"),
    Alike("digest.cu", r"threads < 0 \|\| threads % 32", r"0 to 1 \(2\)", "0 has been replaced before"),
    Alike(
        "span.h", r"if \(shift == 0 && at \+ 16 <= end\)", r"<= to <", "the last 16 bytes come in pieces, more slowly"
    ),
    Alike("span.h", r"k \+ [24] <= count", r"<= to <", "the last bytes come in smaller loads"),
    Alike(
        "compare.cu",
        r"if \(index < found.first\)|v = other > v \?",
        r"< to <=|> to >=",
        "where both are the same, so is what is taken",
    ),
    Alike(
        "compare.cu",
        r"case CK_(F64|F32|BF16|F16|E4M3|E5M2|E8M0): return",
        r"0 to 1",
        UNUSED + ": floats are ordered by their sign",
    ),
    Alike("compare.cu", r"case CK_I(8|16|32): return", r"^0x80+ to ", "the order backwards: distances stay"),
    Alike(
        "box_cast.cu",
        r"if \(\(tally\.lost \| tally\.nans\) >> 24\)",
        r"24 to",
        "counts are reported earlier or later, and added up",
    ),
    Alike("box_cast.cu", r"if \(!cut && d\.run < WARP_ROW\)", r"run to rows|< to <=", SPEED),
    Alike("casts.py", r"_LONGEST = 1 << 31", r"31 to 30", "any limit below it keeps the kernel's sums in 32 bits"),
    Alike(
        "casts.py",
        r"step = max\(1, codes\.bits // 8\)",
        r"8 to 7",
        "a seventh of 4, 8, 16 or 32 bits, rounded down, is an eighth",
    ),
    Alike(
        "casts.py",
        r"if block > _LONGEST",
        r"> to >=",
        "of a block of just that size no more than one fits a part either way",
    ),
    Alike("box_cast.cu", r"return source << 8 \| target", r"8 to [4-79]", "kinds are numbers below 9, and fit 4 bits"),
    Alike(
        "box_cast.cu",
        r"counts \+ 2 \* uint64_t\(record\)",
        r"uint64_t to uint32_t",
        "shows from 2^31 boxes on: a list of 290 GB",
    ),
    Alike("box_cast.cu", r"WARP_(ROW|SPAN) = ", r" to", SPEED),
    Alike(
        "box_cast.cu",
        r"d\.[sd]str, first \+ row\)\) \+ uint64_t\(column\)",
        r"uint64_t to uint32_t \(2\)",
        "rows here are shorter than WARP_ROW",
    ),
)


def why_alike(file: str, line: str, change: str) -> str:
    """Why this mutant can't be told from the original; "" where nobody has said so."""
    for known in EQUIVALENT:
        if known.file == file and re.search(known.line, line) and re.search(known.change, change):
            return known.why
    return ""
