"""One of something: messages are written for many, `agree` puts a sentence about one of them into the singular.

    >>> agree("1 tensors are merged by average; 1 names share another parameter")
    '1 tensor is merged by average; 1 name shares another parameter'
    >>> agree("layer 1 tensors are stored twice")
    'layer 1 tensors are stored twice'
    >>> agree("1 of 3 tensors are in no file")
    '1 of 3 tensors are in no file'

A number counts where it begins a clause or follows a word such as `of` or `has`; `layer 1` and `rank 1` are names. The
nouns are those that messages count; other words in -s stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

NOUNS = frozenset(
    """
    adapters aliases arguments arrays arrows averages biases blocks boxes buckets bytes characters checkpoints
    choices chunks codes copies counts digits dims elements entries experts families faults files findings folders
    formats groups halves heads indexes items kernels keys kinds layers leaves levels lines links marks masters
    members models modules names neighbours nodes numbers objects optimizers pairs parameters parts patterns pieces
    placements places points positions projections ranks records replicas requests revisions rows saves scales
    sections shapes shards shares signatures slices snapshots sources stacks stages statements states steps storages
    stretches tensors times tokens types units values warnings weights words workers
    """.split()
)
_IRREGULAR = {"copies": "copy", "entries": "entry", "halves": "half", "leaves": "leaf", "families": "family"}
_IN_ES = frozenset(("aliases", "biases", "boxes", "indexes", "stretches"))

# The verb behind a noun, or behind `NOUN of the model`.
VERBS = {
    "are": "is",
    "were": "was",
    "have": "has",
    "do": "does",
    "don't": "doesn't",
    **{
        word: word + "s"
        for word in "belong come contradict differ disagree end exceed hold keep lack lose name need repeat "
        "share stay stand state take travel use want".split()
    },
}
_START = (
    r"(?:^|(?<=[(:;,] )|(?<=\()|(?<=\bof )|(?<=\bin )|(?<=\bhas )|(?<=\bhave )|(?<=\band )|(?<=\bwith )"
    r"|(?<=\bholds )|(?<=\bat most ))"
)
_COUNTED = re.compile(
    rf"{_START}1 (?!of )(?P<kind>(?:[a-z0-9'-]+ ){{0,2}}?)(?P<noun>{'|'.join(sorted(NOUNS, key=len, reverse=True))})\b"
    rf"(?: (?P<verb>{'|'.join(VERBS)})\b)?"
)


def agree(text: str) -> str:
    """`text` with `1 tensors are` as `1 tensor is`, wherever something is counted."""
    return _COUNTED.sub(_singular, text) if "1 " in text else text


def agree_all(texts: Iterable[str]) -> list[str]:
    """The same of several sentences, such as the notes of a document."""
    return [agree(text) for text in texts]


def _singular(match: re.Match[str]) -> str:
    verb = match["verb"]
    return f"1 {match['kind']}{singular(match['noun'])}" + (f" {VERBS[verb]}" if verb else "")


def singular(noun: str) -> str:
    """`tensors` -> `tensor`, `copies` -> `copy`."""
    if noun in _IRREGULAR:
        return _IRREGULAR[noun]
    return noun[:-2] if noun in _IN_ES else noun[:-1]
