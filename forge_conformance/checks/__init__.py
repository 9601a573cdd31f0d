"""The checks, one module for each area of the contract; importing this package registers all."""

from importlib import import_module
from pkgutil import iter_modules

from forge_conformance.checks.registry import CHECKS, Check, check

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = ["CHECKS", "Check", "check"]
