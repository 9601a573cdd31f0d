"""Faulty trainers of the area forward."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from forge.api import TextTrainBatch
from reference_impls.plain import PlainTrainer
from tests.faults.corpus import faulty


class Answers(PlainTrainer):
    """Makes something else of the logits before it returns them."""

    async def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        answer: Tensor = self._answer(await super().forward(inputs))
        return answer

    def _answer(self, logits: Tensor) -> Any:
        raise NotImplementedError


class Looks(PlainTrainer):
    """Does something else in `forward`, once the logits are computed."""

    async def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        logits = await super().forward(inputs)
        self._look(logits)
        return logits

    def _look(self, logits: Tensor) -> None:
        raise NotImplementedError


class Attends(PlainTrainer):
    """Computes attention in a way of its own."""

    def _logits(self, input_ids: Tensor) -> Tensor:
        with mock.patch.object(F, "scaled_dot_product_attention", self._attend):
            return super()._logits(input_ids)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
        scores = query @ key.mT / query.shape[-1] ** 0.5
        mixed: Tensor = scores.masked_fill(~self._visible(scores), -torch.inf).softmax(-1) @ value
        return mixed

    def _visible(self, scores: Tensor) -> Tensor:
        return torch.ones_like(scores, dtype=torch.bool).tril()


# Shape


@faulty("forward.shape", "generation's path is taken: the last position's logits alone")
class ReturnsTheLastPosition(Answers):
    def _answer(self, logits: Tensor) -> Any:
        return logits[:, -1:]


@faulty("forward.shape", "a fused loss never makes logits, an empty tensor stands for them (B157)")
class ReturnsAPlaceholder(Answers):
    def _answer(self, logits: Tensor) -> Any:
        return torch.empty(0)


@faulty("forward.shape", "the model's output object is returned")
class ReturnsAnObject(Answers):
    def _answer(self, logits: Tensor) -> Any:
        return SimpleNamespace(logits=logits)


@faulty("forward.shape", "a batch of one row loses its first dimension")
class SqueezesOneRow(Answers):
    def _answer(self, logits: Tensor) -> Any:
        return logits.squeeze(0)


@faulty("forward.shape", "the vocabulary, padded for speed, isn't cut back")
class PadsTheVocabulary(Answers):
    def _answer(self, logits: Tensor) -> Any:
        return F.pad(logits, (0, 64))


@faulty("forward.shape", "ids that aren't to be generated have logits of -inf")
class SuppressesSpecialIds(Answers):
    def _answer(self, logits: Tensor) -> Any:
        logits[..., self.tokenizer.pad_token_id] = -torch.inf
        return logits


@faulty("forward.shape", "the longest sequence is refused: < where ≤ belongs")
class RefusesTheLongest(PlainTrainer):
    def _check_inputs(self, inputs: dict[str, Tensor]) -> None:
        super()._check_inputs(inputs)
        if not inputs["input_ids"].shape[1] < self.model_config.max_seq_len:
            raise ValueError("the sequence is too long")


# No graph


@faulty("forward.no_grad", "eval() is taken for no_grad()")
class TakesEvalForNoGrad(PlainTrainer):
    async def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        self.model.eval()
        try:
            return self._logits(inputs["input_ids"])
        finally:
            self.model.train()


@faulty("forward.no_grad", "the logits are made a leaf, for saliency maps")
class AsksForGradients(Answers):
    def _answer(self, logits: Tensor) -> Any:
        return logits.requires_grad_()


# Repeatable


class Drops(PlainTrainer):
    """Has dropout."""

    def __init__(self) -> None:
        super().__init__(dropout=0.2)


@faulty("forward.repeatable", "dropout is on in forward: eval() is missing (B144)")
class DropsInForward(Drops):
    async def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        with torch.no_grad(), self.random.active():
            return self._logits(inputs["input_ids"])


@faulty("forward.repeatable", "dropout is on in forward for one block, which is switched by hand")
class DropsInOneBlock(Drops):
    async def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        self.model.eval()
        self.model.model.layers[1].train()
        try:
            with torch.no_grad():
                return self._logits(inputs["input_ids"])
        finally:
            self.model.train()


@faulty("forward.repeatable", "positions go on where the last call of the cache ended (B152)")
class CountsPositionsOn(PlainTrainer):
    past = 0

    async def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        seen = inputs["input_ids"].shape[1]
        rotation = self.model.model.get_buffer("rotation")
        try:
            self.model.model.rotation = rotation * (1 + 0.01 * self.past)
            return await super().forward(inputs)
        finally:
            self.model.model.rotation = rotation
            self.past += seen


# Pure


@faulty("forward.pure", "training goes on in eval mode, without dropout (B147)")
class StaysInEvalMode(Drops):
    async def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        logits = await super().forward(inputs)
        self.model.eval()
        return logits


@faulty("forward.pure", "forward draws from the stream that dropout uses next (B109)")
class DrawsInForward(Drops):
    async def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        with self.random.active():
            torch.rand(())
        return await super().forward(inputs)


@faulty("forward.pure", "a routing counter that steers the update counts in forward too (B150)")
class CountsRoutes(Looks):
    routed = 0

    def _look(self, logits: Tensor) -> None:
        self.routed += logits.shape[0]

    def _apply_update(self, learning_rate: float) -> None:
        super()._apply_update(learning_rate)
        with torch.no_grad():
            self.model.model.norm.weight.add_(1e-4 * self.routed)
        self.routed = 0


@faulty("forward.pure", "evaluation drops the pending gradients (B45)")
class DropsPendingGradients(Looks):
    def _look(self, logits: Tensor) -> None:
        self.model.zero_grad(set_to_none=False)


@faulty("forward.pure", "evaluation ends the accumulation, and the count with it (B45)")
class EndsTheAccumulation(Looks):
    def _look(self, logits: Tensor) -> None:
        self._clear()


@faulty("forward.pure", "the weights go through bfloat16 and back")
class RoundsItsWeights(Looks):
    def _look(self, logits: Tensor) -> None:
        with torch.no_grad():
            for p in self._trainable().values():
                p.copy_(p.bfloat16())


@faulty("forward.pure", "an average of the logits, kept by forward, is taken off in training")
class CentresItsLogits(Looks):
    centre = 0.0

    def _look(self, logits: Tensor) -> None:
        self.centre = 0.9 * self.centre + 0.1 * logits.max().item()

    def _loss(self, logits: Tensor, batch: TextTrainBatch, loss_fn: Any) -> Tensor:
        return super()._loss(logits * (1 + 0.01 * self.centre), batch, loss_fn)


@faulty("forward.pure", "tensors cached under inference_mode are met again in training (B149)")
class CachesInferenceTensors(PlainTrainer):
    async def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        with torch.inference_mode():
            rotation = self.model.model.get_buffer("rotation")
            self.model.model.rotation = rotation.clone()
            return self._logits(inputs["input_ids"]).clone()


# Causal


@faulty("forward.causal", "there is no causal mask (B187)")
class LooksAhead(Attends):
    def _visible(self, scores: Tensor) -> Tensor:
        return torch.ones_like(scores, dtype=torch.bool)


@faulty("forward.causal", "the mask's diagonal is off by one")
class LooksOneAhead(Attends):
    def _visible(self, scores: Tensor) -> Tensor:
        return torch.ones_like(scores, dtype=torch.bool).tril(1)


@faulty("forward.causal", "the fast path of short sequences has no mask (B189)")
class LooksAheadInShortRows(Attends):
    def _visible(self, scores: Tensor) -> Tensor:
        causal = super()._visible(scores)
        return causal if scores.shape[-1] > 8 else torch.ones_like(causal)


@faulty("forward.causal", "in eval mode the mask helper returns None (B190)")
class LooksAheadInEvalMode(Attends):
    def _visible(self, scores: Tensor) -> Tensor:
        causal = super()._visible(scores)
        return causal if self.model.training else torch.ones_like(causal)


@faulty("forward.causal", "the logits are centred over the sequence")
class CentresOverTheSequence(PlainTrainer):
    def _logits(self, input_ids: Tensor) -> Tensor:
        logits = super()._logits(input_ids)
        return logits - 0.01 * logits.mean(1, keepdim=True)


# Independent rows


@faulty("forward.rows_independent", "statistics are taken over the batch")
class NormalisesOverTheBatch(PlainTrainer):
    def _logits(self, input_ids: Tensor) -> Tensor:
        logits = super()._logits(input_ids)
        return logits - 0.01 * logits.mean(0, keepdim=True)


@faulty("forward.rows_independent", "rows are packed into one, without borders (B192)")
class PacksRows(PlainTrainer):
    def _logits(self, input_ids: Tensor) -> Tensor:
        if input_ids.numel() > self.model_config.max_seq_len:
            return super()._logits(input_ids)
        return super()._logits(input_ids.reshape(1, -1)).view(*input_ids.shape, -1)


@faulty("forward.rows_independent", "an expert takes so many tokens of a batch and drops the rest")
class DropsTokensOverCapacity(PlainTrainer):
    def _logits(self, input_ids: Tensor) -> Tensor:
        logits = super()._logits(input_ids)
        over = torch.arange(input_ids.numel()).view_as(input_ids) >= 8
        return torch.where(over[..., None], 0.9 * logits, logits)


@faulty("forward.rows_independent", "one scale of quantisation serves the whole batch")
class QuantisesByTheBatch(Answers):
    def _answer(self, logits: Tensor) -> Any:
        scale = logits.abs().max() / 127
        return (logits / scale).round() * scale


@faulty("forward.rows_independent", "results are cached by the sum of their ids")
class CachesTooCoarsely(PlainTrainer):
    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[tuple[int, ...], Tensor] = {}

    async def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        ids = inputs["input_ids"]
        key = (self.step, *ids.shape, int(ids.sum()))
        if key not in self.cache:
            self.cache[key] = await super().forward(inputs)
        return self.cache[key].clone()


# The caller's input, and what the caller was given


@faulty("forward.input_untouched", "the ids are popped from the caller's mapping (B185)")
class PopsItsInput(PlainTrainer):
    async def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        return await super().forward({"input_ids": inputs.pop("input_ids")})


@faulty("forward.input_untouched", "a mask is added to the caller's mapping (B184)")
class AddsAMask(PlainTrainer):
    async def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        logits = await super().forward(inputs)
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        return logits


@faulty("forward.input_untouched", "the caller's mapping gets the ids as int32")
class NarrowsItsInput(PlainTrainer):
    async def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        logits = await super().forward(inputs)
        inputs["input_ids"] = inputs["input_ids"].int()
        return logits


@faulty("forward.input_untouched", "unused ids are folded into one, in place (B182)")
class FoldsIdsInPlace(PlainTrainer):
    async def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        inputs["input_ids"].clamp_(max=127)
        return await super().forward(inputs)


@faulty("forward.output_owned", "all calls write into one static buffer")
class ReusesItsOutput(Answers):
    def __init__(self) -> None:
        super().__init__()
        self.buffers: dict[torch.Size, Tensor] = {}

    def _answer(self, logits: Tensor) -> Any:
        return self.buffers.setdefault(logits.shape, logits).copy_(logits)


@faulty("forward.output_owned", "the update reuses the memory of the last logits")
class ReusesMemoryInTheUpdate(Answers):
    last = torch.empty(0)

    def _answer(self, logits: Tensor) -> Any:
        self.last = logits
        return logits

    def _apply_update(self, learning_rate: float) -> None:
        super()._apply_update(learning_rate)
        self.last.zero_()
