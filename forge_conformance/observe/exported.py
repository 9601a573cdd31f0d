"""Exported weights on disk: reading and changing them without unpickling anything."""

from __future__ import annotations

import shutil
from pathlib import Path

from forge_conformance.finding import NotChecked

_UNUSED_CONTEXT = "logits hardly depend on earlier tokens, so that wrong attention would hide"


def scaled_copy(saved: str, folder: Path, factor: float) -> str:
    """A copy of exported weights in which every matrix is `factor` times as large.

    Args:
        saved: What `save(weights_only=True)` returned: a safetensors file, or a folder with some.
        folder: An empty folder for the copy.

    Raises:
        NotChecked: The weights aren't in safetensors files, or nothing here can write these.
    """
    source = Path(saved)
    copy = folder / source.name
    if source.is_dir():
        shutil.copytree(source, copy)
        files = sorted(copy.rglob("*.safetensors"))
    else:
        shutil.copy2(source, copy)
        files = [copy] if copy.suffix == ".safetensors" else []
    if not files:
        raise NotChecked(f"{_UNUSED_CONTEXT}, and weights that aren't safetensors can't be scaled")
    try:
        from safetensors import safe_open
        from safetensors.torch import save_file
    except ImportError:
        raise NotChecked(f"{_UNUSED_CONTEXT}; install safetensors to scale the weights") from None
    for file in files:
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata()
            tensors = {name: opened.get_tensor(name) for name in sorted(opened.keys())}
        scaled = {
            n: t * factor if t.dim() > 1 and t.is_floating_point() else t
            for n, t in tensors.items()
        }
        save_file(scaled, file, metadata=metadata)
    return str(copy)
