"""Small abilities that a trainer may have beside the protocol, each a protocol of its own.

Ask with `isinstance` before you use one; a trainer that lacks it conforms as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from forge.api.metrics import MetricSpec


@runtime_checkable
class Closable(Protocol):
    """Holds threads, files or processes that it can give back before it is collected.

    Example:
        >>> import asyncio, tempfile
        >>> class Logged:
        ...     def __init__(self):
        ...         self.log = tempfile.TemporaryFile()
        ...
        ...     async def close(self):
        ...         self.log.close()
        >>> trainer = Logged()
        >>> if isinstance(trainer, Closable):
        ...     asyncio.run(trainer.close())
        >>> trainer.log.closed
        True
    """

    async def close(self) -> None:
        """Give everything back. A second call does nothing; no other method may be used after."""
        ...


@runtime_checkable
class DeclaresMetrics(Protocol):
    """Says in advance which metrics `forward_backward` reports.

    Example:
        >>> import asyncio
        >>> from forge.api import MetricSpec
        >>> class Measured:
        ...     async def metric_schema(self):
        ...         return {"num_tokens": MetricSpec(int, minimum=0, unit="tokens")}
        >>> trainer = Measured()
        >>> isinstance(trainer, DeclaresMetrics)
        True
        >>> asyncio.run(trainer.metric_schema())["num_tokens"].unit
        'tokens'
    """

    async def metric_schema(self) -> Mapping[str, MetricSpec]:
        """The metrics by name: a result holds no other, and each of these that is required."""
        ...
