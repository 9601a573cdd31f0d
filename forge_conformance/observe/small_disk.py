"""A disk of this process's own, in memory, that can be made full or read-only."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NEW_MOUNTS, _NEW_USER = 0x00020000, 0x10000000
_READ_ONLY, _REMOUNT, _PRIVATE_BELOW = 0x1, 0x20, 0x4000 | 0x40000
_USUAL_SIZE = "size=50%"


class SmallDisk:
    """A file system in memory, which only this process and its children see.

    Linux allows it to root, and on most machines to all users by a user namespace of their own.

    Args:
        folder: What it covers. The process's working folder is entered again.

    Raises:
        OSError: The system doesn't allow it, or this process has threads already.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self._libc = ctypes.CDLL(None, use_errno=True)
        _leave_the_others_mounts(self._libc)
        self._mount(_USUAL_SIZE)
        os.chdir(Path.cwd())

    @contextmanager
    def with_room_for(self, size: int) -> Iterator[None]:
        """Let so many bytes more be written, rounded down to whole pages."""
        now = os.statvfs(self.folder)
        used = (now.f_blocks - now.f_bfree) * now.f_frsize
        room = size // now.f_frsize * now.f_frsize
        # A size of 0 would be no limit.
        self._mount(f"size={max(used + room, now.f_frsize)}", _REMOUNT)
        try:
            yield
        finally:
            self._mount(_USUAL_SIZE, _REMOUNT)

    @contextmanager
    def read_only(self) -> Iterator[None]:
        """Let nothing be written, by root neither.

        Raises:
            OSError: A file is open for writing.
        """
        self._mount(_USUAL_SIZE, _REMOUNT | _READ_ONLY)
        try:
            yield
        finally:
            self._mount(_USUAL_SIZE, _REMOUNT)

    def size_on_disk(self, files: list[Path]) -> int:
        """Bytes that files of these sizes take here: whole pages."""
        page = os.statvfs(self.folder).f_frsize
        return sum(-(-file.stat().st_size // page) * page for file in files)

    def _mount(self, options: str, flags: int = 0) -> None:
        _mount(self._libc, str(self.folder), flags, "tmpfs", options)


def _leave_the_others_mounts(libc: ctypes.CDLL) -> None:
    if not hasattr(libc, "unshare"):
        raise OSError("this system has no namespaces of mounts")
    user, group = os.getuid(), os.getgid()
    if libc.unshare(_NEW_MOUNTS):
        _check(libc.unshare(_NEW_MOUNTS | _NEW_USER))
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    _mount(libc, "/", _PRIVATE_BELOW)


def _mount(
    libc: ctypes.CDLL, folder: str, flags: int, kind: str | None = None, options: str = ""
) -> None:
    kind_ = kind.encode() if kind else None
    _check(
        libc.mount(b"none", os.fsencode(folder), kind_, ctypes.c_ulong(flags), os.fsencode(options))
    )


def _check(status: int) -> None:
    if status:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
