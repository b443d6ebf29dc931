"""The `digits` model: a small network trained in seconds on scikit-learn's handwritten digits, as a bundle to publish.

python -m docs.demo.digits OUT          write the bundle
python -m docs.demo.digits --sample     print a request body with one held-out digit
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from gpu_worker.architectures import build as build_architecture

ARCHITECTURE = "mlp"
ARGS = {"inputs": 64, "hidden": 128, "layers": 2, "outputs": 10}
_EPOCHS = 60
_SEED = 0

Pixels = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]


def _split() -> tuple[Pixels, Pixels, Labels, Labels]:
    images, labels = load_digits(return_X_y=True)
    pixels = (images / 16.0).astype(np.float32)
    parts: Any = train_test_split(pixels, labels.astype(np.int64), test_size=360, random_state=_SEED, stratify=labels)
    return parts[0], parts[1], parts[2], parts[3]


def held_out() -> tuple[list[list[float]], list[int]]:
    """360 images the model was not trained on, each 64 pixels from 0 to 1, and their digits."""
    _, pixels, _, labels = _split()
    return pixels.tolist(), labels.tolist()


def sample() -> str:
    """The body of an Open Inference Protocol request for the first held-out digit, as JSON."""
    rows, _ = held_out()
    tensor = {"name": "pixels", "datatype": "FP32", "shape": [1, 64], "data": rows[0]}
    return json.dumps({"inputs": [tensor]})


def reference(bundle: Path, rows: list[list[float]]) -> list[list[float]]:
    """Logits of a bundle's model by plain torch in this process: what answers of the API are compared with."""
    model = build_architecture(ARCHITECTURE, ARGS)
    model.load_state_dict(load_file(bundle / "weights.safetensors"))
    with torch.inference_mode():
        logits: list[list[float]] = model.eval()(torch.tensor(rows, dtype=torch.float32)).tolist()
    return logits


def accuracy(bundle: Path) -> float:
    """Share of the held-out digits that a bundle's model recognises, from 0 to 1."""
    rows, labels = held_out()
    guesses = [max(range(10), key=logits.__getitem__) for logits in reference(bundle, rows)]
    return sum(guess == label for guess, label in zip(guesses, labels, strict=True)) / len(labels)


def build(out: Path, *, seed: int = _SEED) -> bool:
    """Train and write the bundle; False when `out` held one made with the same settings and torch, and stays.

    Another `seed` gives another version of the same model.
    """
    producer = f"docs.demo.digits 2, seed {seed}, {_EPOCHS} epochs"
    description = {
        "task": "TENSORS",
        "layout": "safetensors",
        "architecture": ARCHITECTURE,
        "architecture_args": ARGS,
        "files": ["weights.safetensors"],
        "inputs": [{"name": "pixels", "datatype": "FP32", "shape": [-1, 64]}],
        "outputs": [{"name": "logits", "datatype": "FP32", "shape": [-1, 10]}],
        "max_batch_items": 256,
        "max_length": 0,
        "torch_version": torch.__version__,
        "producer": producer,
    }
    text = json.dumps(description, indent=2) + "\n"
    target = out / "model.json"
    if (out / "weights.safetensors").is_file() and target.is_file() and target.read_text(encoding="utf-8") == text:
        return False
    out.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)  # a bundle half-written is no bundle
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # layers this small lose more to waking threads than they gain
    try:
        save_file(_train(seed).state_dict(), out / "weights.safetensors")
    finally:
        torch.set_num_threads(threads)
    target.write_text(text, encoding="utf-8")
    return True


def _train(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    pixels, _, labels, _ = _split()
    x, y = torch.from_numpy(pixels), torch.from_numpy(labels)
    model = build_architecture(ARCHITECTURE, ARGS)
    # Momentum by hand: torch.optim would first import torch's compiler, which takes longer than the training.
    parameters = list(model.parameters())
    velocities = [torch.zeros_like(p) for p in parameters]
    for epoch in range(_EPOCHS):
        rate = 0.05 * (1 - epoch / _EPOCHS)
        order: Any = torch.randperm(len(x))
        for rows in order.split(64):
            loss = torch.nn.functional.cross_entropy(model(x[rows]), y[rows])
            gradients = torch.autograd.grad(loss, parameters)
            with torch.no_grad():
                for parameter, velocity, gradient in zip(parameters, velocities, gradients, strict=True):
                    velocity.mul_(0.9).add_(gradient + 1e-4 * parameter)
                    parameter.sub_(rate * velocity)
    return model


@click.command(epilog="Example:  python -m docs.demo.digits .inferlog/bundles/digits")
@click.argument("out", required=False, type=click.Path(file_okay=False, path_type=Path))
@click.option("--sample", "as_sample", is_flag=True, help="Print a request body with one held-out digit instead.")
def main(out: Path | None, as_sample: bool) -> None:
    """Train the digits model and write it to the folder OUT, ready for `inferlog models publish`."""
    if as_sample == (out is not None):
        raise click.UsageError("expected a folder OUT, or --sample")
    if out is None:
        click.echo(sample())
        return
    started = time.monotonic()
    said = "wrote" if build(out) else "there already:"
    click.echo(f"{said} {out}, held-out accuracy {accuracy(out):.1%}, {time.monotonic() - started:.1f} s")


if __name__ == "__main__":
    main()
