"""The one tolerance rule: how far apart two results may be that ought to be equal.

Nothing is compared with a bare constant. Where a float64 value of the judged quantity is known,
the error against it may be `FACTOR` times the error of the plain PyTorch computation in the
trainer's own dtype, plus `ULPS` units in the last place. Where none is known (the logits of a
model that the kit has never seen), the plain computation is a small causal transformer of the
kit's own, run in that dtype and in float64: its relative error is the noise that honest arithmetic
in that dtype makes. It runs on the trainer's kind of device and with torch's flags as they are, so
that reduced precision which these allow (TF32, say) is measured too. The candidate's own noise is
never the measure.

Long training can leave weights at which honest arithmetic makes more noise than the transformer's.
What is barely beyond what is allowed is therefore judged again on new trainers (see the engine).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from forge_conformance.oracle import differences

FACTOR = 3.0
ULPS = 4.0

_MOST_BY_CONDITION = 30.0
"""Times the tolerance; seven were seen after 50 updates at a high rate with momentum."""
_GROSS = 0.03
"""A relative error that no condition of the weights excuses in float32."""

_WEIGHT_SCALES = (1.0, 2.0)


@dataclass(frozen=True)
class Allowed:
    """The largest error that passes, absolute or relative as its user says, and why this much.

    Args:
        floor: Where each of several tensors may be off by `error` relative to its size: the share
            of the size of all of them that is added to each one's own.
    """

    error: float
    why: str
    floor: float = 0.01

    def barely_exceeded(self, by: float, size: float = 1.0) -> bool:
        """Whether ill-conditioned weights may explain an error `by` of something of this `size`."""
        most = max(FACTOR * self.error, min(_MOST_BY_CONDITION * self.error, _GROSS * size))
        return by <= most


@dataclass(frozen=True)
class Arithmetic:
    """What a trainer computes with.

    Args:
        dtype: The lowest precision that takes part.
        num_layers: The depth of the model, through which errors add up.
        device: The kind of device, as `torch.device.type` names it.
    """

    dtype: torch.dtype
    num_layers: int = 2
    device: str = "cpu"

    @property
    def deeper(self) -> float:
        """How much larger errors are than in the plain transformer, which has two layers."""
        return max(1.0, math.sqrt(self.num_layers / 2))

    @property
    def unit(self) -> float:
        return torch.finfo(self.dtype).eps

    @property
    def name(self) -> str:
        where = "" if self.device == "cpu" else f" on {self.device}"
        return f"{_name(self.dtype)}{where}"


@dataclass(frozen=True)
class Noise:
    """The relative Frobenius error of a plain computation against float64.

    Attributes:
        vanishing: Of gradients that are zero but for rounding (those of queries and keys where
            there is one token to attend to), relative to the size of all gradients together.
    """

    logits: float
    gradients: float
    vanishing: float


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


def logits_error(arithmetic: Arithmetic) -> Allowed:
    """For logits (or anything computed like them) that ought to be equal: relative Frobenius."""
    return _relative(noise(arithmetic.dtype, arithmetic.device).logits, arithmetic, "logits")


def gradients_error(arithmetic: Arithmetic) -> Allowed:
    """For the gradient of one tensor that ought to be equal: relative Frobenius."""
    measured = noise(arithmetic.dtype, arithmetic.device)
    allowed = _relative(measured.gradients, arithmetic, "gradients")
    floor = FACTOR * measured.vanishing * arithmetic.deeper / allowed.error
    return replace(allowed, floor=max(allowed.floor, floor))


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


def halving_error(dtype: torch.dtype) -> Allowed:
    """For gradients of a loss and of its halves by the same arithmetic in `dtype`: relative.

    Halving is exact but for the smallest numbers, which may be left of saturated targets.
    """
    numbers = torch.finfo(dtype)
    return Allowed(
        numbers.tiny / numbers.eps, f"bitwise expected but for what underflows in {_name(dtype)}"
    )


def _relative(measured: float, arithmetic: Arithmetic, what: str) -> Allowed:
    expected = measured * arithmetic.deeper
    return Allowed(
        FACTOR * expected + ULPS * arithmetic.unit,
        f"relative: {FACTOR:g} times the error of a plain transformer's {what} in "
        f"{arithmetic.name} ({expected:.2g}) plus {ULPS:g} units in the last place",
    )


def apart(seen: Tensor, expected: Tensor) -> float:
    """The relative Frobenius distance of two tensors; infinite where one isn't finite."""
    left, right = seen.to("cpu", torch.float64), expected.to("cpu", torch.float64)
    if torch.equal(left, right):
        return 0.0
    difference = torch.linalg.vector_norm(left - right).item()
    size = max(torch.linalg.vector_norm(left).item(), torch.linalg.vector_norm(right).item())
    return difference / size if math.isfinite(difference) and size > 0 else math.inf


def tensors_apart(
    seen: Mapping[str, Tensor], reference: Mapping[str, Tensor], floor: float
) -> tuple[str, float]:
    """The tensor that differs most, and its distance relative to its size.

    The share `floor` of the size of all tensors together is added to each one's own: a gradient
    that is zero but for rounding (that of a key's bias, say) is not compared by its noise. A
    tensor missing on one side counts as zero.
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
        distance = _norm(left.double() - right.double()) / (_norm(right) + floor * total or 1.0)
        if not distance <= worst_distance:
            worst, worst_distance = name, distance if math.isfinite(distance) else math.inf
    return worst, worst_distance


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.double()))


@functools.cache
def noise(dtype: torch.dtype, device: str = "cpu") -> Noise:
    """The noise of `dtype`, measured on the plain transformer at several scales of its weights."""
    if dtype == torch.float64:
        single = noise(torch.float32)
        finer = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
        return Noise(*(error * finer for error in astuple(single)))
    logits = gradients = vanishing = 0.0
    for scale in _WEIGHT_SCALES:
        exact, rounded = _Plain(torch.float64, scale), _Plain(dtype, scale, device=device)
        logits = max(logits, apart(rounded.logits(), exact.logits()))
        for mine, theirs in zip(rounded.gradients(), exact.gradients(), strict=True):
            gradients = max(gradients, apart(mine, theirs))
        alone = _Plain(dtype, scale, shape=(1, 1), device=device)
        vanishing = max(vanishing, alone.vanishing_gradients())
    return Noise(logits, gradients, vanishing)


@functools.cache
def derivative_noise(dtype: torch.dtype, device: str = "cpu") -> float:
    """The relative error of central differences on the plain transformer computing in `dtype`.

    The gradient is the float64 one of the same weights: what is off is the differences' own part,
    rounding and curvature, and what an honest gradient in `dtype` is off by.
    """
    return max(
        _Plain(dtype, scale, shape, device).worst_derivative(loss, part)
        for scale in _WEIGHT_SCALES
        for shape in ((2, 16), (1, 4))
        for loss in (_cross_entropy, _every_logit)
        for part in differences.PARTS
    )


@functools.cache
def training_noise(dtype: torch.dtype, updates: int, device: str = "cpu") -> tuple[float, ...]:
    """The relative error of the plain transformer's loss before each of several updates by AdamW,
    computing in `dtype` against float64; never falling."""
    worst = [0.0] * updates
    for scale in _WEIGHT_SCALES:
        exact = _Plain(torch.float64, scale).losses_of_training(updates)
        rounded = _Plain(dtype, scale, device=device).losses_of_training(updates)
        errors = [abs(r - e) / abs(e) for r, e in zip(rounded, exact, strict=True)]
        worst = [max(pair) for pair in zip(worst, errors, strict=True)]
    return tuple(itertools.accumulate(worst, max))


def training_error(arithmetic: Arithmetic, updates: int) -> Allowed:
    """For the losses of two trainers after so many equal updates: relative."""
    measured = training_noise(arithmetic.dtype, updates + 1, arithmetic.device)[-1]
    return _relative(measured, arithmetic, f"loss after {updates} updates")


def change_of_loss(dtype: torch.dtype, loss: float) -> float:
    """The change of a loss of this size that central differences in `dtype` are best taken with.

    Rounding makes an error of the size of unit / change, curvature one of change²: the cube root
    of the unit balances the two.
    """
    return math.cbrt(torch.finfo(dtype).eps) / 3 * max(abs(loss), 1.0)


def loss_noise(arithmetic: Arithmetic, loss: float) -> float:
    """The absolute error of a loss of this size that is computed with `arithmetic`."""
    return FACTOR * noise(arithmetic.dtype, arithmetic.device).logits * max(abs(loss), 1.0)


def derivative_error(arithmetic: Arithmetic) -> Allowed:
    """For a directional derivative and the reported gradient along it: relative."""
    measured = derivative_noise(arithmetic.dtype, arithmetic.device) * arithmetic.deeper
    return Allowed(
        FACTOR * measured,
        f"relative: {FACTOR:g} times the error of central differences on a plain transformer in "
        f"{arithmetic.name} ({measured:.2g})",
    )


def gradient_along_error(arithmetic: Arithmetic) -> Allowed:
    """For the derivative along a direction in float64 and a gradient computed with `arithmetic`:
    relative."""
    measured = gradient_noise_along(arithmetic.dtype, arithmetic.device)
    return _relative(measured, arithmetic, "gradient along a direction")


@functools.cache
def gradient_noise_along(dtype: torch.dtype, device: str = "cpu") -> float:
    """The relative error of the plain transformer's gradient along directions near to it."""
    worst = 0.0
    for scale, shape in itertools.product(_WEIGHT_SCALES, ((2, 16), (1, 4))):
        exact, rounded = (
            _Plain(torch.float64, scale, shape),
            _Plain(dtype, scale, shape, device),
        )
        for loss in (_cross_entropy, _every_logit):
            pairs = zip(rounded.gradients(loss), exact.gradients(loss), strict=True)
            worst = max(worst, *(_apart_along(mine.cpu().double(), true) for mine, true in pairs))
    return worst


def _apart_along(gradient: Tensor, exact: Tensor) -> float:
    direction = differences.along_gradient(gradient, seed=0)
    if direction is None:
        return 0.0
    slope = float((exact * direction).sum())
    return abs(float((gradient * direction).sum()) / slope - 1) if slope else 0.0


_PlainLoss = Callable[[Tensor, Tensor], Tensor]


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _every_logit(logits: Tensor, _targets: Tensor) -> Tensor:
    return logits.square().mean()


class _Plain:
    """A two-layer causal transformer with fixed weights, and a batch for it."""

    width, heads, vocab = 64, 4, 64

    def __init__(
        self,
        dtype: torch.dtype,
        scale: float,
        shape: tuple[int, int] = (2, 16),
        device: str = "cpu",
    ) -> None:
        generator = torch.Generator().manual_seed(0)

        def weight(rows: int, columns: int) -> Tensor:
            values = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
            values = (values * scale / math.sqrt(columns)).bfloat16().to(device, dtype)
            return values.requires_grad_()

        width = self.width
        self.embedding, self.head = weight(self.vocab, width), weight(self.vocab, width)
        self.layers = [
            (weight(3 * width, width), weight(width, width), weight(4 * width, width),
             weight(width, 4 * width))
            for _ in range(2)
        ]  # fmt: skip
        self.weights = [self.embedding, self.head, *itertools.chain(*self.layers)]
        self.ids = torch.randint(self.vocab, shape, generator=generator).to(device)
        self.targets = torch.randint(self.vocab, shape, generator=generator).to(device)

    def logits(self) -> Tensor:
        with torch.autocast(self.ids.device.type, enabled=False):
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

    def vanishing_gradients(self) -> float:
        """The size of the gradients of queries and keys, relative to that of all together."""
        gradients = dict(zip(map(id, self.weights), self.gradients(), strict=True))
        vanishing = max(_norm(gradients[id(qkv)][: 2 * self.width]) for qkv, *_ in self.layers)
        return vanishing / math.hypot(*map(_norm, gradients.values()))

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
