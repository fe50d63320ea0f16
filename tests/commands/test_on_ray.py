"""The same plan in shares on a Ray cluster of this machine: the same bytes as one process writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt_tool.commands.convert import reshard
from ckpt_tool.core.progress import Silent
from ckpt_tool.errors import UsageError
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import Writing

SOURCE = Path(__file__).parents[2] / "fixtures" / "dcp" / "fsdp2_dp4"


@pytest.mark.peers
def test_shares_write_the_same_bytes(tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed")
    options = {"degrees": {"dp": 3}, "threads": 1}
    document = reshard(str(SOURCE), str(tmp_path / "ray"), Reading(), Writing(**options, ray="local"), Silent())
    reshard(str(SOURCE), str(tmp_path / "alone"), Reading(), Writing(**options), Silent())
    assert document["digest_checked"]
    for file in (tmp_path / "alone").iterdir():
        assert file.read_bytes() == (tmp_path / "ray" / file.name).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "ray"]


def test_without_ray_the_way_out_is_told(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match="Ray is not installed") as caught:
        reshard(str(SOURCE), str(tmp_path / "out"), Reading(), Writing(ray="auto"), Silent())
    assert "pip install" in caught.value.hint and not list(tmp_path.iterdir())
