"""The tokenizer in a GGUF file's metadata as the files that transformers loads.

    tokenizer.ggml.{model = gpt2, pre, tokens, token_type, merges}     ->   tokenizer.json: byte-level BPE
    tokenizer.ggml.{model = llama, tokens, scores, token_type}         ->   tokenizer.json: BPE that falls back on bytes
    bos_token_id, ..., tokenizer.chat_template                         ->   tokenizer_config.json

The one idea: the written files split texts as llama.cpp does with these pairs. The expressions are those that the name
of the pre-tokenizer means (`tokenizer.PRE`); a SentencePiece model's merges are all ways to make a piece, ordered by
its score, and by its number if scores are equal, as transformers converts such a model to BPE (`generate_merges`).
Every token keeps its number and is in the vocabulary, because tokens that are not in it get new numbers. The class is
the general one, which takes tokenizer.json as it is. A tokenizer that contradicts itself, or has no such form, is left
out with a line in the report; the weights are complete without it.

GGUF does not state Unicode normalisation (Qwen's own tokenizers have NFC, and so have these, where the pre-tokenizer is
theirs), nor whether an added token absorbs the spaces next to it. If all scores are equal, as llama.cpp's converter
writes them for a tokenizer.json, llama.cpp splits texts in another way: merges by numbers are those of the source.
Sources: `tokenizer`; llama.cpp of October 2026 `src/llama-vocab.cpp` (`load`: what is true where nothing is said;
`tokenize`: a space before each text between special tokens); transformers 5.23.0 `tokenization_utils_tokenizers.py`,
`convert_slow_tokenizer.py`. Cost: 2 us a token and 28 MB for 128,000; of SentencePiece's 7 us and
74 MB.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from ckpt_tool.systems.llamacpp.gguf.tokenizer import (
    BYTE,
    CONTROL,
    LONGEST,
    MOST,
    NORMAL,
    PRE,
    SPACE,
    UNKNOWN,
    UNUSED,
    USER,
    WHOLE_WORDS,
    ways_to_make,
)

PREFIX = "tokenizer."
TOKENIZER = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
# Other names of llama.cpp for the same expressions
_ALIKE = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "deepseek-r1-qwen": "qwen2", "llama4": "gpt-4o"}
_SPLITS = {name: regexes for regexes, name in PRE.items()}
_NFC = ("qwen2", "qwen35")
# special token in tokenizer_config.json -> its word in the metadata's key (`seperator` is llama.cpp's spelling)
_WORDS = {word: word for word in ("bos", "eos", "mask")} | {"unk": "unknown", "sep": "seperator", "pad": "padding"}
_LLAMA = {"bos": 1, "eos": 2, "unk": 0}  # defaults for a SentencePiece model whose metadata states no numbers
_KEYS = (
    *("model", "pre", "tokens", "token_type", "scores", "merges"),
    *("add_bos_token", "add_eos_token", "add_sep_token", "add_space_prefix"),
    *(f"{word}_token_id" for word in _WORDS.values()),
)
_READ = frozenset(f"tokenizer.ggml.{key}" for key in _KEYS) | {"tokenizer.chat_template"}
UNSAID = (
    "tokenizer.json is made of the metadata, which does not say whether added tokens take up the spaces next to them, "
    "nor how Unicode is normalised"
)


class _Unfit(Exception):
    """The tokenizer can't be written; the text is the reason."""


class _TokenTable(NamedTuple):
    """The vocabulary."""

    tokens: list[str]  # by number
    kinds: list[int]  # by number
    numbers: dict[str, int]  # text -> number, without padding


def tokenizer_files(stated: Mapping[str, Any]) -> tuple[dict[str, bytes], list[str]]:
    """The tokenizer's files, as ({file name: bytes}, lines for the report).

    stated: the metadata pairs whose keys begin with `PREFIX`, with all values of long arrays.
    """
    if "tokenizer.ggml.model" not in stated:
        return {}, []
    try:
        vocabulary = _vocabulary(stated)
        kind = stated["tokenizer.ggml.model"]
        if kind == "gpt2":
            made, lines = _byte_level(stated, vocabulary)
        elif kind == "llama":
            made, lines = _write_pieces(stated, vocabulary)
        else:
            raise _Unfit(f"a tokenizer of llama.cpp's kind {str(kind)[:40]!r} has no such form here")
        words = _special(stated, vocabulary)
        made["post_processor"] = _processor(stated, vocabulary, words)
        settings = _settings(stated, words)
    except _Unfit as e:
        return {}, [f"no tokenizer is written: {e}; copy the files of the model's own repository"]
    rest = sorted(key for key in stated if key not in _READ)
    lines += [f"of the tokenizer not written, having no place in its files: {', '.join(rest)[:400]}"] if rest else []
    files = {TOKENIZER: made, SETTINGS: settings}
    data = {name: (json.dumps(value, ensure_ascii=False) + "\n").encode() for name, value in files.items()}
    return data, [UNSAID, *lines]


def _checked_list(stated: Mapping[str, Any], name: str, kind: type, length: int | None = None) -> list[Any]:
    """A list of the metadata. Raises _Unfit if it has another length, or values of another type."""
    key = f"tokenizer.ggml.{name}"
    found = stated.get(key)
    if not isinstance(found, list) or not all(type(value) is kind for value in found):
        raise _Unfit(f"{key} is {'not there' if found is None else 'of another type'}")
    if length is not None and len(found) != length:
        raise _Unfit(f"{key} has {len(found)} values for {length} tokens")
    return found


def _vocabulary(stated: Mapping[str, Any]) -> _TokenTable:
    tokens = _checked_list(stated, "tokens", str)
    kinds = _checked_list(stated, "token_type", int, len(tokens))
    if not 0 < len(tokens) <= MOST:
        raise _Unfit(f"{len(tokens)} tokens")
    numbers: dict[str, int] = {}
    for number, text in enumerate(tokens):
        if kinds[number] == UNUSED and text == f"[PAD{number}]":  # a row of the embedding without a token
            continue
        if not _is_text(text):
            raise _Unfit(f"the token of number {number} is not UTF-8")
        if numbers.setdefault(text, number) != number:
            raise _Unfit(f"the tokens of numbers {numbers[text]} and {number} are the same text")
    return _TokenTable(tokens, kinds, numbers)


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _model(vocabulary: _TokenTable, merges: list[str], **more: Any) -> dict[str, Any]:
    """tokenizer.json without the steps before and after the model (normalizer, pre-tokenizer, decoder)."""
    kinds = vocabulary.kinds
    whole = {"normalized": False, "single_word": False, "lstrip": False, "rstrip": False}
    added = [
        {"id": number, "content": text, "special": kinds[number] != USER, **whole}
        for text, number in vocabulary.numbers.items()
        if kinds[number] in (CONTROL, UNKNOWN, USER)
    ]
    plain = {"dropout": None, "continuing_subword_prefix": None, "end_of_word_suffix": None, "unk_token": None}
    model = {"type": "BPE", **plain, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, **more}
    model |= {"vocab": vocabulary.numbers, "merges": merges}
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "model": model}


# -- byte-level BPE ----------------------------------------------------------------------------------------------------


def _byte_level(stated: Mapping[str, Any], vocabulary: _TokenTable) -> tuple[dict[str, Any], list[str]]:
    pre = stated.get("tokenizer.ggml.pre")
    name = _ALIKE.get(str(pre), str(pre))
    if name not in _SPLITS:
        raise _Unfit(f"the expressions that the pre-tokenizer {str(pre)[:40]!r} mean is not known here")
    merges = _checked_list(stated, "merges", str)
    for number, merge in enumerate(merges):
        left, _, right = merge.partition(" ")
        if not {left, right, left + right} <= vocabulary.numbers.keys():
            raise _Unfit(f"the merge of number {number} is not one of two tokens into a third")
    made = _model(vocabulary, merges, ignore_merges=name in WHOLE_WORDS)
    regexes = _SPLITS[name]
    steps: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False} for regex in regexes
    ]
    # GPT-2's expression is built into the ByteLevel step; all others come as Split steps before it.
    steps.append(_bytes(use_regex=not regexes))
    made["normalizer"] = {"type": "NFC"} if name in _NFC else None
    made["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps} if regexes else steps[0]
    made["decoder"] = _bytes(use_regex=True)
    return made, ["Unicode is normalised by NFC, as Qwen's own tokenizers do"] if name in _NFC else []


def _bytes(*, use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": use_regex}


# -- SentencePiece -----------------------------------------------------------------------------------------------------


def _write_pieces(stated: Mapping[str, Any], vocabulary: _TokenTable) -> tuple[dict[str, Any], list[str]]:
    numbers = vocabulary.numbers
    kinds = vocabulary.kinds
    scores = _checked_list(stated, "scores", float, len(kinds))
    whole = {text: n for text, n in numbers.items() if kinds[n] == NORMAL}
    long = next((n for text, n in whole.items() if len(text) > LONGEST), None)
    if long is not None:
        raise _Unfit(
            f"the piece of number {long} has {len(vocabulary.tokens[long])} characters, want at most {LONGEST}"
        )

    ways = [(scores[n], pair) for text, n in whole.items() for pair in map(" ".join, ways_to_make(text, whole))]
    # The sort is stable: ways of equal score remain in the order of their pieces' numbers.
    ways.sort(key=lambda way: way[0], reverse=True)
    unknown = next((text for text, n in numbers.items() if kinds[n] == UNKNOWN), None)
    bytes_ = all(
        kinds[numbers[name]] == BYTE if name in numbers else False for name in map("<0x{:02X}>".format, range(256))
    )
    made = _model(vocabulary, [pair for _, pair in ways], unk_token=unknown, fuse_unk=True, byte_fallback=bytes_)
    space = stated.get("tokenizer.ggml.add_space_prefix", True)
    if not isinstance(space, bool):
        raise _Unfit("tokenizer.ggml.add_space_prefix is no truth value")

    steps: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]
    made["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": SPACE}] * space + steps}
    made["pre_tokenizer"] = None
    back: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "}]
    back += [{"type": "ByteFallback"}, {"type": "Fuse"}]
    back += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] * space
    made["decoder"] = {"type": "Sequence", "decoders": back}
    return made, [
        "a space is put before a text, and before one that follows a special token, as llama.cpp does"
    ] * space


# -- special tokens ----------------------------------------------------------------------------------------------------


def _special(stated: Mapping[str, Any], vocabulary: _TokenTable) -> dict[str, str]:
    """The texts of the special tokens, by their kind (bos, eos, ...)."""
    words: dict[str, str] = {}
    usual = _LLAMA if stated["tokenizer.ggml.model"] == "llama" else {}
    for word, key in _WORDS.items():
        number = stated.get(f"tokenizer.ggml.{key}_token_id", usual.get(word))
        if number is None:
            continue
        if type(number) is not int or not 0 <= number < len(vocabulary.tokens):
            raise _Unfit(f"tokenizer.ggml.{key}_token_id is {str(number)[:40]}, of {len(vocabulary.tokens)} tokens")
        if vocabulary.numbers.get(vocabulary.tokens[number]) == number:
            words[word] = vocabulary.tokens[number]
    return words


def _adds(stated: Mapping[str, Any], word: str) -> bool:
    """Whether llama.cpp adds this token before (bos) or after (eos) every text."""
    model = stated["tokenizer.ggml.model"]
    pre = stated.get("tokenizer.ggml.pre")
    usual = word == "bos" and (model == "llama" or _ALIKE.get(str(pre), str(pre)) in WHOLE_WORDS)
    found = stated.get(f"tokenizer.ggml.add_{word}_token", usual)
    if not isinstance(found, bool):
        raise _Unfit(f"tokenizer.ggml.add_{word}_token is no truth value")
    return found


def _processor(stated: Mapping[str, Any], vocabulary: _TokenTable, words: Mapping[str, str]) -> dict[str, Any] | None:
    """The post-processor that adds bos and eos to a text, None if neither is added."""
    around = [words.get(word) if _adds(stated, word) else None for word in ("bos", "eos")]
    tokens = [text for text in dict.fromkeys(around) if text]
    if not tokens:
        return None
    before, behind = ([token] if token else [] for token in around)
    one, two = ([*_steps(before, n), {"Sequence": {"id": "AB"[n], "type_id": n}}, *_steps(behind, n)] for n in (0, 1))
    special = {text: {"id": text, "ids": [vocabulary.numbers[text]], "tokens": [text]} for text in tokens}
    return {"type": "TemplateProcessing", "single": one, "pair": [*one, *two], "special_tokens": special}


def _steps(tokens: list[str], kind: int) -> list[dict[str, Any]]:
    return [{"SpecialToken": {"id": token, "type_id": kind}} for token in tokens]


def _settings(stated: Mapping[str, Any], words: Mapping[str, str]) -> dict[str, Any]:
    """The content of tokenizer_config.json."""
    out: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    out |= {f"{word}_token": text for word, text in words.items()}
    for word in ("bos", "eos"):
        if f"tokenizer.ggml.add_{word}_token" in stated:
            out[f"add_{word}_token"] = _adds(stated, word)
    template = stated.get("tokenizer.chat_template")
    if template is not None:
        if not isinstance(template, str) or not _is_text(template):
            raise _Unfit("tokenizer.chat_template is no text")
        out["chat_template"] = template
    return out
