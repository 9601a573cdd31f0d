"""A disk that is slow for background writers, so that what they read too late can be seen."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

WRITERS = (
    ("torch", "save"),
    ("torch.serialization", "save"),
    ("safetensors.torch", "serialize_file"),
    ("safetensors.torch", "save_file"),
    ("safetensors.torch", "save"),
)
"""The functions that tensors are written by, where a module looks them up when it writes."""


@contextmanager
def slow_for_background_writers(seconds: float) -> Iterator[None]:
    """Let other threads than this one wait before they write tensors to files.

    A save that hands the trainer's own tensors to a thread writes what they have become by then.
    """
    own = threading.current_thread()

    def delayed(write: Callable[..., Any]) -> Callable[..., Any]:
        def wait_and_write(*arguments: Any, **options: Any) -> Any:
            if threading.current_thread() is not own:
                time.sleep(seconds)
            return write(*arguments, **options)

        return wait_and_write

    with ExitStack() as patches:
        for module, name in WRITERS:
            try:
                patch = mock.patch(f"{module}.{name}", delayed(getattr(_import(module), name)))
            except (ImportError, AttributeError):  # not installed, so that nothing writes by it
                continue
            patches.enter_context(patch)
        yield


def _import(name: str) -> Any:
    if name.startswith("torch"):
        return torch if name == "torch" else torch.serialization
    import safetensors.torch

    return safetensors.torch
