"""Finds the Trainer protocol, `forge.api`, and says what is in the way if it isn't there.

Another distribution may own the name `forge`; what it has in `forge.api` serves as well if all
that the kit uses is in it.
"""

from __future__ import annotations

import importlib
import importlib.metadata

USED = (
    "ForwardBackwardResult",
    "Metric",
    "MetricSpec",
    "OptimStepResult",
    "ParallelismConfig",
    "TextTrainBatch",
    "Trainer",
    "TrainerConfig",
    "TrainerStatus",
)
_METHODS = ("forward_backward", "optim_step", "save", "load", "get_config", "get_status")


class ProtocolMissing(Exception):
    """`forge.api` can't serve as the protocol; the message says why and what to do."""


def require_protocol() -> None:
    """Raise `ProtocolMissing` unless `forge.api` has what the kit uses."""
    try:
        api = importlib.import_module("forge.api")
    except Exception as error:
        raise ProtocolMissing(
            f"import forge.api failed: {type(error).__name__}: {error}. {_owners()}"
        ) from error
    missing = [name for name in USED if not hasattr(api, name)]
    if not missing:
        missing = [f"Trainer.{name}" for name in _METHODS if not hasattr(api.Trainer, name)]
    if missing:
        raise ProtocolMissing(
            f"forge.api at {api.__file__} is not the Trainer protocol of this kit: it has no "
            f"{', '.join(missing)}. {_owners()}"
        )


def _owners() -> str:
    owners = sorted(set(importlib.metadata.packages_distributions().get("forge", [])))
    named = f"The name 'forge' belongs to {' and '.join(owners)} here. " if owners else ""
    return (
        f"{named}Install forge-conformance into an environment without other owners of that name, "
        "or reinstall it last (pip install --force-reinstall --no-deps forge-conformance)."
    )
