"""The benchmark's own tools: a failed command is no measurement, synthetic values are finite, tables are Markdown."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

import measure
import synthetic
from measure import Contestant, Failed, Sample


def test_a_command_is_measured_whole() -> None:
    sample = measure.run([sys.executable, "-c", "x = bytearray(64 << 20); sum(range(2_000_000))"])
    assert sample.peak > 64 << 20 and 0.01 < sample.cpu < 30 and sample.wall > 0


def test_a_failed_command_is_no_measurement() -> None:
    with pytest.raises(Failed, match="exit 3\nno such luck"):
        measure.run([sys.executable, "-c", "import sys; print('no such luck', file=sys.stderr); sys.exit(3)"])


def test_contestants_take_turns_and_leave_nothing(tmp_path: Path) -> None:
    log = tmp_path / "log"
    out = tmp_path / "out"
    seen: list[bool] = []
    runs = [
        Contestant(
            name,
            ["sh", "-c", f"echo {name} >> {log}; echo {name} > {out}"],
            out,
            lambda path: seen.append(path.exists()),
            times,
        )
        for name, times in (("a", None), ("b", 1))
    ]
    samples = measure.in_turns(runs, 2)
    assert log.read_text().split() == ["a", "b", "a"] and seen == [True] * 3 and not out.exists()
    assert {name: len(found) for name, found in samples.items()} == {"a": 2, "b": 1}


def test_a_ratio_is_taken_round_by_round() -> None:
    slow_hour = [Sample(wall, 1.0, 1, 0.0) for wall in (1.0, 10.0, 2.0)]
    base = [Sample(wall, 2.0, 1, 0.0) for wall in (1.0, 10.0, 1.0)]
    assert measure.median_ratio(slow_hour, base, "wall") == 1.0 and measure.median_ratio(slow_hour, base, "cpu") == 0.5


def test_a_table_is_markdown() -> None:
    assert measure.table(("job", "s"), [["reshard", "1.25"]]) == (
        "| job     |    s |\n|---------|-----:|\n| reshard | 1.25 |"
    )


@pytest.mark.parametrize(("item", "exponent"), [(2, 0x7F80), (4, 0x7F800000)])
def test_synthetic_values_are_finite(item: int, exponent: int) -> None:
    blocks = list(synthetic.values(np.random.default_rng(1), (1 << 20) + 6, item))
    data = b"".join(blocks)
    assert len(data) == (1 << 20) + 6
    words = np.frombuffer(data[: 1 << 20], f"u{item}")
    assert ((words & exponent) != exponent).all() and len(np.unique(words)) > 1000


@pytest.mark.parametrize("size", ["1MB", "200MB", "2GB", "20GB"])
def test_every_size_makes_a_model_that_eight_ranks_can_cut(size: str) -> None:
    nbytes = synthetic.size_of(size)
    shape = synthetic.shape_of(nbytes)
    assert all(dims[0] % 8 == 0 and (len(dims) == 1 or dims[1] % 8 == 0) for _, dims in shape.tensors())
    assert size == "1MB" or abs(shape.numel * 2 - nbytes) < nbytes / 5
