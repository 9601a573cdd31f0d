"""What the names of metrics tell: which are of time, speed and memory, and so differ each time."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

_TIME = """
    time times timing timings timer timestamp timestamps clock wall walltime date datetime now
    sec secs second seconds ms msec msecs millisecond milliseconds us usec microseconds ns nsec
    nanoseconds minute minutes hour hours elapsed duration durations latency latencies took eta
    uptime idle wait waited
"""
_SPEED = """
    speed throughput tps tgs wps qps fps ips tokps toks persec flops flop tflops tflop gflops
    pflops mfu hfu bandwidth utilization utilisation util
"""
_MEMORY = """
    memory memories mem alloc allocs allocated allocation allocations reserved rss vms pss vram ram
    gpu cuda cpu heap swap gib gb mib mb kib kb bytes ooms
"""
_VARYING = frozenset(f"{_TIME} {_SPEED} {_MEMORY}".split())
_UNITS_AT_THE_END = frozenset({"s", "h"})


def varies(path: Iterable[str], declared: Collection[str] = ()) -> bool:
    """Whether a metric may differ between equal calls, by its name or a name that it is inside of.

    Args:
        path: The names from the outside in.
        declared: Names that the author declared to vary.

    Example:
        >>> varies(["time/forward_backward_ms"]), varies(["perf", "tokensPerSecond"])
        (True, True)
        >>> varies(["mean_loss"]), varies(["num_members"]), varies(["num_members"], ["num_members"])
        (False, False, True)
    """
    names = list(path)
    if any(name in declared for name in names) or ".".join(names) in declared:
        return True
    return any(_is_of_time_speed_or_memory(name) for name in names)


def _is_of_time_speed_or_memory(name: str) -> bool:
    # "tokensPerSecond", "tokens_per_second", "time/step" and "loop.step-ms" by their words.
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name)
    words = [word.lower() for word in re.findall(r"[A-Za-z]+", spaced)]
    if not words:
        return False
    return not _VARYING.isdisjoint(words) or (len(words) > 1 and words[-1] in _UNITS_AT_THE_END)
