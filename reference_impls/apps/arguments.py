"""What the applications' command lines have in common."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

from reference_impls.apps.trainers import trainer_factory


def make_parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """A parser of the command line of `python -m module`, with --trainer and --plot."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--trainer",
        type=trainer_factory,
        action="append",
        required=True,
        metavar="module:Name",
        help="a class or function, sync or async, that makes a trainer; may be repeated",
    )
    parser.add_argument(
        "--plot", type=picture, metavar="PNG", help="draw all curves here; needs matplotlib"
    )
    return parser


def positive(text: str) -> int:
    """An integer from 1; goes with argparse as `type=positive`.

    Raises:
        argparse.ArgumentTypeError: It is something else.
    """
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no integer from 1")
    return int(text)


def picture(path: str) -> Path:
    """Where a picture is to be drawn; goes with argparse as `type=picture`.

    Raises:
        argparse.ArgumentTypeError: matplotlib isn't installed, which draws it.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError(
            "a picture needs matplotlib: pip install 'forge-conformance[apps]'"
        )
    return Path(path)
