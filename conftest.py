"""Keeps doctest from importing modules whose extra isn't installed."""

from importlib.util import find_spec

collect_ignore = []
if find_spec("torchtitan") is None:
    collect_ignore += ["reference_impls/titan.py", "reference_impls/titan_components.py"]
