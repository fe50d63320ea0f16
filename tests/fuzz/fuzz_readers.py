"""Coverage-guided fuzzing of the readers (atheris): whatever the bytes, a value or an error of ours, soon.

    python tests/fuzz/fuzz_readers.py seeds CORPUS              write seeds to CORPUS/TARGET, for each target
    python tests/fuzz/fuzz_readers.py pickle CORPUS [-max_total_time=600 ...]   libFuzzer's options
    python tests/fuzz/fuzz_readers.py zip CORPUS [...]          and so the targets of `targets.py`

The idea: a reader may raise `CkptError` and nothing else, must end within seconds and within `-rss_limit_mb`, and what
it does read must keep its promises: offsets inside the file, values that nest finitely and turn into JSON, and, where a
pickle names nothing, the very value that CPython reads (its pure-Python unpickler with every name forbidden).
"""

from __future__ import annotations

import importlib
import io
import math
import os
import pathlib
import pickle
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))
HERE = pathlib.Path(__file__).parent
LIMIT = 6000  # bytes of an input
LIMITS = {"dcp": 24_000, "plan": 64, "tree": 64}


def _imported():
    """The code under test, instrumented when atheris is there to watch it."""
    try:
        import atheris
    except ImportError:
        import contextlib

        watching = contextlib.nullcontext()
    else:
        watching = atheris.instrument_imports(include=["ckpt_tool"])
    with watching:
        import ckpt_tool.cli.parser  # noqa: F401  all that is loaded late, for coverage
        from ckpt_tool.core import extras
        from ckpt_tool.errors import CkptError
        from ckpt_tool.formats import registry
        from ckpt_tool.storage import source
        from ckpt_tool.storage.pickles import pickle_reader as pickles
        from ckpt_tool.storage.pickles import pickle_values, pickle_writer
        from ckpt_tool.storage.torch_files import torch_stream, torchzip

        for name in registry.NAMES:
            registry.by_name(name)
        sys.path.insert(0, str(HERE))
        targets = importlib.import_module("targets")
    return targets, extras, CkptError, pickle_values, pickle_writer, pickles, source, torch_stream, torchzip


targets, extras, CkptError, pickle_values, pickle_writer, pickles, source, torch_stream, torchzip = _imported()


class Forbidding(pickle._Unpickler):
    """CPython's unpickler without names and persistent ids: plain values alone."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError("a name")

    def persistent_load(self, pid):
        raise pickle.UnpicklingError("a persistent id")

    def get_extension(self, code):
        raise pickle.UnpicklingError("an extension")


class Memory(source.Tree):
    """A tree of one file that is these bytes."""

    def __init__(self, data):
        self.data = data
        self.shown = "input"
        self.single = "input"
        self.bytes_read = 0

    def size(self, path):
        return len(self.data)

    def read(self, path, offset, nbytes):
        if offset < 0 or nbytes < 0 or offset + nbytes > len(self.data):
            raise AssertionError(f"reads {nbytes} bytes at {offset} of {len(self.data)}")
        self.bytes_read += nbytes
        return self.data[offset : offset + nbytes]


def same(a, b, depth=0):
    if depth > 50:
        return True
    if isinstance(b, float) and isinstance(a, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    if isinstance(b, dict):
        return (
            isinstance(a, dict)
            and len(a) == len(b)
            and all(same(x, y, depth + 1) for x, y in zip(a.values(), b.values(), strict=True))
        )
    if isinstance(b, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(same(x, y, depth + 1) for x, y in zip(a, b, strict=True))
    return isinstance(b, bytearray | bytes | str | set | frozenset) or (type(a) is type(b) and a == b)


def one_pickle(data):
    """Read, judge, turn into JSON, write again; compare with CPython where no name is involved."""
    try:
        done = pickles.load(data, path="input", multi=True)
    except CkptError as error:
        str(error), error.to_json()
        return
    assert 0 < done.end <= len(data) and 0 < done.opcodes <= len(data)
    list(pickles.weight_bearing(done.value))
    try:
        pickles.refuse_unsafe(done, "input")
        pickles.refuse_weight_bearing(done.value, "input")
    except CkptError:
        pass
    try:
        extras.to_json(pickle_values.as_extras(done.value))
    except TypeError as error:
        assert "plain values" in str(error), error
    try:
        again = pickle_writer.dumps(done.value, protocol=4)
    except CkptError:
        again = None
    if again is not None:
        assert pickle_writer.dumps(pickles.load(again, path="again").value, protocol=4) == again or not _plain(done)
    if _plain(done) and b"S" not in data and b"T" not in data and b"U" not in data:
        try:
            want = Forbidding(io.BytesIO(data)).load()
        except Exception as error:  # whatever CPython raises: we were laxer than it, which must be of no consequence
            assert not isinstance(error, pickle.UnpicklingError) or "name" not in str(error), error
            return
        assert same(done.value, want), (done.value, want)


def _plain(done):
    return not done.globals and not done.storages


def one_zip(data):
    """Open, read the pickle, resolve every tensor; nothing may point outside the file."""
    tree = Memory(data)
    try:
        if torch_stream.is_stream(data):
            container = torch_stream.TorchStream.open(tree, "input")
            done = container.pickled
        else:
            container = torchzip.TorchZip.open(tree, "input")
            done = container.pickled()
    except CkptError as error:
        str(error), error.to_json()
        return
    todo = [done.value]
    seen = 0
    while todo and seen < 1000:
        item = todo.pop()
        seen = seen + 1
        if isinstance(item, pickle_values.TensorRef):
            try:
                array = container.array(item)
            except CkptError:
                continue
            strides = array.strides or (0,) * len(array.shape)
            reach = (
                sum((n - 1) * s for n, s in zip(array.shape, strides, strict=True))
                if array.strides
                else array.numel - 1
            )
            assert not array.numel or 0 <= array.offset <= array.offset + array.dtype.nbytes(reach + 1) <= len(data)
        elif isinstance(item, dict):
            todo += item.values()
        elif isinstance(item, list | tuple):
            todo += item


def seeds(folder):
    """Small files to start from: the hostile cases, and what torch and CPython write."""
    import importlib.util
    import tempfile

    found = []
    for name in ("pickle_cases", "zip_cases"):
        spec = importlib.util.spec_from_file_location(name, HERE.parent / "hostile" / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for case in module.CASES:
            with tempfile.TemporaryDirectory() as scratch:
                path = case[1](pathlib.Path(scratch))
                if path.is_file():
                    found.append(path.read_bytes())
    fixtures = HERE.parents[1] / "fixtures"
    for path in (*fixtures.glob("torch/*.pt"), *fixtures.glob("dcp/*/.metadata"), *fixtures.glob("dcp/*/*.distcp")):
        found.append(path.read_bytes())
    value = {
        "a": [1, -2, 1 << 40, 2.5, None, True, "ü", b"\0"],
        "t": (1, (2, 3, 4)),
        "s": {1, 2},
        "f": frozenset({"x"}),
    }
    found += [pickle.dumps(value, protocol=protocol) for protocol in range(6)]
    for mode in MODES:
        (folder / mode).mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(found):
        if len(data) <= LIMIT:
            (folder / "zip" / f"{number:04}").write_bytes(data)
        at = data.find(b"\x80", 0, 200)
        if data[:2] != b"PK" or at < 0:
            (folder / "pickle" / f"{number:04}").write_bytes(data[:LIMIT])
        else:  # the pickle inside; what follows its end is another case
            end = data.find(b"PK\x03\x04", at)
            (folder / "pickle" / f"{number:04}").write_bytes(data[at : end if end > 0 else len(data)][:LIMIT])
    for number, (mode, data) in enumerate(targets.seeds()):
        (folder / mode / f"{number:05}").write_bytes(data[: LIMITS.get(mode, LIMIT)])


MODES = {"pickle": one_pickle, "zip": one_zip, **targets.TARGETS}


def main():
    mode, corpus, *options = sys.argv[1:]
    if mode == "seeds":
        seeds(pathlib.Path(corpus))
        return
    import atheris

    atheris.Setup(
        [
            sys.argv[0],
            os.path.join(corpus, mode),
            f"-max_len={LIMITS.get(mode, LIMIT)}",
            "-timeout=10",
            "-rss_limit_mb=1024",
            f"-artifact_prefix={corpus}/{mode}-",
            *options,
        ],
        MODES[mode],
    )
    atheris.Fuzz()


if __name__ == "__main__":
    os.environ.setdefault("PYTHONHASHSEED", "0")
    main()
