"""Every verb runs and every format is read, once each, in one process: what the quick tier is to notice first.

A verb or format that is new has to be given its line or its fixture here, or these tests fail.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ckpt_tool.cli import run
from ckpt_tool.cli.verbs import VERBS
from ckpt_tool.formats.entry import entries

pytestmark = pytest.mark.quick  # always in the quick tier, whatever is chosen of this file

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
DCP = FIXTURES / "dcp" / "fsdp2_dp4"
MODEL = FIXTURES / "safetensors" / "llama_one_file"

# verb -> a line of it, run in this order in a folder of their own. validate and kernels train and compile: their help.
LINES = {
    "inspect": ("inspect", DCP),
    "reshard": ("reshard", DCP, "dp2", "--dp", "2", "--plan", "plan.json"),
    "apply": ("apply", "plan.json"),
    "status": ("status", "plan.json"),
    "verify": ("verify", "dp2"),
    "diff": ("diff", DCP, "dp2"),
    "convert": ("convert", MODEL, "one.pt", "--to", "torch"),
    "merge": ("merge", MODEL, "less", "--remove-keys", "lm_head.*", "--to", "sharded"),
    "delta": ("delta", MODEL, MODEL, "change"),
    "patch": ("patch", MODEL, "change", "again"),
    "audit": ("audit", MODEL),
    "latest": ("latest", FIXTURES / "megatron" / "hybrid_tp2pp2"),
    "prune": ("prune", FIXTURES / "megatron" / "hybrid_tp2pp2", "--keep-last", "1", "--dry-run"),
    "validate": ("validate", "--help"),
    "kernels": ("kernels", "--help"),
    "doctor": ("doctor",),
    "help": ("help", "recipes"),
    "clean": ("clean", "."),
    "explain": ("explain", "E0301"),
}
# format -> a checkpoint of it
SOURCES = {
    "safetensors": "safetensors/llama_one_file",
    "torch": "torch/structures.pt",
    "dcp": "dcp/fsdp2_dp4",
    "sharded": "sharded/llama_tp4_pp2",
    "megatron": "megatron/hybrid_tp2pp2",
    "megatron-dist": "megatron-dist/llama_tp2",
    "megatron-fsdp": "megatron-fsdp/fsdp_dp2",
    "deepspeed": "deepspeed/z1_bf16_dp4",
    "deepspeed-universal": "deepspeed-universal/z1_bf16_dp2",
    "paddle": "paddle/llama_bf16_legacy_tp2",
    "paddle-unified": "paddle-unified/llama_tied_hf",
    "paddle-flex": "paddle-flex/llama_tied_pp2",
    "meta": "meta/llama3_tp4",
    "peft": "peft/lora_bf16",
    "gguf": "gguf/llama3.gguf",
    "orbax": "orbax/adamw_ocdbt_zarr2",
}


def _answer(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str]:
    code = run([str(word) for word in words])
    shown = capsys.readouterr()
    return code, shown.out + shown.err


def test_every_verb_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert set(LINES) == set(VERBS)
    for line in LINES.values():
        code, shown = _answer(capsys, *line)
        assert code == 0, f"{line}: {shown}"


def test_every_format_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(SOURCES) == set(entries())
    for name, source in SOURCES.items():
        code, shown = _answer(capsys, "inspect", FIXTURES / source, "--json")
        assert code == 0, f"{name}: {shown}"
        document: dict[str, Any] = json.loads(shown)
        assert document["format"] == name and document["tensors"], source
