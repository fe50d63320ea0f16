"""How this copy of the tool was installed, and so the command that adds one of its extras.

    in a clone, or installed from one     pip install '.[remote]'          run in another folder: '/src/ckpt[remote]'
    from a repository                     pip install 'ckpt-tool[remote] @ git+https://host/ckpt@v0.2.0'
    from a file or an address             pip install 'ckpt-tool[remote] @ https://host/ckpt_tool-0.2.0-py3-none-any.whl'
    by its name, from an index            pip install 'ckpt-tool[remote]'

A name on an index is only given where this copy came from one by that name: whoever installed it otherwise would get
what somebody else has put there. The record is `direct_url.json` of the installed distribution (PEP 610), which pip, uv
and pipx write for everything that does not come from an index. Costs milliseconds, when a hint or `ckpt doctor` asks.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from ckpt_tool.core.urls import hide_secrets

DISTRIBUTION = "ckpt-tool"
_PACKAGE = Path(__file__).resolve().parents[1]


def install_command(extra: str) -> str:
    """The command that installs an extra into this copy, for a hint."""
    return f"pip install '{_requirement(extra)}'"


def _requirement(extra: str) -> str:
    record, name = _read_record()
    if record is None:
        return f"{name}[{extra}]" if name else _folder_requirement(_PACKAGE.parent, extra)

    url = str(record.get("url", ""))
    if "dir_info" in record:
        return _folder_requirement(_folder_of(url), extra)

    origin = hide_secrets(url)
    vcs = record.get("vcs_info")
    if isinstance(vcs, dict):
        revision = vcs.get("requested_revision") or vcs.get("commit_id")
        origin = f"{vcs.get('vcs', 'git')}+{origin}" + (f"@{revision}" if revision else "")
    if record.get("subdirectory"):
        origin += f"#subdirectory={record['subdirectory']}"
    return f"{name or DISTRIBUTION}[{extra}] @ {origin}"


def _folder_of(url: str) -> Path:
    """The path of a `file://` URL, percent-decoded."""
    encoded = os.fsencode(url.removeprefix("file://"))
    return Path(os.fsdecode(re.sub(rb"%([0-9A-Fa-f]{2})", lambda found: bytes.fromhex(found[1].decode()), encoded)))


def _folder_requirement(folder: Path, extra: str) -> str:
    """A source folder with its extra. One that is gone, or is none, is a clone that the reader has to go to."""
    is_clone = (folder / "pyproject.toml").is_file()
    is_elsewhere = is_clone and folder.resolve() != Path.cwd()
    return f"{folder if is_elsewhere else '.'}[{extra}]"


def _read_record() -> tuple[dict[str, Any] | None, str]:
    """(`direct_url.json`, the distribution's name) of this copy; (None, "") where no distribution is this copy: it runs
    from a folder that was never installed."""
    from importlib import metadata

    try:
        distribution = metadata.distribution(DISTRIBUTION)
        name = str(distribution.metadata["Name"] or DISTRIBUTION)
        text = distribution.read_text("direct_url.json")
        record = json.loads(text) if text else None
    except (metadata.PackageNotFoundError, OSError, ValueError):
        return None, ""

    if not isinstance(record, dict):
        installed = os.path.realpath(str(distribution.locate_file(_PACKAGE.name)))
        return None, name if installed == str(_PACKAGE) else ""

    is_editable = isinstance(record.get("dir_info"), dict) and record["dir_info"].get("editable") is True
    clone = _folder_of(str(record.get("url", "")))
    place = clone / _PACKAGE.name if is_editable else Path(str(distribution.locate_file(_PACKAGE.name)))
    return (record, name) if os.path.realpath(place) == str(_PACKAGE) else (None, "")
