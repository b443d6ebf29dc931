"""Whose fault a failure is, because that decides what happens next.

one request's inputs -> ItemError     that request fails, its neighbours in the batch do not
the version's files  -> ModelError    every request for the version fails, other versions go on
this machine         -> MachineError  the work waits or moves to another worker; nobody is told it failed
"""

from __future__ import annotations

from typing import ClassVar


class WorkerError(Exception):
    """A failure whose owner is known. `code` is what the caller sees beside the message."""

    code: ClassVar[str] = "internal"


class ItemError(WorkerError):
    """A request that no worker could run: its inputs do not fit the version, or running it alone failed."""

    code = "invalid_input"


class InputLost(ItemError):
    """Inputs that are no longer where the request says."""

    code = "input_lost"


class InputAltered(ItemError):
    """Bytes found for an input that are not the ones the request names."""

    code = "input_altered"


class ModelError(WorkerError):
    """A version that cannot be served: bytes that are not the ones its hash names, or a model that does not load."""

    code = "model_unavailable"


class MachineError(WorkerError):
    """Something around the model is away or full: the store, memory, the device. The same work may succeed later."""

    code = "unavailable"
