"""The figures of the house on a made-up one."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import house_figures
from house_figures import Figures

LONG = "def long():\n" + "    x = 1\n" * house_figures.LONG
HOUSE = {
    "errors.py": "class E(Exception):\n    pass\n",
    "core/box.py": "from ckpt_tool.errors import E\n",
    "run/a.py": "from typing import Any\nfrom ckpt_tool.core import box\nfrom ckpt_tool.run import b\nx: Any = [1]  "
    "# fmt: skip\n",
    "run/b.py": "def f(v: Any) -> Any:\n    from ckpt_tool.core.box import E\n    from ckpt_tool.errors import E\n"
    + LONG,
}


def test_rooms_and_arrows() -> None:
    assert house_figures.figures(HOUSE) == {
        ".": Figures(files=1, lines=2, into=2),
        "core": Figures(files=1, lines=1, out=1, packages=1, into=2),
        "run": Figures(files=2, lines=7 + house_figures.LONG + 1, out=3, packages=2, anys=3, long=1, skips=1),
    }


def test_the_table_ends_with_the_whole() -> None:
    last = house_figures.markdown(house_figures.figures(HOUSE)).splitlines()[-1]
    assert last == f"| **all** | 4 | {11 + house_figures.LONG} | 4 | 3 | 4 | 3 | 1 | 1 |"
