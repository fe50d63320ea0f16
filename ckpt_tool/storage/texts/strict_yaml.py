"""YAML that comes from a stranger, as plain values: maps with text keys, lists (sets as such too), text, numbers, true,
false, null.

    parse(b"a: [1, 2]")    {"a": [1, 2]}

PyYAML composes the nodes, and nothing is constructed but scalars: no tag asks for a class, an alias of aliases is
counted each time it is used, a duplicate key is an error. Cost: some 20 us a value, and 10 ms for the import.
What it does not do: read files, know a schema.
"""

from __future__ import annotations

from typing import Any

NODES = 20_000  # of the tree, aliases taken apart
DEPTH = 32
DIGITS = 400  # of a number; sexagesimal ones grow without bounds


class NotPlain(ValueError):
    """What a document is that is no plain YAML: `not YAML: ...`, at a line or at an offset in bytes."""

    def __init__(self, what: str, place: str | None = None, offset: int | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.place = place
        self.offset = offset


def parse(data: bytes) -> Any:
    """The one document of a file; None for an empty one. Raises NotPlain."""
    import yaml  # 10 ms that no other command pays

    try:
        node = yaml.compose(data.decode("utf-8-sig"), yaml.SafeLoader)
    except UnicodeDecodeError as e:
        raise NotPlain("not UTF-8", offset=e.start) from e
    except yaml.YAMLError as e:
        mark = getattr(e, "problem_mark", None)
        raise NotPlain(
            f"not YAML: {getattr(e, 'problem', None) or e}", f"line {mark.line + 1}" if mark else None
        ) from e
    except RecursionError as e:
        raise NotPlain(f"nested in more than {DEPTH} levels") from e
    return _NodeValues(yaml).of(node, 0) if node is not None else None


class _NodeValues:
    """Nodes of one file as values; aliases count each time."""

    def __init__(self, yaml: Any) -> None:
        self._yaml = yaml
        self._seen = 0
        self._scalars = yaml.SafeLoader("")

    def of(self, node: Any, depth: int) -> Any:
        self._seen += 1
        if depth > DEPTH or self._seen > NODES:
            raise _fault(node, "larger than any config needs: aliases of aliases?")
        kind = node.tag.removeprefix("tag:yaml.org,2002:")
        if isinstance(node, self._yaml.MappingNode) and kind == "map":
            return self._mapping(node, depth)
        if isinstance(node, self._yaml.MappingNode) and kind == "set":  # Megatron-Bridge writes those of Python so
            return list(self._mapping(node, depth))
        if isinstance(node, self._yaml.SequenceNode) and kind == "seq":
            return [self.of(each, depth + 1) for each in node.value]
        if isinstance(node, self._yaml.ScalarNode):
            if kind in ("str", "timestamp", "value", "merge", "binary"):
                return node.value
            if kind == "null":
                return None
            if kind in ("bool", "int", "float"):
                return self._number(node, kind)
        raise _fault(node, f"not plain: the tag {node.tag[:80]} asks for more than values")

    def _mapping(self, node: Any, depth: int) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key_node, value in node.value:
            key = self.of(key_node, depth + 1)
            if not isinstance(key, str):
                raise _fault(key_node, f"not plain: the key {key!r} is no text")
            if key in out:
                raise _fault(key_node, f"not plain: the key {key!r} appears twice")
            out[key] = self.of(value, depth + 1)
        return out

    def _number(self, node: Any, kind: str) -> Any:
        if len(node.value) > DIGITS:
            raise _fault(node, f"not plain: {node.value[:40]!r}... is no {kind} of at most {DIGITS} characters")
        try:
            return self._scalars.construct_object(node)
        except (ValueError, OverflowError, LookupError) as e:
            raise _fault(node, f"not plain: {node.value[:40]!r} is no {kind}") from e


def _fault(node: Any, what: str) -> NotPlain:
    return NotPlain(what, f"line {node.start_mark.line + 1}")
