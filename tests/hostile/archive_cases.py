"""Hostile archives of NeMo's (tar), and files of verl's adapters: what their headers, names and configs may not do."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from pathlib import Path

FIXTURES = Path(__file__).parents[2] / "fixtures"
CONFIG = "model_config.yaml"


def packed(name, data, *, cut=None, **attributes):
    """Makes an archive of NeMo's config and one more member, or its first `cut` bytes."""

    def make(folder):
        path = folder / "model.nemo"
        with tarfile.open(path, "w:") as tar:
            for member, content in ((CONFIG, b"x: 1\n"), (name, data)):
                info = tarfile.TarInfo(member)
                info.size = len(content)
                if member is name:
                    for key, value in attributes.items():
                        setattr(info, key, value)
                tar.addfile(info, io.BytesIO(content))
        if cut is not None:
            path.write_bytes(path.read_bytes()[:cut])
        return path

    return make


def adapter(change):
    """Makes verl's adapter folder of two expert ranks, spoiled by `change(folder)`."""

    def make(folder):
        copy = folder / "actor"
        shutil.copytree(FIXTURES / "verl/moe_ep2", copy)
        change(copy)
        return copy

    return make


def says(**values):
    def change(folder):
        file = folder / "transformer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return change


def code(folder):
    (folder / "adapter_checkpoint/mp_rank_00_001_adapter.pt").write_bytes(
        b"\x80\x02cposix\nsystem\nX\x02\x00\x00\x00id\x85R."
    )


def nested(folder):
    (folder / "transformer_config.json").write_text('{"a":' + "[" * 100_000 + "]" * 100_000 + "}")


RANKS = {f"{dim}_model_parallel_size": 1 << 19 for dim in ("tensor", "pipeline")}
CASES = [
    ("nemo-link", packed("w", b"", type=tarfile.SYMTYPE, linkname="/etc/passwd"), 4, "is a link"),
    ("nemo-outside", packed("../w", b"1"), 4, "plain names"),
    ("nemo-twice", packed("./" + CONFIG, b"y"), 4, "appears in it twice"),
    ("nemo-device", packed("w", b"", type=tarfile.BLKTYPE), 4, "no plain file"),
    ("nemo-cut", packed("model_weights.ckpt", bytes(4096), cut=3000), 3, "damaged or cut short"),
    ("nemo-no-end", packed("model_weights.ckpt", bytes(4096), cut=5632), 3, "damaged or cut short"),
    ("nemo-huge-name", packed("n" * (3 << 20), b"1"), 3, "a header of"),
    ("adapter-code", adapter(code), 4, ("posix.system",)),
    ("adapter-ranks", adapter(says(**RANKS)), 3, "no job has"),
    ("adapter-experts", adapter(says(num_moe_experts=1 << 19)), 3, "no job has"),
    ("adapter-nested", adapter(nested), 3, "transformer_config.json"),
]  # fmt: skip
