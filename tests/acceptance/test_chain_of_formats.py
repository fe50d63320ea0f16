"""A real flex checkpoint of Paddle (TP 2, sharding 2, averages) through every kind of system and back, bit for bit.

It has no config, so its names travel as they are, which is said in words: they are no names that Megatron knows."""

from __future__ import annotations

from pathlib import Path

from safetensors import safe_open
from writings import writing_of

from ckpt_tool.commands.convert import convert
from ckpt_tool.commands.diff import diff
from ckpt_tool.core.progress import Silent
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import Writing

FLEX = Path(__file__).parents[2] / "fixtures" / "paddle-flex"
SOURCE = FLEX / "ernie_ema_tp2sd2v2"
TRUTH = FLEX / "ernie_ema_tp2sd2v2.truth.safetensors"
CHAIN = (
    ("megatron-dist", {}),
    ("paddle-unified", {}),
    ("dcp", {"dp": 3}),
    ("paddle-flex", {"tp": 2, "dp": 2}),
)


def test_flex_to_megatron_to_unified_to_dcp_to_flex(tmp_path: Path) -> None:
    at = SOURCE
    for number, (fmt, degrees) in enumerate(CHAIN):
        out = tmp_path / f"{number}_{fmt}"
        sharding = "v2" if fmt == "paddle-flex" else None
        writing = writing_of(to=fmt, dialect="keep", degrees=degrees, sharding=sharding, fsync=False, verify="full")
        convert(str(at), str(out), Reading(), writing, Silent())
        same = diff(str(SOURCE), str(out), Reading(), progress=Silent())
        assert same["equal"], (fmt, same["differences"][:3])
        at = out
    assert {file.name for file in (at / "optimizer_state").iterdir()} == {
        file.name for file in (SOURCE / "optimizer_state").iterdir()
    }


def test_the_end_of_the_chain_is_the_live_run(tmp_path: Path) -> None:
    """The truth was taken from the trainer, not from a reader of ours."""
    kept = Writing(to="megatron-dist", dialect="keep", fsync=False)
    convert(str(SOURCE), str(tmp_path / "mid"), Reading(), kept, Silent())
    convert(
        str(tmp_path / "mid"),
        str(tmp_path / "out"),
        Reading(),
        Writing(to="sharded", dialect="keep", fsync=False),
        Silent(),
    )
    with safe_open(TRUTH, "pt") as truth:
        for key in truth.keys():
            state, name = key.split("/", 1)
            with safe_open(tmp_path / "out" / f"{state}.safetensors", "pt") as found:
                mine = found.get_tensor(name)
                want = truth.get_tensor(key)
            assert (
                mine.dtype == want.dtype
                and mine.shape == want.shape
                and bytes(mine.untyped_storage()) == bytes(want.contiguous().untyped_storage())
            ), key
