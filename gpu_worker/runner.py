"""torch: load a version's model, warm it up, run requests through it.

Blocking and without any server: it is called from the device's threads, and by `models publish` to try a model before
it becomes a version. Values such as NaN are data; only shapes, datatypes and exceptions are failures.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.export.passes import move_to_device_pass

from gpu_worker import architectures, text
from gpu_worker.archives import Reader, require_plain
from gpu_worker.blame import first_line
from gpu_worker.endings import Answer, Failure, Ran
from gpu_worker.errors import ItemError, MachineError, ModelError
from gpu_worker.signatures import check_inputs, check_task, fits
from schemas.manifest import Manifest, TensorSpec
from schemas.records import InferenceRequested, Task
from schemas.tensors import BYTES, Tensor, bytes_tensor

WEIGHTS_FILE = "weights.safetensors"
PROGRAM_FILE = "model.pt2"

#: Padded tokens in one run of a text model; bounds the memory of its largest intermediate values.
MAX_PADDED_TOKENS = 8192

_DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "UINT8": torch.uint8,
    "UINT16": torch.uint16,
    "UINT32": torch.uint32,
    "UINT64": torch.uint64,
    "INT8": torch.int8,
    "INT16": torch.int16,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "FP16": torch.float16,
    "FP32": torch.float32,
    "FP64": torch.float64,
}

Inputs = Sequence[tuple[Tensor, ...]]


def use_threads(count: int) -> None:
    """Let each operation use `count` cores. One is right where several processes share a machine."""
    torch.set_num_threads(count)


def prime() -> None:
    """Import what reading a `.pt2` file needs: seconds that the first real one would wait for.

    Imports only, because it goes on beside running models: to export something for practice, torch would replace
    methods of every module for a while, also of those in other threads.
    """
    for name in ("torch.export.pt2_archive", "torch.export._trace"):
        with suppress(ImportError):  # of another version of torch, whose first file then takes longer
            importlib.import_module(name)


def load(folder: Path, manifest: Manifest, *, device: str) -> LoadedModel:
    """The model of a version whose files are in `folder`, on `device`, tried once.

    The files must already be verified. Raises ModelError when they do not make the model the manifest describes,
    MachineError when the device is away or full.
    """
    # Inside torch this overrides every request to unpickle freely, so that a crafted archive fails instead of running.
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    try:
        forward = _forward(folder, manifest, device)
    except torch.OutOfMemoryError as error:
        raise MachineError(f"loading onto {device}: out of memory") from error
    except (MachineError, ModelError):
        raise
    except Exception as error:
        raise ModelError(f"the model does not load: {_short(error)}") from error
    tokeniser = None
    if manifest.task is Task.EMBEDDINGS:
        tokeniser = text.Tokeniser(folder / text.TOKENIZER_FILE, max_length=manifest.max_length)
    model = LoadedModel(manifest=manifest, device=device, forward=forward, tokeniser=tokeniser)
    model.warm_up()
    return model


def _forward(folder: Path, manifest: Manifest, device: str) -> Callable[..., Any]:
    if manifest.layout == "safetensors":
        module = architectures.build(manifest.architecture, manifest.architecture_args)
        try:
            weights = load_file(folder / WEIGHTS_FILE, device=device)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{WEIGHTS_FILE}: {error}") from error
        module.load_state_dict(weights, strict=True, assign=True)
        return module.eval()
    if manifest.layout == "pt2":
        path = folder / PROGRAM_FILE
        require_plain(path, _archive_reader(path))
        program = torch.export.load(str(path))
        if device != "cpu":
            program = move_to_device_pass(program, device)
        forward: Callable[..., Any] = program.module()
        return forward
    raise ModelError(f"layout '{manifest.layout}' is not known here, expected 'safetensors' or 'pt2'")


def _archive_reader(path: Path) -> Reader:
    from torch.export.pt2_archive import PT2ArchiveReader  # takes seconds, see `prime`

    try:
        reader: Reader = PT2ArchiveReader(str(path))
    except Exception as error:
        raise ModelError(f"{path.name}: not a .pt2 archive: {_short(error)}") from error
    return reader


class LoadedModel:
    """One version on one device. Not for use by two threads at once."""

    def __init__(
        self, *, manifest: Manifest, device: str, forward: Callable[..., Any], tokeniser: text.Tokeniser | None
    ) -> None:
        self.manifest = manifest
        self._version = manifest.version
        self._device = device
        self._call = forward
        self._tokeniser = tokeniser

    def run(self, requests: Sequence[InferenceRequested]) -> Ran:
        """One answer or failure per request, in order. Raises MachineError when the device itself is broken.

        All requests run together. When that fails each runs alone, so that the one at fault fails and the others do
        not pay for it.
        """
        started = time.perf_counter_ns()
        fitting, outcomes = self._split(requests)
        if fitting:
            try:
                answers: list[Answer | Failure] = [*self._answers([requests[i].inputs for i in fitting])]
            except MachineError:
                raise
            except Exception as error:  # noqa: BLE001  the model's code may raise anything
                answers = [self._alone(requests[i]) for i in fitting] if len(fitting) > 1 else [_failure(error)]
            for i, answer in zip(fitting, answers, strict=True):
                outcomes[i] = answer
        run_us = (time.perf_counter_ns() - started) // 1000
        return Ran(version=self._version, results=[o for o in outcomes if o is not None], run_us=run_us)

    def warm_up(self) -> None:
        """Run made-up items, one and then several, and check what comes out. Raises ModelError."""
        for count in sorted({1, min(3, self.manifest.max_batch_items)}):
            try:
                self._answers([tuple(_sample(spec, count) for spec in self.manifest.inputs)])
            except (MachineError, ModelError):
                raise
            except Exception as error:
                raise ModelError(f"the model fails on a sample of {count}: {_short(error)}") from error

    def _split(self, requests: Sequence[InferenceRequested]) -> tuple[list[int], list[Answer | Failure | None]]:
        fitting: list[int] = []
        outcomes: list[Answer | Failure | None] = [None] * len(requests)
        for i, request in enumerate(requests):
            try:
                check_task(self.manifest.task, request.task)  # by the request's it is billed
                check_inputs(self.manifest.inputs, request.inputs)
                fitting.append(i)
            except ItemError as error:
                outcomes[i] = Failure(code=error.code, message=str(error))
        return fitting, outcomes

    def _alone(self, request: InferenceRequested) -> Answer | Failure:
        try:
            return self._answers([request.inputs])[0]
        except MachineError:
            raise
        except Exception as error:  # noqa: BLE001  whatever the model raises belongs to this request alone
            return _failure(error)

    def _answers(self, inputs: Inputs) -> list[Answer]:
        try:
            with torch.inference_mode():
                if self._tokeniser is None:
                    return self._run_tensors(inputs)
                return self._run_texts(inputs, self._tokeniser)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            # The process's context is lost, nothing will run here again. It shows wherever the device is waited for,
            # so also when inputs or outputs are copied.
            if "CUDA error" in str(error):
                raise MachineError(f"device {self._device}: {_short(error)}") from error
            raise

    def _run_tensors(self, inputs: Inputs) -> list[Answer]:
        counts = [tensors[0].item_count for tensors in inputs]
        stacked = [_stack([tensors[i] for tensors in inputs], self._device) for i in range(len(self.manifest.inputs))]
        step = self.manifest.max_batch_items
        runs = [self._forward([t[at : at + step] for t in stacked]) for at in range(0, sum(counts), step)]
        return self._cut(runs, counts, [0] * len(counts))

    def _run_texts(self, inputs: Inputs, tokeniser: text.Tokeniser) -> list[Answer]:
        name = self.manifest.inputs[0].name
        counts = [tensors[0].item_count for tensors in inputs]
        rows = tokeniser.encode([t for tensors in inputs for t in text.decode_texts(name, tensors[0].elements())])
        lengths = [len(row) for row in rows]
        order: list[int] = []
        runs = []
        for part in text.slices(lengths, max_items=self.manifest.max_batch_items, max_padded=MAX_PADDED_TOKENS):
            ids, mask = text.pad([rows[i] for i in part])
            runs.append(self._forward([torch.from_numpy(a).to(self._device) for a in (ids, mask)]))
            order += part
        # Slices ran in order of length; put the rows of every output back in the order of the requests.
        back = np.argsort(np.asarray(order))
        whole = [np.concatenate(parts)[back] for parts in zip(*runs, strict=True)]
        ends = np.cumsum(counts)
        tokens = [sum(lengths[end - count : end]) for end, count in zip(ends, counts, strict=True)]
        return self._cut([whole], counts, tokens)

    def _forward(self, inputs: list[torch.Tensor]) -> list[Any]:
        """One run. Returns numpy arrays, one per output of the signature, each with one row per item."""
        found = self._call(*inputs)
        outputs = [found] if isinstance(found, torch.Tensor) else list(found)
        if len(outputs) != len(self.manifest.outputs):
            raise ModelError(f"expected {len(self.manifest.outputs)} outputs, the model gave {len(outputs)}")
        count = inputs[0].shape[0]
        for spec, output in zip(self.manifest.outputs, outputs, strict=True):
            _check_output(spec, output, count)
        return [output.cpu().contiguous().numpy() for output in outputs]

    def _cut(self, runs: Sequence[Sequence[Any]], counts: Sequence[int], tokens: Sequence[int]) -> list[Answer]:
        """The rows of each request out of the rows of all, as tensors of the signature."""
        columns = []
        for spec, parts in zip(self.manifest.outputs, zip(*runs, strict=True), strict=False):
            data = b"".join(part.tobytes() for part in parts)
            item_shape = parts[0].shape[1:]
            columns.append((spec.name, spec.datatype, item_shape, data, len(data) // max(1, sum(counts))))
        answers = []
        at = 0
        for count, used in zip(counts, tokens, strict=True):
            outputs = tuple(
                Tensor(
                    name=name,
                    datatype=datatype,
                    shape=(count, *item_shape),
                    data=data[at * row_bytes : (at + count) * row_bytes],
                )
                for name, datatype, item_shape, data, row_bytes in columns
            )
            answers.append(Answer(outputs=outputs, items=count, tokens=used))
            at += count
        return answers


def _check_output(spec: TensorSpec, output: torch.Tensor, count: int) -> None:
    if output.dtype != _DTYPES[spec.datatype]:
        raise ModelError(f"output '{spec.name}': expected {spec.datatype}, the model gave {output.dtype}")
    if output.shape[:1] != (count,) or not fits(spec.shape, output.shape):
        raise ModelError(
            f"output '{spec.name}' of {count} items: expected shape {list(spec.shape)}, "
            f"the model gave {list(output.shape)}"
        )


def _stack(tensors: Sequence[Tensor], device: str) -> torch.Tensor:
    """Rows of all requests as one tensor. A bytearray, because torch refuses to share memory it may not write."""
    data = bytearray().join([t.data for t in tensors])
    shape = (sum(t.shape[0] for t in tensors), *tensors[0].shape[1:])
    stacked = torch.frombuffer(data, dtype=_DTYPES[tensors[0].datatype]).view(shape)
    return stacked.to(device)


def _sample(spec: TensorSpec, count: int) -> Tensor:
    if spec.datatype == BYTES:
        return bytes_tensor(spec.name, [b"warm up"] * count)
    shape = (count, *(1 if d == -1 else d for d in spec.shape[1:]))
    size = int(np.prod(shape)) * _DTYPES[spec.datatype].itemsize
    return Tensor(name=spec.name, datatype=spec.datatype, shape=shape, data=bytes(size))


def _failure(error: Exception) -> Failure:
    if isinstance(error, (ItemError, ModelError)):
        return Failure(code=error.code, message=str(error))
    if isinstance(error, torch.OutOfMemoryError):
        return Failure(code="too_large", message="the request does not fit into the device's memory")
    return Failure(code="run_failed", message=f"the model failed on this request: {_short(error)}")


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"
