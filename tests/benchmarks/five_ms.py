"""A trainer whose calls take 5 ms each, to measure what the kit adds."""

from __future__ import annotations

import time
from typing import Any

from reference_impls.plain import PlainTrainer

SECONDS = 0.005


def _in_five_milliseconds(name: str) -> Any:
    async def call(self: PlainTrainer, *args: Any, **kwargs: Any) -> Any:
        end = time.perf_counter() + SECONDS
        try:
            return await getattr(super(FiveMillisecondTrainer, self), name)(*args, **kwargs)
        finally:
            time.sleep(max(0.0, end - time.perf_counter()))

    return call


class FiveMillisecondTrainer(PlainTrainer):
    """`PlainTrainer`, with calls that would be quicker brought to 5 ms."""

    forward_backward = _in_five_milliseconds("forward_backward")
    optim_step = _in_five_milliseconds("optim_step")
    clear_gradients = _in_five_milliseconds("clear_gradients")
    forward = _in_five_milliseconds("forward")
    get_status = _in_five_milliseconds("get_status")
