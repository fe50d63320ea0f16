"""Two checkpoints in one folder: fixtures of every pair of formats laid together.

What the contract says: two formats that both claim a folder are an error that names both, and `--from` decides. `ONE`
lists the pairs that are one checkpoint all the same, each with its reason. Read with `--from`, either is what it is
alone.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import pytest

from ckpt_tool.errors import CkptError
from ckpt_tool.formats import registry
from ckpt_tool.options.reading import Reading
from ckpt_tool.sources.opening import open_source

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
NO_HUB = ("dcp_uneven", "ranks_tp2_dp2", "llama2_tp2")  # forms that no hub's loader opens: they accompany nothing
# A folder of each form that a format has, else the first; of a run with a pointer file the step's own folder. GGUF's
# fixtures are files.
FIRST = {
    p.parent.name: p.name for name in registry.NAMES for p in sorted((FIXTURES / name).iterdir())[::-1] if p.is_dir()
}
FOLDERS = {name: (folder,) for name, folder in FIRST.items()}
FOLDERS |= {
    "safetensors": ("llama_one_file", "hf_llama_sharded", "dcp_uneven"),
    "torch": ("hf_bin", "ranks_tp2_dp2"),
    "dcp": ("fsdp2_dp4", "accelerate_fsdp2", "no_collectives"),
    "sharded": ("llama_tp4_pp2",),
    "megatron": ("moe_tp2ep2etp1/iter_0000002",),
    "megatron-fsdp": ("fsdp_dp2/iter_0000002",),
    "megatron-dist": ("llama_tp2/iter_0000001", "core19/iter_0000005"),
    "deepspeed": ("z1_bf16_dp4", "z0_bf16_dp2"),
    "deepspeed-universal": ("pipe_pp2_dp2",),
    "paddle": ("llama_bf16_legacy_tp2",),
    "paddle-unified": ("llama_tied_hf", "llama_lora_hf"),
    "paddle-flex": ("llama_tied_pp2", "parts", "nested"),
    "meta": ("llama2_tp2", "mistral"),
    "peft": ("on_llama", "bin"),
}
HUB = "a hub's folder holds the model in several forms, and transformers takes safetensors first"
BASE = "an adapter beside its base: transformers opens the base"
# (the format that is read, the one that accompanies it, which of its folders): why
NEAREST = "DCP folders are those nearest to the root: below a save there are no others"
ONE = {
    ("safetensors", "meta", "mistral"): HUB,
    ("safetensors", "peft", "on_llama"): BASE,
    ("safetensors", "peft", "bin"): BASE,
    ("torch", "peft", "on_llama"): BASE,
    ("torch", "peft", "bin"): BASE,
    ("meta", "peft", "on_llama"): BASE,
    ("meta", "peft", "bin"): BASE,
    ("megatron-dist", "dcp", "accelerate_fsdp2"): NEAREST,
    ("megatron-fsdp", "dcp", "accelerate_fsdp2"): NEAREST,
}
SIDE = ("config.json", "generation_config.json", "latest_checkpointed_iteration.txt", "params.json", "README.md")


def pairs() -> Iterator[object]:
    for one, other in combinations(FOLDERS, 2):
        for left in FOLDERS[one]:
            for right in FOLDERS[other]:
                a = FIXTURES / one / left
                b = FIXTURES / other / right
                common = {p.relative_to(a) for p in a.rglob("*") if p.is_file()} & {
                    p.relative_to(b) for p in b.rglob("*")
                }
                if not {path.name for path in common} - set(SIDE):
                    yield pytest.param((one, left), (other, right), id=f"{one}-{left}+{other}-{right}")


def names_of(path: Path, fmt: str) -> set[str]:
    catalog = open_source(str(path), Reading(from_format=fmt, lenient=True)).catalog
    return {str(key) for key in catalog.tensors}


@pytest.mark.share(36)
@pytest.mark.parametrize(("one", "other"), list(pairs()))
def test_both_are_named_or_one_accompanies_the_other(
    one: tuple[str, str], other: tuple[str, str], tmp_path: Path
) -> None:
    for name, case in (one, other):
        shutil.copytree(FIXTURES / name / case, tmp_path, dirs_exist_ok=True)
    known = [key for key in ONE if (key[0], *key[1:]) in ((one[0], *other), (other[0], *one))]
    if known and not {one[1], other[1]} & set(NO_HUB):
        opened = open_source(str(tmp_path), Reading(lenient=True))
        assert opened.format.name == known[0][0], ONE[known[0]]
        return
    with pytest.raises(CkptError) as e:
        open_source(str(tmp_path), Reading())
    if other == ("torch", "hf_bin") and one[0] == "safetensors" and one[1] not in NO_HUB:
        assert e.value.code == "E2604", "a hub's two forms of two models: their indexes name other tensors"
        return
    assert e.value.code == "E0391" and one[0] in e.value.message and other[0] in e.value.message, e.value
    assert f"--from {one[0]}" in e.value.hint and f"--from {other[0]}" in e.value.hint
    for name, case in (one, other):
        if case != "dcp_uneven":  # of several forms of its own a format reads one
            assert names_of(tmp_path, name) == names_of(FIXTURES / name / case, name), f"--from {name}"
