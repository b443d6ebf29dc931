"""Real torch, no servers: the runner's answers, whose fault a failure is, and the two demo models."""

from __future__ import annotations

import json
import re
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from docs.demo import digits, minilm
from gpu_worker import runner, text
from gpu_worker.bundle import BundleError, read_bundle
from gpu_worker.endings import Answer, Failure
from gpu_worker.errors import MachineError, ModelError
from gpu_worker.publish import require_runnable
from gpu_worker.runner import LoadedModel
from schemas.manifest import Manifest, TensorSpec
from schemas.records import InferenceRequested, Task
from schemas.tensors import Tensor, bytes_tensor
from tests.factories import floats, requested
from tests.fakes import manifest as any_manifest
from tests.processes import ROOT


def manifest(*, width: int = 2, max_batch_items: int = 4, outputs: int = 1) -> Manifest:
    return any_manifest(
        inputs=(TensorSpec(name="x", datatype="FP32", shape=(-1, width)),),
        outputs=tuple(TensorSpec(name=f"y{i}", datatype="FP32", shape=(-1, width)) for i in range(outputs)),
        max_batch_items=max_batch_items,
    )


class Doubling:
    """Doubles its input; refuses a run that holds a 13, and remembers how many items each run had."""

    def __init__(self) -> None:
        self.runs: list[int] = []

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.runs.append(len(x))
        if bool((x == 13).any()):
            raise ValueError("thirteen")
        return x * 2


def loaded(forward: Any, **changes: Any) -> LoadedModel:
    return LoadedModel(manifest=manifest(**changes), device="cpu", forward=forward, tokeniser=None)


def rows(*values: tuple[float, float]) -> InferenceRequested:
    data = struct.pack(f"<{2 * len(values)}f", *[v for row in values for v in row])
    tensor = Tensor(name="x", datatype="FP32", shape=(len(values), 2), data=data)
    return requested(inputs=(tensor,), item_count=len(values))


def values(result: Answer | Failure) -> tuple[float, ...]:
    assert isinstance(result, Answer), result
    return struct.unpack(f"<{len(result.outputs[0].data) // 4}f", result.outputs[0].data)


def test_each_request_gets_its_own_rows_back_however_runs_were_sliced() -> None:
    model = Doubling()
    requests = [rows((1, 2)), rows((3, 4), (5, 6), (7, 8)), rows((9, 10), (11, 12))]
    ran = loaded(model).run(requests)
    assert model.runs == [4, 2]
    assert [values(r) for r in ran.results] == [(2, 4), (6, 8, 10, 12, 14, 16), (18, 20, 22, 24)]
    assert [r.outputs[0].shape for r in ran.results if isinstance(r, Answer)] == [(1, 2), (3, 2), (2, 2)]


def test_a_request_that_breaks_the_run_fails_alone() -> None:
    ran = loaded(Doubling()).run([rows((1, 2)), rows((13, 0)), rows((3, 4))])
    assert values(ran.results[0]) == (2, 4)
    assert ran.results[1] == Failure(
        code="run_failed", message="the model failed on this request: ValueError: thirteen"
    )
    assert values(ran.results[2]) == (6, 8)


def test_without_the_second_try_one_bad_request_would_fail_its_neighbours() -> None:
    model = loaded(Doubling())
    with pytest.raises(ValueError, match="thirteen"):
        model._answers([r.inputs for r in (rows((1, 2)), rows((13, 0)))])


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((), "expected 1 inputs, found 0"),
        ((floats("z", 1, 2),), "input 'z' of FP32: expected 'x' of FP32"),
        ((Tensor(name="x", datatype="FP64", shape=(1, 2), data=bytes(16)),), "'x' of FP64: expected 'x' of FP32"),
        ((floats("x", 1, 2, 3),), r"input 'x': expected shape \[-1, 2\], found \[1, 3\]"),
        ((Tensor(name="x", datatype="FP32", shape=(0, 2), data=b""),), r"found \[0, 2\]"),
    ],
)
def test_inputs_that_do_not_fit_are_told_by_name(inputs: tuple[Tensor, ...], message: str) -> None:
    bad, good = loaded(Doubling()).run([requested(inputs=inputs), rows((1, 2))]).results
    assert isinstance(bad, Failure)
    assert bad.code == "invalid_input"
    assert re.search(message, bad.message)
    assert values(good) == (2, 4)


def test_a_request_of_another_task_fails_alone_and_the_rest_is_counted_by_its_rows() -> None:
    other = replace(rows((1, 2)), task=Task.EMBEDDINGS)
    bad, good = loaded(Doubling()).run([other, replace(rows((1, 2), (3, 4)), item_count=99)]).results
    assert bad == Failure(
        code="invalid_input", message="task: expected TENSORS, which is the version's, found EMBEDDINGS"
    )
    assert isinstance(good, Answer)
    assert good.items == 2


@pytest.mark.parametrize("where", ["in the model", "when its outputs are copied"])
def test_a_lost_device_is_no_requests_fault_wherever_it_shows(where: str) -> None:
    lost = RuntimeError("CUDA error: device-side assert triggered")

    class Output:
        """Kernels run on after the call; what became of them shows at the next copy."""

        dtype, shape = torch.float32, torch.Size([1, 2])

        def cpu(self) -> Any:
            raise lost

    def forward(x: torch.Tensor) -> Any:
        if where == "in the model":
            raise lost
        return [Output()]

    with pytest.raises(MachineError, match="device-side assert"):
        loaded(forward).run([rows((1, 2))])


def test_nan_and_infinity_are_data() -> None:
    found = values(loaded(Doubling()).run([rows((float("inf"), float("nan")))]).results[0])
    assert found[0] == float("inf")
    assert np.isnan(found[1])


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        pytest.param(lambda x: x[:-1], "expected shape", id="a row is missing"),
        pytest.param(lambda x: x[:, :1], "expected shape", id="narrower rows"),
        pytest.param(lambda x: x.double(), "expected FP32", id="another datatype"),
        pytest.param(lambda x: (x, x), "expected 1 outputs, the model gave 2", id="an output too many"),
        pytest.param(lambda x: x.missing, "fails on a sample of 1", id="an exception"),
    ],
)
def test_a_model_that_is_not_what_its_manifest_says_does_not_pass_the_warm_up(forward: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        loaded(forward).warm_up()


def test_texts_of_like_length_run_together_and_come_back_in_order() -> None:
    lengths = [9, 1, 8, 2, 1]
    assert text.slices(lengths, max_items=2, max_padded=100) == [[1, 4], [3, 2], [0]]
    assert text.slices(lengths, max_items=9, max_padded=6) == [[1, 4, 3], [2], [0]]
    assert text.slices([], max_items=9, max_padded=6) == []


def test_digits_answers_what_plain_torch_answers_and_reads_handwriting(tmp_path: Path) -> None:
    digits.build(tmp_path)
    first = (tmp_path / "weights.safetensors").stat().st_mtime_ns
    digits.build(tmp_path)
    assert (tmp_path / "weights.safetensors").stat().st_mtime_ns == first, "built from the same inputs already"
    pixels, labels = digits.held_out()
    assert len(pixels) == 360
    model = runner.load(tmp_path, read_bundle(tmp_path), device="cpu")
    requests = [requested(inputs=(floats("pixels", *row),)) for row in pixels]
    found = np.array([values(r) for r in model.run(requests).results])
    assert np.abs(found - np.array(digits.reference(tmp_path, pixels))).max() < 1e-5
    assert (found.argmax(1) == labels).mean() > 0.95


def embedded(model: LoadedModel, texts: Sequence[str]) -> list[tuple[float, ...]]:
    return [values(r) for r in model.run([request_of(t) for t in texts]).results]


def request_of(*texts: str) -> InferenceRequested:
    tensor = bytes_tensor("text", [t.encode() for t in texts])
    return requested(task=Task.EMBEDDINGS, inputs=(tensor,), item_count=len(texts))


def test_minilm_answers_what_transformers_answers(minilm_bundle: Path) -> None:
    model = runner.load(minilm_bundle, read_bundle(minilm_bundle), device="cpu")
    texts = ["a cat", "", "日本語の文", "long " * 400, "one more sentence, a little longer than the others"]
    assert np.abs(np.array(embedded(model, texts)) - np.array(minilm.reference(texts))).max() < 1e-5
    together, not_text, alone = model.run(
        [
            request_of(*texts),
            requested(task=Task.EMBEDDINGS, inputs=(bytes_tensor("text", [b"\xff"]),)),
            request_of("a cat"),
        ]
    ).results
    assert isinstance(together, Answer)
    assert together.outputs[0].shape == (5, 384)
    tokeniser = text.Tokeniser(minilm_bundle / "tokenizer.json", max_length=minilm.MAX_LENGTH)
    assert together.tokens == sum(len(ids) for ids in tokeniser.encode(texts))
    assert isinstance(not_text, Failure)
    assert not_text.message == "input 'text': element 0 is not UTF-8 (invalid start byte at byte 0)"
    assert isinstance(alone, Answer)
    assert alone.tokens == 4


def test_a_bundle_is_refused_when_its_model_is_not_what_it_says(minilm_bundle: Path, tmp_path: Path) -> None:
    for name in ("model.pt2", "tokenizer.json"):
        (tmp_path / name).symlink_to(minilm_bundle / name)
    description = json.loads((minilm_bundle / "model.json").read_text())
    description["outputs"][0]["shape"] = [-1, 100]
    (tmp_path / "model.json").write_text(json.dumps(description))
    with pytest.raises(BundleError, match=r"expected shape \[-1, 100\], the model gave \[1, 384\]"):
        require_runnable(tmp_path, read_bundle(tmp_path), lambda line: None)
    description["files"] = ["model.pt2"]
    (tmp_path / "model.json").write_text(json.dumps(description))
    with pytest.raises(BundleError, match=r"tokenizer\.json.* missing"):
        require_runnable(tmp_path, read_bundle(tmp_path), lambda line: None)


@pytest.fixture(scope="module")
def minilm_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("minilm")
    minilm.build(folder)
    return folder


def test_what_a_crafted_weights_file_would_run_does_not_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"stack.0.weight": Evil()}, tmp_path / "weights.safetensors")
    with pytest.raises(ModelError):
        runner.load(
            tmp_path,
            replace(manifest(), architecture_args={"inputs": 2, "hidden": 2, "layers": 1, "outputs": 2}),
            device="cpu",
        )
    assert not (tmp_path / "ran").exists()


def in_a_size(program: str, call: str) -> str:
    return re.sub('("expr_str": )"[^"]*"', rf'\1"{call}"', program)


def in_a_guard(program: str, call: str) -> str:
    return program.replace('"guards_code": [', f'"guards_code": ["{call}", ')


def as_a_function(program: str, call: str) -> str:
    return program.replace('"torch.ops.aten.gelu.default"', '"torch.os.mkdir"')


class Gated(torch.nn.Module):
    """Sizes that depend on its input's, a branch, a constant and a string: much of what exports hold."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(4))
        self.shift = torch.full((4,), 2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)) * self.scale + self.shift
        y = torch.nn.functional.gelu(y, approximate="tanh").masked_fill(x > 9, float("-inf"))
        return torch.cat([y, x.new_zeros(x.shape[0], x.shape[1] % 3 + x.shape[1] // 2)], dim=1)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exported") / "model.pt2"
    with torch.no_grad():
        program = torch.export.export(Gated(), (torch.ones(3, 4),), dynamic_shapes=({0: torch.export.Dim("n", max=8)},))
    program._guards_code = ["L['x'].size()[0] <= 8"]
    torch.export.save(program, path)
    return path


def signature() -> Manifest:
    (y,) = manifest().outputs
    return replace(
        manifest(),
        layout="pt2",
        inputs=(TensorSpec(name="x", datatype="FP32", shape=(-1, 4)),),
        outputs=(replace(y, shape=(-1, 7)),),
    )


def test_an_export_with_dynamic_sizes_and_a_branch_loads_and_runs(exported: Path) -> None:
    model = runner.load(exported.parent, signature(), device="cpu")
    (found,) = model.run([requested(inputs=(floats("x", 1, 2, 3, 10),))]).results
    assert values(found)[3:] == (float("-inf"), 0, 0, 0)


def crafted(exported: Path, folder: Path, craft: Callable[[str, str], str]) -> Path:
    """A copy of an export in which something runs as it loads; returns the folder that appears when it did."""
    marker = folder / "ran"
    with zipfile.ZipFile(exported) as source, zipfile.ZipFile(folder / "model.pt2", "w") as target:
        for entry in source.infolist():
            data = source.read(entry)
            if entry.filename.endswith("models/model.json"):
                program = json.dumps(json.loads(data))
                data = craft(program, f"__import__('os').mkdir('{marker}')").encode()
                assert data != program.encode()
            target.writestr(entry.filename, data)
    return marker


@pytest.mark.parametrize("craft", [in_a_size, in_a_guard, as_a_function])
def test_what_a_crafted_archive_would_run_does_not_run(
    exported: Path, tmp_path: Path, craft: Callable[[str, str], str]
) -> None:
    marker = crafted(exported, tmp_path, craft)
    with pytest.raises(ModelError, match="is not what an export has there"):
        runner.load(tmp_path, signature(), device="cpu")
    assert not marker.exists()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("craft", [in_a_size, in_a_guard])
def test_without_the_check_it_would_run(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, craft: Callable[[str, str], str]
) -> None:
    marker = crafted(exported, tmp_path, craft)
    monkeypatch.setattr(runner, "require_plain", lambda path, reader: None)
    with suppress(ModelError):
        runner.load(tmp_path, signature(), device="cpu")
    assert marker.exists()


def test_neither_priming_nor_loading_touches_models_that_run_meanwhile(
    minilm_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def traced(*args: Any, **options: Any) -> Any:
        raise AssertionError("tracing replaces methods of every module in the process")

    monkeypatch.setattr(torch.fx.Tracer, "trace", traced)
    runner.prime()
    runner.load(minilm_bundle, read_bundle(minilm_bundle), device="cpu")


def test_a_model_of_plain_weights_waits_for_nothing_that_priming_imports(tmp_path: Path) -> None:
    digits.build(tmp_path)
    code = f"""
import sys
from pathlib import Path
from gpu_worker import runner
from gpu_worker.bundle import read_bundle
before, folder = set(sys.modules), Path({str(tmp_path)!r})
runner.load(folder, read_bundle(folder), device="cpu")
assert not [name for name in set(sys.modules) - before if name.startswith("torch")]
assert "torch._dynamo" not in sys.modules
runner.prime()
assert {{"torch._dynamo", "torch.export.pt2_archive", "torch.export._trace"}} <= set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
