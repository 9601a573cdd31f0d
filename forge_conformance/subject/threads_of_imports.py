"""The threads that importing the target has started; the server process imports this after it.

A process that is forked from the server lacks them: a trainer that hands work to one would wait
for ever.
"""

from __future__ import annotations

import threading
from pathlib import Path

_TASKS = Path("/proc/self/task")

STARTED = len([*_TASKS.iterdir()] if _TASKS.exists() else threading.enumerate()) > 1
"""Whether there are any: where the system tells, those of native code as well."""
