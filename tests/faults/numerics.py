"""Faulty trainers of the area numerics: what runs, and learns, and is wrong."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from forge.api import TextTrainBatch
from forge_conformance import Target
from reference_impls.hf import HFTrainer, small_config
from reference_impls.llama import Llama
from reference_impls.plain import PlainTrainer
from reference_impls.random_stream import RandomStream
from reference_impls.targets import named_parameters
from tests.faults.corpus import faulty
from tests.faults.declared import constant_rate, declared
from tests.faults.forward_backward import kept, weighted_nll
from tests.faults.honest import CallersStream, HoldsBfloat16, Recomputes

# The gradient, changed after backward


class ChangesGradients(PlainTrainer):
    """Does something to each call's gradients before they are added."""

    def _backward(self, loss: Tensor) -> None:
        pending = {name: p.grad for name, p in self._trainable().items()}
        self.model.zero_grad()
        super()._backward(loss)
        for name, p in self._trainable().items():
            if p.grad is not None:
                p.grad = self._changed(name, p.grad)
            if pending[name] is not None:
                p.grad = pending[name] if p.grad is None else pending[name] + p.grad

    def _changed(self, name: str, gradient: Tensor) -> Tensor | None:
        raise NotImplementedError


@faulty("numerics.gradient", "one layer's gradient is a hundredth too large")
class MistakesOneLayerByAHundredth(ChangesGradients):
    def _changed(self, name: str, gradient: Tensor) -> Tensor:
        return 1.01 * gradient if name.endswith("layers.1.mlp.up_proj.weight") else gradient


@faulty("numerics.gradient", "the norms' gradients are halved")
class HalvesTheNormsGradients(ChangesGradients):
    def _changed(self, name: str, gradient: Tensor) -> Tensor:
        return gradient / 2 if gradient.dim() == 1 else gradient


@faulty("numerics.gradient", "a projection's gradient has the wrong sign")
class TurnsAProjection(ChangesGradients):
    def _changed(self, name: str, gradient: Tensor) -> Tensor:
        return -gradient if name.endswith("layers.0.self_attn.v_proj.weight") else gradient


@faulty("numerics.gradient", "the head has no gradient: its group was never built (B75)")
class ForgetsTheHead(ChangesGradients):
    def _changed(self, name: str, gradient: Tensor) -> Tensor:
        return torch.zeros_like(gradient) if name == "lm_head.weight" else gradient


@faulty("numerics.gradient", "half of the rows' gradients are lost with a shard")
class LosesAShard(ChangesGradients):
    def _changed(self, name: str, gradient: Tensor) -> Tensor:
        if name.endswith("layers.0.mlp.down_proj.weight"):
            gradient = gradient.clone()
            gradient[::2] = 0
        return gradient


@faulty("numerics.gradient", "a hundredth of the gradient before stays (B40)")
class KeepsAStalePart(ChangesGradients):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.before: dict[str, Tensor] = {}

    def _changed(self, name: str, gradient: Tensor) -> Tensor:
        stale = self.before.get(name, torch.zeros_like(gradient))
        self.before[name] = gradient.clone()
        return gradient + 0.01 * stale


class QuartersTheDefaultLoss(PlainTrainer):
    """Reports the loss, and differentiates a quarter of it."""

    def _default_loss(self, logits: Tensor, batch: TextTrainBatch) -> Tensor:
        loss = super()._default_loss(logits, batch)
        return loss.detach() + (loss - loss.detach()) / 4


@faulty("numerics.gradient", "the default loss is divided by accumulation steps once reported")
def quarters_the_default_loss() -> PlainTrainer:
    return QuartersTheDefaultLoss()


@faulty("forward_backward.declared_loss", "the same, beside the loss that is declared")
def quarters_the_declared_loss() -> Target:
    return declared(QuartersTheDefaultLoss)


@faulty("numerics.gradient", "a z-loss is differentiated that isn't in the loss")
class HidesAZLoss(PlainTrainer):
    def _default_loss(self, logits: Tensor, batch: TextTrainBatch) -> Tensor:
        size = logits.logsumexp(-1)[kept(batch)].square().sum() / kept(batch).sum().clamp(min=1)
        return super()._default_loss(logits, batch) + 0.05 * (size - size.detach())


@faulty("numerics.gradient", "blocks are computed again in backward, with other dropout")
class RecomputesWithOtherDropout(PlainTrainer):
    def __init__(self) -> None:
        super().__init__(dropout=0.2)

    def _make_model(self) -> Llama:
        return Recomputes(self.model_config, use_reentrant=False, preserve_rng_state=False)


@faulty("numerics.gradient", "all gradients are halved, as by a mean over two ranks (B204)")
class HalvesAll(ChangesGradients):
    def _changed(self, name: str, gradient: Tensor) -> Tensor:
        return gradient / 2


@faulty("numerics.gradient", "each call's gradient is clipped by value")
class ClipsByValue(ChangesGradients):
    def _changed(self, name: str, gradient: Tensor) -> Tensor:
        largest = float(gradient.abs().max())
        return gradient.clamp(-largest / 2, largest / 2)


@faulty("numerics.gradient", "a layer's gradient of bfloat16 is a hundredth too large")
class MistakesALayerOfBfloat16(MistakesOneLayerByAHundredth, HoldsBfloat16):
    pass


@faulty("numerics.gradient", "matrices are multiplied in bfloat16, and stale gradient stays (B40)")
def keeps_a_stale_part_in_bfloat16() -> PlainTrainer:
    return KeepsAStalePart(compute_dtype=torch.bfloat16)


@faulty("numerics.gradient", "gradients pass through float16 unscaled, where small ones vanish")
class VanishesInFloat16(ChangesGradients):
    def _changed(self, name: str, gradient: Tensor) -> Tensor:
        return gradient.half().float()


@faulty("numerics.gradient", "the loss scale stays in the head's gradient")
class ScalesTheHeadsGradient(ChangesGradients):
    def _changed(self, name: str, gradient: Tensor) -> Tensor:
        return gradient * 2**10 if name == "lm_head.weight" else gradient


class ReducesTheTiedWeightTwice(ChangesGradients):
    def _changed(self, name: str, gradient: Tensor) -> Tensor:
        return 2 * gradient if name == "model.embed_tokens.weight" else gradient


@faulty("numerics.gradient", "a tied weight is in two buckets, and its gradient reduced twice")
def reduces_the_tied_weight_twice() -> PlainTrainer:
    return ReducesTheTiedWeightTwice(tie_weights=True)


@faulty("numerics.gradient", "backward runs under autocast: float32 is multiplied in bfloat16")
class LeavesAutocastOn(PlainTrainer):
    def _backward(self, loss: Tensor) -> None:
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            super()._backward(loss)


@faulty("numerics.gradient", "of a bfloat16 model only the head's gradient is averaged (B204)")
class AveragesTheHeadsGradient(HFTrainer):
    def _make_model(self) -> PreTrainedModel:
        model = super()._make_model().bfloat16()
        model.lm_head.weight.register_post_accumulate_grad_hook(lambda p: p.grad.div_(2))
        return model


# The gradient, wrong in the graph itself


@faulty("numerics.gradient", "a layer's output is detached: what is before it learns past it")
class DetachesALayer(PlainTrainer):
    def _make_model(self) -> Llama:
        model = super()._make_model()
        model.model.layers[1].mlp.register_forward_hook(lambda _module, _input, out: out.detach())
        return model


@faulty("numerics.gradient", "in bfloat16 too, a layer's output is detached")
def detaches_a_layer_in_bfloat16() -> PlainTrainer:
    return DetachesALayer(compute_dtype=torch.bfloat16)


class TurnsAProjectionInBackward(PlainTrainer):
    def _make_model(self) -> Llama:
        model = super()._make_model()
        projection = model.model.layers[1].mlp.up_proj
        projection.forward = lambda hidden: F.linear(
            hidden, 2 * projection.weight.detach() - projection.weight
        )
        return model


@faulty("numerics.gradient", "in bfloat16 a projection's own backward has the wrong sign")
def turns_a_projection_in_bfloat16() -> PlainTrainer:
    return TurnsAProjectionInBackward(compute_dtype=torch.bfloat16)


class TakesItsStatisticsAsGiven(torch.nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        assert self.eps is not None
        scale = x.detach().square().mean(-1, keepdim=True).add(self.eps).rsqrt()
        return x * scale * self.weight


@faulty("numerics.gradient", "no gradient goes through a norm's statistics")
class DetachesStatistics(PlainTrainer):
    def _make_model(self) -> Llama:
        model = super()._make_model()
        model.model.norm.__class__ = TakesItsStatisticsAsGiven
        return model


@faulty("numerics.gradient", "a token that comes twice has the mean of both gradients")
class AveragesRepeatedTokens(PlainTrainer):
    def _make_model(self) -> Llama:
        model = super()._make_model()
        model.model.embed_tokens.scale_grad_by_freq = True
        return model


@faulty("numerics.gradient", "id 0 is taken for padding, and its row has no gradient (B24)")
class TakesZeroForPadding(PlainTrainer):
    def _make_model(self) -> Llama:
        model = super()._make_model()
        model.model.embed_tokens.padding_idx = 0
        return model


class ForgetsTheTiedHead(PlainTrainer):
    def _make_model(self) -> Llama:
        model = super()._make_model()
        head = model.lm_head
        head.forward = lambda hidden: F.linear(hidden, head.weight.detach())
        return model


@faulty("numerics.gradient", "a tied weight has the embedding's gradient, without the head's")
def forgets_the_tied_head() -> PlainTrainer:
    return ForgetsTheTiedHead(tie_weights=True)


@faulty("numerics.gradient", "logits are capped without a gradient of the cap")
class CapsWithoutGradient(PlainTrainer):
    def _logits(self, input_ids: Tensor) -> Tensor:
        logits = super()._logits(input_ids)
        return logits + (2 * torch.tanh(logits / 2) - logits).detach()


@faulty("numerics.gradient", "activations are recomputed with another dropout mask (B199, B200)")
class RecomputesWithAnotherMask(PlainTrainer):
    def __init__(self) -> None:
        super().__init__(dropout=0.2)
        self.random = CallersStream(0, self.device)

    def _make_model(self) -> Llama:
        model = super()._make_model()
        for layer in model.model.layers:
            layer.forward = partial(
                checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
            )
        return model


class RecomputesWithoutAnInputsGradient(PlainTrainer):
    def _make_model(self) -> Llama:
        model = Recomputes(self.model_config, use_reentrant=True)
        model.model.embed_tokens.requires_grad_(False)
        return model


@faulty("numerics.gradient", "recomputed after a frozen embedding, no layer has a gradient (B79)")
def recomputes_without_an_inputs_gradient() -> Target:
    return replace(declared(RecomputesWithoutAnInputsGradient), parameters=named_parameters)


# Microbatches


@faulty("numerics.microbatches", "the gradient is a mean over the rows of a call (B10)")
class AveragesOverRows(PlainTrainer):
    def _loss(self, logits: Tensor, batch: TextTrainBatch, loss_fn: Any) -> Tensor:
        loss = super()._loss(logits, batch, loss_fn)
        return loss / len(logits) if loss_fn is not None else loss


@faulty("numerics.microbatches", "a call is weighted by its share of kept targets (B207)")
class WeightsByKeptTargets(PlainTrainer):
    def _loss(self, logits: Tensor, batch: TextTrainBatch, loss_fn: Any) -> Tensor:
        loss = super()._loss(logits, batch, loss_fn)
        mask = batch.target_mask
        share = 1.0 if mask is None else float(mask.float().mean())
        return loss * (0.5 + share / 2) if loss_fn is not None else loss


@faulty("numerics.microbatches", "gradients are summed in bfloat16 (B174)")
class SumsInBfloat16(PlainTrainer):
    def _backward(self, loss: Tensor) -> None:
        for p in self._trainable().values():
            if p.grad is not None:
                p.grad = p.grad.bfloat16().float()
        super()._backward(loss)


class LosesTheOddRow(PlainTrainer):
    def _logits(self, input_ids: Tensor) -> Tensor:
        logits = super()._logits(input_ids)
        paired = len(logits) // 2 * 2 or 1
        return torch.cat([logits[:paired], logits[paired:].detach()])


@faulty("numerics.microbatches", "rows are taken by twos, and the odd one is lost (B07)")
def loses_the_odd_row() -> PlainTrainer:
    return LosesTheOddRow(compute_dtype=torch.bfloat16)


# Several updates


class UsesAnotherRate(PlainTrainer):
    def _apply_update(self, learning_rate: float) -> None:
        super()._apply_update(learning_rate * (0.99 if self.step == 3 else 1.0))


@faulty("numerics.train_step", "the rate of one update is another than reported (B52)")
def uses_another_rate() -> Target:
    return declared(UsesAnotherRate)


class ScalesByMicrobatches(PlainTrainer):
    def _clip(self) -> None:
        for p in self._trainable().values():
            if p.grad is not None and self.accumulated_microbatches > 2:
                p.grad /= self.accumulated_microbatches
        super()._clip()


@faulty("numerics.train_step", "from three microbatches on the update averages them (B02)")
def scales_by_microbatches() -> Target:
    return declared(ScalesByMicrobatches)


class RestartsMoments(PlainTrainer):
    def _apply_update(self, learning_rate: float) -> None:
        if self.step == 2:
            self.optimizer.state.clear()
        super()._apply_update(learning_rate)


@faulty("numerics.train_step", "the optimizer forgets its moments after two updates (B84)")
def restarts_moments() -> Target:
    return declared(RestartsMoments)


class KeepsMomentsInBfloat16(PlainTrainer):
    def _apply_update(self, learning_rate: float) -> None:
        super()._apply_update(learning_rate)
        for state in self.optimizer.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name].copy_(state[name].bfloat16())


@faulty("numerics.train_step", "the optimizer's moments are kept in bfloat16 (B89)")
def keeps_moments_in_bfloat16() -> Target:
    return declared(KeepsMomentsInBfloat16)


class ForgetsItsMasterWeights(PlainTrainer):
    @torch.no_grad()
    def _apply_update(self, learning_rate: float) -> None:
        super()._apply_update(learning_rate)
        for p in self._trainable().values():
            p.copy_(p.bfloat16())


@faulty("numerics.train_step", "weights are rounded to bfloat16 after each update (B97)")
def forgets_its_master_weights() -> Target:
    return declared(ForgetsItsMasterWeights)


class RoundsItsRate(PlainTrainer):
    def _apply_update(self, learning_rate: float) -> None:
        super()._apply_update(torch.tensor(learning_rate).bfloat16().item())


@faulty("numerics.train_step", "the rate is rounded to bfloat16 on its way to the optimizer")
def rounds_its_rate() -> Target:
    return declared(RoundsItsRate)


class CountsMicrobatchesAsUpdates(PlainTrainer):
    def _apply_update(self, learning_rate: float) -> None:
        for state in self.optimizer.state.values():
            state["step"] += self.accumulated_microbatches - 1
        super()._apply_update(learning_rate)


@faulty("numerics.train_step", "Adam's bias correction counts microbatches (B105)")
def counts_microbatches_as_updates() -> Target:
    return declared(CountsMicrobatchesAsUpdates)


class KeepsTheLargestMoment(PlainTrainer):
    def _make_optimizer(self) -> torch.optim.Optimizer:
        made = super()._make_optimizer()
        for group in made.param_groups:
            group["amsgrad"] = True
        return made


@faulty("numerics.train_step", "Adam is AMSGrad, which shows once gradients have become smaller")
def keeps_the_largest_moment() -> Target:
    return declared(KeepsTheLargestMoment)


class TrainsItsAverage(PlainTrainer):
    @torch.no_grad()
    def _apply_update(self, learning_rate: float) -> None:
        before = [p.clone() for p in self._trainable().values()]
        super()._apply_update(learning_rate)
        if self.step == 2:
            for p, old in zip(self._trainable().values(), before, strict=True):
                p.lerp_(old, 0.1)


@faulty("numerics.train_step", "after the third update the weights' average stays in their place")
def trains_its_average() -> Target:
    return declared(TrainsItsAverage)


class SkipsBiasCorrectionInBfloat16(HoldsBfloat16):
    def _apply_update(self, learning_rate: float) -> None:
        for state in self.optimizer.state.values():
            state["step"].fill_(1e6)
        super()._apply_update(learning_rate)


@faulty("numerics.train_step", "with weights of bfloat16, moments aren't corrected but at first")
def skips_bias_correction_in_bfloat16() -> Target:
    return declared(SkipsBiasCorrectionInBfloat16, schedule=constant_rate)


class SkipsAnUpdate(HFTrainer):
    def _make_optimizer(self) -> Any:
        optimizer, scheduler = super()._make_optimizer()
        optimizer.register_step_pre_hook(lambda *_: self.step == 2 and self.model.zero_grad())
        return optimizer, scheduler


@faulty("numerics.train_step", "one update is skipped as if for an overflow, and counted")
def skips_an_update() -> Target:
    return declared(SkipsAnUpdate)


# Two equal trainers


_seeds = itertools.count()


@faulty("numerics.deterministic", "the weights are not seeded, though determinism is declared")
def is_not_seeded() -> Target:
    return declared(lambda **options: PlainTrainer(seed=next(_seeds), **options))


class DrawsDropoutAnew(PlainTrainer):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.random = RandomStream(next(_seeds), self.device)


@faulty("numerics.deterministic", "dropout is not seeded, though determinism is declared")
def draws_dropout_anew() -> Target:
    return declared(DrawsDropoutAnew, dropout=0.1)


class AddsInAnyOrder(PlainTrainer):
    made = itertools.count()

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.order = next(AddsInAnyOrder.made) % 2

    def _backward(self, loss: Tensor) -> None:
        super()._backward(loss)
        for p in self._trainable().values():
            if self.order and p.grad is not None:
                p.grad += p.grad * torch.finfo(p.dtype).eps


@faulty("numerics.deterministic", "gradients differ in the last place, as with atomic adds")
def adds_in_any_order() -> Target:
    return declared(AddsInAnyOrder)


# Another trainer with the same weights


@faulty("numerics.parity", "the learning rate is another one's after two updates")
class ForgetsTheWarmUp(PlainTrainer):
    def _learning_rate(self) -> float:
        return super()._learning_rate() if self.step < 2 else 0.01


@faulty("numerics.parity", "clipping is missing, which no other clause sees undeclared")
class NeverClips(PlainTrainer):
    def _clip(self) -> None:
        pass


@faulty("numerics.parity", "logits are a thousandth larger in one trainer's head")
class ScalesItsHead(PlainTrainer):
    def _logits(self, input_ids: Tensor) -> Tensor:
        return super()._logits(input_ids) * 1.001


@faulty("numerics.parity", "positions turn queries and keys the other way round")
class TurnsBackwards(PlainTrainer):
    def _make_model(self) -> Llama:
        model = super()._make_model()
        model.model.get_buffer("rotation")[1].neg_()
        return model


@faulty("numerics.parity", "targets that are shifted are shifted again (B29)")
class ShiftsTargetsAgain(PlainTrainer):
    def _default_loss(self, logits: Tensor, batch: TextTrainBatch) -> Tensor:
        return super()._default_loss(logits.roll(1, dims=1), batch)


@faulty("numerics.parity", "the default loss is a mean of the rows' means (B207)")
class AveragesRowMeans(PlainTrainer):
    def _default_loss(self, logits: Tensor, batch: TextTrainBatch) -> Tensor:
        mask = kept(batch)
        sums = (weighted_nll(logits, batch) * mask).sum(dim=1)
        means = sums / mask.sum(dim=1).clamp(min=1)
        return means.sum() / mask.any(dim=1).sum().clamp(min=1)


@faulty("numerics.parity", "the norms' epsilon is another library's default")
def has_another_epsilon() -> HFTrainer:
    config = small_config("llama", tie_weights=False, dropout=0.0)
    config.rms_norm_eps = 1e-5
    return HFTrainer(config)
