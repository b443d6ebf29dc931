"""A `.pt2` archive that would run something while it loads is refused before torch loads it.

That torch would run it, and that real exports pass, is shown with torch in tests/integration/test_worker_models.py.
"""

from __future__ import annotations

import io
import json
import pickle
import warnings
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gpu_worker.archives import require_plain
from gpu_worker.errors import ModelError
from gpu_worker.programs import require_plain_program


class Evil:
    def __reduce__(self) -> Any:
        return (print, ("ran",))


def samples(payload: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as inner:
        inner.writestr("archive/data.pkl", payload)
    return out.getvalue()


def config(**payload: Any) -> bytes:
    entry = {"path_name": "weight_0", "is_param": True, "use_pickle": False, "tensor_meta": None, **payload}
    return json.dumps({"config": {"w": entry}}).encode()


PROGRAM = "models/model.json"
CONFIG = "data/weights/model_weights_config.json"
CONSTANTS = "data/constants/model_constants_config.json"
SAMPLES = "data/sample_inputs/model.pt"
PLAIN = {PROGRAM: b"{}", CONFIG: config(), CONSTANTS: b'{"config": {}}', SAMPLES: samples(pickle.dumps(1))}


class ZipReader:
    """What torch's reader does, by Python's."""

    def __init__(self, path: Path, *, hidden: Sequence[str] = ()) -> None:
        self._archive = zipfile.ZipFile(path)
        self._hidden = hidden

    def get_file_names(self) -> list[str]:
        names = [name.partition("/")[2] for name in self._archive.namelist()]
        return [name for name in names if name not in self._hidden]

    def read_bytes(self, name: str) -> bytes:
        return self._archive.read(f"m/{name}")


def check(path: Path, entries: Sequence[tuple[str, bytes]], *, hidden: Sequence[str] = ()) -> None:
    with warnings.catch_warnings(), zipfile.ZipFile(path, "w") as outer:  # of the same name twice
        warnings.simplefilter("ignore")
        for name, data in entries:
            outer.writestr(name, data)
    reader = ZipReader(path, hidden=hidden)
    with reader._archive:
        require_plain(path, reader)


def entries(**changed: bytes) -> list[tuple[str, bytes]]:
    return [(f"m/{name}", data) for name, data in {**PLAIN, **changed}.items()]


def test_a_plain_archive_passes(tmp_path: Path) -> None:
    check(tmp_path / "m.pt2", entries())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        pytest.param({CONFIG: config(use_pickle=True)}, "an entry needs pickle", id="pickled weights"),
        pytest.param({CONSTANTS: config(path_name="opaque_obj_0")}, "path_name 'opaque_obj_0'", id="unflagged pickle"),
        pytest.param({CONSTANTS: config(path_name="custom_obj_0")}, "path_name 'custom_obj_0'", id="script object"),
        pytest.param({SAMPLES: samples(pickle.dumps(Evil(), 2))}, "names .*print", id="pickled call, protocol 2"),
        pytest.param({SAMPLES: samples(pickle.dumps(Evil(), 4))}, "STACK_GLOBAL", id="pickled call, protocol 4"),
        pytest.param({"data/constants/opaque_obj_0": b""}, "holds 'data/constants/opaque_obj_0'", id="stray pickle"),
        pytest.param({"serialized_state_dict.pt": b""}, "holds 'serialized_state_dict.pt'", id="older torch's format"),
        pytest.param({"data/aotinductor/model/m.so": b""}, "holds 'data/aotinductor/model/m.so'", id="native code"),
        pytest.param({"models/other.json": b"{}"}, "holds 'models/other.json'", id="a second program"),
        pytest.param({PROGRAM: b'{"expr_str": "exec(1)"}'}, r"expr_str 'exec\(1\)'", id="a program that runs"),
        pytest.param({PROGRAM: b"{"}, "is not JSON", id="no program"),
        pytest.param({PROGRAM: b"[" * 100_000}, "is not JSON", id="nested without end"),
    ],
)
def test_what_would_run_is_refused(tmp_path: Path, changed: dict[str, bytes], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        check(tmp_path / "m.pt2", entries(**changed))


def test_an_archive_that_two_readers_see_differently_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there twice"):
        check(tmp_path / "m.pt2", [*entries(), (f"m/{PROGRAM}", b"{}")])
    with pytest.raises(ModelError, match="there twice"):
        check(tmp_path / "m.pt2", [*entries(), (f"m/{PROGRAM}".upper().replace("M/", "m/"), b"{}")])
    with pytest.raises(ModelError, match="expected one folder, found 2"):
        check(tmp_path / "m.pt2", [*entries(), ("version", b"8.20")])
    with pytest.raises(ModelError, match="differ by how it is read"):
        check(tmp_path / "m.pt2", entries(), hidden=[PROGRAM])


def test_a_file_that_lacks_a_part_or_is_something_else_is_no_archive(tmp_path: Path) -> None:
    for name in (PROGRAM, CONFIG, CONSTANTS):
        with pytest.raises(ModelError, match=f"{name} is missing"):
            check(tmp_path / "m.pt2", [(entry, data) for entry, data in entries() if entry != f"m/{name}"])
    (tmp_path / "m.pt2").write_bytes(b"hello")
    with pytest.raises(ModelError, match=r"not a \.pt2 archive"):
        require_plain(tmp_path / "m.pt2", None)  # type: ignore[arg-type]  # refused before anything is read


LEAF = {"type": None, "context": None, "children_spec": []}


def nesting(kind: str, context: str) -> str:
    return json.dumps([1, {"type": kind, "context": context, "children_spec": [LEAF]}])


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("expr_str", "Symbol('s53', positive=True, integer=True)"),
        (
            "expr_str",
            "Add(FloorDiv(Symbol('s5', integer=True), Integer(2)), Mul(Integer(-1), Float('0.5', precision=53)))",
        ),
        ("expr_str", "Max(s0 + 1, 2*s1)"),
        ("expr_str", "And(GreaterThan(Symbol('u0', integer=True), Integer(0)), true)"),
        ("guards_code", "L['a'].size()[1] == L['b'][0]['c'].size()[1]"),
        ("guards_code", "torch.sym_max(2, L['x'].size()[2] // 3) <= 3*L['x'].size()[2] and not (L['n'] < -1)"),
        ("target", "torch.ops.aten.__and__.Tensor"),
        ("target", "torch.ops.aten._assert_scalar.default"),
        ("target", "_operator.floordiv"),
        ("as_operator", "torch.sym_max"),
        ("name", "add_1"),
        ("parameter_name", "encoder.layer.0.weight"),
        ("in_spec", nesting("builtins.dict", '["input_ids"]')),
        ("out_spec", nesting("torch.return_types.topk", "null")),
        ("as_float", "-Infinity"),
        ("as_string", "bij,bkj->bik \"'; anything, it is quoted"),
    ],
)
def test_what_exports_hold_passes(field: str, text: str) -> None:
    require_plain_program("model.json", {"graph": [{field: text}, {field: [text]}]})


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("expr_str", "exec(\"open('x', 'w')\")"),
        ("expr_str", "__import__('os').system('x')"),
        ("expr_str", "Symbol('s53').__class__"),
        ("expr_str", "Max('exec(1)', 2)"),
        ("expr_str", "Symbol('exec(1)')"),
        ("expr_str", "Symbol('s5', positive=exec(1))"),
        ("expr_str", "Integer('2')"),
        ("expr_str", "sympify('1')"),
        ("expr_str", "[exec(1) for s0 in (1,)]"),
        ("expr_str", "lambda: 1"),
        ("expr_str", "s0 + os"),
        ("expr_str", "s0 #"),
        ("expr_str", "s0\n"),
        ("expr_str", "("),
        ("expr_str", "(" * 10_000 + "s0"),
        ("expr_str", "-" * 19_000 + "1"),
        ("guards_code", "exec(1)"),
        ("guards_code", "torch.load('x')"),
        ("guards_code", "math.__loader__.load_module('os')"),
        ("guards_code", "L['x'].tofile('x')"),
        ("guards_code", "L['x'].size(exec(1))[0] == 1"),
        ("guards_code", "L['x'][exec(1)].size()[0] == 1"),
        ("guards_code", 'L["x"].size()[0] == 1'),
        ("guards_code", "1, ''); exec(1); ("),
        ("target", "torch.os.system"),
        ("target", "torch.load"),
        ("target", "torch.ops.load_library"),
        ("target", "torch.ops.aten.__class__.mro"),
        ("target", "torch.ops.aten.add.__init__"),
        ("target", "torch.ops.aten.from_file.default"),
        ("target", "torch.ops.other.op.default"),
        ("target", "_operator.methodcaller"),
        ("target", "_operator.attrgetter"),
        ("target", "#extension:x"),
        ("as_operator", "torch.os.system"),
        ("name", "x = exec(1)"),
        ("as_name", "x\n"),
        ("forward_arg_names", "x=exec(1)"),
        ("parameter_name", 'a"); exec(1); ("'),
        ("fqn", "a b"),
        ("in_spec", nesting("builtins.dict", '["x=exec(1)"]')),
        ("in_spec", nesting("collections.defaultdict", '{"default_factory_module": "os"}')),
        ("out_spec", nesting("builtins.tuple", '{"__enum__": true}')),
        ("as_int", "1"),
        ("min_val", "exec(1)"),
        ("hint", "1"),
        ("class_fqn", "__torch__.X"),
        ("of_a_later_torch", "x"),
    ],
)
def test_any_other_text_is_refused_in_its_place(field: str, text: str) -> None:
    for value in (text, [text], {"custom": [], field: text}):
        with pytest.raises(ModelError, match=f"model.json: {field} "):
            require_plain_program("model.json", {"graph": [{field: value}]})


def test_a_key_that_would_be_source_is_refused() -> None:
    with pytest.raises(ModelError, match="is not a name"):
        require_plain_program("model.json", {"as_string_to_argument": {"x': exec(1), '": {"as_int": 1}}})
