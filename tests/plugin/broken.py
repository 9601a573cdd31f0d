"""What `tiny:Trainer` becomes when something in it is broken, one class for each break."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import threading
import time

import torch
from tiny import Trainer


class SeesLater(Trainer):
    """Breaks forward.causal: every position sees the mean over the sequence."""

    async def forward(self, inputs):
        logits = await super().forward(inputs)
        return logits + logits.mean(1, keepdim=True)


class KeepsGraph(Trainer):
    """Breaks forward.no_grad, and nothing else."""

    async def forward(self, inputs):
        return await super().forward(inputs) + 0 * self.weight.sum()


class Forgetful(Trainer):
    """Breaks tokenizer.round_trip, a SHOULD, and nothing else."""

    async def get_tokenizer(self):
        tokenizer = await super().get_tokenizer()
        tokenizer.decode = lambda ids, skip_special_tokens=False: "?" * (len(ids) // 2)
        return tokenizer


class Refuses(Trainer):
    """Takes no custom loss, which many clauses need."""

    async def forward_backward(self, batch, loss_fn=None):
        if loss_fn is not None:
            raise NotImplementedError("custom losses aren't supported")
        return await super().forward_backward(batch)


class Awaits(Trainer):
    async def forward(self, inputs):
        await asyncio.Event().wait()


class Sleeps(Trainer):
    async def forward(self, inputs):
        time.sleep(1000)


class Deadlocks(Trainer):
    async def forward(self, inputs):
        lock = threading.Lock()
        with lock:
            lock.acquire()


class LeavesThread(Trainer):
    async def forward(self, inputs):
        await asyncio.to_thread(time.sleep, 1000)


class LeavesStubbornTask(Trainer):
    async def forward(self, inputs):
        self.task = asyncio.create_task(self.never_ends())
        return await super().forward(inputs)

    async def never_ends(self):
        while True:
            with contextlib.suppress(BaseException):  # on purpose: nothing ends it
                await asyncio.sleep(0.01)


class BlocksInNativeCode(Trainer):
    async def forward(self, inputs):
        native = ctypes.CDLL(None)
        mutex = ctypes.create_string_buffer(64)
        native.pthread_mutex_lock(mutex)
        native.pthread_mutex_lock(mutex)


class HoldsInterpreterLock(Trainer):
    async def forward(self, inputs):
        ctypes.PyDLL(None).sleep(1000)


class Dies(Trainer):
    async def forward(self, inputs):
        os._exit(17)


class Unlike(Trainer):
    """No two of its trainers agree, and load can't help that: twins can't be had."""

    def __init__(self):
        super().__init__()
        with torch.no_grad():
            self.weight += torch.randn(
                self.weight.shape, generator=torch.Generator().manual_seed(id(self) % 2**31)
            )

    async def load(self, path=None):
        raise OSError("no checkpoints here")


def raises():
    raise ValueError("no weights found")


def gives_none():
    return None


async def hangs():
    await asyncio.Event().wait()


def needs(path):
    return Trainer()


number = 3
