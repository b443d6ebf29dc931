"""A `.pt2` archive that would run something while it loads is refused before torch sees it."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest

from gpu_worker.archives import require_no_pickle
from gpu_worker.errors import ModelError


class Evil:
    def __reduce__(self) -> Any:
        return (print, ("ran",))


def samples(payload: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as inner:
        inner.writestr("archive/data.pkl", payload)
    return out.getvalue()


def archive(path: Path, entries: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as outer:
        for name, data in entries.items():
            outer.writestr(name, data)
    return path


def config(*, use_pickle: bool) -> bytes:
    return json.dumps({"config": {"w": {"path_name": "weight_0", "use_pickle": use_pickle}}}).encode()


CONFIG = "m/data/weights/model_weights_config.json"
SAMPLES = "m/data/sample_inputs/model.pt"


def test_a_plain_archive_passes(tmp_path: Path) -> None:
    require_no_pickle(
        archive(tmp_path / "m.pt2", {CONFIG: config(use_pickle=False), SAMPLES: samples(pickle.dumps(1))})
    )


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        pytest.param({CONFIG: config(use_pickle=True)}, "weight_0 needs pickle", id="pickled weights"),
        pytest.param({SAMPLES: samples(pickle.dumps(Evil(), 2))}, "names .*print", id="pickled call, protocol 2"),
        pytest.param({SAMPLES: samples(pickle.dumps(Evil(), 4))}, "STACK_GLOBAL", id="pickled call, protocol 4"),
        pytest.param({"m/data/extra.pkl": b""}, "would run as code", id="stray pickle"),
        pytest.param({"m/serialized_state_dict.pt": b""}, "would run as code", id="format of older torch"),
        pytest.param({"m/data/aotinductor/model.so": b""}, "would run as code", id="native code"),
    ],
)
def test_what_would_run_is_refused(tmp_path: Path, entries: dict[str, bytes], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        require_no_pickle(archive(tmp_path / "m.pt2", entries))


def test_something_else_is_no_archive(tmp_path: Path) -> None:
    (tmp_path / "m.pt2").write_bytes(b"hello")
    with pytest.raises(ModelError, match=r"not a \.pt2 archive"):
        require_no_pickle(tmp_path / "m.pt2")
