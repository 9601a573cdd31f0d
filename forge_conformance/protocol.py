"""Finds the Trainer protocol, `forge.api`, and says what is in the way if it isn't there.

Another distribution may own the name `forge`; what it has in `forge.api` serves as well if all
that the kit uses is in it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys

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
            f"the Trainer protocol can't be imported from forge.api: {type(error).__name__}: "
            f"{error}\n{_what_is_in_the_way()}"
        ) from error
    missing = [name for name in USED if not hasattr(api, name)]
    if not missing:
        missing = [f"Trainer.{name}" for name in _METHODS if not hasattr(api.Trainer, name)]
    if missing:
        raise ProtocolMissing(
            "the forge.api found here is not the Trainer protocol of this kit: it lacks "
            f"{', '.join(missing)}\n{_what_is_in_the_way()}"
        )


def _what_is_in_the_way() -> str:
    forge = sys.modules.get("forge")
    paths = list(getattr(forge, "__path__", [])) or [getattr(forge, "__file__", None)]
    found = f"The name 'forge' leads to {', '.join(map(str, paths))} here" if forge else ""
    owners = sorted(set(importlib.metadata.packages_distributions().get("forge", [])))
    if found and owners:
        found += f" (installed by {', '.join(owners)})"
    return (
        f"{found + '. ' if found else ''}Run the kit where no other package has that name, or "
        "reinstall it last: pip install --force-reinstall --no-deps forge-conformance"
    )
