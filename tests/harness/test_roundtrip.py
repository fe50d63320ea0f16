"""A -> X -> A in several formats at once: a small pair by default, the whole matrix behind `slow`; and a difference is
seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckpt_tool.harness import roundtrip
from ckpt_tool.harness.layout import HarnessLayout
from ckpt_tool.harness.roundtrip import RoundTrip, cases, gather
from ckpt_tool.harness.saving import formats
from ckpt_tool.harness.shape import ModelShape

TINY = ModelShape.quick().with_(hidden=32, heads=4, kv_heads=4, dense_ffn=32, expert_ffn=16, batch=2, sequence=16)


def trip(source: str, target: str, fmt: str | None = None) -> RoundTrip:
    return RoundTrip(HarnessLayout.parse(source), HarnessLayout.parse(target), fmt, TINY)


def folder(root: Path) -> Path:
    (root / "001").mkdir()
    return root / "001"


@pytest.mark.slow  # test_saving_formats.py does the same of made-up states
@pytest.mark.timeout(240)
def test_there_and_back(tmp_path: Path) -> None:
    document = gather(trip("dp2,ep2", "tp2", "megatron-dist"), folder(tmp_path))
    assert document["ok"], document["checks"]
    assert [check["check"] for check in document["checks"]] == ["megatron-dist"]
    assert "byte for byte" in document["checks"][0]["text"]


@pytest.mark.timeout(240)
def test_a_lost_average_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `--drop ema` on the way there the same command succeeds, and the check does not."""
    real = roundtrip.run_tool

    def forgetful(*words: Any) -> Any:
        lossy = ("--state", "model,master,optimizer") if words[0] == "reshard" and words[2].name == "away" else ()
        return real(*words, *lossy)

    monkeypatch.setattr(roundtrip, "run_tool", forgetful)
    document = gather(trip("dp2", "tp2", "sharded"), folder(tmp_path))
    assert not document["ok"]
    assert "[ema]" in document["checks"][0]["text"]


def test_the_matrix_has_every_format_and_degree() -> None:
    found = cases()
    met = {fmt for trip in found for fmt in roundtrip._fitting(trip)[0]}
    assert met == set(formats.WRITERS)
    for dim in ("tp", "pp", "dp", "ep", "vpp"):
        assert any(getattr(trip.source, dim) > 1 for trip in found) and any(
            getattr(trip.target, dim) > 1 for trip in found
        )
    assert len(set(found)) == len(found) > 30


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_the_whole_matrix(tmp_path: Path) -> None:
    failed = []
    for number, each in enumerate(cases()):
        (tmp_path / str(number)).mkdir()
        document = gather(each, tmp_path / str(number))
        print(
            document["from"],
            "->",
            document["to"],
            *(f"{c['check']}: {c['text']}" for c in document["checks"]),
            sep="\n  ",
        )
        failed += [(document["from"], document["to"], check) for check in document["checks"] if not check["ok"]]
    assert not failed
