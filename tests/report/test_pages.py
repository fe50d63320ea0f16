"""The documents of the verbs as pages: what a person must find there, and what a stranger's text can't do."""

from __future__ import annotations

import copy
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from ckpt_tool.errors import CorruptFile, OutputExists, StorageError
from ckpt_tool.report import errors, html
from ckpt_tool.report.comparison import comparison, verification
from ckpt_tool.report.inspection import inspection
from ckpt_tool.report.listing import listing
from ckpt_tool.report.page import Page
from ckpt_tool.report.plain import Look, render
from ckpt_tool.report.writing import after, before

EVIL = "a\x1b]0;owned\x07<script>alert(1)</script>\u202e\n::error::x"


def text(page: Page) -> str:
    return render(page, Look())


def catalog(**more: Any) -> dict[str, Any]:
    """A document of `inspect`: two layers in two states on tp 2."""
    tensors = []
    for layer in range(2):
        for name, shape in (("attn.q.weight", [8, 4]), ("norm.weight", [4])):
            for state, dtype, item in (("model", "BF16", 2), ("exp_avg", "F32", 4)):
                numel = 32 if len(shape) == 2 else 4
                tensors.append(
                    {
                        "name": f"layers.{layer}.{name}",
                        "state": state,
                        "dtype": dtype,
                        "shape": shape,
                        "bytes": numel * item,
                    }
                )
    states = {
        s: {"tensors": 4, "bytes": sum(t["bytes"] for t in tensors if t["state"] == s)} for s in ("model", "exp_avg")
    }
    return {
        "schema_version": 1,
        "format": "sharded",
        "path": "runs/7",
        "resolved": "",
        "mesh": {"tp": 2},
        "total": {"tensors": 8, "bytes": 432, "parameters": 72},
        "states": states,
        "tensors": tensors,
        "extras": {"iteration": 100, "args": {"lr": 0.1}},
        "notes": ["one note"],
        **more,
    }


WRITTEN = {
    "schema_version": 1,
    "source": {"path": "runs/7/iter_100", "format": "dcp", "resolved": "latest points to iter_100"},
    "target": {"path": "out", "format": "sharded", "mesh": {"tp": 8}, "files": [{"path": "a", "bytes": 1}]},
    "plan": {
        "bytes_read": 13_000_000_000,
        "bytes_written": 13_400_000_000,
        "peak_memory": 8 << 20,
        "files": 8,
        "copies": 2910,
    },
    "states": {"model": {"tensors": 291, "bytes": 4_400_000_000}, "exp_avg": {"tensors": 291, "bytes": 9_000_000_000}},
    "layout_source": "the family's axes",
    "fallbacks": [
        {
            "requested": ["dp", "tp"],
            "used": ["tp"],
            "reason": "fallback",
            "tensors": 12,
            "example": "w.q",
            "shape": [12, 4],
            "extra_bytes": 4_100_000,
            "better": ["dp"],
        }
    ],
    "removed": [
        {"name": "lm_head.weight", "state": "model", "bytes": 2_000_000},
        {"name": "lm_head.weight", "state": "exp_avg", "bytes": 4_000_000},
    ],
    "removed_bytes": 6_000_000,
    "dropped": [
        {"state": "ema", "tensors": 291, "bytes": 4_400_000_000, "reason": "as requested"},
        {"state": "extras", "names": ["rng", "args"], "tensors": 0, "bytes": 0, "reason": "no place for them"},
    ],
    "notes": ["tied weights written once"],
}
DONE = {**WRITTEN, "elapsed_s": 3.3, "digest_checked": True}


def test_inspection_tells_what_lies_there() -> None:
    shown = text(inspection(catalog()))
    assert "format  sharded" in shown and "mesh    tp 2" in shown
    assert "8 tensors, 72 parameters, 432 B" in shown
    assert "each name with its states: model, exp_avg" in shown
    rows = [line.split() for line in shown.splitlines()]
    assert ["model", "4", "144", "B", "BF16"] in rows and ["exp_avg", "4", "288", "B", "F32"] in rows
    assert ["layers.[0-1]", "4", "432", "B"] in rows
    assert ["attn.q.weight", "2", "BF16", "F32", "[8,", "4]", "384", "B"] in rows
    assert "iteration  100" in shown and "one note" in shown


def test_inspection_says_which_checkpoint_was_taken() -> None:
    assert "(latest points to iter_7)" in text(inspection(catalog(resolved="latest points to iter_7")))


def test_unsafe_globals_come_first_and_in_red() -> None:
    security = {"unsafe": ["posix.system at data.pkl, opcode 12"], "globals": ["collections.OrderedDict"]}
    page = inspection(catalog(security=security))
    shown = text(page)
    assert "UNSAFE global posix.system at data.pkl, opcode 12" in shown
    assert shown.index("UNSAFE") < shown.index("collections.OrderedDict") < shown.index("layers")
    assert "\x1b[1;31mUNSAFE global posix.system" in render(page, Look(colour=True))
    assert "no pickle names a global" in text(inspection(catalog(security={"unsafe": [], "globals": []})))
    assert "security" not in text(inspection(catalog()))


def test_placement_tells_the_cut_and_the_files() -> None:
    document = catalog()
    for tensor in document["tensors"]:
        cut = len(tensor["shape"]) == 2
        tensor["chunks"] = [
            {
                "file": f"{tensor['state']}.tp0{rank}.safetensors",
                "offset": [rank * 4, 0] if cut else [0],
                "shape": [4, 4] if cut else [4],
                "rank": {"tp": rank},
            }
            for rank in range(2)
        ]
    rows = [line.split() for line in text(inspection(document)).splitlines()]
    assert ["attn.q.weight", "2", "BF16", "F32", "[8,", "4]", "2x1", "384", "B"] in rows
    assert ["norm.weight", "2", "BF16", "F32", "[4]", "1,", "2", "chunks", "48", "B"] in rows
    assert ["model.tp00.safetensors", "tp", "0", "4", "80", "B"] in rows


def test_stats_are_listed_by_tensor() -> None:
    document = catalog()
    for tensor in document["tensors"]:
        tensor["stats"] = {"min": -1.0, "max": 2.5, "mean": 0.1, "std": 1.0, "zeros": 3, "nan": 1, "inf": 0}
    shown = text(inspection(document))
    assert sum(line.strip().startswith("layers.") for line in shown.splitlines()) == 8
    assert "min" in shown and "2.5" in shown
    document["tensors"][0]["stats"] = None  # a sub-byte tensor has none
    text(inspection(document))


def test_an_empty_checkpoint_is_a_page_too() -> None:
    empty = {
        "format": "safetensors",
        "path": "x",
        "mesh": {},
        "total": {"tensors": 0, "bytes": 0, "parameters": 0},
        "states": {},
        "tensors": [],
        "extras": {},
        "notes": [],
    }
    assert "0 tensors, 0 B" in text(inspection(empty))


def test_the_plan_tells_all_before_bytes_move() -> None:
    shown = text(before(WRITTEN))
    for part in (
        "from    runs/7/iter_100  (dcp)",
        "(latest points to iter_100)",
        "to      out  (sharded, tp 8)",
        "layout  the family's axes",
        "writes  13.4 GB in 8 files, copied in 2,910 pieces",
        "12 tensors such as w.q [12, 4]: requested dp x tp, cut by tp; 4.10 MB more on disk",
        "removed 2 tensors, 6.00 MB",
        "exp_avg: 1 tensor, 4.00 MB",
        "ema: 291 tensors, 4.40 GB (as requested)",
        "extras: rng, args (no place for them)",
        "tied weights written once",
    ):
        assert part in shown, part


def test_the_result_ends_in_one_line() -> None:
    shown = text(after(DONE))
    assert shown.splitlines()[-1] == "wrote 13.4 GB in 8 files to out in 3.3 s (4.06 GB/s); digests checked"
    assert "removed 2 tensors, 6.00 MB" in shown and shown.startswith("from  ")
    assert text(after(DONE, shown=True)) == shown.splitlines()[-1] + "\n"
    assert text(after(WRITTEN)).splitlines()[-1] == "dry run: nothing was written"
    assert (
        text(after({**WRITTEN, "plan_file": "p.json"})).splitlines()[-1] == "plan saved; run it with ckpt apply p.json"
    )
    part = {**DONE, "committed": False, "part": [3, 8]}
    assert text(after(part)).splitlines()[-1] == "part 3 of 8 is done; the output appears when the last part is"


def test_the_device_is_named_with_what_it_leaves_to_the_cpu() -> None:
    left = [{"tensors": 3, "from": "F64", "to": "C64"}]
    device = {"name": "a card", "pinned_memory": 1 << 20, "device_memory": 3_000_000, "left_to_cpu": left}
    shown = text(before({**WRITTEN, "device": device}))
    assert "device  a card (3.00 MB of its memory)" in shown and "the CPU casts 3 tensors from F64 to C64" in shown
    assert "device" not in text(before(WRITTEN))
    text(before(evil({**copy.deepcopy(WRITTEN), "device": device})))


def test_lists_are_cut_and_minus_v_shows_them_whole() -> None:
    many = {**WRITTEN, "dropped": [{"state": f"s{i}", "tensors": 1, "bytes": 1} for i in range(40)]}
    assert "... 28 more entries; -v lists all" in text(before(many))
    assert (
        "s39" in text(before(many, everything=True))
        and "more" not in text(before(many, everything=True)).split("s0")[1]
    )


def test_comparison() -> None:
    differences = [
        {
            "name": "w",
            "state": "model",
            "kind": "value",
            "first_index": [3, 17],
            "max_ulp": 2,
            "max_abs": 1e-5,
            "elements": 1,
        },
        {"name": "v", "state": "exp_avg", "kind": "missing_right"},
        {"name": "u", "state": "model", "kind": "shape", "left": [3, 4], "right": [4, 3]},
    ]
    shown = text(comparison({"equal": False, "compared": 291, "differences": differences, "left": "a", "right": "b"}))
    table = shown.split("tensors whose values differ, worst first\n")[1].splitlines()
    assert " ".join(table[0].split()) == "tensor state rel. L2 cosine max abs ulp elements first at"
    assert table[1].split() == ["w", "model", "1.00e-05", "2", "1", "[3,", "17]"]
    assert "only in the first" in shown and "[3, 4] / [4, 3]" in shown
    assert shown.splitlines()[-1] == "not equal: 3 tensors of 291 differ"
    assert text(comparison({"equal": True, "compared": 1, "differences": []})) == "equal: 1 tensor compared\n"
    nothing = {
        "name": "w",
        "state": "model",
        "kind": "value",
        "first_index": [0],
        "max_ulp": None,
        "max_abs": float("nan"),
    }
    row = text(comparison({"equal": False, "compared": 1, "differences": [nothing]})).splitlines()[2]
    assert row.split() == ["w", "model", "nan", "[0]"]


def test_many_differences_are_counted() -> None:
    differences = [{"name": f"w{i}", "state": "model", "kind": "value"} for i in range(100)]
    shown = text(comparison({"equal": False, "compared": 100, "differences": differences}))
    assert "... 60 more differences; -v lists all" in shown and "values differ: 100" in shown


def test_verification() -> None:
    finding = {"code": "E0331", "message": "CRC is 3, want 4", "file": "a.pt", "tensor": "w", "offset": 7}
    shown = text(verification({"ok": False, "findings": [finding], "digests": {}, "path": "x", "format": "torch"}))
    assert "E0331" in shown and "CRC is 3, want 4" in shown and "a.pt" in shown
    assert shown.splitlines()[0] == "not valid: 1 finding"
    assert "a.pt, byte 7" in shown
    sound = {"ok": True, "findings": [], "digests": {"model": {"w": "8f" * 16}}, "nonfinite": {"w": 3}}
    shown = text(verification(sound))
    assert "w: 3" in shown and shown.splitlines()[0] == "complete and valid: no findings, 1 tensor"
    assert "8f" * 16 not in shown
    assert "8f" * 16 in text(verification(sound, everything=True))
    of_a_rank = {**finding, "rank": "tp 1, pp 0"}
    shown = text(verification({"ok": False, "findings": [of_a_rank], "digests": {}}))
    assert "a.pt, rank tp 1, pp 0, byte 7" in shown
    rows = [{"file": "config.json", "bytes": 651, "size": 651}, {"file": "a.pt", "bytes": 1206, "size": 90_000}]
    shown = text(verification({**sound, "uncovered": rows}))
    assert "not covered by a checksum  1 file, 651 B; 1.21 kB of headers and padding in 1 other file" in shown
    assert "not covered by a checksum  1.21 kB of headers and padding in 1 file" in text(
        verification({**sound, "uncovered": rows[1:]})
    )
    assert "no checksum" not in text(verification({**sound, "uncovered": None}))


def test_listing_takes_any_document() -> None:
    document = {
        "schema_version": 1,
        "python": "3.11",
        "disk": {"free_bytes": 10**10},
        "gpu": [],
        "extras": {"ray": False},
        "leavings": [{"path": ".x", "bytes": 3, "locked": True}],
        "ok": True,
    }
    shown = text(listing(document, "ckpt doctor"))
    assert "python  3.11" in shown and "10.0 GB" in shown and "all is well" in shown and "schema" not in shown


# -- nothing that a stranger wrote acts --------------------------------------------------------------------------------


def evil(value: Any) -> Any:
    """The document with every text in it (dtype, state, kind included) made hostile."""
    if isinstance(value, dict):
        return {evil(k) if k in ("lr", "model", "exp_avg", "iteration") else k: evil(v) for k, v in value.items()}
    if isinstance(value, list):
        return [evil(item) for item in value]
    return EVIL if isinstance(value, str) else value


PAGES = {
    "inspection": lambda: inspection(evil(catalog(security={"unsafe": ["x"], "globals": ["y"]})), everything=True),
    "plan": lambda: before(evil(copy.deepcopy(WRITTEN)), everything=True),
    "result": lambda: after(evil(copy.deepcopy(DONE)), everything=True),
    "comparison": lambda: comparison(
        evil(
            {"equal": False, "compared": 1, "left": "a", "differences": [{"name": "w", "state": "s", "kind": "value"}]}
        )
    ),
    "verification": lambda: verification(
        evil(
            {
                "ok": False,
                "path": "x",
                "findings": [{"code": "E", "message": "m", "file": "f", "tensor": "t"}],
                "digests": {"model": {EVIL: "d"}},
            }
        )
    ),
    "listing": lambda: listing(evil({EVIL: "x", "a": {EVIL: "y"}, "b": [{"c": "d"}]}), EVIL),
}


@pytest.mark.parametrize("which", PAGES)
@pytest.mark.parametrize("width", [None, 60])
def test_a_hostile_document_is_only_text(which: str, width: int | None) -> None:
    shown = render(PAGES[which](), Look(width=width))
    assert not {chr(c) for c in (*range(10), *range(11, 32), 0x7F, 0x9B, 0x202E)} & set(shown)
    assert not any(line.lstrip().startswith("::") for line in shown.splitlines())


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, list[tuple[str, str | None]]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, attrs))


@pytest.mark.parametrize("which", PAGES)
def test_a_hostile_document_is_only_text_in_html(which: str) -> None:
    source = html.document(PAGES[which](), facts=((EVIL, EVIL),))
    tags = Tags()
    tags.feed(source)
    names = {tag for tag, _ in tags.seen}
    assert names <= set(
        "html head body main meta title style h1 h2 dl dt dd div table tr th td ul li p wbr span".split()
    ), names
    assert {name for _, attrs in tags.seen for name, _ in attrs} <= {
        "lang",
        "charset",
        "http-equiv",
        "content",
        "name",
        "class",
        "tabindex",
        "role",
        "aria-label",
        "data-state",
    }
    assert not {chr(c) for c in (*range(10), *range(11, 32), 0x7F, 0x9B, 0x202E)} & set(source)
    assert "<script" not in source and "&lt;script&gt;" in source


def test_html_is_one_page_without_requests(tmp_path: Path) -> None:
    path = tmp_path / "r.html"
    html.save(inspection(catalog()), str(path), title="ckpt inspect", facts=(("made by", "ckpt"),))
    source = path.read_text()
    assert source.startswith(html.MARK) and "default-src 'none'" in source
    assert "http://" not in source and "https://" not in source and "src=" not in source
    assert "layers.<wbr>[0-1]" in source
    html.check_target(str(path))  # an earlier report may be replaced
    assert sorted(p.name for p in tmp_path.iterdir()) == ["r.html"]


def test_a_report_replaces_nothing_else(tmp_path: Path) -> None:
    taken = tmp_path / "model.safetensors"
    taken.write_bytes(b"weights")
    with pytest.raises(OutputExists, match="is no earlier one"):
        html.check_target(str(taken))
    with pytest.raises(StorageError, match="does not exist"):
        html.check_target(str(tmp_path / "none" / "r.html"))
    assert taken.read_bytes() == b"weights"


def test_a_failed_report_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "r.html").mkdir()
    with pytest.raises(OutputExists):
        html.save(Page("t", ()), str(tmp_path / "r.html"))
    assert [p.name for p in tmp_path.iterdir()] == ["r.html"]


# -- errors ------------------------------------------------------------------------------------------------------------


def test_an_error_is_three_lines() -> None:
    error = CorruptFile(
        "found 3, want 4", code="E0311", path="m.safetensors", offset=8, place="/a/b", key="w", hint="fetch it"
    )
    assert errors.as_text(error, Look()).splitlines() == [
        "error[E0311]: found 3, want 4",
        "  at: m.safetensors, byte 8, /a/b, tensor w",
        "  hint: fetch it",
    ]


def test_a_narrow_terminal_breaks_an_error_between_words() -> None:
    message = "the nearest, qwen3, knows 12 of 15 kinds of tensors"
    error = CorruptFile(message, code="E0311", path="a/very/long/path/of/one/model.safetensors", faults=[message])
    lines = errors.as_text(error, Look(width=30)).splitlines()
    assert lines[:3] == ["error[E0311]: the nearest,", "    qwen3, knows 12 of 15", "    kinds of tensors"]
    assert lines[3:6] == ["  also: the nearest, qwen3,", "    knows 12 of 15 kinds of", "    tensors"]
    assert lines[6] == "  at: a/very/long/path/of/one/model.safetensors" and lines[7].startswith("  hint: ")
    assert "\x1b[1;31merror[E0311]:\x1b[0m \x1b[1mthe nearest,\x1b[0m\n" in errors.as_text(error, Look(True, 30))


def test_all_faults_are_told_and_a_hint_is_never_missing() -> None:
    error = CorruptFile("first", path="p", faults=[f"fault {i}" for i in range(300)])
    shown = errors.as_text(error, Look())
    assert "  also: fault 4" in shown and "fault 5" not in shown and "  also: 295 more; -v lists all" in shown
    assert "fault 299" in errors.as_text(error, Look(), everything=True)
    assert shown.splitlines()[-1].startswith("  hint: ckpt inspect")
    assert json.loads(errors.as_json(error))["error"]["hint"].startswith("ckpt inspect")
    assert len(json.loads(errors.as_json(error))["error"]["faults"]) == 300


def test_an_error_quotes_a_hostile_file_safely() -> None:
    error = CorruptFile(EVIL, path=EVIL, place=EVIL, key=EVIL, hint=EVIL, faults=[EVIL])
    shown = errors.as_text(error, Look(), trace=ValueError(EVIL))
    assert "\x1b" not in shown and "\u202e" not in shown and "\x07" not in shown
    document = json.loads(errors.as_json(error))
    assert document["error"]["message"] == EVIL and document["error"]["tensor"] == EVIL  # JSON keeps the exact text
    assert errors.as_json(error).isascii()
