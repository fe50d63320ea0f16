"""The tokenizer in a GGUF file's metadata, made from the files next to a model.

    tokenizer.json, tokenizer_config.json   ->   tokenizer.ggml.{model = gpt2, pre, tokens, token_type, merges, ...}
    tokenizer.model (SentencePiece)         ->   tokenizer.ggml.{model = llama, tokens, scores, token_type, ...}
    tokenizer.json, BPE with byte_fallback  ->   the same, with scores that give its merges

llama.cpp's converter runs the tokenizer on one text and looks up the hash of its ids to name the pre-tokenizer. Here
the regular expressions in tokenizer.json name it, since they are what the name means. If they are not in the table, no
tokenizer is written and the report has a line: a wrong name would load, and split texts in another way. A SentencePiece
model is a protobuf of pieces (text, score, kind); apart from them only its type is read (unigram or not).

A tokenizer.json of Llama without tokenizer.model (BPE that falls back on bytes) is SentencePiece to llama.cpp, which
merges the pair that makes the piece of the highest score. Its converter writes -1000 for all, so that texts are merged
from the left; here a piece's score is the position of its merges, if every way to make it is a merge and these merges
are consecutive, as transformers writes them (`generate_merges`). Merges in another order are left out, with a line.

Sources: llama.cpp of October 2026 `conversion/base.py` (`get_vocab_base`, `_create_vocab_sentencepiece`), `phi.py`,
`src/llama-vocab.cpp` (the expressions, `llm_tokenizer_spm`); its gguf-py `vocab.py` (`SpecialVocab`, `LlamaHfVocab`);
sentencepiece 0.2.1 `sentencepiece_model.proto`; transformers 5.23.0 `tokenization_utils_tokenizers.py`. Cost: 1 us a
token, 7 us a piece of merges. What it does not do: WordPiece and unigram vocabularies, which no converter has for the
architectures here; tokens that a tokenizer would normalise.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ckpt_tool.core.bounds import numeral
from ckpt_tool.errors import UsageError

# `TokenType`; SentencePiece has the same numbers
NORMAL = 1
UNKNOWN = 2
CONTROL = 3
USER = 4
UNUSED = 5
BYTE = 6
WRONG = "E1713"
MOST = 1 << 24  # tokens
_CASES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
)
_SLASH = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = _CASES + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TAIL
QWEN2 = _CASES + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TAIL
QWEN35 = _CASES + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN = _WORDS % ("", "") + r"|\p{N}" + _SLASH
GPT4O = _WORDS % (_CASES + "?", _CASES + "?") + r"|\p{N}{1,3}" + _SLASH
_DEEPSEEK_WORDS = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
).replace(r"\r\n", "\r\n")  # DeepSeek's tokenizer.json has the characters themselves, not the escapes
DEEPSEEK3 = (r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK_WORDS)
# The expressions by which a text is split, in order -> llama.cpp's name for them
PRE: Mapping[tuple[str, ...], str] = {
    (): "gpt-2",
    (LLAMA3,): "llama-bpe",
    (QWEN2,): "qwen2",
    (QWEN35,): "qwen35",
    (TEKKEN,): "tekken",
    (GPT4O,): "gpt-4o",
    DEEPSEEK3: "deepseek-v3",
}
WHOLE_WORDS = frozenset(("llama-bpe", "tekken"))  # a word that is a token is not merged (`ignore_merges`)
_BPE_ALWAYS = frozenset(("qwen2moe", "qwen3moe", "deepseek2"))  # their converter ignores tokenizer.model
_SPECIAL = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_IDS = {kind: kind for kind in ("bos", "eos", "mask", "eot", "eom")} | {
    "unk": "unknown",
    "sep": "seperator",
    "pad": "padding",
}
_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")
_UNIGRAM = 1  # `TrainerSpec.model_type`, also its default
SPACE = "\u2581"  # what SentencePiece writes for a space
LONGEST = 128  # characters of a piece that is merged
Pair = tuple[str, str, Any]


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The content of a tokenizer's files next to a model; None for those that are missing."""

    tokenizer: Mapping[str, Any] | None = None  # tokenizer.json
    settings: Mapping[str, Any] | None = None  # tokenizer_config.json
    pieces: bytes | None = None  # tokenizer.model
    added: Mapping[str, Any] = field(default_factory=dict)  # added_tokens.json
    template: str | None = None  # chat_template.jinja
    config: Mapping[str, Any] = field(default_factory=dict)  # config.json of the model


class _Vocabulary(NamedTuple):
    """Three columns of equal length, indexed by the number of a token."""

    tokens: list[str | bytes]
    scores: list[float]
    kinds: list[int]


def tokenizer_pairs(files: TokenizerFiles, architecture: str) -> tuple[list[Pair], list[str]]:
    """The metadata pairs of the tokenizer: ([(key, type, value), ...], lines about what is left out).

    Raises UsageError E1713 for files that are damaged or belong to another model.
    """
    size = files.config.get("vocab_size")
    if type(size) is not int or not 0 < size <= MOST:
        return [], [_without("the config states no vocabulary")]

    out: list[Pair] = []
    if files.pieces is not None and architecture not in _BPE_ALWAYS and not _is_bpe(files, architecture):
        found = _read_pieces(files, size, architecture)
        space = (files.settings or {}).get("add_prefix_space")
        if architecture == "llama" and isinstance(space, bool):
            out.append(("tokenizer.ggml.add_space_prefix", "BOOL", space))
        out += [("tokenizer.ggml.model", "STRING", "llama"), ("tokenizer.ggml.pre", "STRING", "default")]
        out += [("tokenizer.ggml.tokens", "STRING", found.tokens), ("tokenizer.ggml.scores", "FLOAT32", found.scores)]
        out += [("tokenizer.ggml.token_type", "INT32", found.kinds), *_special(files, size)]
        # 107 is <end_of_turn> of the first Gemma; llama.cpp's converter has the number as a constant too.
        if architecture.startswith("gemma"):
            out += [("tokenizer.ggml.eot_token_id", "UINT32", 107)] if architecture == "gemma" else []
            out.append(("tokenizer.ggml.add_space_prefix", "BOOL", False))
        return out, [_UNIGRAMS] if _is_unigram(files.pieces) else []

    model = (files.tokenizer or {}).get("model")
    if not isinstance(model, Mapping):
        return [], [_without("there is no tokenizer.json and no tokenizer.model")]
    if architecture == "llama" and model.get("type") == "BPE" and model.get("byte_fallback"):
        return _like_pieces(files, model, size)
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        return [], [_without(f"its vocabulary is {model.get('type')}, and there is no tokenizer.model")]

    pre = _pre_tokenizer(files.tokenizer or {})
    if pre is None:
        return [], [_without("its pre-tokenizer splits texts by none of the expressions that are known here")]

    found = _read_bpe(files, model, size)
    out += [("tokenizer.ggml.model", "STRING", "gpt2"), ("tokenizer.ggml.pre", "STRING", pre)]
    out += [("tokenizer.ggml.tokens", "STRING", found.tokens), ("tokenizer.ggml.token_type", "INT32", found.kinds)]
    return [*out, ("tokenizer.ggml.merges", "STRING", _merges(model)), *_special(files, None)], []


def _without(why: str) -> str:
    return f"no tokenizer is written, and llama.cpp wants one: {why}"


_UNIGRAMS = (
    "tokenizer.model is a model of unigrams: its scores are written as they are, and llama.cpp merges by them, as it "
    "does for BPE, so texts may be split otherwise"
)


def _is_bpe(files: TokenizerFiles, architecture: str) -> bool:
    """Whether byte-level BPE counts although there is a tokenizer.model: Phi-4 has both, its class decides."""
    return architecture == "phi3" and (files.settings or {}).get("tokenizer_class") == "GPT2Tokenizer"


# -- byte-level BPE ----------------------------------------------------------------------------------------------------


def _pre_tokenizer(tokenizer: Mapping[str, Any]) -> str | None:
    """llama.cpp's name of the pre-tokenizer in a tokenizer.json, None if it is not in the table `PRE`."""
    stated = tokenizer.get("pre_tokenizer")
    if not isinstance(stated, Mapping):
        return None
    steps = stated.get("pretokenizers") if stated.get("type") == "Sequence" else [stated]
    if not isinstance(steps, list) or not steps or not all(isinstance(step, Mapping) for step in steps):
        return None
    *splits, last = steps
    regexes = tuple(_regex(step) for step in splits)
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space") or None in regexes:
        return None
    if bool(last.get("use_regex", True)) != (not regexes):
        return None
    name = PRE.get(regexes)  # type: ignore[arg-type]
    whole = bool(tokenizer["model"].get("ignore_merges"))
    return name if name is None or whole == (name in WHOLE_WORDS) else None


def _regex(step: Mapping[str, Any]) -> str | None:
    pattern = step.get("pattern")
    plain = step.get("type") == "Split" and step.get("behavior") == "Isolated" and not step.get("invert")
    regex = pattern.get("Regex") if plain and isinstance(pattern, Mapping) else None
    return regex if isinstance(regex, str) else None


def _read_bpe(files: TokenizerFiles, model: Mapping[str, Any], size: int) -> _Vocabulary:
    # The embedding may have more rows than there are tokens: llama.cpp wants a token for each.
    tokens: list[str | bytes] = [f"[PAD{number}]" for number in range(size)]
    kinds = [UNUSED] * size
    vocab = model.get("vocab")
    for text, number in vocab.items() if isinstance(vocab, Mapping) else ():
        _check_number(number, size, text)
        tokens[number], kinds[number] = text, NORMAL
    for number, text, special in _list_added(files):
        _check_number(number, size, text)
        if special or looks_special(text):
            tokens[number], kinds[number] = text, CONTROL
        else:
            tokens[number], kinds[number] = text.replace("\u2581", " "), USER
    return _Vocabulary(tokens, [], kinds)


def _list_added(files: TokenizerFiles) -> Iterator[tuple[int, str, bool]]:
    """(number, text, is it special) of each added token; tokenizer.json wins over tokenizer_config.json."""
    rows = {}
    listed = (files.tokenizer or {}).get("added_tokens")
    for entry in listed if isinstance(listed, list) else ():
        if isinstance(entry, Mapping) and type(entry.get("id")) is int:
            rows[entry["id"]] = entry
    decoder = (files.settings or {}).get("added_tokens_decoder")
    for number, entry in decoder.items() if isinstance(decoder, Mapping) else ():
        if isinstance(entry, Mapping) and numeral(number):
            rows.setdefault(int(number), entry)
    for number, entry in rows.items():
        yield number, str(entry.get("content")), bool(entry.get("special"))


def _merges(model: Mapping[str, Any]) -> list[str]:
    """The merges as texts `a b`; pairs are joined, with their spaces spelled as byte-level BPE does. Raises E1713."""
    rows = model.get("merges")
    out = list[str]()
    for row in rows if isinstance(rows, list) else (rows,):
        parts = row if isinstance(row, list) else [row]
        if len(parts) not in (1, 2) or not all(isinstance(part, str) for part in parts):
            raise UsageError(
                f"{str(row)[:60]!r} is no merge of two tokens",
                code=WRONG,
                path="tokenizer.json",
                hint="the file is damaged: fetch it again",
            )
        out.append(row if isinstance(row, str) else " ".join(str(part).replace(" ", "\u0120") for part in parts))
    return out


def looks_special(text: str) -> bool:
    """Whether a token's text looks like a control token: some models do not mark theirs (`does_token_look_special`)."""
    ends = (("<|", "|>"), ("<\uff5c", "\uff5c>"), ("<unused", ">"))
    return text in ("<pad>", "<mask>", "<2mass>", "[@BOS@]") or any(
        text.startswith(first) and text.endswith(last) for first, last in ends
    )


def _check_number(number: object, size: int, text: str) -> None:
    if type(number) is not int or not 0 <= number < size:
        raise UsageError(
            f"the token {text[:60]!r} has number {str(number)[:40]}, the vocabulary has {size} rows",
            code=WRONG,
            hint="the tokenizer's files are another model's: fetch both again, or --vocab-size adds rows",
        )


# -- SentencePiece -----------------------------------------------------------------------------------------------------


def _read_pieces(files: TokenizerFiles, size: int, architecture: str) -> _Vocabulary:
    tokens: list[str | bytes] = [f"[PAD{number}]" for number in range(size)]
    scores = [-10000.0] * size
    kinds = [UNUSED] * size
    for number, (text, score, kind) in enumerate(pieces_of(files.pieces or b"")):
        if number >= size:
            break
        tokens[number], scores[number], kinds[number] = text, score, kind
    for word, place in files.added.items():
        if type(place) is int and 0 <= place < size:
            tokens[place], scores[place], kinds[place] = word, -1000.0, USER
    phi = architecture == "phi3"
    rows = list(_list_added(TokenizerFiles(settings=files.settings)))
    for place, word, special in [*rows, *(_list_added(TokenizerFiles(tokenizer=files.tokenizer)) if phi else ())]:
        if 0 <= place < size:
            control = special or (not phi and looks_special(word))
            kinds[place] = CONTROL if control else USER
            scores[place] = -1000.0
            tokens[place] = word if control or phi else word.replace("\u2581", " ")
    return _Vocabulary(tokens, scores, kinds)


def pieces_of(raw: bytes) -> Iterator[tuple[bytes, float, int]]:
    """(text, score, kind) of each piece of a SentencePiece model. Raises UsageError E1713."""
    for number, value in _fields(raw):
        if number == 1 and isinstance(value, bytes):
            piece = dict(_fields(value))
            text = piece.get(1, b"")
            score = piece.get(2, bytes(4))
            kind = piece.get(3, NORMAL)
            if not (isinstance(text, bytes) and isinstance(score, bytes) and len(score) == 4 and isinstance(kind, int)):
                raise _no_model("a piece is none")
            if not NORMAL <= kind <= BYTE:
                raise _no_model(f"a piece of kind {kind}")
            yield text, struct.unpack("<f", score)[0], kind


def _is_unigram(raw: bytes) -> bool:
    """Whether a SentencePiece model is a unigram model: it splits a text by the best sum of scores, not by merges."""
    trained = [value for number, value in _fields(raw) if number == 2 and isinstance(value, bytes)]
    return bool(trained) and dict(_fields(b"".join(trained))).get(3, _UNIGRAM) == _UNIGRAM


def _fields(raw: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a protobuf message as (number of the field, value): varints as int, all others as bytes."""
    at = 0
    while at < len(raw):
        tag, at = _varint(raw, at)
        kind = tag & 7
        if kind == 0:
            value, at = _varint(raw, at)
            yield tag >> 3, value
            continue
        if kind == 2:
            length, at = _varint(raw, at)
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
        else:
            raise _no_model(f"a field of kind {kind}")
        if at + length > len(raw):
            raise _no_model("it is cut short")
        yield tag >> 3, raw[at : at + length]
        at += length


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(raw) and shift < 64:
        byte = raw[at]
        value = value | (byte & 127) << shift
        at = at + 1
        shift = shift + 7
        if byte < 128:
            return value, at
    raise _no_model("it is cut short")


def _no_model(why: str) -> UsageError:
    return UsageError(
        f"tokenizer.model is no SentencePiece model: {why}", code=WRONG, path="tokenizer.model", hint="fetch it again"
    )


# -- BPE that falls back on bytes --------------------------------------------------------------------------------------


def _like_pieces(files: TokenizerFiles, model: Mapping[str, Any], size: int) -> tuple[list[Pair], list[str]]:
    """As `tokenizer_pairs`, for a tokenizer.json that was converted from a SentencePiece model."""
    stated = files.tokenizer or {}
    vocab = model.get("vocab")
    if not isinstance(vocab, Mapping) or not _one_line(stated.get("pre_tokenizer")):
        return [], [_without("tokenizer.json splits texts before it merges, and there is no tokenizer.model")]

    merged = _scores(vocab, model.get("merges"))
    if merged is None:
        return [], [_without("the merges of tokenizer.json are in no order of scores, and there is no tokenizer.model")]

    tokens: list[str | bytes] = [f"[PAD{number}]" for number in range(size)]
    scores = [-1000.0] * size
    kinds = [UNUSED] * size
    special = _named_special(files.settings or {})

    for text, number in vocab.items():
        _check_number(number, size, text)
        kind = CONTROL if text in special else NORMAL
        if _BYTE.fullmatch(text):
            kind = BYTE
        tokens[number] = text
        scores[number] = merged.get(text, -1000.0)
        kinds[number] = kind

    for number, text, _ in _list_added(files):
        _check_number(number, size, text)
        if text not in vocab:
            tokens[number], kinds[number] = text, CONTROL if text in special else USER

    out: list[Pair] = []
    space = (files.settings or {}).get("add_prefix_space")
    if not isinstance(space, bool):
        space = _prepends(stated.get("normalizer")) or _prepends(stated.get("pre_tokenizer"))
        space = None if space else False  # llama.cpp puts one before a text unless it is said not to

    if isinstance(space, bool):
        out.append(("tokenizer.ggml.add_space_prefix", "BOOL", space))
    out += [("tokenizer.ggml.model", "STRING", "llama"), ("tokenizer.ggml.pre", "STRING", "default")]
    out += [("tokenizer.ggml.tokens", "STRING", tokens), ("tokenizer.ggml.scores", "FLOAT32", scores)]
    return [*out, ("tokenizer.ggml.token_type", "INT32", kinds), *_special(files, size)], []


def _scores(vocab: Mapping[str, Any], merges: Any) -> dict[str, float] | None:
    """Scores by which llama.cpp merges pieces in the order of `merges`: {piece: minus the position of its merges}.

    None if there are no such scores: the merges of a piece are not consecutive, or one of the ways to make it is none.
    """
    ways: dict[str, int] = {}
    last = ""
    rows = merges if isinstance(merges, list) else []
    for row in rows:
        parts = row.split(" ") if isinstance(row, str) else row
        if not isinstance(parts, list) or len(parts) != 2 or not all(isinstance(part, str) for part in parts):
            return None
        made = "".join(parts)
        if (made != last and made in ways) or made not in vocab:
            return None
        ways[made], last = ways.get(made, 0) + 1, made
    for text in vocab:
        if len(text) > 1 and ways.get(text, 0) != len(list(ways_to_make(text, vocab))):
            return None
    return {made: -float(place) for place, made in enumerate(ways)}


def ways_to_make(text: str, vocab: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Every pair of tokens whose concatenation is `text`; nothing for a text longer than `LONGEST`."""
    for at in range(1, len(text) if len(text) <= LONGEST else 0):
        if text[:at] in vocab and text[at:] in vocab:
            yield text[:at], text[at:]


def _one_line(step: Any) -> bool:
    """Whether a pre-tokenizer leaves a text unsplit."""
    if isinstance(step, Mapping) and step.get("type") == "Sequence":
        inner = step.get("pretokenizers")
        return isinstance(inner, list) and all(map(_one_line, inner))
    if step is None:
        return True
    return isinstance(step, Mapping) and step.get("type") == "Metaspace" and step.get("split") is False


def _prepends(step: Any) -> bool:
    """Whether a normalizer or pre-tokenizer puts a space before a text."""
    if not isinstance(step, Mapping):
        return False
    inner = step.get("normalizers", step.get("pretokenizers"))
    metaspace = step.get("type") == "Metaspace" and step.get("prepend_scheme", "always") != "never"
    return metaspace or step.get("type") == "Prepend" or (isinstance(inner, list) and any(map(_prepends, inner)))


def _named_special(settings: Mapping[str, Any]) -> set[Any]:
    """The texts of the tokens that tokenizer_config.json declares as special."""
    named = [value for key, value in settings.items() if key.endswith("_token")]
    for key in ("extra_special_tokens", "additional_special_tokens"):
        more = settings.get(key)
        if isinstance(more, Mapping):
            more = more.values()
        elif not isinstance(more, list):
            more = ()
        named += more
    return {text for text in map(_text, named) if isinstance(text, str)}


# -- special tokens ----------------------------------------------------------------------------------------------------


class _Special(NamedTuple):
    """The special tokens that a tokenizer.json implies."""

    adds: dict[str, bool]  # bos, eos, ... -> is it added to every text?
    words: dict[str, Any]  # KIND_token -> text


def _special(files: TokenizerFiles, size: int | None) -> Iterator[Pair]:
    """The pairs of the special tokens and the chat template, as gguf-py's `SpecialVocab` derives them.

    size: numbers from it on are left out; None for no bound.
    """
    kinds: tuple[str, ...] = _SPECIAL
    ids = dict[str, int]()
    adds = dict[str, bool]()

    if files.tokenizer is not None:
        found = _read_template(files.tokenizer, dict(files.settings or {}))
        adds = found.adds
        settings = found.words
        kinds = (*kinds, *(kind for kind in ("eot", "eom") if f"{kind}_token" in settings))
    else:
        settings = dict(files.settings or {})

    texts: dict[Any, Any] = {}
    listed = (files.tokenizer or {}).get("added_tokens")
    for entry in listed if isinstance(listed, list) else ():
        if isinstance(entry, Mapping) and isinstance(entry.get("content"), str):
            texts.setdefault(entry["content"], entry.get("id"))

    for kind in kinds if files.settings is not None else ():
        if isinstance(settings.get(f"add_{kind}_token"), bool):
            adds.setdefault(kind, settings[f"add_{kind}_token"])
        word = settings.get(f"{kind}_token")
        text = word.get("content") if isinstance(word, Mapping) else word
        if isinstance(text, str):
            _note(ids, kind, texts.get(text), size)

    for kind in kinds:
        _note(ids, kind, files.config.get(f"{kind}_token_id"), size)
    yield from ((f"tokenizer.ggml.{_IDS[kind]}_token_id", "UINT32", ids[kind]) for kind in ids if kind in _IDS)
    yield from (
        (f"tokenizer.ggml.add_{kind}_token", "BOOL", adds[kind]) for kind in ("bos", "eos", "sep") if kind in adds
    )
    template = settings.get("chat_template", files.template)
    if isinstance(template, str) and files.settings is not None:
        yield "tokenizer.chat_template", "STRING", template


def _note(ids: dict[str, int], kind: str, number: object, size: int | None) -> None:
    if type(number) is int and 0 <= number < (1 << 32 if size is None else size):
        ids.setdefault(kind, number)


def _read_template(tokenizer: Mapping[str, Any], settings: dict[str, Any]) -> _Special:
    """The tokens that the post-processor of a tokenizer.json adds to a text, as `SpecialVocab` reads them."""
    adds: dict[str, bool] = {}
    for kind, other in (("bos", "cls"), ("eos", "sep")):
        if settings and not settings.get(f"{kind}_token") and settings.get(f"{other}_token"):
            settings[f"{kind}_token"] = settings[f"{other}_token"]
    stated = tokenizer.get("post_processor")
    steps = stated.get("processors", [stated]) if isinstance(stated, Mapping) else []
    for step in steps if isinstance(steps, list) else ():
        if not isinstance(step, Mapping):
            continue
        if step.get("type") == "ByteLevel":
            adds.setdefault("bos", False)
            adds.setdefault("eos", False)
        single = step.get("single") if step.get("type") == "TemplateProcessing" else None
        if isinstance(single, list) and len(single) > 1:
            _around(single, step.get("pair"), settings, adds)
    return _Special(adds, settings)


def _around(single: Sequence[Any], pair: Any, settings: dict[str, Any], adds: dict[str, bool]) -> None:
    first, last = (_token(single[at]) for at in (0, -1))
    words = {kind: _text(settings.get(f"{kind}_token")) for kind in ("bos", "cls", "eos")}
    if first is not None:
        adds["bos"] = first in (words["bos"], words["cls"]) or not words["bos"] or not words["cls"]
        if settings and first not in (words["bos"], words["cls"]):
            settings |= {f"{kind}_token": first for kind in ("bos", "cls") if not words[kind]}
    if last is not None:
        if settings and last != words["eos"]:
            settings |= {"eot_token": words["eos"], "eos_token": last}
        adds["eos"] = True
    if isinstance(pair, list):
        _between(pair, first, last, settings, adds)


def _between(
    pair: list[Any], first: str | None, last: str | None, settings: dict[str, Any], adds: dict[str, bool]
) -> None:
    """Set `adds["sep"]`: whether the template of two texts has a separator token between them."""
    inner = pair[first is not None and bool(pair) and _token(pair[0]) == first :]
    inner = inner[:-1] if last is not None and inner and _token(inner[-1]) == last else inner
    ends = [_sequence(inner[at]) for at in (0, -1)] if inner else []
    middle = [_token(step) for step in inner[1:-1]]
    if ends != ["A", "B"] or not middle:
        return
    words = [_text(settings.get(f"{kind}_token")) for kind in ("sep", "eos")]
    adds["sep"] = (middle[0] in words and last is None) or (len(middle) == 2 and middle[1] in words)
    adds["sep"] &= None not in middle[:2]
    if adds["sep"] and settings and not words[0]:
        settings["sep_token"] = words[1]


def _sequence(step: Any) -> Any:
    found = step.get("Sequence") if isinstance(step, Mapping) else None
    return found.get("id") if isinstance(found, Mapping) else None


def _token(step: Any) -> str | None:
    special = step.get("SpecialToken") if isinstance(step, Mapping) else None
    text = special.get("id") if isinstance(special, Mapping) else None
    return text if isinstance(text, str) and text else None


def _text(word: Any) -> Any:
    return word.get("content") if isinstance(word, Mapping) else word
