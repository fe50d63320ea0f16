"""`ckpt inspect --anonymous`: what is left of a document says nothing of whose checkpoint it is."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import ckpt_tool as ckpt
from ckpt_tool.cli import run
from ckpt_tool.commands.anonymous import anonymize

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
SECRETS = ("acme", "hydra", "20251103", "ann@", "Übung", "зебра")


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A model with words in its names, folder and metadata that nobody else may know."""
    folder = tmp_path / "acme" / "hydra-20251103"
    folder.mkdir(parents=True)
    names = [
        "model.layers.0.acme_gate.weight",
        "model.layers.11.acme_gate.weight",
        "model.layers.0.HydraProj.weight",
        "model.20251103.зебра.Übung.weight",
        "ann@acme.weight",
    ]
    tensors = {name: np.full((2, 3), 0.815, np.float32) for name in names}
    save_file(tensors, folder / "hydra.safetensors", metadata={"made_by": "ann@acme", "format": "pt"})
    return folder


def shown(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert run(["inspect", *arguments]) == 0
    captured = capsys.readouterr()
    return captured.out + captured.err


@pytest.mark.parametrize("options", [["--json"], ["--json", "--placement", "--security"], [], ["--placement", "-v"]])
def test_no_word_of_the_owner_is_shown(
    secret: Path, options: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPT_ANONYMOUS_KEY", "a key")
    text = shown([str(secret), "--anonymous", *options], capsys).lower()
    assert not [word for word in SECRETS if word.lower() in text]
    assert "0.815" not in text and "tmp" not in text and "a key" not in text


def test_structure_stays(secret: Path) -> None:
    document = ckpt.inspect(secret, anonymous=True)
    plain = ckpt.inspect(secret)
    assert document["anonymous"] is True
    assert document["total"] == plain["total"] and document["states"] == plain["states"]
    assert [row["shape"] for row in document["tensors"]] == [row["shape"] for row in plain["tensors"]]
    assert [row["dtype"] for row in document["tensors"]] == [row["dtype"] for row in plain["tensors"]]

    names = {row["name"] for row in document["tensors"]}
    gates = [re.fullmatch(r"model\.layers\.(0|11)\.(x[0-9a-f]{8})_gate\.weight", name) for name in names]
    found = [match for match in gates if match]
    assert {match[1] for match in found} == {"0", "11"}
    assert len({match[2] for match in found}) == 1  # one word, one hash
    assert len(names) == len(plain["tensors"])


def test_the_key_is_new_for_each_run_unless_it_is_given(secret: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (ckpt.inspect(secret, anonymous=True) for _ in range(2))
    assert first != second

    monkeypatch.setenv("CKPT_ANONYMOUS_KEY", "one")
    assert ckpt.inspect(secret, anonymous=True) == ckpt.inspect(secret, anonymous=True) != first


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("deepspeed/z1_bf16_dp4", "mp_rank_00_model_states.pt"),
        ("megatron/hybrid_tp2pp2", "model_optim_rng.pt"),
        ("dcp/fsdp2_dp4", "__0_0.distcp"),
        ("safetensors/hf_llama_sharded", "self_attn.q_proj.weight"),
    ],
)
def test_common_words_stay(source: str, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    document = ckpt.inspect(FIXTURES / source, anonymous=True, placement=True)
    assert word in json.dumps(document)


def test_of_extras_the_kinds_stay() -> None:
    document = ckpt.inspect(FIXTURES / "deepspeed/z1_bf16_dp4", anonymous=True)
    assert document["extras"]["global_steps"] == "int" and document["extras"]["optimizer"].startswith("dict of ")
    assert set(map(type, document["extras"].values())) == {str}
    assert "0.0025" not in json.dumps(document)


def test_an_incomplete_checkpoint_names_no_file(secret: Path, capsys: pytest.CaptureFixture[str]) -> None:
    index = {
        "metadata": {},
        "weight_map": {"model.acme.weight": "hydra.safetensors", "a.weight": "lost-hydra.safetensors"},
    }
    (secret / "model.safetensors.index.json").write_text(json.dumps(index))
    assert run(["inspect", str(secret), "--json", "--anonymous"]) == 3
    captured = capsys.readouterr()
    assert not [word for word in SECRETS if word.lower() in (captured.out + captured.err).lower()]
    assert json.loads(captured.out)["missing"]["error"]["code"] in captured.err


def test_what_a_document_gains_is_left_out_until_it_is_listed() -> None:
    document: dict[str, Any] = {**ckpt.inspect(FIXTURES / "dcp/fsdp2_dp4"), "owner": "acme"}
    document["tensors"][0]["note"] = "acme"
    assert "acme" not in json.dumps(anonymize(document))


def test_a_class_of_one_s_own_is_hashed() -> None:
    document: dict[str, Any] = dict(ckpt.inspect(FIXTURES / "dcp/fsdp2_dp4"))
    document["security"] = {"unsafe": ["acme.Model is no data"], "globals": ["torch.Size", "acme.models.HydraConfig"]}
    public = anonymize(document)["security"]
    assert public["globals"][0] == "torch.Size" and public["unsafe"] == ["findings that are left out: 1"]
    assert "acme" not in json.dumps(public) and "Hydra" not in json.dumps(public)


@pytest.mark.parametrize("more", [["--stats"], ["--report", "out.html"]])
def test_what_shows_values_or_the_command_is_refused(
    more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["inspect", str(FIXTURES / "dcp/fsdp2_dp4"), "--anonymous", *more]) == 2
    assert "E3050" in capsys.readouterr().err and not (tmp_path / "out.html").exists()
