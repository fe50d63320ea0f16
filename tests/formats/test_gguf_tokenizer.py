"""The tokenizer of a GGUF: from the files beside a model as llama.cpp's converter writes it, and back into such files.

The goldens are the converter's and transformers' (`fixtures/make/gguf_files.py`)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt_tool.cli import run
from ckpt_tool.errors import UsageError
from ckpt_tool.storage.source import Tree
from ckpt_tool.systems.llamacpp.gguf.header import read_header, value_of
from ckpt_tool.systems.llamacpp.gguf.tokenizer import (
    BYTE,
    CONTROL,
    NORMAL,
    UNUSED,
    USER,
    TokenizerFiles,
    tokenizer_pairs,
)
from ckpt_tool.systems.llamacpp.gguf.tokenizer_files import UNSAID, tokenizer_files

MADE = Path(__file__).parents[2] / "fixtures/gguf-made"
Pairs = dict[str, Any]
TEXTS = [
    "the quick brown fox jumps over the lazy dog 12345 it's we've\n\n  Größe 東京", "def f(x): return x + 1\n",
    "  leading   and   trailing  ", "", " ", "\t\n\r\n x", "IT'S HE'LL", "😀 ünïcode", "<|end|> a <tool> b <|begin|>c",
    "1234567890 !?#$%^&*() foo_bar/baz", "the" * 20, "<|user|>the <plain> dog",
]  # fmt: skip


def call(*words: object) -> int:
    return run([*map(str, words), "--json"])


def pairs_of(path: Path) -> Pairs:
    tree = Tree(path)
    header = read_header(tree, path.name)
    return {key: value_of(tree, header, key) for key in header.entries if key.startswith("tokenizer.")}


def files_of(folder: Path, **changed: Any) -> TokenizerFiles:
    tokenizer, settings, config = (
        json.loads((folder / name).read_text()) for name in ("tokenizer.json", "tokenizer_config.json", "config.json")
    )
    return TokenizerFiles(**{"tokenizer": tokenizer, "settings": settings, "config": config, **changed})


def ids(folder: Path) -> list[list[int]]:
    """Of all texts, with what is put around them and without, and of two."""
    tokenizers = pytest.importorskip("tokenizers", reason="it is the judge")
    loaded = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    each = [loaded.encode(text, add_special_tokens=special).ids for text in TEXTS for special in (True, False)]
    return [*each, loaded.encode("the", "dog").ids]


# -- into GGUF ---------------------------------------------------------------------------------------------------------


def test_pieces_without_their_model_are_what_the_converter_writes_but_for_the_scores() -> None:
    want = pairs_of(MADE / "llama_pieces.gguf")
    found, lines = tokenizer_pairs(files_of(MADE / "llama_pieces"), "llama")
    have = {key: value for key, _, value in found}
    count = len(want["tokenizer.ggml.tokens"])
    scores = have.pop("tokenizer.ggml.scores")
    assert lines == [] and set(want.pop("tokenizer.ggml.scores")) == {-1000.0}  # the converter has none to write
    for key in ("tokens", "token_type"):  # and no rows beyond the tokens, without which llama.cpp refuses the embedding
        assert len(have[f"tokenizer.ggml.{key}"]) == 320 > count
        have[f"tokenizer.ggml.{key}"] = have[f"tokenizer.ggml.{key}"][:count]
    assert have == want
    merges = json.loads((MADE / "llama_pieces/tokenizer.json").read_text())["model"]["merges"]
    vocab = have["tokenizer.ggml.tokens"]
    first = [scores[vocab.index("".join(merge))] for merge in merges]
    assert first == sorted(first, reverse=True) and len(set(first)) > 9


def changed(files: TokenizerFiles, path: str, value: Any) -> TokenizerFiles:
    *steps, last = path.split("/")
    at: Any = files.tokenizer
    for step in steps:
        at = at[int(step) if step.isdigit() else step]
    at[last] = value(at[last]) if callable(value) else value
    return files


OF_ITS_OWN: list[tuple[str, Any]] = [
    ("model/merges", lambda rows: rows[1:]),
    ("model/merges", lambda rows: [*rows, rows[0]]),
    ("model/merges", lambda rows: [*rows, ["the", "no such token"]]),
    ("model/merges", lambda rows: [*rows, ["a"]]),
    ("model/merges", lambda rows: [*rows, [1, 2]]),
    ("model/merges", lambda rows: [*rows, 7]),
    ("model/merges", {}),
    ("model/vocab", []),
    ("pre_tokenizer", {"type": "Metaspace", "split": True}),
    ("pre_tokenizer", {"type": "Sequence", "pretokenizers": 3}),
    ("pre_tokenizer", "Metaspace"),
]


@pytest.mark.parametrize(("path", "value"), OF_ITS_OWN, ids=[str(n) for n in range(len(OF_ITS_OWN))])
def test_what_no_scores_give_is_left_out_with_a_line(path: str, value: Any) -> None:
    pairs, lines = tokenizer_pairs(changed(files_of(MADE / "llama_pieces"), path, value), "llama")
    assert pairs == [] and len(lines) == 1 and "no tokenizer is written" in lines[0]


def test_merges_of_one_piece_stand_together_or_no_scores_give_them() -> None:
    def scores(*merges: str) -> Any:
        files = files_of(MADE / "llama_pieces")
        vocab = {text: number for number, text in enumerate(("a", "b", "c", "ab", "bc", "abc"))}
        files = changed(changed(files, "model/vocab", vocab), "model/merges", list(merges))
        pairs, lines = tokenizer_pairs(files, "llama")
        found = {key: value for key, _, value in pairs}.get("tokenizer.ggml.scores")
        return (found[3:6] if found else None, len(lines))

    assert scores("b c", "a b", "ab c", "a bc") == ([-1.0, -0.0, -2.0], 0)
    assert scores("a b", "ab c", "b c", "a bc") == (None, 1)
    assert scores("a b", "b c", "ab c") == (None, 1)  # what llama.cpp would merge too


@pytest.mark.parametrize("number", [-1, 320, 1 << 70, "3", None, True])
def test_a_number_beyond_the_vocabulary_is_an_error(number: Any) -> None:
    files = changed(files_of(MADE / "llama_pieces"), "model/vocab", lambda vocab: {**vocab, "x": number})
    with pytest.raises(UsageError, match="the vocabulary has 320 rows"):
        tokenizer_pairs(files, "llama")


def test_no_space_is_put_before_texts_where_the_tokenizer_puts_none() -> None:
    def stated(files: TokenizerFiles) -> Any:
        return {key: value for key, _, value in tokenizer_pairs(files, "llama")[0]}.get(
            "tokenizer.ggml.add_space_prefix"
        )

    assert stated(files_of(MADE / "llama_pieces")) is None
    assert stated(changed(files_of(MADE / "llama_pieces"), "pre_tokenizer", None)) is False
    prepended = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"}]}
    files = changed(files_of(MADE / "llama_pieces"), "pre_tokenizer", None)
    assert stated(changed(files, "normalizer", prepended)) is None


def test_a_model_of_unigrams_is_said_to_be_merged() -> None:
    raw = (MADE / "gemma3/tokenizer.model").read_bytes()
    config = {"vocab_size": 320}
    assert tokenizer_pairs(TokenizerFiles(pieces=raw, config=config), "llama")[1] == []
    trained = b"\x12\x02\x18\x01"  # trainer_spec { model_type = UNIGRAM }, which is laid over what stands before
    _, lines = tokenizer_pairs(TokenizerFiles(pieces=raw + trained, config=config), "llama")
    assert len(lines) == 1 and "unigrams" in lines[0]


def test_what_stands_between_two_texts_is_said_as_the_converter_says_it() -> None:
    def sep(*between: str, last: str | None = None) -> Any:
        files = files_of(MADE / "llama_pieces")
        steps = [{"SpecialToken": {"id": token}} for token in between]
        end = [{"SpecialToken": {"id": last}}] if last else []
        ends = [{"Sequence": {"id": name}} for name in "AB"]
        pair = [{"SpecialToken": {"id": "<s>"}}, ends[0], *steps, ends[1], *end]
        single = [{"SpecialToken": {"id": "<s>"}}, ends[0], *end]
        assert files.tokenizer is not None
        files.tokenizer["post_processor"].update(single=single, pair=pair)  # type: ignore[index]
        return {key: value for key, _, value in tokenizer_pairs(files, "llama")[0]}.get("tokenizer.ggml.add_sep_token")

    assert [sep(), sep("<s>"), sep("</s>"), sep("</s>", last="</s>")] == [None, False, True, False]
    assert [sep("<s>", "</s>"), sep("</s>", "</s>", last="</s>"), sep("</s>", "<s>")] == [True, True, True]


# -- out of GGUF -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_byte_level_bpe_gives_the_ids_of_the_source(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("convert", MADE / f"{name}.gguf", tmp_path / "out", "--to", "safetensors", "--dtype", "bf16") == 0
    assert UNSAID in json.loads(capsys.readouterr().out)["notes"]
    assert ids(tmp_path / "out") == ids(MADE / name)
    assert call("convert", tmp_path / "out", tmp_path / "again.gguf", "--to", "gguf") == 0
    assert pairs_of(tmp_path / "again.gguf") == pairs_of(MADE / f"{name}.gguf")
    settings, theirs = (
        json.loads((at / "tokenizer_config.json").read_text()) for at in (tmp_path / "out", MADE / name)
    )
    same = ("bos_token", "eos_token")
    assert [settings[key] for key in same] == [theirs[key] for key in same]
    assert settings["chat_template"] == (MADE / name / "chat_template.jinja").read_text()


def test_pieces_give_the_merges_and_ids_of_the_source(tmp_path: Path) -> None:
    found, _ = tokenizer_pairs(files_of(MADE / "llama_pieces"), "llama")
    files, lines = tokenizer_files({key: value for key, _, value in found})
    assert set(files) == {"tokenizer.json", "tokenizer_config.json"} and lines[0] == UNSAID
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    made, theirs = (json.loads((at / "tokenizer.json").read_text()) for at in (tmp_path, MADE / "llama_pieces"))
    theirs["model"]["vocab"] |= {"<|user|>": 316, "<plain>": 317}  # that were added to it
    theirs["model"]["merges"] = list(map(" ".join, theirs["model"]["merges"]))
    assert made["model"] | {"unk_token": "<unk>"} == theirs["model"]
    same = [
        (a, b)
        for a, b, text in zip(ids(tmp_path), ids(MADE / "llama_pieces"), [t for t in TEXTS for _ in "ab"], strict=False)
        if "<" not in text
    ]  # behind a special token llama.cpp puts a space, and Metaspace puts it elsewhere
    assert len(same) == 20 and all(a == b for a, b in same)


def test_files_that_lie_beside_the_source_stay(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    shutil.copy(MADE / "qwen3_moe.gguf", tmp_path / "in")
    (tmp_path / "in/tokenizer_config.json").write_text('{"mine": 1}')
    assert call("convert", tmp_path / "in", tmp_path / "out", "--to", "safetensors", "--dtype", "bf16") == 0
    assert [path.name for path in (tmp_path / "out").glob("tok*")] == ["tokenizer_config.json"]


def test_transformers_loads_what_was_made(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="it is the judge")
    for name in ("qwen3_moe", "gemma3"):
        assert call("convert", MADE / f"{name}.gguf", tmp_path / name, "--to", "safetensors", "--dtype", "bf16") == 0
        loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / name)
        tokens = pairs_of(MADE / f"{name}.gguf")["tokenizer.ggml.tokens"]
        assert all(loaded.convert_ids_to_tokens(n) == text for n, text in enumerate(tokens) if text != f"[PAD{n}]")
        assert loaded.decode(loaded("the quick dog")["input_ids"], skip_special_tokens=True) == "the quick dog"
    source = transformers.AutoTokenizer.from_pretrained(MADE / "qwen3_moe")
    mine = transformers.AutoTokenizer.from_pretrained(tmp_path / "qwen3_moe")
    assert [mine(text)["input_ids"] for text in TEXTS] == [source(text)["input_ids"] for text in TEXTS]


Change = Callable[[Pairs], object]


def key(name: str, value: Any) -> Change:
    def change(pairs: Pairs) -> None:
        old = pairs.get(f"tokenizer.ggml.{name}")
        pairs[f"tokenizer.ggml.{name}"] = value(old) if callable(value) else value

    return change


BPE: list[tuple[Change, str]] = [
    (key("model", "bert"), "'bert'"),
    (key("model", 7), "'7'"),
    (key("pre", "falcon"), "'falcon'"),
    (key("pre", ["x"]), "stands for"),
    (lambda pairs: pairs.pop("tokenizer.ggml.tokens"), "tokens is not there"),
    (key("tokens", []), "token_type has 320 values for 0"),
    (key("tokens", "x" * 320), "tokens is of another type"),
    (key("tokens", lambda rows: [*rows[:-1], 3]), "tokens is of another type"),
    (key("tokens", lambda rows: [*rows[:3], rows[2], *rows[4:]]), "are the same text"),
    (key("tokens", lambda rows: ["\udcff", *rows[1:]]), "not UTF-8"),
    (key("token_type", lambda rows: rows[1:]), "319 values for 320"),
    (key("token_type", lambda rows: [1.0, *rows[1:]]), "token_type is of another type"),
    (lambda pairs: pairs.pop("tokenizer.ggml.merges"), "merges is not there"),
    (key("merges", lambda rows: ["a b c", *rows]), "merge of number 0"),
    (key("merges", lambda rows: [*rows, "a \udcff"]), "is not one of two tokens"),
    (key("merges", lambda rows: [["a", "b"]]), "merges is of another type"),
    (key("bos_token_id", 320), "bos_token_id is 320"),
    (key("eos_token_id", -1), "eos_token_id is -1"),
    (key("padding_token_id", "x"), "padding_token_id is x"),
    (key("add_bos_token", 1), "add_bos_token is no truth value"),
    (lambda pairs: pairs.update({"tokenizer.chat_template": ["x"]}), "chat_template is no text"),
    (lambda pairs: pairs.update({"tokenizer.chat_template": "\udcff"}), "chat_template is no text"),
]
PIECES: list[tuple[Change, str]] = [
    (lambda pairs: pairs.pop("tokenizer.ggml.scores"), "scores is not there"),
    (key("scores", lambda rows: rows[1:]), "319 values for 320"),
    (key("scores", lambda rows: [1, *rows[1:]]), "scores is of another type"),
    (key("tokens", lambda rows: [*rows[:-5], "x" * 129, *rows[-4:]]), ""),
    (key("add_space_prefix", 3), "no truth value"),
]


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [*(("qwen3_moe", *row) for row in BPE), *(("gemma3", *row) for row in PIECES)],
    ids=[str(n) for n in range(len(BPE) + len(PIECES))],
)
def test_pairs_that_contradict_themselves_are_left_out_with_a_line(name: str, change: Change, words: str) -> None:
    pairs = pairs_of(MADE / f"{name}.gguf")
    change(pairs)
    if not words:  # the piece counts as one
        pairs["tokenizer.ggml.token_type"][-5], words = NORMAL, "129 characters"
    files, lines = tokenizer_files(pairs)
    assert files == {} and len(lines) == 1
    assert lines[0].startswith("no tokenizer is written") and words in lines[0]


def test_what_is_said_where_the_metadata_says_nothing() -> None:
    def made(**more: Any) -> Pairs:
        tokens = ["<unk>", "<s>", "</s>", "a", "b", "ab", "<x>", "[PAD7]", "<0x0A>"]
        kinds = [2, CONTROL, CONTROL, NORMAL, NORMAL, NORMAL, USER, UNUSED, BYTE]
        pairs = {"model": "llama", "tokens": tokens, "token_type": kinds, "scores": [0.0] * 9, **more}
        files, _ = tokenizer_files({f"tokenizer.ggml.{key}": value for key, value in pairs.items()})
        return {**json.loads(files["tokenizer.json"]), **json.loads(files["tokenizer_config.json"])}

    found = made()
    assert found["bos_token"] == "<s>" and found["unk_token"] == "<unk>" and found["model"]["byte_fallback"] is False
    assert found["model"]["merges"] == ["a b"] and "[PAD7]" not in found["model"]["vocab"]
    assert found["post_processor"]["single"][0] == {"SpecialToken": {"id": "<s>", "type_id": 0}}
    assert [token["special"] for token in found["added_tokens"]] == [True, True, True, False]
    assert made(add_bos_token=False)["post_processor"] is None
    around = made(add_eos_token=True, bos_token_id=3)["post_processor"]
    assert [next(iter(step)) for step in around["pair"]] == ["SpecialToken", "Sequence", "SpecialToken"] * 2
    bpe = made(model="gpt2", pre="llama3", merges=["a b"], eos_token_id=6, eot_token_id=6)
    assert bpe["model"]["ignore_merges"] is True and bpe["post_processor"] is None  # no number of bos
    assert bpe["eos_token"] == "<x>" and bpe["normalizer"] is None


def test_what_has_no_place_in_the_files_is_named() -> None:
    pairs = pairs_of(MADE / "qwen3_moe.gguf") | {"tokenizer.ggml.eot_token_id": 3}
    assert "tokenizer.ggml.eot_token_id" in tokenizer_files(pairs)[1][-1]
    assert tokenizer_files({}) == ({}, [])
