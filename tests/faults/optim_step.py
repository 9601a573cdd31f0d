"""Faulty trainers of the area optim_step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from forge.api import ForwardBackwardResult, LossFn, OptimStepResult, TextTrainBatch
from forge_conformance import Target
from reference_impls.hf import HFTrainer
from reference_impls.optimization import adamw, clip
from reference_impls.plain import PlainTrainer
from tests.faults.corpus import faulty
from tests.faults.declared import declared, declared_sgd


class Reports(PlainTrainer):
    """Returns another result of an update than `PlainTrainer`."""

    async def optim_step(self) -> OptimStepResult:
        return self._reported(await super().optim_step())

    def _reported(self, result: OptimStepResult) -> OptimStepResult:
        raise NotImplementedError


def gradients(trainer: PlainTrainer) -> list[Tensor]:
    return [p.grad for p in trainer._trainable().values() if p.grad is not None]


# Step and count


@faulty("optim_step.step_and_count", "the step is read before it moves")
class ReportsTheStepBefore(Reports):
    def _reported(self, result: OptimStepResult) -> OptimStepResult:
        return replace(result, step=result.step - 1)


@faulty("optim_step.step_and_count", "the count is read after it was cleared")
class ReportsTheClearedCount(Reports):
    def _reported(self, result: OptimStepResult) -> OptimStepResult:
        return replace(result, accumulated_microbatches=self.accumulated_microbatches)


@faulty("optim_step.step_and_count", "the count is the configured one (B04)")
class ReportsAConfiguredCount(Reports):
    def _reported(self, result: OptimStepResult) -> OptimStepResult:
        return replace(result, accumulated_microbatches=1)


@faulty("optim_step.step_and_count", "the count is the total since the start")
class ReportsTheTotal(Reports):
    total = 0

    def _reported(self, result: OptimStepResult) -> OptimStepResult:
        self.total += result.accumulated_microbatches
        return replace(result, accumulated_microbatches=self.total)


@faulty("optim_step.step_and_count", "the step reported is of microbatches (B105)")
class ReportsTheMicrostep(Reports):
    microsteps = 0

    def _reported(self, result: OptimStepResult) -> OptimStepResult:
        self.microsteps += result.accumulated_microbatches
        return replace(result, step=self.microsteps)


# Cleared


@faulty("optim_step.clears", "zero_grad is missing after the update (B35)")
class ForgetsToZero(PlainTrainer):
    async def optim_step(self) -> OptimStepResult:
        pending = {p: p.grad for p in self._trainable().values()}
        result = await super().optim_step()
        for p, grad in pending.items():
            p.grad = grad
        return result


class Leaves(PlainTrainer):
    """Leaves something in the gradients after an update; `clear_gradients` is sound."""

    async def optim_step(self) -> OptimStepResult:
        pending = {name: p.grad for name, p in self._trainable().items()}
        result = await super().optim_step()
        for name, p in self._trainable().items():
            p.grad = self._left(name, pending[name])
        return result

    def _left(self, name: str, grad: Tensor | None) -> Tensor | None:
        raise NotImplementedError


@faulty("optim_step.clears", "1% of the gradient stays")
class LeavesOnePercent(Leaves):
    def _left(self, name: str, grad: Tensor | None) -> Tensor | None:
        return None if grad is None else 0.01 * grad


@faulty("optim_step.clears", "the gradients of norms stay: a group that nobody zeroes")
class LeavesNorms(Leaves):
    def _left(self, name: str, grad: Tensor | None) -> Tensor | None:
        return grad if "norm" in name else None


class MainGradients(PlainTrainer):
    """Accumulates beside `.grad`, in `main`, as sharded optimizers do."""

    def __init__(self) -> None:
        super().__init__()
        self.main: dict[str, Tensor] = {}

    def _backward(self, loss: Tensor) -> None:
        super()._backward(loss)
        for name, p in self._trainable().items():
            if p.grad is not None:
                self.main[name] = self.main[name] + p.grad if name in self.main else p.grad
                p.grad = None

    def _clip(self) -> None:
        for name, p in self._trainable().items():
            p.grad = self.main.get(name)
        super()._clip()

    def _clear(self) -> None:
        super()._clear()
        self._clear_main()

    def _clear_main(self) -> None:
        self.main = {}


@faulty("optim_step.clears", "the update leaves the accumulator beside .grad as it is (B40)")
class LeavesTheAccumulator(MainGradients):
    async def optim_step(self) -> OptimStepResult:
        pending = self.main
        result = await super().optim_step()
        self.main = {name: grad.clone() for name, grad in pending.items()}
        return result


# The rate


@faulty("optim_step.lr_used", "the rate is read after the schedule has moved on, undeclared")
class ReportsTheRateAfter(Reports):
    def _reported(self, result: OptimStepResult) -> OptimStepResult:
        return replace(result, learning_rate=self._learning_rate())


@faulty("optim_step.lr_used", "the rate reported is the configured peak, undeclared")
class ReportsThePeak(Reports):
    def _reported(self, result: OptimStepResult) -> OptimStepResult:
        return replace(result, learning_rate=0.01)


@faulty("optim_step.lr_used", "the rate is read after the schedule has moved on")
def reports_the_next_rate() -> Target:
    return declared(ReportsTheRateAfter)


@faulty("optim_step.lr_used", "the rate reported is the configured peak")
def reports_the_peak() -> Target:
    return declared(ReportsThePeak)


@faulty("optim_step.lr_used", "the first rate is reported as 0, and isn't (B69)")
class ReportsTheRateBefore(Reports):
    def _reported(self, result: OptimStepResult) -> OptimStepResult:
        return replace(result, learning_rate=self.schedule(self.step - 1))


@faulty("optim_step.lr_used", "the rate falls below 0 when the schedule has ended")
def falls_below_zero() -> PlainTrainer:
    return PlainTrainer(schedule=lambda position: 0.01 * (1 - position / 5))


@faulty("optim_step.lr_used", "the optimizer keeps the rate it was made with (B70)")
def keeps_its_first_rate() -> Target:
    class KeepsItsFirstRate(PlainTrainer):
        def _apply_update(self, learning_rate: float) -> None:
            self.optimizer.step()

    return declared(KeepsItsFirstRate)


@faulty("optim_step.lr_used", "a schedule that divides by its warm-up of 0 gives a rate of NaN")
def divides_by_its_warm_up() -> PlainTrainer:
    return PlainTrainer(schedule=lambda position: 0.01 if position < 3 else math.nan)


# The schedule


class Schedules(PlainTrainer):
    """Has its own position in the schedule."""

    position = 0

    def _learning_rate(self) -> float:
        self.position = self._next(self.position)
        return self.schedule(self.position)

    def _next(self, position: int) -> int:
        raise NotImplementedError


@faulty("optim_step.schedule", "the schedule advances at each microbatch")
class AdvancesByMicrobatch(Schedules):
    def _next(self, position: int) -> int:
        return position + self.accumulated_microbatches


@faulty("optim_step.schedule", "the schedule advances by a configured accumulation or more (B105)")
class AdvancesByLargeSteps(Schedules):
    def _next(self, position: int) -> int:
        return position + max(1, self.accumulated_microbatches - 1)


@faulty("optim_step.schedule", "the schedule advances after full accumulations only")
class AdvancesNowAndThen(Schedules):
    def _next(self, position: int) -> int:
        return position + (self.accumulated_microbatches > 1)


@faulty("optim_step.schedule", "optimizer and trainer both advance the schedule (B67)")
def advances_twice() -> Target:
    class AdvancesTwice(Schedules):
        def _next(self, position: int) -> int:
            return position + 2

    return declared(AdvancesTwice)


@faulty("optim_step.schedule", "the schedule starts at position 0 instead of 1 (B69)")
def starts_one_too_early() -> Target:
    class StartsOneTooEarly(PlainTrainer):
        def _learning_rate(self) -> float:
            return self.schedule(self.step)

    return declared(StartsOneTooEarly)


# All parameters


def without(optimizer: Any, part: str) -> Any:
    """An optimizer that isn't told of the parameters with `part` in their name."""

    def build(parameters: Mapping[str, Tensor]) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = optimizer(
            {name: p for name, p in parameters.items() if part not in name}
        )
        return made

    return build


@faulty("optim_step.updates_all", "the head's group was never handed to the optimizer (B75)")
def forgets_the_head() -> PlainTrainer:
    return PlainTrainer(optimizer=without(adamw, "lm_head"))


@faulty("optim_step.updates_all", "the last norm isn't in the optimizer")
def forgets_the_last_norm() -> PlainTrainer:
    return PlainTrainer(optimizer=without(adamw, "model.norm"))


@faulty("optim_step.updates_all", "one projection of one layer isn't in the optimizer")
def forgets_a_projection() -> PlainTrainer:
    return PlainTrainer(optimizer=without(adamw, "layers.1.self_attn.k_proj"))


@faulty("optim_step.updates_all", "the second group's rate stays 0")
class SetsOneGroupsRate(PlainTrainer):
    def _apply_update(self, learning_rate: float) -> None:
        first, *others = self.optimizer.param_groups
        first["lr"] = learning_rate
        for group in others:
            group["lr"] = 0.0
        self.optimizer.step()


@faulty("optim_step.updates_all", "the optimizer updates copies that nobody reads (B82)")
class UpdatesCopies(PlainTrainer):
    def _make_optimizer(self) -> torch.optim.Optimizer:
        return self._optimizer_factory(
            {name: p.detach().clone() for name, p in self._trainable().items()}
        )


# The update rule


@faulty("optim_step.update_rule", "norms decay like matrices (B74)")
def decays_norms() -> Target:
    class DecaysNorms(PlainTrainer):
        def _make_optimizer(self) -> torch.optim.Optimizer:
            made = super()._make_optimizer()
            made.param_groups[1]["weight_decay"] = 0.1
            return made

    return declared(DecaysNorms)


@faulty("optim_step.update_rule", "decay is added to the gradient: Adam for AdamW")
def couples_decay() -> Target:
    class CouplesDecay(PlainTrainer):
        def _apply_update(self, learning_rate: float) -> None:
            for group in self.optimizer.param_groups:
                group.setdefault("kept_decay", group["weight_decay"])
                group["weight_decay"] = 0.0
                for p in group["params"]:
                    p.grad += group["kept_decay"] * p.detach()
            super()._apply_update(learning_rate)

    return declared(CouplesDecay)


@faulty("optim_step.update_rule", "Adam's moments aren't corrected for their start at 0")
def skips_bias_correction() -> Target:
    class SkipsBiasCorrection(PlainTrainer):
        def _apply_update(self, learning_rate: float) -> None:
            for state in self.optimizer.state.values():
                state["step"].fill_(1e6)
            super()._apply_update(learning_rate)

    return declared(SkipsBiasCorrection)


@faulty("optim_step.update_rule", "the betas are the library's, not the declared ones (B72)")
def takes_default_betas() -> Target:
    class TakesDefaultBetas(PlainTrainer):
        def _make_optimizer(self) -> torch.optim.Optimizer:
            made = super()._make_optimizer()
            for group in made.param_groups:
                group["betas"] = (0.9, 0.999)
            return made

    return declared(TakesDefaultBetas)


class Clips(PlainTrainer):
    """Clips in a way of its own."""

    def _clip(self) -> None:
        self._clip_to(self.clip_norm)

    def _clip_to(self, limit: float) -> None:
        raise NotImplementedError


@faulty("optim_step.update_rule", "clipping is declared and missing")
def never_clips() -> Target:
    class NeverClips(Clips):
        def _clip_to(self, limit: float) -> None:
            return

    return declared_sgd(NeverClips)


@faulty("optim_step.update_rule", "each tensor is clipped by itself")
def clips_each_tensor() -> Target:
    class ClipsEachTensor(Clips):
        def _clip_to(self, limit: float) -> None:
            for p in self._trainable().values():
                clip([p], limit)

    return declared_sgd(ClipsEachTensor)


@faulty("optim_step.update_rule", "entries are clamped to the norm that is declared")
def clamps_entries() -> Target:
    class ClampsEntries(Clips):
        def _clip_to(self, limit: float) -> None:
            for grad in gradients(self):
                grad.clamp_(-limit, limit)

    return declared_sgd(ClampsEntries)


@faulty("optim_step.update_rule", "replicated parameters count twice in the norm (B54)")
def counts_norms_twice() -> Target:
    class CountsNormsTwice(Clips):
        def _clip_to(self, limit: float) -> None:
            parameters = list(self._trainable().values())
            total = torch.nn.utils.get_total_norm(gradients(self)[:4] * 2)
            rest = torch.nn.utils.get_total_norm(gradients(self)[4:])
            norm = (total.square() + rest.square()).sqrt()
            torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)

    return declared_sgd(CountsNormsTwice)


@faulty("optim_step.update_rule", "the update divides by the number of microbatches (B04)")
def divides_by_microbatches() -> Target:
    class DividesByMicrobatches(PlainTrainer):
        def _apply_update(self, learning_rate: float) -> None:
            super()._apply_update(learning_rate / self.accumulated_microbatches)

    return declared_sgd(DividesByMicrobatches)


@faulty("optim_step.update_rule", "gradients pass through bfloat16 on their way to the update")
def rounds_gradients() -> Target:
    class RoundsGradients(PlainTrainer):
        def _apply_update(self, learning_rate: float) -> None:
            for grad in gradients(self):
                grad.copy_(grad.bfloat16())
            super()._apply_update(learning_rate)

    return declared(RoundsGradients)


@faulty("optim_step.update_rule", "the second group's rate stays the optimizer's own (B72)")
def sets_one_groups_rate() -> Target:
    class SetsOneGroupsRate(PlainTrainer):
        def _apply_update(self, learning_rate: float) -> None:
            self.optimizer.param_groups[0]["lr"] = learning_rate
            self.optimizer.step()

    return declared(SetsOneGroupsRate)


@faulty("optim_step.update_rule", "each update starts from copies of the first weights (B119)")
def starts_from_old_copies() -> Target:
    class StartsFromOldCopies(PlainTrainer):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.masters = {name: p.detach().clone() for name, p in self._trainable().items()}

        def _apply_update(self, learning_rate: float) -> None:
            with torch.no_grad():
                for name, p in self._trainable().items():
                    p.copy_(self.masters[name])
            super()._apply_update(learning_rate)

    return declared(StartsFromOldCopies)


@faulty("optim_step.update_rule", "Adam's epsilon is inside the root")
def roots_its_epsilon() -> Target:
    class RootsItsEpsilon(PlainTrainer):
        def _apply_update(self, learning_rate: float) -> None:
            before = {p: p.detach().clone() for p in self._trainable().values()}
            super()._apply_update(learning_rate)
            for group in self.optimizer.param_groups:
                for p in group["params"]:
                    self._move(p, before[p], group)

        @torch.no_grad()
        def _move(self, p: Tensor, before: Tensor, group: dict[str, Any]) -> None:
            state, (beta1, beta2) = self.optimizer.state[p], group["betas"]
            updates = state["step"].item()
            root = (state["exp_avg_sq"] / (1 - beta2**updates) + group["eps"]).sqrt()
            p.copy_(before * (1 - group["lr"] * group["weight_decay"]))
            p.sub_(group["lr"] * state["exp_avg"] / (1 - beta1**updates) / root)

    return declared(RootsItsEpsilon)


@faulty("optim_step.update_rule", "Adam's betas are swapped")
def swaps_betas() -> Target:
    class SwapsBetas(PlainTrainer):
        def _make_optimizer(self) -> torch.optim.Optimizer:
            made = super()._make_optimizer()
            for group in made.param_groups:
                group["betas"] = group["betas"][::-1]
            return made

    return declared(SwapsBetas)


@faulty("optim_step.update_rule", "weights decay at the peak rate, whatever the schedule's")
def decays_at_the_peak() -> Target:
    class DecaysAtThePeak(PlainTrainer):
        @torch.no_grad()
        def _apply_update(self, learning_rate: float) -> None:
            for group in self.optimizer.param_groups:
                for p in group["params"]:
                    p.mul_(1 - (0.01 - learning_rate) * group["weight_decay"])
            super()._apply_update(learning_rate)

    return declared(DecaysAtThePeak)


def nesterov(parameters: Mapping[str, Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(parameters.values()), momentum=0.9, nesterov=True)


@faulty("optim_step.update_rule", "momentum is declared as Nesterov's, and isn't")
def looks_not_ahead() -> Target:
    class LooksNotAhead(PlainTrainer):
        def _make_optimizer(self) -> torch.optim.Optimizer:
            made = super()._make_optimizer()
            for group in made.param_groups:
                group["nesterov"] = False
            return made

    return declared(LooksNotAhead, optimizer=nesterov)


@faulty("optim_step.update_rule", "the clipping's norm is that of the matrices alone (B54)")
def leaves_norms_out_of_the_norm() -> Target:
    class LeavesNormsOutOfTheNorm(Clips):
        def _clip_to(self, limit: float) -> None:
            parameters = list(self._trainable().values())
            norm = torch.nn.utils.get_total_norm([g for g in gradients(self) if g.dim() > 1])
            torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)

    return declared_sgd(LeavesNormsOutOfTheNorm)


@faulty("optim_step.update_rule", "the gradient is clipped by the norm of the last one (B50)")
def clips_by_the_last_norm() -> Target:
    class ClipsByTheLastNorm(Clips):
        last: Tensor | None = None

        def _clip_to(self, limit: float) -> None:
            norm = torch.nn.utils.get_total_norm(gradients(self))
            applied = norm if self.last is None else self.last
            torch.nn.utils.clip_grads_with_norm_(self._trainable().values(), limit, applied)
            self.last = norm

    return declared_sgd(ClipsByTheLastNorm)


@faulty("optim_step.update_rule", "gradients are clipped before the loss scale is taken out (B52)")
def clips_scaled_gradients() -> Target:
    class ClipsScaledGradients(PlainTrainer):
        scale = 2.0**16

        def _backward(self, loss: Tensor) -> None:
            super()._backward(loss * self.scale)

        def _clip(self) -> None:
            super()._clip()
            for grad in gradients(self):
                grad /= self.scale

    return replace(
        declared_sgd(ClipsScaledGradients), loss_scale=lambda trainer: float(trainer.scale)
    )


@faulty("optim_step.update_rule", "a wrapped optimizer decays all that it is given (B74)")
def decays_all_on_transformers() -> Target:
    class DecaysAll(HFTrainer):
        def _make_optimizer(self) -> Any:
            optimizer, scheduler = super()._make_optimizer()
            for group in optimizer.param_groups:
                group["weight_decay"] = 0.1
            return optimizer, scheduler

    return declared(DecaysAll)


# Clipping


@faulty("optim_step.clip_once", "each microbatch is clipped, the sum isn't (B49)")
def clips_each_microbatch() -> Target:
    class ClipsEachMicrobatch(PlainTrainer):
        def _backward(self, loss: Tensor) -> None:
            pending = {p: p.grad for p in self._trainable().values()}
            self.model.zero_grad()
            super()._backward(loss)
            clip(list(pending), self.clip_norm)
            for p, grad in pending.items():
                if grad is not None and p.grad is not None:
                    p.grad += grad

        def _clip(self) -> None:
            return

    return declared(ClipsEachMicrobatch)


@faulty("optim_step.clip_once", "what has accumulated is clipped after each backward (B49)")
def clips_after_each_backward() -> Target:
    class ClipsAfterEachBackward(PlainTrainer):
        def _backward(self, loss: Tensor) -> None:
            super()._backward(loss)
            clip(list(self._trainable().values()), self.clip_norm)

    return declared(ClipsAfterEachBackward)


@faulty("optim_step.clip_once", "clipping comes before the last backward, on the others (B50)")
def clips_before_backward() -> Target:
    class ClipsBeforeBackward(PlainTrainer):
        def _backward(self, loss: Tensor) -> None:
            if self.accumulated_microbatches:
                clip(list(self._trainable().values()), self.clip_norm)
            super()._backward(loss)

        def _clip(self) -> None:
            return

    return declared_sgd(ClipsBeforeBackward)


@faulty("optim_step.clip_once", "a microbatch may have its share of the norm")
def clips_each_to_its_share() -> Target:
    class ClipsEachToItsShare(PlainTrainer):
        def _backward(self, loss: Tensor) -> None:
            super()._backward(loss)
            limit = self.clip_norm * (1 + self.accumulated_microbatches)
            clip(list(self._trainable().values()), limit)

    return declared(ClipsEachToItsShare)


# Nothing accumulated


class StepsOnNothing(PlainTrainer):
    """Makes an update without a microbatch; what that does is up to `_update_of_nothing`."""

    async def optim_step(self) -> OptimStepResult:
        if self.accumulated_microbatches:
            return await super().optim_step()
        rate = self._learning_rate()
        self._update_of_nothing(rate)
        return OptimStepResult(self.step, rate, 0)

    def _update_of_nothing(self, rate: float) -> None:
        raise NotImplementedError


@faulty("optim_step.empty", "weights decay and momentum moves them without a gradient (B77)")
class DecaysOnNothing(StepsOnNothing):
    def _update_of_nothing(self, rate: float) -> None:
        for p in self._trainable().values():
            p.grad = torch.zeros_like(p)
        self._apply_update(rate)
        self._clear()


@faulty("optim_step.empty", "an update of nothing counts as a step")
class CountsNothing(StepsOnNothing):
    def _update_of_nothing(self, rate: float) -> None:
        self.step += 1


@faulty("optim_step.empty", "an update of nothing raises after it was counted")
class RaisesTooLate(StepsOnNothing):
    def _update_of_nothing(self, rate: float) -> None:
        self.step += 1
        raise RuntimeError("there is no gradient to apply")


@faulty("optim_step.empty", "an update of nothing advances the schedule")
class AdvancesOnNothing(StepsOnNothing):
    empty = 0

    def _update_of_nothing(self, rate: float) -> None:
        self.empty += 1

    def _learning_rate(self) -> float:
        return self.schedule(self.step + 1 + self.empty)


@faulty("optim_step.empty", "whether something accumulated is a flag that clearing doesn't reset")
class ForgetsThatItCleared(PlainTrainer):
    has_gradients = False

    async def forward_backward(
        self, batch: TextTrainBatch, loss_fn: LossFn | None = None
    ) -> ForwardBackwardResult:
        result = await super().forward_backward(batch, loss_fn)
        self.has_gradients = True
        return result

    async def optim_step(self) -> OptimStepResult:
        count, self.accumulated_microbatches = self.accumulated_microbatches, self.has_gradients
        result = await super().optim_step()
        self.has_gradients = False
        return replace(result, accumulated_microbatches=count)


# Gradients that aren't finite


@faulty("optim_step.nonfinite", "the clip factor becomes NaN and destroys all weights (B57)")
class ClipsToNaN(PlainTrainer):
    def _clip(self) -> None:
        torch.nn.utils.clip_grad_norm_(self._trainable().values(), self.clip_norm)


class Skips(PlainTrainer):
    """Skips an update that isn't finite; what it leaves is up to `_skip`."""

    async def optim_step(self) -> OptimStepResult:
        if all(bool(grad.isfinite().all()) for grad in gradients(self)):
            return await super().optim_step()
        rate = self._learning_rate()
        self._skip()
        return OptimStepResult(self.step, rate, 0)

    def _skip(self) -> None:
        raise NotImplementedError


@faulty("optim_step.nonfinite", "a skipped update keeps its gradients (B42)")
class KeepsNaN(Skips):
    def _skip(self) -> None:
        return


@faulty("optim_step.nonfinite", "a skipped update drops its gradients and keeps their count (B47)")
class KeepsTheCountOfNaN(Skips):
    def _skip(self) -> None:
        self.model.zero_grad()


@faulty("optim_step.nonfinite", "a skipped update is zeroed by a product: 0 x NaN (B42)")
class ZeroesByAProduct(Skips):
    def _skip(self) -> None:
        self.accumulated_microbatches = 0
        for grad in gradients(self):
            grad *= 0


@faulty("optim_step.nonfinite", "a skipped update counts as a step, the schedule stays")
class CountsSkippedSteps(Skips):
    skipped = 0

    def _skip(self) -> None:
        self._clear()
        self.step += 1
        self.skipped += 1

    def _learning_rate(self) -> float:
        return self.schedule(self.step + 1 - self.skipped)


@faulty("optim_step.nonfinite", "NaN is replaced by 0, and the rest applied")
class AppliesTheRest(PlainTrainer):
    def _clip(self) -> None:
        for grad in gradients(self):
            grad.nan_to_num_(0.0, 0.0, 0.0)
        super()._clip()
