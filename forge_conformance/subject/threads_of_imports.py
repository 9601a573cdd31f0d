"""The threads that importing the target has started; the server process imports this after it.

A process that is forked from the server lacks them: a trainer that hands work to one would wait
for ever.
"""

from __future__ import annotations

import threading

STARTED = [each.name for each in threading.enumerate() if each is not threading.main_thread()]
"""Python's own; libraries of mathematics start native ones, and mind forks themselves."""
