"""Keeps doctest from importing modules whose extra isn't installed."""

from importlib.util import find_spec

_NEED = {
    "reference_impls/titan.py": ["torchtitan"],
    "reference_impls/titan_components.py": ["torchtitan"],
    "reference_impls/titan_parallel.py": ["torchtitan"],
    "reference_impls/monarch_actor.py": ["monarch", "torchtitan"],
    "tests/reference_impls/titan_on_ranks.py": ["torchtitan"],
}

collect_ignore = [
    module for module, needed in _NEED.items() if not all(find_spec(each) for each in needed)
]
