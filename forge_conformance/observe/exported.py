"""Saved files read, and exported weights changed, without unpickling anything that could run."""

from __future__ import annotations

import io
import pickle
import pickletools
import re
import shutil
import zipfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from forge_conformance.contract import Need
from forge_conformance.finding import NotChecked
from forge_conformance.observe.parameters import Tensors

_DCP_METADATA = ".metadata"
_TORCH = (".pt", ".pth", ".bin", ".ckpt")


class Unreadable(Exception):
    """A file can't be read without unrestricted unpickling, or not at all; the message says why."""


def read_weights(saved: str) -> Tensors:
    """All tensors of exported weights by name: safetensors, else a distributed checkpoint, else
    what `torch.load(weights_only=True)` reads.

    Args:
        saved: What `save(weights_only=True)` returned: a file or a folder.

    Raises:
        NotChecked: There are none, or they can't be read safely.
    """
    for found in _by_format(saved):
        return found
    raise NotChecked("the exported weights are in no format that can be read safely")


def read_tensors(saved: str) -> Tensors:
    """All tensors in the files of a checkpoint, in all these formats.

    Raises:
        NotChecked: A file of these formats can't be read safely.
    """
    return {name: tensor for found in _by_format(saved) for name, tensor in found.items()}


def _by_format(saved: str) -> Iterator[Tensors]:
    path = Path(saved)
    if not path.exists():
        raise NotChecked("the exported weights aren't on this machine", Need.LOCAL_FILES)
    files = files_of(path)
    safetensors = [file for file in files if _is_safetensors(file)]
    readers: list[tuple[Sequence[Path], Callable[[Path], Tensors]]] = [
        (safetensors, _read_safetensors),
        ([file for file in files if file.name == _DCP_METADATA], _read_distributed),
        (
            [
                file
                for file in files
                if (file.suffix in _TORCH or file == path) and file not in safetensors
            ],
            _read_torch,
        ),
    ]
    for matching, read in readers:
        try:
            if matching:
                yield {
                    f"{file.name} {name}" if len(matching) > 1 else name: tensor
                    for file in matching
                    for name, tensor in read(file).items()
                }
        except Unreadable as error:
            raise NotChecked(f"the exported weights can't be read: {error}") from None


def files_of(path: Path) -> list[Path]:
    """The files of a checkpoint, which is a file or a folder, in the order of their names."""
    return sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]


def scaled_copy(saved: str, folder: Path, factor: float) -> str:
    """A copy of exported weights in which every matrix is `factor` times as large.

    Args:
        saved: What `save(weights_only=True)` returned: a safetensors file, or a folder with some.
        folder: An empty folder for the copy.

    Raises:
        NotChecked: The weights aren't in safetensors files, or nothing here can write these.
    """

    def scaled(tensors: Tensors) -> Tensors:
        return {
            n: t * factor if t.dim() > 1 and t.is_floating_point() else t
            for n, t in tensors.items()
        }

    return changed_copy(saved, folder, scaled)


def changed_copy(saved: str, folder: Path, change: Callable[[Tensors], Tensors]) -> str:
    """A copy of exported weights with the tensors of each file changed.

    Raises:
        NotChecked: The weights aren't in safetensors files, or nothing here can write these.
    """
    source = Path(saved)
    copy = folder / source.name
    if source.is_dir():
        shutil.copytree(source, copy)
    else:
        shutil.copy2(source, copy)
    files = [file for file in files_of(copy) if file.suffix == ".safetensors"]
    if not files:
        raise NotChecked("exported weights that aren't safetensors can't be changed for a test")
    for file in files:
        try:
            from safetensors import safe_open
            from safetensors.torch import save_file
        except ImportError:
            raise NotChecked("install safetensors, to change exported weights for a test") from None
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata()
        save_file(change(_read_safetensors(file)), file, metadata=metadata)
    return str(copy)


def _is_safetensors(file: Path) -> bool:
    """By its name, or where that tells nothing by its start: the header's length, and JSON."""
    if file.suffix or file.name.startswith("."):
        return file.suffix == ".safetensors"
    with file.open("rb") as stream:
        start = stream.read(9)
    return start[8:] == b"{" and int.from_bytes(start[:8], "little") < file.stat().st_size


def _read_safetensors(file: Path) -> Tensors:
    try:
        from safetensors.torch import load_file
    except ImportError:
        raise Unreadable("safetensors isn't installed") from None
    try:
        return load_file(file)
    except Exception as error:
        raise Unreadable(f"{file.name}: {error}") from error


def _read_torch(file: Path) -> Tensors:
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        what = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        raise Unreadable(f"{file.name}: {what}") from error
    return dict(_tensors_in(content, ""))


def _tensors_in(content: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(content, Tensor):
        yield path or "tensor", content
    elif isinstance(content, Mapping):
        for key, value in content.items():
            yield from _tensors_in(value, f"{path}.{key}" if path else str(key))
    elif isinstance(content, list | tuple):
        for index, value in enumerate(content):
            yield from _tensors_in(value, f"{path}[{index}]")


def _read_distributed(metadata_file: Path) -> Tensors:
    """The tensors of a checkpoint of torch.distributed.checkpoint; what else it holds is pickled,
    and left out."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    class Reader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            return metadata

    try:
        with metadata_file.open("rb") as stream:
            metadata = _MetadataUnpickler(stream).load()
        tensors = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        load(tensors, storage_reader=Reader(metadata_file.parent), no_dist=True)
    except BaseException as error:  # its own errors are no `Exception`s
        if isinstance(error, KeyboardInterrupt):
            raise
        raise Unreadable(f"{metadata_file.name}: {type(error).__name__}: {error}") from error
    return tensors


class _MetadataUnpickler(pickle.Unpickler):
    """Makes what the metadata of a distributed checkpoint consists of, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (
            module == "torch.distributed.checkpoint.metadata"
            or (module, name) in _METADATA_PARTS
            or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype))
        ):
            return super().find_class(module, name)
        raise Unreadable(f"it needs {module}.{name}, which only unpickling can make")


_METADATA_PARTS = {
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("torch", "Size"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
    ("torch.serialization", "_get_layout"),
}


def needing_unpickling(saved: str) -> dict[str, str]:
    """The files of a checkpoint that only an unrestricted unpickler can read, each with why.

    What a file is, its content says, whatever its name. Restricted readers are
    `torch.load(weights_only=True)` and, for other pickles, one that makes plain values and what
    the metadata of a distributed checkpoint consists of.

    Args:
        saved: What `save` returned: a file or a folder.
    """
    path = Path(saved)
    files = files_of(path)
    parts = {file: _distributed_parts(file) for file in files if file.name == _DCP_METADATA}
    in_parts = {file: ranges for found in parts.values() for file, ranges in found.items()}
    needing = {}
    for file in files:
        with file.open("rb") as stream:
            whole = [stream] if file not in in_parts else _cut(stream, in_parts[file])
            reasons = [reason for part in whole if (reason := _need(part)) is not None]
        if reasons:
            needing[str(file.relative_to(path)) if file != path else file.name] = reasons[0]
    return needing


def _need(stream: BinaryIO) -> str | None:
    """Why unrestricted unpickling is needed to read what `stream` holds; None if it isn't."""
    start = stream.read(_LONGEST_HEADER)
    stream.seek(0)
    if start.startswith(b"\x93NUMPY"):
        return "an array of Python objects" if b"|O" in start else None
    if start.startswith(b"PK\x03\x04") and zipfile.is_zipfile(stream):
        stream.seek(0)
        with zipfile.ZipFile(stream) as archive:
            names = [name for name in archive.namelist() if not name.endswith("/")]
            if not any(name.endswith("data.pkl") for name in names):
                contents = (io.BytesIO(archive.read(name)) for name in names)
                return next((need for part in contents if (need := _need(part))), None)
        stream.seek(0)
        return _torch_need(stream)
    return _pickle_need(stream) if _is_pickle(stream) else None


def _is_pickle(stream: BinaryIO) -> bool:
    try:
        deque(pickletools.genops(stream), maxlen=0)
    except Exception:  # what reading the wrong bytes as opcodes raises is anything
        return False
    finally:
        stream.seek(0)
    return True


def _torch_need(stream: BinaryIO) -> str | None:
    try:
        torch.load(stream, map_location="cpu", weights_only=True)
    except Exception as error:
        needed = re.search(r"GLOBAL ([\w.]+)", str(error))
        return f"it needs {needed[1]}" if needed else str(error).splitlines()[0]
    return None


def _pickle_need(stream: BinaryIO) -> str | None:
    """Of one pickle after the other; the first of an old torch file is its magic number."""
    try:
        while (value := _MetadataUnpickler(stream).load()) != torch.serialization.MAGIC_NUMBER:
            del value
    except Unreadable as error:
        return str(error)
    except Exception:  # the end of the file, or what only looked like a pickle
        return None
    stream.seek(0)
    return _torch_need(stream)


def _distributed_parts(metadata_file: Path) -> dict[Path, list[tuple[int, int]]]:
    """The offset and length of each part of the files of a distributed checkpoint."""
    parts: dict[Path, list[tuple[int, int]]] = {}
    try:
        with metadata_file.open("rb") as stream:
            metadata = _MetadataUnpickler(stream).load()
        for stored in metadata.storage_data.values():
            file = metadata_file.parent / stored.relative_path
            parts.setdefault(file, []).append((stored.offset, stored.length))
    except Exception:  # what is wrong with the metadata shows when it is looked at for itself
        return {}
    return parts


def _cut(stream: BinaryIO, ranges: Sequence[tuple[int, int]]) -> Iterator[BinaryIO]:
    for offset, length in ranges:
        stream.seek(offset)
        yield io.BytesIO(stream.read(length))


_LONGEST_HEADER = 512
