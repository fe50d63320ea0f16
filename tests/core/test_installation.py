"""The command that adds an extra is one for the copy that runs: a name on an index is given where it came from one."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from ckpt_tool.core import installation
from ckpt_tool.core.installation import install_command

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretend that this copy was installed with this `direct_url.json`; None: from an index."""
    site = tmp_path / "site-packages"
    package = site / "ckpt_tool"
    info = site / "ckpt_tool-0.2.0.dist-info"
    package.mkdir(parents=True)
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.4\nName: ckpt-tool\nVersion: 0.2.0\n")
    monkeypatch.setattr(metadata, "distribution", lambda name: metadata.PathDistribution(info))

    def pretend(record: object, *, runs_in: Path = package) -> None:
        if record is not None:
            (info / "direct_url.json").write_text(record if isinstance(record, str) else json.dumps(record))
        monkeypatch.setattr(installation, "_PACKAGE", runs_in)

    return pretend


def clone(folder: Path) -> Path:
    """A source folder of the project."""
    (folder / "ckpt_tool").mkdir(parents=True)
    (folder / "pyproject.toml").write_text("")
    return folder


def test_from_an_index_it_is_the_distribution_s_name(install: Any) -> None:
    install(None)
    assert install_command("remote") == "pip install 'ckpt-tool[remote]'"


def test_from_a_repository(install: Any) -> None:
    vcs = {"vcs": "git", "requested_revision": "v0.2.0", "commit_id": COMMIT}
    install({"url": "https://ann:secret@git.example/ckpt", "vcs_info": vcs, "subdirectory": "tool"})
    command = install_command("sign")
    assert command == "pip install 'ckpt-tool[sign] @ git+https://***@git.example/ckpt@v0.2.0#subdirectory=tool'"


def test_from_a_repository_at_its_head(install: Any) -> None:
    install({"url": "https://git.example/ckpt", "vcs_info": {"vcs": "git", "commit_id": COMMIT}})
    assert install_command("ray") == f"pip install 'ckpt-tool[ray] @ git+https://git.example/ckpt@{COMMIT}'"


def test_from_a_wheel(install: Any) -> None:
    install({"url": "file:///wheels/ckpt_tool-0.2.0-py3-none-any.whl", "archive_info": {}})
    command = install_command("gguf")
    assert command == "pip install 'ckpt-tool[gguf] @ file:///wheels/ckpt_tool-0.2.0-py3-none-any.whl'"


@pytest.mark.parametrize("editable", [False, True])
def test_from_a_clone(install: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, editable: bool) -> None:
    source = clone(tmp_path / "the clone")
    record = {"url": source.as_uri(), "dir_info": {"editable": True} if editable else {}}
    if editable:
        install(record, runs_in=source / "ckpt_tool")
    else:
        install(record)
    assert install_command("torch") == f"pip install '{source}[torch]'"

    monkeypatch.chdir(source)
    assert install_command("torch") == "pip install '.[torch]'"


def test_a_clone_that_is_gone_is_one_to_go_to(install: Any, tmp_path: Path) -> None:
    install({"url": (tmp_path / "gone").as_uri(), "dir_info": {}})
    assert install_command("remote") == "pip install '.[remote]'"


@pytest.mark.parametrize("record", [None, {"url": "file:///elsewhere", "dir_info": {"editable": True}}])
def test_another_copy_that_is_installed_says_nothing_of_this_one(install: Any, tmp_path: Path, record: object) -> None:
    install(record, runs_in=clone(tmp_path / "clone") / "ckpt_tool")
    assert install_command("remote") == f"pip install '{tmp_path / 'clone'}[remote]'"


@pytest.mark.parametrize("record", ["[]", "{", "null"])
def test_a_record_that_does_not_read_is_none(install: Any, record: str) -> None:
    install(record)
    assert install_command("remote").startswith("pip install '")


def test_a_copy_that_was_never_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    monkeypatch.chdir(installation._PACKAGE.parent)
    assert install_command("remote") == "pip install '.[remote]'"


def test_no_text_assumes_that_a_name_on_an_index_is_ours() -> None:
    """Neither a message nor a page names the distribution with an extra: `install_command` alone does."""
    root = Path(__file__).resolve().parents[2]
    texts = [path for kind in ("*.py", "*.md", "*.toml", "*.yml") for path in (root / "ckpt_tool").rglob(kind)]
    texts += [*root.glob("*.md"), *(root / "tests").glob("*.md")]
    texts += [path for path in (root / ".github").rglob("*.*") if path.suffix != ".pyc"]
    naming = [
        path.relative_to(root).as_posix()
        for path in texts
        if "ckpt-tool[" in path.read_text() and path.name != "installation.py"
    ]
    assert not naming
