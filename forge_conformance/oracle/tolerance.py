"""The one tolerance rule: how far apart two results may be that ought to be equal.

Nothing is compared with a bare constant. Where a float64 value of the judged quantity is known,
the error against it may be `FACTOR` times the error of the plain PyTorch computation in the
trainer's own dtype, plus `ULPS` units in the last place. Where none is known (the logits of a
model that the kit has never seen), the plain computation is a small causal transformer of the
kit's own, run in that dtype and in float64: its relative error is the noise that honest arithmetic
in that dtype makes. The candidate's own noise is never the measure.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from forge_conformance.oracle import differences

FACTOR = 3.0
ULPS = 4.0

_WEIGHT_SCALES = (1.0, 2.0)


@dataclass(frozen=True)
class Allowed:
    """The largest error that passes, absolute or relative as its user says, and why this much."""

    error: float
    why: str


@dataclass(frozen=True)
class Noise:
    """The relative Frobenius error of a plain computation in `dtype` against float64."""

    dtype: torch.dtype
    logits: float
    gradients: float


def value_error(exact: float, plain: float, dtype: torch.dtype, scale: float = 0.0) -> Allowed:
    """For a number whose float64 value is `exact` and that plain PyTorch computes as `plain`.

    Args:
        scale: The magnitude of the terms that the number is summed from, where it is larger than
            the number itself.
    """
    magnitude = max(abs(exact), scale)
    unit = torch.finfo(dtype).eps
    return Allowed(
        FACTOR * abs(plain - exact) + ULPS * unit * magnitude,
        f"{FACTOR:g} times the error of plain PyTorch in {_name(dtype)} ({abs(plain - exact):.2g}) "
        f"plus {ULPS:g} units in the last place of {magnitude:.3g}",
    )


def logits_error(dtype: torch.dtype, num_layers: int = 2) -> Allowed:
    """For logits (or anything computed like them) that ought to be equal: relative Frobenius."""
    return _relative(noise(dtype).logits, dtype, "logits", num_layers)


def gradients_error(dtype: torch.dtype, num_layers: int = 2) -> Allowed:
    """For the gradient of one tensor that ought to be equal: relative Frobenius."""
    return _relative(noise(dtype).gradients, dtype, "gradients", num_layers)


def same_graph_error(dtype: torch.dtype, repeated: float) -> Allowed:
    """For one tensor's gradient beside another one from the same autograd graph: relative.

    Args:
        dtype: Of the gradient.
        repeated: How far apart two differentiations of that graph are.
    """
    return Allowed(
        FACTOR * repeated + torch.finfo(dtype).eps,
        f"relative: {FACTOR:g} times what differentiating the same graph twice differs by "
        f"({repeated:.2g}) plus a unit in the last place of {_name(dtype)}",
    )


def _relative(measured: float, dtype: torch.dtype, what: str, num_layers: int) -> Allowed:
    deeper = max(1.0, math.sqrt(num_layers / 2))
    unit = torch.finfo(dtype).eps
    return Allowed(
        FACTOR * measured * deeper + ULPS * unit,
        f"relative: {FACTOR:g} times the error of a plain transformer's {what} in {_name(dtype)} "
        f"({measured * deeper:.2g}) plus {ULPS:g} units in the last place",
    )


def apart(seen: Tensor, expected: Tensor) -> float:
    """The relative Frobenius distance of two tensors; infinite where one isn't finite."""
    left, right = seen.double(), expected.double()
    if torch.equal(left, right):
        return 0.0
    difference = torch.linalg.vector_norm(left - right).item()
    size = max(torch.linalg.vector_norm(left).item(), torch.linalg.vector_norm(right).item())
    return difference / size if math.isfinite(difference) and size > 0 else math.inf


def tensors_apart(seen: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> tuple[str, float]:
    """The tensor that differs most, and its distance relative to its size.

    A hundredth of the size of all tensors together is added to each one's own: a gradient that is
    zero but for rounding (that of a key's bias, say) is not compared by its noise. A tensor
    missing on one side counts as zero.
    """
    total = math.sqrt(sum(_norm(tensor) ** 2 for tensor in reference.values()))
    worst, worst_distance = "no tensor", 0.0
    for name in {**reference, **seen}:
        present = seen[name] if name in seen else reference[name]
        zero = torch.zeros_like(present)
        left, right = seen.get(name, zero), reference.get(name, zero)
        if left.shape != right.shape:
            return name, math.inf
        if torch.equal(left, right):
            continue
        distance = _norm(left.double() - right.double()) / (_norm(right) + 0.01 * total or 1.0)
        if not distance <= worst_distance:
            worst, worst_distance = name, distance if math.isfinite(distance) else math.inf
    return worst, worst_distance


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.double()))


@functools.cache
def noise(dtype: torch.dtype) -> Noise:
    """The noise of `dtype`, measured on the plain transformer at several scales of its weights."""
    if dtype == torch.float64:
        single = noise(torch.float32)
        finer = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
        return Noise(dtype, single.logits * finer, single.gradients * finer)
    logits = gradients = 0.0
    for scale in _WEIGHT_SCALES:
        exact, rounded = _Plain(torch.float64, scale), _Plain(dtype, scale)
        logits = max(logits, apart(rounded.logits(), exact.logits()))
        for mine, theirs in zip(rounded.gradients(), exact.gradients(), strict=True):
            gradients = max(gradients, apart(mine, theirs))
    return Noise(dtype, logits, gradients)


@functools.cache
def derivative_noise(dtype: torch.dtype) -> float:
    """The relative error of central differences on the plain transformer computing in `dtype`.

    The gradient is the float64 one of the same weights: what is off is the differences' own part,
    rounding and curvature, and what an honest gradient in `dtype` is off by.
    """
    return max(
        _Plain(dtype, scale, shape).worst_derivative(loss, part)
        for scale in _WEIGHT_SCALES
        for shape in ((2, 16), (1, 4))
        for loss in (_cross_entropy, _every_logit)
        for part in differences.PARTS
    )


@functools.cache
def training_noise(dtype: torch.dtype, updates: int) -> tuple[float, ...]:
    """The relative error of the plain transformer's loss before each of several updates by AdamW,
    computing in `dtype` against float64; never falling."""
    worst = [0.0] * updates
    for scale in _WEIGHT_SCALES:
        exact = _Plain(torch.float64, scale).losses_of_training(updates)
        rounded = _Plain(dtype, scale).losses_of_training(updates)
        errors = [abs(r - e) / abs(e) for r, e in zip(rounded, exact, strict=True)]
        worst = [max(pair) for pair in zip(worst, errors, strict=True)]
    return tuple(itertools.accumulate(worst, max))


def training_error(dtype: torch.dtype, updates: int, num_layers: int = 2) -> Allowed:
    """For the losses of two trainers after so many equal updates: relative."""
    deeper = max(1.0, math.sqrt(num_layers / 2))
    measured = training_noise(dtype, updates + 1)[-1] * deeper
    return Allowed(
        FACTOR * measured + ULPS * torch.finfo(dtype).eps,
        f"relative: {FACTOR:g} times the error of a plain transformer's loss after as many "
        f"updates in {_name(dtype)} ({measured:.2g}) plus {ULPS:g} units in the last place",
    )


def change_of_loss(dtype: torch.dtype, loss: float) -> float:
    """The change of a loss of this size that central differences in `dtype` are best taken with.

    Rounding makes an error of the size of unit / change, curvature one of change²: the cube root
    of the unit balances the two.
    """
    return math.cbrt(torch.finfo(dtype).eps) / 3 * max(abs(loss), 1.0)


def loss_noise(dtype: torch.dtype, loss: float) -> float:
    """The absolute error of a loss of this size that is computed in `dtype`."""
    return FACTOR * noise(dtype).logits * max(abs(loss), 1.0)


def derivative_error(dtype: torch.dtype, num_layers: int = 2) -> Allowed:
    """For a directional derivative and the reported gradient along it: relative."""
    deeper = max(1.0, math.sqrt(num_layers / 2))
    measured = derivative_noise(dtype) * deeper
    return Allowed(
        FACTOR * measured,
        f"relative: {FACTOR:g} times the error of central differences on a plain transformer in "
        f"{_name(dtype)} ({measured:.2g})",
    )


_PlainLoss = Callable[[Tensor, Tensor], Tensor]


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _every_logit(logits: Tensor, _targets: Tensor) -> Tensor:
    return logits.square().mean()


class _Plain:
    """A two-layer causal transformer with fixed weights, and a batch for it."""

    width, heads, vocab = 64, 4, 64

    def __init__(self, dtype: torch.dtype, scale: float, shape: tuple[int, int] = (2, 16)) -> None:
        generator = torch.Generator().manual_seed(0)

        def weight(rows: int, columns: int) -> Tensor:
            values = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
            values = (values * scale / math.sqrt(columns)).bfloat16().to(dtype)
            return values.requires_grad_()

        width = self.width
        self.embedding, self.head = weight(self.vocab, width), weight(self.vocab, width)
        self.layers = [
            (weight(3 * width, width), weight(width, width), weight(4 * width, width),
             weight(width, 4 * width))
            for _ in range(2)
        ]  # fmt: skip
        self.weights = [self.embedding, self.head, *itertools.chain(*self.layers)]
        self.ids = torch.randint(self.vocab, shape, generator=generator)
        self.targets = torch.randint(self.vocab, shape, generator=generator)

    def logits(self) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            hidden = self.embedding[self.ids]
            for layer in self.layers:
                hidden = self._layer(hidden, *layer)
            return F.linear(F.rms_norm(hidden, (self.width,), eps=1e-5), self.head)

    def gradients(self, loss: _PlainLoss | None = None) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            logits = self.logits()
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
            value = (loss or _cross_entropy)(wide, self.targets)
            return torch.autograd.grad(value, self.weights)

    def losses_of_training(self, updates: int) -> list[float]:
        """The loss before each update by AdamW with a rate of a hundredth."""
        optimizer = torch.optim.AdamW(self.weights, lr=0.01)
        losses = []
        for _ in range(updates):
            with torch.no_grad():
                losses.append(_cross_entropy(self.logits().double(), self.targets).item())
            for weight, gradient in zip(self.weights, self.gradients(), strict=True):
                weight.grad = gradient
            optimizer.step()
        return losses

    def worst_derivative(self, loss: _PlainLoss, part: float) -> float:
        """The largest relative error of central differences against the gradient."""

        def measure() -> float:
            with torch.no_grad():
                return loss(self.logits().double(), self.targets).item()

        change = part * change_of_loss(self.embedding.dtype, measure())
        worst = 0.0
        for weight, gradient in zip(self.weights, self.gradients(loss), strict=True):
            exact = gradient.double()
            for seed in range(2):
                direction = differences.along_gradient(exact, seed)
                if direction is None:
                    continue
                found = differences.along(measure, weight, direction, exact, change)
                if found is not None:
                    worst = max(worst, found.error)
        return worst

    def _layer(self, hidden: Tensor, qkv: Tensor, out: Tensor, up: Tensor, down: Tensor) -> Tensor:
        shape = (*self.ids.shape, self.heads, self.width // self.heads)
        projected = F.linear(F.rms_norm(hidden, (self.width,), eps=1e-5), qkv).chunk(3, dim=-1)
        query, key, value = (part.reshape(shape).transpose(1, 2) for part in projected)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + F.linear(mixed.transpose(1, 2).flatten(2), out)
        normed = F.rms_norm(hidden, (self.width,), eps=1e-5)
        return hidden + F.linear(F.silu(F.linear(normed, up)), down)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
