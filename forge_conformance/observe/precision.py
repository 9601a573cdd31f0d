"""Torch's flags that let a trainer compute in less precision than its dtypes say."""

from __future__ import annotations

import torch

_FULL = ("none", "ieee", "highest")


def reduced_precision(device: str) -> list[str]:
    """What torch may do in reduced precision on this kind of device, by the flag that allows it.

    Example:
        >>> torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        >>> reduced_precision("cpu")
        ["torch.backends.mkldnn.matmul.fp32_precision = 'bf16'"]
        >>> torch.backends.mkldnn.matmul.fp32_precision = "none"
        >>> reduced_precision("cpu")
        []
    """
    backend = "cuda" if device == "cuda" else "mkldnn"
    settings = getattr(torch.backends, backend).matmul
    precision = getattr(settings, "fp32_precision", None)
    if precision is None:  # torch before 2.9 has one flag for all devices
        precision = torch.get_float32_matmul_precision()
    found = []
    if precision not in _FULL:
        found.append(f"torch.backends.{backend}.matmul.fp32_precision = {precision!r}")
    for kind in ("fp16", "bf16") if device == "cuda" else ():
        flag = f"allow_{kind}_reduced_precision_reduction"
        if getattr(settings, flag):
            found.append(f"torch.backends.cuda.matmul.{flag} = True")
    return found
