"""PaddleFormers reads a config.json of ours: `python load_paddle_config.py FOLDER REPORT` (run with Paddle's Python).

REPORT (JSON): {"class": name of the config class, "values": every plain value that it holds, its rope among them}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(folder: str, report: str) -> None:
    from paddleformers.transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    values = {}
    for name in dir(config):
        value = None if name.startswith("_") else getattr(config, name, None)
        if isinstance(value, str | int | float | bool | dict | list):
            values[name] = value
    Path(report).write_text(json.dumps({"class": type(config).__name__, "values": values}, default=str))


if __name__ == "__main__":
    for folder in Path(sys.argv[1]).iterdir():
        main(str(folder), sys.argv[2] + f"/{folder.name}.json")
