"""What masks and weights mean to a loss that the kit doesn't know: `default_loss` in parts."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from forge.api import TextTrainBatch
from forge_conformance.checks.comparing import expect_same_effect, losses_of
from forge_conformance.effects import effects
from forge_conformance.finding import broken, expect, expect_near
from forge_conformance.lab import Lab
from forge_conformance.oracle.tolerance import ULPS, value_error
from forge_conformance.scenarios.batches import kept_mask, make_batch
from forge_conformance.scenarios.losses import summed_nll
from forge_conformance.subject import CallFailed


def expect_masked_targets_ignored(lab: Lab, batch: TextTrainBatch, place: int) -> None:
    """Other ids there change neither the loss nor its gradient."""
    masked = (~kept_mask(batch)).nonzero()
    if not len(masked):
        return
    changed = batch.target_ids.clone()
    for row, column in masked.tolist():
        changed[row, column] = (changed[row, column] + 1 + place) % lab.domain.vocab_size
    other = replace(batch, target_ids=changed)
    loss, with_others = losses_of(lab, batch, other)
    what = "the loss with other ids at masked targets is the same"
    expect_near(with_others, loss, what, value_error(loss, loss, lab.dtype))
    seen, reference = effects(
        lab,
        lambda subject: subject.forward_backward(other),
        lambda subject: subject.forward_backward(batch),
    )
    what = "the gradient with other ids at masked targets is the same"
    expect_same_effect(lab, seen, reference, what, exact=True)
    if batch.target_weights is not None:
        weights = batch.target_weights.masked_fill(~kept_mask(batch), math.nan)
        with suppress(CallFailed):  # a trainer may refuse weights that aren't finite
            loss, with_nan = losses_of(lab, batch, replace(batch, target_weights=weights))
            if math.isnan(with_nan) and not math.isnan(loss):
                lab.advise("leave masked targets out: 0 times a weight of NaN is NaN")


def expect_kept_targets_counted(
    lab: Lab, batch: TextTrainBatch, logits: Tensor, place: int
) -> None:
    """Each is, whether it is one of many or the only one, and at the edges too."""
    kept = kept_mask(batch).nonzero()
    drawn = tuple(kept[place % len(kept)].tolist())
    rows, columns = batch.target_ids.shape
    for row, column in {drawn, (0, 0), (rows - 1, columns - 1)}:
        only = torch.zeros_like(batch.target_ids)
        only[row, column] = 1
        changed = _with_another_target(batch, logits, row, column)
        if changed is None:
            continue
        for mask in (only, batch.target_mask) if (row, column) == drawn else (only,):
            given = replace(batch, target_mask=mask, target_weights=None)
            other = replace(given, target_ids=changed.target_ids)
            loss, with_other = losses_of(lab, given, other)
            expect(
                loss != with_other or not _shows(lab, loss, logits, given, other),
                expected=f"another loss for another id at the kept target [{row}, {column}]",
                seen=f"loss {loss:.9g} for both",
            )
        if not lab.stochastic:
            _expect_right_position(lab, replace(given, target_mask=only), logits, (row, column))


def expect_all_counted_without_mask(lab: Lab, seed: int) -> None:
    """In a batch of several full rows the first target matters, the last, and one in between."""
    batch = make_batch(lab.domain, lab.domain.usual_shape, seed, mask="none")
    logits = lab.trainer.forward(batch.input_ids)
    rows, columns = batch.target_ids.shape
    for row, column in {(0, 0), (rows // 2, columns // 2), (rows - 1, columns - 1)}:
        changed = _with_another_target(batch, logits, row, column)
        if changed is None:
            continue
        loss, with_other = losses_of(lab, batch, changed)
        expect(
            loss != with_other or not _shows(lab, loss, logits, batch, changed),
            expected=f"another loss for another id at target [{row}, {column}], without a mask",
            seen=f"loss {loss:.9g} for both",
        )


def _with_another_target(
    batch: TextTrainBatch, logits: Tensor, row: int, column: int
) -> TextTrainBatch | None:
    """The batch with the id whose logit is farthest; None where the logits tell no ids apart."""
    values = logits[row, column].double()
    target = int(batch.target_ids[row, column])
    farthest = int((values - values[target]).abs().argmax())
    if abs(values[farthest] - values[target]) < 0.01:
        return None
    ids = batch.target_ids.clone()
    ids[row, column] = farthest
    return replace(batch, target_ids=ids)


def _shows(
    lab: Lab, loss: float, logits: Tensor, batch: TextTrainBatch, other: TextTrainBatch
) -> bool:
    """Whether two batches' losses differ by more than `loss` resolves, as it was reported: one that
    is computed in 16 bits can't tell one target among many.

    They are taken over the kept targets, and over their weights.
    """
    coarse = torch.tensor(loss, dtype=torch.float64).to(lab.dtype).item() == loss
    unit = torch.finfo(lab.dtype if coarse else torch.float32).eps
    ones = torch.ones(batch.target_ids.shape)

    def means(each: TextTrainBatch) -> tuple[float, float]:
        kept = kept_mask(each)
        weights = ones if each.target_weights is None else each.target_weights
        total = summed_nll({"logits": logits}, each).item()
        return total / kept.sum().item(), total / (weights * kept).sum().item()

    pairs = zip(means(batch), means(other), strict=True)
    return all(abs(left - right) > ULPS * unit * abs(left) for left, right in pairs)


def _expect_right_position(
    lab: Lab, batch: TextTrainBatch, logits: Tensor, place: tuple[int, int]
) -> None:
    """With one kept target, a loss that is the cross entropy of it at another position's logits."""
    row, column = place
    loss = losses_of(lab, batch)[0]
    target = int(batch.target_ids[row, column])
    entropies = -logits[row].double().log_softmax(-1)[:, target]
    allowed = 1e-6 * abs(loss)
    if abs(loss - entropies[column].item()) <= allowed:
        return
    for other in (column - 1, column + 1):
        if 0 <= other < len(entropies) and abs(loss - entropies[other].item()) <= allowed:
            broken(
                expected=f"target [{row}, {column}] predicted from the logits at its position",
                seen=f"the cross entropy of it and the logits at [{row}, {other}]: shifted by one",
            )


def expect_none_means_ones(lab: Lab, batch: TextTrainBatch) -> None:
    """Without mask or weights the loss is that with ones."""
    ones = torch.ones_like(batch.target_ids, dtype=torch.float32)
    bare = replace(batch, target_weights=None, target_mask=None)
    masked = replace(bare, target_mask=batch.target_mask)
    for what, left, right in (
        ("target_mask=None as a mask of ones", bare, replace(bare, target_mask=ones)),
        ("target_weights=None as weights of one", masked, replace(masked, target_weights=ones)),
    ):
        loss, with_ones = losses_of(lab, left, right)
        expect_near(with_ones, loss, f"the loss with {what}", value_error(loss, loss, lab.dtype))


def expect_finite_without_weight(lab: Lab, batch: TextTrainBatch) -> None:
    """Kept targets all of weight 0 have a finite loss, where they aren't refused."""
    nothing = replace(batch, target_weights=torch.zeros(batch.target_ids.shape))
    with suppress(CallFailed):
        (loss,) = losses_of(lab, nothing)
        expect(
            math.isfinite(loss),
            expected="a finite loss, or an error, where all kept targets have weight 0",
            seen=f"loss {loss}",
        )


def expect_weights_are_factors(lab: Lab, batch: TextTrainBatch, logits: Tensor, place: int) -> None:
    """A weight of 0 takes a target's influence away; ½ is neither 0 nor 1, and 2 isn't 1."""
    kept = kept_mask(batch).nonzero()
    if len(kept) < 2:
        return
    row, column = kept[place % len(kept)].tolist()

    def weighted(weight: float, target: int) -> TextTrainBatch:
        weights = torch.ones_like(batch.target_ids, dtype=torch.float32)
        weights[row, column] = weight
        ids = batch.target_ids.clone()
        ids[row, column] = target
        return replace(batch, target_ids=ids, target_weights=weights)

    for special in _special_ids(lab):
        counted, left_out = weighted(1.0, special), weighted(0.0, special)
        with_it, without = losses_of(lab, counted, left_out)
        expect(
            with_it != without or not _shows(lab, with_it, logits, counted, left_out),
            expected=f"the kept target {special} at [{row}, {column}] to count: the mask decides",
            seen=f"loss {with_it:.9g} with weight 1 and with weight 0",
        )
    least_likely = int(logits[row, column].argmin())
    likeliest = int(logits[row, column].argmax())
    none, none_too, half, full, double = losses_of(
        lab,
        weighted(0.0, least_likely),
        weighted(0.0, likeliest),
        weighted(0.5, least_likely),
        weighted(1.0, least_likely),
        weighted(2.0, least_likely),
    )
    expect_near(
        none_too,
        none,
        f"the loss with another id at target [{row}, {column}] of weight 0",
        value_error(none, none, lab.dtype),
    )
    noise = value_error(full, full, lab.dtype).error
    if abs(full - none) <= 4 * noise:
        return
    expect(
        abs(half - none) > noise and abs(half - full) > noise,
        expected=f"weight 0.5 at [{row}, {column}] to be neither weight 0 nor weight 1",
        seen=f"loss {half:.9g}; with weight 0 {none:.9g}, with weight 1 {full:.9g}",
    )
    expect(
        abs(double - full) > noise,
        expected=f"weight 2 at [{row}, {column}] to be another than weight 1",
        seen=f"loss {double:.9g}; with weight 1 {full:.9g}",
    )


def _special_ids(lab: Lab) -> list[int]:
    """Ids that a loss may take for padding: the tokenizer's special ones, 0 and the last."""
    tokenizer = lab.trainer.get_tokenizer()
    told = [getattr(tokenizer, f"{name}_token_id", None) for name in ("pad", "eos", "bos", "unk")]
    ids = [0, lab.domain.vocab_size - 1, *told]
    return sorted({i for i in ids if isinstance(i, int) and 0 <= i < lab.domain.vocab_size})
