"""The page of `ckpt validate`: what failed is seen, and the drawings are SVG with escaped text."""

from __future__ import annotations

import copy
import re

from ckpt_tool.report.html import document as as_html
from ckpt_tool.report.plain import Look, render
from ckpt_tool.report.validation import validation

CASE = {
    "ok": True,
    "from": "tp2",
    "to": "dp2",
    "format": "dcp",
    "mode": "canonical",
    "device": "cpu",
    "seed": 7,
    "before": 1,
    "after": 1,
    "killed": "rank 1 was killed by SIGKILL",
    "commands": ["ckpt reshard a b --tp 1"],
    "elapsed_s": 1.5,
    "notes": ["<torn> & told"],
    "checks": [{"check": "curve", "ok": True, "text": "loss and gradient norm bit for bit"}],
    "states": [
        {"what": "reshard", "counted": True, "ok": True, "states": [{"state": "ema", "tensors": 3, "equal": 3}]}
    ],
    "curve": [
        {"step": 1, "loss": 4.5, "norm": 2.0, "rate": 0.1},
        {"step": 2, "loss": 4.25, "norm": 1.0, "rate": 0.1, "resumed_loss": 4.25, "resumed_norm": 1.0, "equal": True},
    ],
    "controls": [
        {
            "fault": "ema-reset",
            "what": "EMA reset",
            "loss_first": 0.0,
            "loss_max": 0.0,
            "caught": True,
            "ok": True,
            "seen_by": {"digests": True, "scalars": False, "curve": False, "end": True},
        }
    ],
    "layouts": {
        "from": [{"rank": r, "tp": r, "pp": 0, "dp": 0, "layers": [[0], [1]], "experts": [0, 1]} for r in range(2)],
        "to": [{"rank": 0, "tp": 0, "pp": 0, "dp": 0, "layers": [[0, 1]], "experts": []}],
    },
}


def document(*cases):
    return {"ok": all(case["ok"] for case in cases), "matrix": None, "cases": list(cases), "elapsed_s": 2.0}


def broken():
    case = copy.deepcopy(CASE)
    case["ok"] = case["checks"][0]["ok"] = case["curve"][1]["equal"] = False
    case["checks"][0]["text"] = "loss differs, 1.0e-03 relative at most"
    case["curve"][1]["resumed_loss"] = 4.26
    return case


def test_a_pair_that_holds():
    text = render(validation(document(CASE)), Look(width=100))
    assert "proved: 1 pair of layouts in 2.0 s, every check holds" in text
    assert "digests, end" in text and "3 of 3" in text and "4.250000000" in text
    assert "NO" not in text


def test_a_check_that_fails_is_seen():
    text = render(validation(document(CASE, broken())), Look(width=120))
    assert "not proved: 1 of 2 pairs of layouts in 2.0 s failed" in text
    assert "failed: curve" in text and "loss differs, 1.0e-03" in text


def test_a_narrow_window():
    assert all(len(line) <= 60 for line in render(validation(document(broken())), Look(width=60)).splitlines())


def test_the_drawings():
    html = as_html(validation(document(CASE)))
    assert html.count("<svg") == 4 and html.count("<polyline") == 4 and html.count("<rect") == 3
    assert "layers 0 + 1" in html and "&lt;torn&gt; &amp; told" in html and "<torn>" not in html
    # the resumed curve begins where the uninterrupted one goes on
    lines = [part.split('"')[0] for part in html.split('<polyline points="')[1:]]
    assert len(lines[0].split()) == 2 and lines[1] == lines[0].split()[1]


def test_long_lines_of_tiles_keep_their_numbers_and_axes_have_one_notation():
    case = copy.deepcopy(CASE)
    case["layouts"]["from"][0]["layers"] = [[*range(8)], [*range(16, 24)]]
    html = as_html(validation(document(case)))
    assert "layers 0,1,2,3,4,5,6,7 + 16,17,18,19,20\u2026" in html  # the whole is in its title
    assert "layers 0,1,2,3,4,5,6,7 + 16,17,18,19,20,21,22,23;" in html and "characters)" not in html
    ticks = re.findall(r'text-anchor="end">([-0-9.]+)</text>', html)
    assert len(ticks) == 10 and {len(tick.partition(".")[2]) for tick in ticks[:5]} == {3}
