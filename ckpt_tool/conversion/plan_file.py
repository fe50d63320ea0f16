"""Writes plan files (`--plan`) and reads them back as untrusted input.

`plan.saved` checks the plan itself. This module adds what only a command knows: the format's name, and the report that
a run prints (`conversion.planning._report`). The type of every value in the report is checked before it is used.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ckpt_tool.core.gc_pause import gc_paused
from ckpt_tool.errors import OutputExists, SourceChanged, wrap_os_error
from ckpt_tool.formats import registry
from ckpt_tool.plan.plan import Plan
from ckpt_tool.plan.saved import check_seal, read_plan, sealed

LIMIT = 4 << 30  # bytes

# What a value must be: a type, [form] a list of it, {key: form} an object with these keys as far as it has them, "*"
# any other key,
# a key with "!" one that it must have.
_ROW = {"name!": str, "state": str, "bytes": int}
_SUM = {"state": str, "tensors": int, "bytes": int, "names": [str], "reason": str}
_FALLBACK = {
    "requested": [str],
    "used": [str],
    "better": [str],
    "shape": [int],
    "reason": str,
    "tensors": int,
    "example!": str,
    "extra_bytes": int,
}
_FORM: dict[str, Any] = {
    "schema_version": int,
    "layout_source": str,
    "fallbacks": [_FALLBACK],
    "removed": [_ROW],
    "removed_bytes": int,
    "dropped": [_SUM],
    "notes": [str],
    "names": [{"source!": str, "target!": [str], "tensors!": int}],
    "states": {"*": {"tensors!": int, "bytes!": int}},
    "source": {"path": str, "format": str, "resolved": str, "paths": [str]},
    "target": {"path": str, "format": str, "mesh": {"*": int}, "files": [{"path": str, "bytes": int}]},
    "plan!": {"bytes_read!": int, "bytes_written!": int, "peak_memory!": int, "files!": int, "copies!": int},
}


def save_plan(plan: Plan, path: str) -> None:
    """Write the plan as one sealed JSON file. Raises OutputExists E0506, StorageError."""
    text = json.dumps(sealed(plan.to_json()), separators=(",", ":"))
    write_new(path, text, "the plan", "E0506")


def write_new(path: str, text: str, what: str, code: str) -> None:
    """Write a file that is not there yet. Raises OutputExists with the code, StorageError."""
    try:
        with open(path, "x", encoding="utf-8", errors="surrogateescape") as f:  # paths may be any bytes
            f.write(text)
    except FileExistsError as e:
        raise OutputExists(f"{path} exists", code=code, path=path, hint=f"choose another name for {what}") from e
    except OSError as e:
        raise wrap_os_error(e, path, f"writing {what}") from e


def load_plan(plan_file: str) -> Plan:
    """The plan in a file, checked whole. Raises SourceChanged: E0610 for what is no plan, E1601 for one that was
    edited; UnsafeInput E1600 for output paths that lead elsewhere."""
    path = Path(plan_file)
    with gc_paused():
        document = _parsed(path)
        check_seal(document, plan_file)
        plan = read_plan(document, plan_file)
    faults = list(_unlike(plan.report, _FORM, "report"))
    if plan.format not in registry.NAMES:
        faults.insert(0, f"format: expected one of {', '.join(registry.NAMES)}, got {plan.format[:40]!r}")
    if faults:
        raise SourceChanged(
            f"the plan file is not a valid plan: {faults[0]}",
            code="E0610",
            path=path,
            hint="make it again with --plan",
            faults=faults[1:20],
        )
    return plan


def _parsed(path: Path) -> Any:
    try:
        if path.stat().st_size > LIMIT:
            raise SourceChanged(
                f"{path.stat().st_size} bytes are too many for a plan file, want at most {LIMIT}",
                code="E0610",
                path=path,
                hint="make it again with --plan",
            )
        return json.loads(path.read_bytes())
    except OSError as e:
        raise wrap_os_error(e, path, "reading the plan") from e
    except (ValueError, RecursionError) as e:
        raise SourceChanged(
            f"the plan file is not JSON: {e}", code="E0610", path=path, hint="make it again with --plan"
        ) from e


def _unlike(value: Any, form: Any, where: str) -> Iterator[str]:
    """What of `value` is not as the form says, in words."""
    kind = form
    if isinstance(form, Mapping):
        kind = dict
    elif isinstance(form, list):
        kind = list
    if type(value) is not kind:
        names = {dict: "an object", list: "a list", str: "a string", int: "a whole number"}
        yield f"{where}: expected {names[kind]}, got {value!r:.40}"
    elif isinstance(form, list):
        for number, item in enumerate(value):
            yield from _unlike(item, form[0], f"{where}/{number}")
    elif isinstance(form, Mapping) and isinstance(value, dict):
        forms = {key.removesuffix("!"): inner for key, inner in form.items()}
        missing = [key[:-1] for key in form if key.endswith("!") and key[:-1] not in value]
        yield from (f"{where}: {key} is missing" for key in missing)
        for key, item in value.items():
            inner = forms.get(key, forms.get("*"))
            if inner is not None:
                yield from _unlike(item, inner, f"{where}/{key}")
