"""A conforming trainer that imports nothing of this project: a bigram model, 16 × 16 weights.

The tests of the plugin copy this file into a folder of their own and judge it, or what a subclass
breaks in it. Its metrics are declared nowhere, so that `metrics.schema` isn't checked.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from types import SimpleNamespace

import torch

VOCAB, LONGEST = 16, 8


class Trainer:
    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.weight = torch.randn(VOCAB, VOCAB, generator=generator).requires_grad_()
        self.step = 0
        self.count = 0
        self.folder = Path("checkpoints").absolute()
        self.config = SimpleNamespace(
            model_name="bigram",
            model_config={
                "vocab_size": VOCAB,
                "hidden_size": VOCAB,
                "num_layers": 1,
                "num_attention_heads": 1,
                "max_seq_len": LONGEST,
            },
            parallelism=SimpleNamespace(
                dp_degree=1,
                tp_degree=1,
                pp_degree=1,
                cp_degree=1,
                ep_degree=1,
                world_size=1,
                dp_rank=0,
                tp_rank=0,
                device="cpu",
            ),
        )

    async def forward_backward(self, batch, loss_fn=None):
        check_ids(batch.input_ids)
        mask, weights = batch.target_mask, batch.target_weights
        others = [batch.target_ids, *(each for each in (mask, weights) if each is not None)]
        if any(each.shape != batch.input_ids.shape for each in others):
            raise ValueError("the tensors of the batch differ in shape")
        kept = torch.ones_like(batch.target_ids) if mask is None else mask
        check_ids(torch.where(kept.bool(), batch.target_ids, 0))
        outputs = {"logits": self.weight[batch.input_ids]}
        loss = (loss_fn or token_mean)(outputs, batch)
        if not isinstance(loss, torch.Tensor) or loss.dim() or not loss.is_floating_point():
            raise TypeError(f"loss_fn returned {loss!r}, not a floating scalar tensor")
        loss.backward()
        self.count += 1
        return SimpleNamespace(loss=loss.item(), metrics={"loss": loss.item()})

    async def optim_step(self):
        if not self.count:
            raise RuntimeError("nothing was accumulated")
        applied, self.count = self.count, 0
        gradient, self.weight.grad = self.weight.grad, None
        if not gradient.isfinite().all():
            raise FloatingPointError("the accumulated gradient isn't finite")
        with torch.no_grad():
            self.weight -= 0.5 * gradient
        self.step += 1
        return SimpleNamespace(step=self.step, learning_rate=0.5, accumulated_microbatches=applied)

    async def clear_gradients(self):
        self.weight.grad = None
        self.count = 0

    async def forward(self, inputs):
        check_ids(inputs["input_ids"])
        return self.weight.detach()[inputs["input_ids"]]

    async def save(self, name=None, path=None, weights_only=False):
        name = name or (f"weights-{self.step}" if weights_only else f"step-{self.step}")
        location = Path(path or self.folder).absolute() / name
        location.parent.mkdir(parents=True, exist_ok=True)
        number = 1 + max(self._saved().values(), default=0)
        state = {"weight": self.weight.detach(), "number": number}
        unfinished = location.with_name(f"{location.name}.part")
        torch.save(state if weights_only else {**state, "step": self.step}, unfinished)
        os.replace(unfinished, location)
        return str(location)

    def _saved(self):
        """The full checkpoints of the default folder, each with its number."""
        found = {}
        for file in self.folder.glob("*"):
            try:
                state = torch.load(file, weights_only=True)
            except Exception:
                continue
            if file.suffix != ".part" and "step" in state:
                found[file] = state["number"]
        return found

    async def load(self, path=None):
        saved = self._saved() if path is None else {path: 0}
        if not saved:
            raise FileNotFoundError(f"no full checkpoint in {self.folder}")
        path = max(saved, key=saved.get)
        state = torch.load(path, weights_only=True)
        if state["weight"].shape != self.weight.shape:
            raise ValueError(f"{path} is of another model")
        with torch.no_grad():
            self.weight.copy_(state["weight"])
        self.step = state.get("step", self.step)
        await self.clear_gradients()
        return str(path)

    async def get_config(self):
        return copy.deepcopy(self.config)

    async def get_status(self):
        return SimpleNamespace(step=self.step, accumulated_microbatches=self.count)

    async def get_tokenizer(self):
        return HalfBytes()


class HalfBytes:
    pad_token_id = eos_token_id = None

    def encode(self, text, add_special_tokens=True):
        return [half for byte in text.encode() for half in divmod(byte, 16)]

    def decode(self, ids, skip_special_tokens=False):
        halves = iter(int(each) for each in ids)
        return bytes(16 * high + low for high, low in zip(halves, halves, strict=False)).decode(
            errors="replace"
        )


def check_ids(ids):
    if ids.dtype != torch.int64 or ids.dim() != 2 or not ids.numel():
        raise ValueError(f"ids of {ids.dtype} and shape {list(ids.shape)}, not int64 [batch, seq]")
    if ids.min() < 0 or ids.max() >= VOCAB or ids.shape[1] > LONGEST:
        raise ValueError(f"ids outside [0, {VOCAB}), or more than {LONGEST} in a row")


def token_mean(outputs, batch):
    kept = torch.ones(batch.target_ids.shape)
    if batch.target_mask is not None:
        kept = batch.target_mask.to(kept)
    targets = torch.where(kept.bool(), batch.target_ids, 0)
    losses = -outputs["logits"].log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    weights = kept if batch.target_weights is None else kept * batch.target_weights
    # A masked target may carry any weight, NaN too.
    weights = torch.where(kept.bool(), weights, 0.0)
    return (losses * weights).sum() / kept.sum().clamp(min=1)
