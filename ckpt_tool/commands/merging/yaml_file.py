"""A YAML file as plain values: mappings with text keys, lists, texts, numbers, flags, nothing.

What could do more than say values is refused: tags (`!!python/...`), merge keys are plain keys, aliases beyond a number that
no config needs (a few kilobytes of them can mean gigabytes), nesting beyond 32 levels, one key twice, files beyond 256 KiB.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ckpt_tool.errors import CkptError, UsageError, wrap_os_error

LIMIT = 256 << 10  # bytes; those of real merges have some hundred
NODES = 20_000  # of the tree, aliases taken apart
DEPTH = 32
DIGITS = 400  # of a number; sexagesimal ones grow without bounds
CODE = "E1443"


def read_yaml(path: str) -> Any:
    """The one document of the file. Raises UsageError E1443 with the line, StorageError."""
    try:
        if Path(path).stat().st_size > LIMIT:
            raise UsageError(f"a config of more than {LIMIT >> 10} KiB", code=CODE, path=path)
        data = Path(path).read_bytes()
    except OSError as e:
        raise wrap_os_error(e, path, "reading the config") from e
    import yaml  # 10 ms that no other command pays

    try:
        node = yaml.compose(data.decode("utf-8-sig"), yaml.SafeLoader)
    except UnicodeDecodeError as e:
        raise UsageError("the config is not UTF-8", code=CODE, path=path, offset=e.start) from e
    except yaml.YAMLError as e:
        mark = getattr(e, "problem_mark", None)
        raise UsageError(
            f"the config is not YAML: {getattr(e, 'problem', None) or e}", code=CODE, path=path,
            place=f"line {mark.line + 1}" if mark else None, hint="see mergekit's examples",
        ) from e  # fmt: skip
    except RecursionError as e:
        raise UsageError(f"more than {DEPTH} levels", code=CODE, path=path) from e
    return _Values(path, yaml).of(node, 0) if node is not None else None


class _Values:
    """Nodes of one file as values; aliases count each time."""

    def __init__(self, path: str, yaml: Any) -> None:
        self._path, self._yaml, self._seen = path, yaml, 0
        self._scalars = yaml.SafeLoader("")

    def of(self, node: Any, depth: int) -> Any:
        self._seen += 1
        if depth > DEPTH or self._seen > NODES:
            raise self._fault(node, "more values than any config needs: aliases of aliases?")
        if isinstance(node, self._yaml.MappingNode):
            return self._mapping(node, depth)
        if isinstance(node, self._yaml.SequenceNode):
            self._plain(node, "seq")
            return [self.of(each, depth + 1) for each in node.value]
        return self._scalar(node)

    def _mapping(self, node: Any, depth: int) -> dict[str, Any]:
        self._plain(node, "map")
        out: dict[str, Any] = {}
        for key_node, value in node.value:
            key = self.of(key_node, depth + 1)
            if not isinstance(key, str):
                raise self._fault(key_node, f"the key {key!r} is no text")
            if key in out:
                raise self._fault(key_node, f"the key {key!r} stands twice")
            out[key] = self.of(value, depth + 1)
        return out

    def _scalar(self, node: Any) -> Any:
        kind = node.tag.rpartition(":")[2]
        if node.tag.startswith("tag:yaml.org,2002:"):
            if kind in ("str", "timestamp", "value", "merge", "binary"):
                return node.value
            if kind == "null":
                return None
            try:
                if kind in ("bool", "int", "float") and len(node.value) <= DIGITS:
                    return self._scalars.construct_object(node)
            except (ValueError, OverflowError, LookupError) as e:
                raise self._fault(node, f"{node.value[:40]!r} is no {kind}") from e
            if kind in ("bool", "int", "float"):
                raise self._fault(node, f"{node.value[:40]!r}... is no {kind} of at most {DIGITS} characters")
        raise self._fault(node, f"the tag {node.tag[:80]} asks for more than plain values")

    def _plain(self, node: Any, kind: str) -> None:
        if node.tag != f"tag:yaml.org,2002:{kind}":
            raise self._fault(node, f"the tag {node.tag[:80]} asks for more than plain values")

    def _fault(self, node: Any, message: str) -> CkptError:
        return UsageError(message, code=CODE, path=self._path, place=f"line {node.start_mark.line + 1}")
