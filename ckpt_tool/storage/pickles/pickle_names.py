"""Every name that a byte range of pickles mentions, also where the pickle is broken or of classes that the reader
refuses.

The machine (`pickles.pickle_machine`) knows what a name is used for, but stops at the first thing that it does not
understand. Behind that point the stream is only walked: opcodes and their arguments, no stack, with the strings that
name a global (STACK_GLOBAL takes the last two, from the stream or the memo).

    cposix\\nsystem\\n(X\\x04\\0\\0\\0truetR]K\\x01K\\x02s.     SETITEM on a list: broken, and it names posix.system

Nothing is built, called or imported. Cost: that of reading the pickle; strings of 4 KiB or more are jumped over.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ckpt_tool.storage.pickles import pickle_reader as pickles
from ckpt_tool.storage.pickles.pickle_globals import canonical, tier
from ckpt_tool.storage.pickles.pickle_machine import Machine
from ckpt_tool.storage.pickles.pickle_values import GlobalUse, Misuse
from ckpt_tool.storage.source import Tree

_FIXED = {b: n for ops, n in ((b"Khq\x80\x82", 1), (b"M\x83", 2), (b"Jjr\x84", 4), (b"G\x95", 8)) for b in ops}
_COUNTED = {b: n for ops, n in ((b"UC\x8c\x8a", 1), (b"TXB\x8b", 4), (b"\x8d\x8e\x96", 8)) for b in ops}
_LINES = {b: n for ops, n in ((b"ILFSVgpP", 1), (b"ci", 2)) for b in ops}
_PLAIN = frozenset(b"(.012NQRabde}]l)ostu\x81\x85\x86\x87\x88\x89\x8f\x90\x91\x92\x93\x94\x97\x98")
_TEXT = frozenset(b"\x8cX\x8d")
_KEPT = 4096  # bytes of a string that can name something
_LINE = 1 << 16  # bytes


class Mentioned(NamedTuple):
    """uses: each global once. end: bytes from the start of the file to behind STOP, None where the stream is broken.
    lost: the byte behind which nothing could be walked, None where all was."""

    uses: tuple[GlobalUse, ...]
    end: int | None
    lost: int | None = None


def mentioned(tree: Tree, path: str, start: int, end: int) -> Mentioned:
    """The names of the pickle at bytes [start, end) of a file; more may follow its STOP. Raises what reading the file
    raises."""
    limit = pickles.METADATA_OPCODES if path.endswith(".metadata") else pickles.OPCODE_LIMIT
    machine = pickles.machine_of(tree, path, start=start, end=end, opcodes=limit)
    try:
        machine.run()
    except Misuse:
        walk = _Walk(tree, path, start, end)
        uses = tuple(_and_walked(machine, walk))
        return Mentioned(uses, None, None if walk.stopped else walk.at)
    return Mentioned(machine.verdicts(), machine.origin + machine.pos)


def _and_walked(machine: Machine, walk: _Walk) -> Iterator[GlobalUse]:
    """What the machine met, and what it did not come to."""
    met = machine.verdicts()
    yield from met
    known = {(use.module, use.name) for use in met}
    for module, name, position, offset in walk.names():
        if (module, name) not in known:
            known.add((module, name))
            yield GlobalUse(module, name, position, offset, tier(*canonical(module, name, walk.protocol)))


class _Walk:
    """A walk over opcodes, until one that there is not."""

    def __init__(self, tree: Tree, path: str, start: int, end: int) -> None:
        self.tree = tree
        self.path = path
        self.at = start
        self.end = end
        self.protocol = 0
        self.stopped = False  # at STOP
        self._window = (start, b"")

    def _take(self, nbytes: int) -> bytes:
        """The next bytes, fewer at the end."""
        at, data = self._window
        if not at <= self.at <= self.at + nbytes <= at + len(data):
            at = self.at
            data = self.tree.read(self.path, self.at, max(0, min(max(nbytes, _LINE), self.end - self.at)))
            self._window = (at, data)
        found = data[self.at - at : self.at - at + nbytes]
        self.at += len(found)
        return found

    def _line(self) -> str | None:
        at = self.at
        head, newline, _ = self._take(_LINE).partition(b"\n")
        self.at = at + len(head) + 1
        return head.decode("utf-8", "replace") if newline else None

    def names(self) -> Iterator[tuple[str, str, int, int]]:
        """(module, name, number of the opcode, byte) of each use."""
        memo: dict[int, str | None] = {}
        before: str | None = None
        last: str | None = None

        for position in range(pickles.OPCODE_LIMIT):
            offset = self.at
            op = self._take(1)
            if not op or op == b".":
                self.stopped = bool(op)
                return
            text: str | None = None
            number = 0
            if op[0] in _LINES:
                lines = [self._line() for _ in range(_LINES[op[0]])]
                if None in lines:
                    return
                if len(lines) == 2:
                    yield lines[0] or "", lines[1] or "", position, offset
                elif op in b"SV":
                    text = (lines[0] or "").strip("'\"")
                elif op in b"gp":
                    number = int(lines[0] or "") if (lines[0] or "").isdigit() and len(lines[0] or "") < 10 else -1
            elif op[0] in _FIXED:
                number = int.from_bytes(self._take(_FIXED[op[0]]), "little")
            elif op[0] in _COUNTED:
                nbytes = int.from_bytes(self._take(_COUNTED[op[0]]), "little")
                if nbytes > self.end - self.at:
                    return
                if nbytes <= _KEPT:
                    raw = self._take(nbytes)
                    text = raw.decode("utf-8", "replace") if op[0] in _TEXT or op in b"UT" else None
                else:
                    self.at += nbytes
            elif op[0] not in _PLAIN:
                return
            if op == b"\x80":
                self.protocol = number
            elif op == b"\x93" and before is not None and last is not None:
                yield before, last, position, offset
            if op == b"\x94":
                memo[len(memo)] = last
            elif op in b"qrp":
                memo[number] = last
            elif op not in b"\x80\x95":
                before = last
                last = memo.get(number) if op in b"hjg" else text
