"""What the verbs give on the CPU and on the device, side by side: documents, bytes, errors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import save_file

import ckpt_tool as ckpt
from ckpt_tool.errors import CkptError

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
OWN = ("elapsed_s", "device")  # of a writer's document; the bytes of its buffers too


class Outcome(NamedTuple):
    """What a call gave, without what must differ, and the hashes of the files that it wrote."""

    document: Any
    files: dict[str, str]


def hashes(path: Path) -> dict[str, str]:
    if path.is_file():
        return {"": hashlib.sha256(path.read_bytes()).hexdigest()}
    return {
        str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(path.rglob("*"))
        if file.is_file()
    }


def outcome(call: Callable[[], dict[str, Any]], output: Path | None = None) -> Outcome:
    """The document or the error of a call. output: what it writes; its parent's name is left out of the document."""
    try:
        document: Any = {key: value for key, value in call().items() if key not in OWN}
        if "plan" in document:
            document["plan"] = {key: value for key, value in document["plan"].items() if key != "peak_memory"}
        if "findings" in document:
            document["findings"] = sorted(document["findings"], key=str)
    except CkptError as e:
        document = {
            "error": e.code,
            "exit": e.exit_code,
            "message": e.message,
            "path": str(e.path),
            "key": str(e.key),
            "offset": e.offset,
            "faults": list(e.faults),
            "hint": e.hint,
        }
    text = json.dumps(document, sort_keys=True, default=str)
    if output is not None:
        text = text.replace(str(output.parent), "OUT")
    return Outcome(json.loads(text), hashes(output) if output is not None and output.exists() else {})


def both(verb: str, *sources: Path, tmp_path: Path, name: str = "out", **options: Any) -> tuple[Outcome, Outcome]:
    """A verb on the CPU, then on the device."""
    found = []
    for device in ("cpu", "cuda"):
        if verb in ("verify", "diff"):
            found.append(outcome(lambda: getattr(ckpt, verb)(*sources, device=device, **options)))  # noqa: B023
            continue
        folder = tmp_path / device
        folder.mkdir(exist_ok=True)
        given = (list(sources), folder / name) if verb == "merge" else (*sources, folder / name)
        found.append(outcome(lambda: getattr(ckpt, verb)(*given, device=device, **options), folder / name))  # noqa: B023
    return found[0], found[1]


def model(path: Path, *, seed: int = 0, rows: int = 300) -> Path:
    """A folder of tensors of many types and odd shapes: one of some MiB, small ones, an empty one, a scalar."""
    rng = np.random.default_rng(seed)
    path.mkdir(parents=True)
    values = {
        "big.weight": rng.standard_normal((rows, 1031), np.float32),
        "wide": np.arange(rows * 7 * 16, dtype=np.int64).reshape(7, rows, 16),
        "half": rng.standard_normal((257, 96)).astype(np.float16),
        "codes": rng.integers(0, 255, (130, 66), np.uint8),
        "flag": rng.integers(0, 2, 11).astype(np.bool_),
        "scalar": np.array(3.5, np.float64),
        "empty": np.zeros((0, 4), np.float32),
        **{f"norm.{i}": np.arange(64, dtype=np.float32) + i for i in range(40)},
    }
    values["big.weight"][0, :5] = [np.inf, -np.inf, 3e38, 1e-45, -0.0]
    save_file(values, path / "model.safetensors")
    return path
