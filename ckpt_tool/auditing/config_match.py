"""What headers and side files say of one another: heads, dtypes, vocabularies, quantisation.

    A0301  an output layer of another shape than the embedding that it is tied to
    A0302  one layer's tensor in another float type than the same tensor of the others
    A0401  token numbers of the tokenizer, rows of the embedding and vocab_size that do not fit one another
    A0501  a quantisation that the config states and no tensor has, codes without scales, codes that no config states

Sources of the side files' keys: tokenizers 0.22 (`tokenizer.json`: `model.vocab`, `added_tokens`), transformers 5.23
`tokenization_utils_base.py` (`added_tokens.json`: {token: id}). Cost: the headers, and the tokenizer's JSON.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ckpt_tool.auditing.findings import DTYPE, HEAD, QUANTISED, WORDS, FoundFault
from ckpt_tool.auditing.subject import Subject
from ckpt_tool.conversion.tied_head import TIED, pair_of
from ckpt_tool.conversion.vocabulary import is_vocabulary
from ckpt_tool.families.table import form_of
from ckpt_tool.sources.config import tree_of
from ckpt_tool.weight_schemes.declared_scheme import quantisation, section
from ckpt_tool.weight_schemes.quantised_weights import CODES, CONFIG_KEYS, DTYPES, has_integers

_TOKENIZER = "tokenizer.json"
_ADDED = "added_tokens.json"
_TOKENIZER_LIMIT = 256 << 20  # bytes: the largest real ones have 35 MB
_FLOATS = ("F32", "F16", "BF16")
_FEW = 3  # an outlier is at most one of so many, of at least so many layers
_SHOWN = 50


def findings(subject: Subject) -> Iterator[FoundFault]:
    """What the config and the side files show. Headers and small files alone."""
    if subject.whole:
        yield from _heads(subject)
        yield from _vocabulary(subject)
    yield from _dtypes(subject)
    yield from _check_quantisation(subject)


def _heads(subject: Subject) -> Iterator[FoundFault]:
    pair = pair_of(subject.kinds)
    if pair is None or subject.config.get(TIED) is not True or pair[0] not in subject.kinds:
        return
    head, embedding = (subject.kinds[name] for name in pair)
    if head.shape != embedding.shape:
        message = (
            f"{pair[0]} is {list(head.shape)}, and the embedding to which the config ties it {list(embedding.shape)}"
        )
        yield FoundFault(HEAD, message, pair[0])


def _dtypes(subject: Subject) -> Iterator[FoundFault]:
    """By the form of a name, one tensor a layer. Where something is quantised, layers differ by intent."""
    if any(kind.dtype.name in CODES or kind.dtype.name in ("U8", "I32") for kind in subject.kinds.values()):
        return
    forms: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, kind in subject.kinds.items():
        if kind.dtype.name in _FLOATS:
            form, numbers = form_of(name)
            if numbers:
                forms[form][kind.dtype.name].append(name)
    for types in forms.values():
        total = sum(map(len, types.values()))
        if len(types) < 2 or total < _FEW:
            continue
        usual = max(types, key=lambda each: len(types[each]))
        for dtype_name, names in types.items():
            if dtype_name != usual and len(names) * _FEW <= total:
                for name in names[:_SHOWN]:
                    others = len(types[usual])
                    yield FoundFault(DTYPE, f"{name} is {dtype_name}, and that of {others} other layers {usual}", name)


def _vocabulary(subject: Subject) -> Iterator[FoundFault]:
    named = [name for name, kind in subject.kinds.items() if kind.shape and is_vocabulary(name) and subject.ruled(name)]
    rows = {name: subject.kinds[name].shape[0] for name in named}
    if not rows:
        return
    config = subject.found.family.facts(subject.config) if subject.found else subject.config
    vocab_size = config.get("vocab_size")
    padded = subject.found is not None and subject.found.dialect.startswith("megatron")
    name = next(iter(rows))
    wrong = type(vocab_size) is int and (rows[name] < vocab_size or (rows[name] > vocab_size and not padded))
    if wrong and subject.sure:
        yield FoundFault(WORDS, f"{name} has {rows[name]} rows, and the config says vocab_size {vocab_size}", name)
    different = [tensor for tensor in rows if rows[tensor] != rows[name]]
    if different and not padded:
        message = f"{different[0]} has {rows[different[0]]} rows, and {name} {rows[name]}"
        yield FoundFault(WORDS, message, different[0])
    last_token, file = max(_token_numbers(subject), default=(-1, ""))
    if last_token >= rows[name]:
        message = f"{file} has tokens up to number {last_token}, and {name} {rows[name]} rows"
        yield FoundFault(WORDS, message, name, file=file)


def _token_numbers(subject: Subject) -> Iterator[tuple[int, str]]:
    """(the highest number of a token, the file), for each tokenizer file that can be read."""
    for file in (_TOKENIZER, _ADDED):
        tree = tree_of(subject.opened, file)
        if tree is None or tree.single is not None or tree.size(file) > _TOKENIZER_LIMIT:
            continue
        try:
            value = json.loads(tree.read_whole(file, limit=_TOKENIZER_LIMIT))
        except (ValueError, RecursionError):  # `sources.sound` reports a file that is cut short
            continue
        numbers = [number for number in _numbers(value) if type(number) is int]
        if numbers:
            yield max(numbers), file


def _numbers(value: Any) -> Iterable[Any]:
    if not isinstance(value, Mapping):
        return ()
    if "model" not in value:  # added_tokens.json
        return value.values()
    vocab = value["model"].get("vocab") if isinstance(value["model"], Mapping) else None
    words: Iterable[Any] = ()
    if isinstance(vocab, Mapping):
        words = vocab.values()
    elif isinstance(vocab, list):  # a list of tokens: their numbers are their places
        words = [len(vocab) - 1]
    added = value.get("added_tokens")
    added_ids = [token.get("id") for token in added if isinstance(token, Mapping)] if isinstance(added, list) else []
    return [*words, *added_ids]


def _check_quantisation(subject: Subject) -> Iterator[FoundFault]:
    scheme = quantisation(subject.model.config)
    kinds = subject.kinds
    quantised = subject.quantised
    by_name = quantisation(None, kinds) if has_integers(kinds.values()) else None

    # If the scheme is unknown, so is which parts belong together.
    is_known = scheme.known if scheme is not None else by_name is None or by_name.known
    is_told = bool(quantised.weights) or scheme is not None
    for fault in quantised.faults[:_SHOWN] if is_told and is_known else ():
        yield FoundFault(QUANTISED, f"{fault.name}: {fault.what}", fault.name)

    integers = any(kind.dtype.name in DTYPES and len(kind.shape) > 1 for kind in kinds.values())
    is_stored = bool(quantised.weights) or by_name is not None or (integers if not is_known else _has_codes(subject))
    if section(subject.config) is not None and not is_stored:
        yield FoundFault(
            QUANTISED, f"the config states {scheme.scheme if scheme else CONFIG_KEYS[0]}, and no tensor is quantised"
        )
    if scheme is None and by_name is not None and by_name.wants_config:
        problem = "and no config says how they are stored: quantize_config.json, or a section of config.json"
        yield FoundFault(QUANTISED, f"there are codes of {by_name.scheme} ({by_name.why}), {problem}")
    floats8 = [name for name in quantised.weights if kinds[name].dtype.name.startswith("F8")]
    if floats8 and scheme is None and by_name is None and subject.model.config is not None:
        dtype = kinds[floats8[0]].dtype.name
        message = f"{len(floats8)} weights are {dtype} with scales, and the config has no {CONFIG_KEYS[0]}"
        yield FoundFault(QUANTISED, message, floats8[0])


def _has_codes(subject: Subject) -> bool:
    return any(kind.dtype.name in CODES for kind in subject.kinds.values())
