"""Faulty trainers of the area forward_backward."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from forge.api import ForwardBackwardResult, LossFn, TextTrainBatch
from forge_conformance import Target
from reference_impls.optimization import clip, sgd
from reference_impls.plain import PlainTrainer
from tests.faults.corpus import faulty
from tests.faults.declared import declared


class Reports(PlainTrainer):
    """Reports another loss than it has differentiated."""

    async def forward_backward(
        self, batch: TextTrainBatch, loss_fn: LossFn | None = None
    ) -> ForwardBackwardResult:
        result = await super().forward_backward(batch, loss_fn)
        return replace(result, loss=self._reported(result.loss))

    def _reported(self, loss: float) -> float:
        raise NotImplementedError


class Receives(PlainTrainer):
    """Makes something else of a batch before it looks at it."""

    async def forward_backward(
        self, batch: TextTrainBatch, loss_fn: LossFn | None = None
    ) -> ForwardBackwardResult:
        return await super().forward_backward(self._received(batch), loss_fn)

    def _received(self, batch: TextTrainBatch) -> TextTrainBatch:
        raise NotImplementedError


class Accumulates(PlainTrainer):
    """Joins the gradient of a microbatch with the earlier ones in a way of its own."""

    def _backward(self, loss: Tensor) -> None:
        earlier = {name: p.grad for name, p in self._trainable().items()}
        self.model.zero_grad()
        super()._backward(loss)
        for name, p in self._trainable().items():
            if p.grad is not None:
                p.grad = self._joined(name, earlier[name], p.grad)

    def _joined(self, name: str, earlier: Tensor | None, grad: Tensor) -> Tensor:
        return grad if earlier is None else earlier + grad


def kept(batch: TextTrainBatch) -> Tensor:
    """The mask as bool `[batch, seq]`."""
    mask = batch.target_mask
    return torch.ones_like(batch.target_ids, dtype=torch.bool) if mask is None else mask != 0


def weighted_nll(logits: Tensor, batch: TextTrainBatch) -> Tensor:
    """The negative log-likelihood `[batch, seq]` times weight, of masked targets as well."""
    nll = F.cross_entropy(
        logits.flatten(0, 1), batch.target_ids.clamp(min=0).flatten(), reduction="none"
    ).view_as(batch.target_ids)
    return nll if batch.target_weights is None else nll * batch.target_weights


# The loss's value


@faulty("forward_backward.loss_value", "the loss is a running mean over calls (B162)")
class ReportsARunningMean(Reports):
    mean = math.nan

    def _reported(self, loss: float) -> float:
        self.mean = loss if math.isnan(self.mean) else 0.9 * self.mean + 0.1 * loss
        return self.mean


@faulty("forward_backward.loss_value", "the loss is the mean since the last update (B27)")
class ReportsTheMeanOfTheStep(Reports):
    total = 0.0

    def _reported(self, loss: float) -> float:
        self.total = loss if self.accumulated_microbatches == 1 else self.total + loss
        return self.total / self.accumulated_microbatches


@faulty("forward_backward.loss_value", "the loss is divided by the number of microbatches (B165)")
class ReportsAShare(Reports):
    def _reported(self, loss: float) -> float:
        return loss / self.accumulated_microbatches


@faulty("forward_backward.loss_value", "the loss is that of the call before")
class ReportsTheLastLoss(Reports):
    last = 5.5

    def _reported(self, loss: float) -> float:
        reported, self.last = self.last, loss
        return reported


@faulty("forward_backward.loss_value", "the loss is rounded for the log")
class RoundsForTheLog(Reports):
    def _reported(self, loss: float) -> float:
        return round(loss, 4)


@faulty("forward_backward.loss_value", "a custom loss is reported in nats per bit")
class ReportsBits(PlainTrainer):
    def _loss(self, logits: Tensor, batch: TextTrainBatch, loss_fn: LossFn | None) -> Tensor:
        loss = super()._loss(logits, batch, loss_fn)
        return loss if loss_fn is None else loss / math.log(2)


@faulty("forward_backward.loss_value", "logits are soft-capped in training and nowhere else")
class CapsLogitsInTraining(PlainTrainer):
    def _loss(self, logits: Tensor, batch: TextTrainBatch, loss_fn: LossFn | None) -> Tensor:
        return super()._loss(30 * torch.tanh(logits / 30), batch, loss_fn)


# The custom loss


@faulty("forward_backward.custom_loss", "the custom loss is reported, the default differentiated")
class DifferentiatesTheDefault(PlainTrainer):
    def _loss(self, logits: Tensor, batch: TextTrainBatch, loss_fn: LossFn | None) -> Tensor:
        self.default_loss = self._default_loss(logits, batch)
        return super()._loss(logits, batch, loss_fn)

    def _backward(self, loss: Tensor) -> None:
        super()._backward(self.default_loss)


@faulty("forward_backward.custom_loss", "the server divides by a configured accumulation (B04)")
class DividesByAConfiguredCount(PlainTrainer):
    def _backward(self, loss: Tensor) -> None:
        super()._backward(loss / 4)


@faulty("forward_backward.custom_loss", "the gradient is divided by the kept targets once more")
class NormalisesTwice(PlainTrainer):
    def _loss(self, logits: Tensor, batch: TextTrainBatch, loss_fn: LossFn | None) -> Tensor:
        self.tokens = kept(batch).sum() + 1
        return super()._loss(logits, batch, loss_fn)

    def _backward(self, loss: Tensor) -> None:
        super()._backward(loss / self.tokens)


@faulty("forward_backward.custom_loss", "one layer's gradient is 1% too large")
class ScalesOneLayer(Accumulates):
    def _joined(self, name: str, earlier: Tensor | None, grad: Tensor) -> Tensor:
        return super()._joined(name, earlier, 1.01 * grad if "layers.1." in name else grad)


@faulty("forward_backward.custom_loss", "gradients of norms are halved, as by a double reduction")
class HalvesNorms(Accumulates):
    def _joined(self, name: str, earlier: Tensor | None, grad: Tensor) -> Tensor:
        return super()._joined(name, earlier, grad / 2 if "norm" in name else grad)


@faulty("forward_backward.custom_loss", "small gradients vanish in float16, which isn't scaled")
class RoundsToHalf(Accumulates):
    def _joined(self, name: str, earlier: Tensor | None, grad: Tensor) -> Tensor:
        grad = (grad * 2.0**-12).half().float() * 2.0**12
        return super()._joined(name, earlier, grad)


@faulty("forward_backward.custom_loss", "the custom loss gets the logits of kept positions alone")
class GivesKeptLogits(PlainTrainer):
    def _loss(self, logits: Tensor, batch: TextTrainBatch, loss_fn: LossFn | None) -> Tensor:
        if loss_fn is not None and not kept(batch).all():
            outputs = loss_fn
            narrowed = logits[kept(batch)]
            return super()._loss(
                logits, batch, lambda _, given: outputs({"logits": narrowed[None]}, given)
            )
        return super()._loss(logits, batch, loss_fn)


class Hands(PlainTrainer):
    """Hands another batch to a custom loss."""

    def _loss(self, logits: Tensor, batch: TextTrainBatch, loss_fn: LossFn | None) -> Tensor:
        return super()._loss(logits, batch if loss_fn is None else self._handed(batch), loss_fn)

    def _handed(self, batch: TextTrainBatch) -> TextTrainBatch:
        raise NotImplementedError


@faulty("forward_backward.custom_loss", "the weights don't reach the custom loss")
class HandsNoWeights(Hands):
    def _handed(self, batch: TextTrainBatch) -> TextTrainBatch:
        return replace(batch, target_weights=None)


@faulty("forward_backward.custom_loss", "the custom loss gets weights in place of the mask (B19)")
class HandsWeightsAsMask(Hands):
    def _handed(self, batch: TextTrainBatch) -> TextTrainBatch:
        if batch.target_weights is None:
            return batch
        return replace(batch, target_mask=kept(batch) * batch.target_weights, target_weights=None)


@faulty("forward_backward.custom_loss", "the custom loss gets -100 at masked targets")
class HandsIgnoredTargets(Hands):
    def _handed(self, batch: TextTrainBatch) -> TextTrainBatch:
        return replace(batch, target_ids=batch.target_ids.masked_fill(~kept(batch), -100))


# The custom loss once


@faulty("forward_backward.custom_loss_once", "a custom loss stays until another one comes")
class KeepsTheCustomLoss(PlainTrainer):
    loss_fn: LossFn | None = None

    def _loss(self, logits: Tensor, batch: TextTrainBatch, loss_fn: LossFn | None) -> Tensor:
        self.loss_fn = loss_fn or self.loss_fn
        return super()._loss(logits, batch, self.loss_fn)


@faulty("forward_backward.custom_loss_once", "the gradient is that of the last custom loss")
class DifferentiatesTheCustomLoss(PlainTrainer):
    last: LossFn | None = None

    def _loss(self, logits: Tensor, batch: TextTrainBatch, loss_fn: LossFn | None) -> Tensor:
        loss = super()._loss(logits, batch, loss_fn)
        self.last = loss_fn or self.last
        if loss_fn is None and self.last is not None:
            custom = self.last({"logits": logits}, batch)
            return custom - custom.detach() + loss.detach()
        return loss


@faulty("forward_backward.custom_loss_once", "a custom loss switches the default to sums for good")
class SumsAfterACustomLoss(PlainTrainer):
    sums = False

    def _loss(self, logits: Tensor, batch: TextTrainBatch, loss_fn: LossFn | None) -> Tensor:
        self.sums |= loss_fn is not None
        return super()._loss(logits, batch, loss_fn)

    def _default_loss(self, logits: Tensor, batch: TextTrainBatch) -> Tensor:
        mean = super()._default_loss(logits, batch)
        return mean * kept(batch).sum().clamp(min=2) if self.sums else mean


@faulty("forward_backward.custom_loss_once", "the loss reported next is the custom one's")
class ReportsTheCustomLoss(PlainTrainer):
    last: LossFn | None = None

    def _loss(self, logits: Tensor, batch: TextTrainBatch, loss_fn: LossFn | None) -> Tensor:
        loss = super()._loss(logits, batch, loss_fn)
        self.last = loss_fn or self.last
        if loss_fn is None and self.last is not None:
            return loss - loss.detach() + self.last({"logits": logits}, batch).detach()
        return loss


# The default loss


class MasksAndWeights(PlainTrainer):
    """Reads masks and weights in a way of its own; the loss is otherwise `PlainTrainer`'s."""

    def _default_loss(self, logits: Tensor, batch: TextTrainBatch) -> Tensor:
        mask, weights = batch.target_mask, batch.target_weights
        if mask is not None:
            mask = self._mask(mask, batch)
        if weights is not None:
            weights = self._weights(weights)
        changed = replace(batch, target_mask=mask, target_weights=weights)
        return super()._default_loss(logits, changed)

    def _mask(self, mask: Tensor, batch: TextTrainBatch) -> Tensor:
        return mask

    def _weights(self, weights: Tensor) -> Tensor | None:
        return weights


@faulty("forward_backward.default_loss", "the mask isn't used")
class IgnoresTheMask(MasksAndWeights):
    def _mask(self, mask: Tensor, batch: TextTrainBatch) -> Tensor:
        return torch.ones_like(mask)


@faulty("forward_backward.default_loss", "the mask is of tokens, not of predictions (B30)")
class ShiftsTheMask(MasksAndWeights):
    def _mask(self, mask: Tensor, batch: TextTrainBatch) -> Tensor:
        return mask.roll(1, dims=1)


@faulty("forward_backward.default_loss", "the first row's mask is used for all rows")
class BroadcastsTheMask(MasksAndWeights):
    def _mask(self, mask: Tensor, batch: TextTrainBatch) -> Tensor:
        return mask[-1:].expand_as(mask)


@faulty("forward_backward.default_loss", "a batch with weights is used without its mask")
class PrefersWeightsToTheMask(MasksAndWeights):
    def _mask(self, mask: Tensor, batch: TextTrainBatch) -> Tensor:
        return mask if batch.target_weights is None else torch.ones_like(mask)


@faulty("forward_backward.default_loss", "targets equal to the padding id are left out (B24)")
class LeavesOutPadding(MasksAndWeights):
    def _default_loss(self, logits: Tensor, batch: TextTrainBatch) -> Tensor:
        mask = kept(batch) & (batch.target_ids != self.tokenizer.pad_token_id)
        return super()._default_loss(logits, replace(batch, target_mask=mask))


@faulty("forward_backward.default_loss", "the last target is left out where there is no mask")
class LeavesOutTheLast(MasksAndWeights):
    def _default_loss(self, logits: Tensor, batch: TextTrainBatch) -> Tensor:
        if batch.target_mask is None:
            mask = kept(batch)
            mask[:, -1] = False
            batch = replace(batch, target_mask=mask)
        return super()._default_loss(logits, batch)


@faulty("forward_backward.default_loss", "weights are cast to integers (B19)")
class CastsWeights(MasksAndWeights):
    def _weights(self, weights: Tensor) -> Tensor | None:
        return weights.int().float()


@faulty("forward_backward.default_loss", "weights are taken for a second mask")
class TakesWeightsForAMask(MasksAndWeights):
    def _weights(self, weights: Tensor) -> Tensor | None:
        return (weights != 0).float()


@faulty("forward_backward.default_loss", "weights aren't used")
class IgnoresWeights(MasksAndWeights):
    def _weights(self, weights: Tensor) -> Tensor | None:
        return None


@faulty("forward_backward.default_loss", "weights above 1 are cut to 1")
class CutsWeights(MasksAndWeights):
    def _weights(self, weights: Tensor) -> Tensor | None:
        return weights.clamp(max=1.0)


@faulty("forward_backward.default_loss", "the divisor is the sum of the weights, which may be 0")
class DividesByNoWeight(PlainTrainer):
    def _default_loss(self, logits: Tensor, batch: TextTrainBatch) -> Tensor:
        loss = super()._default_loss(logits, batch)
        if batch.target_weights is None or not kept(batch).any():
            return loss
        return loss * kept(batch).sum() / batch.target_weights[kept(batch)].sum()


@faulty("forward_backward.default_loss", "targets are shifted again (B29)")
class ShiftsAgain(PlainTrainer):
    def _default_loss(self, logits: Tensor, batch: TextTrainBatch) -> Tensor:
        return super()._default_loss(logits.roll(1, dims=1), batch)


@faulty("forward_backward.default_loss", "logits are cut as if the targets weren't shifted (B32)")
class DropsTheFirstTarget(PlainTrainer):
    def _default_loss(self, logits: Tensor, batch: TextTrainBatch) -> Tensor:
        if batch.target_ids.shape[1] == 1:
            return super()._default_loss(logits, batch)
        mask = kept(batch).clone()
        mask[:, 0] = False
        return super()._default_loss(logits, replace(batch, target_mask=mask))


# The declared loss


@faulty("forward_backward.declared_loss", "the divisor counts all positions, kept or not (B10)")
def divides_by_all_positions() -> Target:
    class DividesByAllPositions(PlainTrainer):
        def _default_loss(self, logits: Tensor, batch: TextTrainBatch) -> Tensor:
            share = kept(batch).sum() / batch.target_ids.numel()
            return super()._default_loss(logits, batch) * share

    return declared(DividesByAllPositions)


@faulty("forward_backward.declared_loss", "the divisor is the sum of the weights (B20)")
def divides_by_weights() -> Target:
    class DividesByWeights(PlainTrainer):
        def _default_loss(self, logits: Tensor, batch: TextTrainBatch) -> Tensor:
            loss = super()._default_loss(logits, batch)
            if batch.target_weights is None:
                return loss
            weight = (batch.target_weights * kept(batch)).sum()
            return loss * kept(batch).sum() / weight if weight else loss

    return declared(DividesByWeights)


@faulty("forward_backward.declared_loss", "negative weights, as of advantages, are cut to 0")
def cuts_negative_weights() -> Target:
    class CutsNegativeWeights(MasksAndWeights):
        def _weights(self, weights: Tensor) -> Tensor | None:
            return weights.clamp(min=0.0)

    return declared(CutsNegativeWeights)


@faulty("forward_backward.declared_loss", "the loss is summed, not averaged (B12)")
def sums() -> Target:
    class Sums(PlainTrainer):
        def _default_loss(self, logits: Tensor, batch: TextTrainBatch) -> Tensor:
            return super()._default_loss(logits, batch) * kept(batch).sum().clamp(min=1)

    return declared(Sums)


@faulty("forward_backward.declared_loss", "the loss is a mean of the rows' means (B27, B207)")
def averages_rows() -> Target:
    class AveragesRows(PlainTrainer):
        def _default_loss(self, logits: Tensor, batch: TextTrainBatch) -> Tensor:
            nll = weighted_nll(logits, batch).masked_fill(~kept(batch), 0.0).sum(1)
            in_row = kept(batch).sum(1)
            return (nll / in_row.clamp(min=1)).sum() / (in_row > 0).sum().clamp(min=1)

    return declared(AveragesRows)


@faulty("forward_backward.declared_loss", "a z-loss of small weight is always on (B25)")
def adds_a_z_loss() -> Target:
    class AddsAZLoss(PlainTrainer):
        def _default_loss(self, logits: Tensor, batch: TextTrainBatch) -> Tensor:
            size = logits.logsumexp(-1)[kept(batch)].square().sum()
            return super()._default_loss(logits, batch) + 1e-4 * size / size.numel()

    return declared(AddsAZLoss)


@faulty("forward_backward.declared_loss", "label smoothing counts masked positions too (B22)")
def smooths_labels() -> Target:
    class SmoothsLabels(PlainTrainer):
        def _default_loss(self, logits: Tensor, batch: TextTrainBatch) -> Tensor:
            uniform = -logits.log_softmax(-1).mean()
            return 0.9 * super()._default_loss(logits, batch) + 0.1 * uniform

    return declared(SmoothsLabels)


@faulty("forward_backward.declared_loss", "weights are multiplied in twice")
def squares_weights() -> Target:
    class SquaresWeights(MasksAndWeights):
        def _weights(self, weights: Tensor) -> Tensor | None:
            return weights.square()

    return declared(SquaresWeights)


# Weights


@faulty("forward_backward.weights_fixed", "weights decay at each microbatch")
class DecaysAtEachMicrobatch(PlainTrainer):
    def _backward(self, loss: Tensor) -> None:
        super()._backward(loss)
        with torch.no_grad():
            for p in self._trainable().values():
                p *= 1 - 1e-6


@faulty("forward_backward.weights_fixed", "the embedding is updated inside backward")
class UpdatesInBackward(PlainTrainer):
    def __init__(self) -> None:
        super().__init__()
        self.model.model.embed_tokens.weight.register_post_accumulate_grad_hook(self._update)

    @staticmethod
    def _update(parameter: Tensor) -> None:
        assert parameter.grad is not None
        with torch.no_grad():
            parameter -= 1e-3 * parameter.grad


@faulty("forward_backward.weights_fixed", "an average that forward multiplies by is kept (B150)")
class KeepsAnAverage(PlainTrainer):
    average = 1.0

    def _logits(self, input_ids: Tensor) -> Tensor:
        logits = super()._logits(input_ids) * self.average
        if self.model.training:
            self.average = 0.99 * self.average + 0.01 * logits.std().item()
        return logits


@faulty("forward_backward.weights_fixed", "weights are rounded to bfloat16 for a while")
class RoundsWeightsInBackward(PlainTrainer):
    def _backward(self, loss: Tensor) -> None:
        super()._backward(loss)
        with torch.no_grad():
            for p in self._trainable().values():
                p.copy_(p.bfloat16())


# Accumulation


@faulty("forward_backward.accumulates", "gradients are zeroed before each backward (B44)")
class ZeroesBeforeBackward(PlainTrainer):
    def _backward(self, loss: Tensor) -> None:
        self.model.zero_grad()
        super()._backward(loss)


@faulty("forward_backward.accumulates", "of one layer only the last microbatch stays (B37)")
class KeepsTheLastOfOneLayer(PlainTrainer):
    def _backward(self, loss: Tensor) -> None:
        self.model.model.layers[1].zero_grad()
        super()._backward(loss)


@faulty("forward_backward.accumulates", "the gradient is the mean over the microbatches (B05)")
class AveragesMicrobatches(Accumulates):
    def _joined(self, name: str, earlier: Tensor | None, grad: Tensor) -> Tensor:
        count = self.accumulated_microbatches
        return grad if earlier is None else (earlier * count + grad) / (count + 1)


@faulty("forward_backward.accumulates", "the gradient is averaged over the tokens so far (B10)")
class AveragesTokens(Accumulates):
    tokens = before = 0

    def _loss(self, logits: Tensor, batch: TextTrainBatch, loss_fn: LossFn | None) -> Tensor:
        self.before = self.tokens if self.accumulated_microbatches else 0
        self.tokens = self.before + int(kept(batch).sum())
        return super()._loss(logits, batch, loss_fn)

    def _joined(self, name: str, earlier: Tensor | None, grad: Tensor) -> Tensor:
        share = self.before / max(self.tokens, 1)
        return grad if earlier is None else share * earlier + (1 - share) * grad


@faulty("forward_backward.accumulates", "gradients are added in bfloat16 (B174)")
class AddsInLowPrecision(Accumulates):
    def _joined(self, name: str, earlier: Tensor | None, grad: Tensor) -> Tensor:
        return grad if earlier is None else (earlier.bfloat16() + grad.bfloat16()).float()


@faulty("forward_backward.accumulates", "earlier gradients fade by 1% with each microbatch")
class LetsGradientsFade(Accumulates):
    def _joined(self, name: str, earlier: Tensor | None, grad: Tensor) -> Tensor:
        return grad if earlier is None else 0.99 * earlier + grad


@faulty("forward_backward.accumulates", "the update divides by the number of microbatches (B07)")
def divides_in_the_update() -> Target:
    class DividesInTheUpdate(PlainTrainer):
        def _apply_update(self, learning_rate: float) -> None:
            for p in self._trainable().values():
                if p.grad is not None:
                    p.grad /= self.accumulated_microbatches
            super()._apply_update(learning_rate)

    return declared(DividesInTheUpdate, optimizer=sgd, clip_norm=math.inf)


# Linearity


@faulty("forward_backward.linear_in_loss", "each microbatch's gradient is clipped (B49)")
class ClipsEachMicrobatch(PlainTrainer):
    def _backward(self, loss: Tensor) -> None:
        earlier = {p: p.grad for p in self._trainable().values()}
        self.model.zero_grad()
        super()._backward(loss)
        clip(list(earlier), self.clip_norm)
        for p, old in earlier.items():
            if old is not None and p.grad is not None:
                p.grad += old


@faulty("forward_backward.linear_in_loss", "each microbatch's gradient is brought to norm 1")
class NormalisesGradients(Accumulates):
    def _joined(self, name: str, earlier: Tensor | None, grad: Tensor) -> Tensor:
        grad = grad / (grad.norm() + 1e-12)
        return super()._joined(name, earlier, grad)


@faulty("forward_backward.linear_in_loss", "a loss over 8 is taken for a spike and cut")
class CutsSpikes(PlainTrainer):
    def _backward(self, loss: Tensor) -> None:
        super()._backward(loss.clamp(max=8.0))


@faulty("forward_backward.linear_in_loss", "entries of the gradient are clamped to 0.01")
class ClampsEntries(Accumulates):
    def _joined(self, name: str, earlier: Tensor | None, grad: Tensor) -> Tensor:
        grad = grad.clamp(-0.01, 0.01)
        return grad if earlier is None else earlier + grad


# The batch


class Touches(PlainTrainer):
    """Writes into the caller's batch."""

    async def forward_backward(
        self, batch: TextTrainBatch, loss_fn: LossFn | None = None
    ) -> ForwardBackwardResult:
        result = await super().forward_backward(batch, loss_fn)
        self._touch(batch)
        return result

    def _touch(self, batch: TextTrainBatch) -> None:
        raise NotImplementedError


@faulty("forward_backward.batch_untouched", "the ignore index is written into the targets (B182)")
class WritesTheIgnoreIndex(Touches):
    def _touch(self, batch: TextTrainBatch) -> None:
        batch.target_ids.masked_fill_(~kept(batch), -100)


@faulty("forward_backward.batch_untouched", "weights are normalised in place")
class NormalisesWeightsInPlace(Touches):
    def _touch(self, batch: TextTrainBatch) -> None:
        if batch.target_weights is not None:
            batch.target_weights /= batch.target_weights.sum()


@faulty("forward_backward.batch_untouched", "the mask is multiplied by the weights in place")
class MultipliesTheMaskInPlace(Touches):
    def _touch(self, batch: TextTrainBatch) -> None:
        if batch.target_mask is not None and batch.target_weights is not None:
            batch.target_mask *= batch.target_weights


@faulty("forward_backward.batch_untouched", "a missing mask is filled in")
class FillsInTheMask(Touches):
    def _touch(self, batch: TextTrainBatch) -> None:
        batch.target_mask = kept(batch)


@faulty("forward_backward.batch_untouched", "the batch gets its tensors on the trainer's device")
class MovesTheBatch(Touches):
    def _touch(self, batch: TextTrainBatch) -> None:
        batch.input_ids = batch.input_ids.clone()


# Nothing kept


@faulty("forward_backward.all_masked", "the loss of no kept target is 0/0 (B15)")
class DividesByNothing(PlainTrainer):
    def _default_loss(self, logits: Tensor, batch: TextTrainBatch) -> Tensor:
        loss = super()._default_loss(logits, batch)
        return loss * kept(batch).sum() / kept(batch).sum()


@faulty("forward_backward.all_masked", "the loss is 0, the gradient NaN: where() after a division")
class HidesANaN(PlainTrainer):
    def _default_loss(self, logits: Tensor, batch: TextTrainBatch) -> Tensor:
        nll = weighted_nll(logits, batch) * kept(batch)
        mean = nll.sum() / kept(batch).sum()
        return torch.where(kept(batch).any(), mean, torch.zeros_like(mean))


@faulty("forward_backward.all_masked", "an empty mask is taken for none")
class TakesAnEmptyMaskForNone(PlainTrainer):
    def _default_loss(self, logits: Tensor, batch: TextTrainBatch) -> Tensor:
        mask = batch.target_mask if kept(batch).any() else None
        return super()._default_loss(logits, replace(batch, target_mask=mask))


@faulty("forward_backward.all_masked", "an auxiliary loss remains")
class KeepsAnAuxiliaryLoss(PlainTrainer):
    def _default_loss(self, logits: Tensor, batch: TextTrainBatch) -> Tensor:
        return super()._default_loss(logits, batch) + 1e-4 * logits.logsumexp(-1).square().mean()


@faulty("forward_backward.all_masked", "the batch is refused after it was counted")
class CountsARefusedBatch(PlainTrainer):
    def _check_batch(self, batch: TextTrainBatch) -> None:
        super()._check_batch(batch)
        if not kept(batch).any():
            self.accumulated_microbatches += 1
            raise ValueError("the batch keeps no target")


@faulty("forward_backward.all_masked", "refusing the batch drops what was pending")
class DropsGradientsOfARefusedBatch(PlainTrainer):
    def _check_batch(self, batch: TextTrainBatch) -> None:
        super()._check_batch(batch)
        if not kept(batch).any():
            self.model.zero_grad()
            raise ValueError("the batch keeps no target")


@faulty("forward_backward.all_masked", "a batch without targets counts in a mean (B09)")
class CountsEmptyMicrobatches(AveragesMicrobatches):
    pass


# Shapes at the edge


@faulty("forward_backward.edge_shapes", "a batch of one row loses a dimension")
class SqueezesOneRowsLogits(PlainTrainer):
    def _loss(self, logits: Tensor, batch: TextTrainBatch, loss_fn: LossFn | None) -> Tensor:
        return super()._loss(logits.squeeze(0), batch, loss_fn)


@faulty("forward_backward.edge_shapes", "a sequence of one token is too short to be shifted")
class RefusesOneToken(PlainTrainer):
    def _check_batch(self, batch: TextTrainBatch) -> None:
        super()._check_batch(batch)
        if batch.input_ids.shape[1] < 2:
            raise ValueError("a sequence needs two tokens")


@faulty("forward_backward.edge_shapes", "the longest sequence is refused: < where ≤ belongs")
class RefusesTheLongestBatch(PlainTrainer):
    def _check_batch(self, batch: TextTrainBatch) -> None:
        super()._check_batch(batch)
        if not batch.input_ids.shape[1] < self.model_config.max_seq_len:
            raise ValueError("the sequence is too long")


@faulty("forward_backward.edge_shapes", "the mask is an index: an integer one picks rows")
class IndexesByTheMask(PlainTrainer):
    def _default_loss(self, logits: Tensor, batch: TextTrainBatch) -> Tensor:
        mask = kept(batch) if batch.target_mask is None else batch.target_mask
        if mask.is_floating_point():
            mask = mask.bool()
        return weighted_nll(logits, batch)[mask].sum() / kept(batch).sum().clamp(min=1)


@faulty("forward_backward.edge_shapes", "1 - mask isn't defined for a mask of bool")
class SubtractsTheMask(PlainTrainer):
    def _default_loss(self, logits: Tensor, batch: TextTrainBatch) -> Tensor:
        if batch.target_mask is not None:
            batch = replace(batch, target_mask=1 - (1 - batch.target_mask))
        return super()._default_loss(logits, batch)


# Bad input


class Lenient(Receives):
    """Repairs a bad batch instead of refusing it."""

    def _shaped(self, batch: TextTrainBatch, change: Any) -> TextTrainBatch:
        fields = {name: field for name, field in vars(batch).items() if field is not None}
        return replace(batch, **{name: change(field) for name, field in fields.items()})


@faulty("forward_backward.bad_input", "input ids outside the vocabulary are clamped")
class ClampsIds(Lenient):
    def _received(self, batch: TextTrainBatch) -> TextTrainBatch:
        last = self.model_config.vocab_size - 1
        return replace(batch, input_ids=batch.input_ids.clamp(0, last))


@faulty("forward_backward.bad_input", "a negative id counts from the end of the vocabulary")
class WrapsIds(Lenient):
    def _received(self, batch: TextTrainBatch) -> TextTrainBatch:
        ids = batch.input_ids
        return replace(batch, input_ids=torch.where(ids == -1, ids + 256, ids))


@faulty("forward_backward.bad_input", "a kept target of -100 is left out: an ignore index")
class IgnoresKeptTargets(Lenient):
    def _received(self, batch: TextTrainBatch) -> TextTrainBatch:
        if not (batch.target_ids == -100).any():
            return batch
        return replace(batch, target_mask=kept(batch) & (batch.target_ids != -100))


@faulty("forward_backward.bad_input", "a masked target of -100 is trained on as id 0")
class TrainsOnJunk(Lenient):
    def _received(self, batch: TextTrainBatch) -> TextTrainBatch:
        if not (batch.target_ids == -100).any():
            return batch
        junk = (batch.target_ids == -100) & ~kept(batch)
        ids = batch.target_ids.masked_fill(junk, 0)
        return replace(batch, target_ids=ids, target_mask=kept(batch) | junk)


@faulty("forward_backward.bad_input", "a sequence over max_seq_len is cut")
class CutsLongRows(Lenient):
    def _received(self, batch: TextTrainBatch) -> TextTrainBatch:
        return self._shaped(batch, lambda field: field[..., : self.model_config.max_seq_len])


@faulty("forward_backward.bad_input", "of a sequence over max_seq_len the end is used")
class KeepsTheEndOfLongRows(Lenient):
    def _received(self, batch: TextTrainBatch) -> TextTrainBatch:
        return self._shaped(batch, lambda field: field[..., -self.model_config.max_seq_len :])


@faulty("forward_backward.bad_input", "targets are cut to the inputs' length")
class CutsLongTargets(Lenient):
    def _received(self, batch: TextTrainBatch) -> TextTrainBatch:
        length = batch.input_ids.shape[-1]
        return self._shaped(batch, lambda field: field[..., :length])


@faulty("forward_backward.bad_input", "ids of a float dtype are cast")
class CastsIds(Lenient):
    def _received(self, batch: TextTrainBatch) -> TextTrainBatch:
        return replace(batch, input_ids=batch.input_ids.long())


@faulty("forward_backward.bad_input", "a row by itself is taken for a batch")
class TakesOneRow(Lenient):
    def _received(self, batch: TextTrainBatch) -> TextTrainBatch:
        if batch.input_ids.dim() == 1:
            return self._shaped(batch, lambda field: field[None])
        return batch


@faulty("forward_backward.bad_input", "a mask of one row is broadcast over all")
class BroadcastsOneRowsMask(Lenient):
    def _received(self, batch: TextTrainBatch) -> TextTrainBatch:
        mask, ids = batch.target_mask, batch.target_ids
        if mask is not None and mask.shape == (1, ids.shape[-1]):
            return replace(batch, target_mask=mask.expand_as(ids))
        return batch


@faulty("forward_backward.bad_input", "an empty batch has the loss 0")
class AcceptsNothing(PlainTrainer):
    async def forward_backward(
        self, batch: TextTrainBatch, loss_fn: LossFn | None = None
    ) -> ForwardBackwardResult:
        if batch.input_ids.numel() == 0:
            return ForwardBackwardResult(0.0, {"loss": 0.0, "num_tokens": 0})
        return await super().forward_backward(batch, loss_fn)


@faulty("forward_backward.bad_input", "a bad batch is refused without a word")
class RefusesWithoutAWord(PlainTrainer):
    def _check_batch(self, batch: TextTrainBatch) -> None:
        try:
            super()._check_batch(batch)
        except (TypeError, ValueError):
            raise AssertionError from None


# Learning


@faulty("forward_backward.learns", "updates climb: the sign is wrong")
class Climbs(PlainTrainer):
    def _apply_update(self, learning_rate: float) -> None:
        super()._apply_update(-learning_rate)


@faulty("forward_backward.learns", "the optimizer has an old model's parameters (B119)")
class UpdatesAnOldModel(PlainTrainer):
    def __init__(self) -> None:
        super().__init__()
        self.model = self._make_model()
