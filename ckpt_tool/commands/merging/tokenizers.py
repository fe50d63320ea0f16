"""Do models speak the same tokens? Read from the files that lie beside the weights; nothing of a tokenizer is run.

Files that are equal byte for byte settle it. `tokenizer.json` and `vocab.json` that differ are compared by what they say of
tokens: the number of each token, the added ones too, and the merges; how they were formatted or by which version is no matter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt_tool.errors import CorruptFile
from ckpt_tool.storage.source import Tree
from ckpt_tool.storage.strict_json import parse

FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "sentencepiece.bpe.model", "tiktoken.model")
LIMIT = 256 << 20  # bytes; the largest real ones have some 30 MB


def difference(first: Tree, other: Tree) -> str | None:
    """How the tokenizers of two models differ, in words; None where they don't, or where one of them lies without any."""
    mine, theirs = _files(first), _files(other)
    if not mine or not theirs:
        return None
    both = [name for name in mine if name in theirs]
    if not both:
        return f"{mine[0]} here, {theirs[0]} there: they can't be compared"
    name = both[0]
    a, b = (tree.read_whole(name, limit=LIMIT) for tree in (first, other))
    if a == b:
        return None
    if not name.endswith(".json"):
        return f"{name} differs"
    try:
        one, two = (parse(data, path=tree.display(name)) for data, tree in ((a, first), (b, other)))
    except CorruptFile as e:
        return f"{name} differs, and is not read: {e.message}"
    return _of_vocabularies(name, _numbers(one), _numbers(two)) or _of_merges(name, one, two)


def _files(tree: Tree) -> list[str]:
    return [name for name in FILES if tree.single is None and tree.exists(name)]


def _numbers(data: Any) -> dict[str, Any]:
    """{token: its number} of a tokenizer.json or a vocab.json."""
    if not isinstance(data, Mapping):
        return {}
    model = data.get("model")
    if not isinstance(model, Mapping):
        return dict(data)
    vocab = model.get("vocab")
    found: dict[str, Any] = {}
    if isinstance(vocab, Mapping):
        found = dict(vocab)
    elif isinstance(vocab, list):
        found = {str(row[0]): number for number, row in enumerate(vocab) if isinstance(row, list) and row}
    added = data.get("added_tokens")
    for row in added if isinstance(added, list) else ():
        if isinstance(row, Mapping):
            found[str(row.get("content"))] = row.get("id")
    return found


def _of_vocabularies(name: str, one: Mapping[str, Any], two: Mapping[str, Any]) -> str | None:
    other = [token for token, number in one.items() if two.get(token) != number]
    other += [token for token in two if token not in one]
    if not other:
        return None
    token = other[0]
    return (
        f"{name}: {len(other)} tokens have another number, or are in one alone:"
        f" {token!r} is {one.get(token)} here, {two.get(token)} there"
    )


def _of_merges(name: str, one: Any, two: Any) -> str | None:
    merges = [
        data["model"].get("merges") if isinstance(data, Mapping) and isinstance(data.get("model"), Mapping) else None
        for data in (one, two)
    ]
    plain = [[each if isinstance(each, str) else " ".join(map(str, each)) for each in m or ()] for m in merges]
    return f"{name}: the merges of tokens differ" if plain[0] != plain[1] else None
