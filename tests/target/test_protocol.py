"""Whether the kit knows all that it needs of `forge.api` (another package may own the name)."""

from __future__ import annotations

import ast
from pathlib import Path

import forge.api
import forge_conformance
from forge_conformance.protocol import USED, require_protocol


def test_the_protocol_of_this_project_will_do():
    require_protocol()
    assert set(USED) <= set(forge.api.__all__)


def test_everything_that_the_kit_imports_is_required():
    imported = set()
    for file in Path(forge_conformance.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "forge.api":
                imported |= {alias.name for alias in node.names}
    assert imported <= set(USED)
