"""Read members out of .deb, .whl/.zip and .tar.* packages with the standard library, trusting no name in them."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import shutil
import subprocess
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

# Called for each file; says where its bytes go, or None to pass over it.
Chooser = Callable[[str], "Path | None"]


class ArchiveError(ValueError):
    """An archive that is damaged, of an unknown kind, unsafe, or lacks a member."""


def safe_name(name: str, archive: str | os.PathLike[str] = "") -> str:
    """`name` without a leading './'; ArchiveError when it is absolute, climbs out with '..' or holds odd characters."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/") or ".." in parts or "\\" in name or "\0" in name or not parts or parts[0][1:2] == ":":
        raise ArchiveError(f"{archive}: unsafe member name {name!r}")
    return "/".join(parts)


def extract(archive: str | os.PathLike[str], members: Mapping[str, str | os.PathLike[str]]) -> None:
    """Write each member named in `members` to the file given for it; ArchiveError names all that are missing."""
    wanted = {safe_name(name, archive): Path(target) for name, target in members.items()}
    seen: set[str] = set()

    def choose(name: str) -> Path | None:
        if name in wanted:
            seen.add(name)
        return wanted.get(name)

    extract_chosen(archive, choose)
    missing = sorted(set(wanted) - seen)
    if missing:
        raise ArchiveError(f"{archive}: holds no {', '.join(missing)}")


def extract_chosen(archive: str | os.PathLike[str], choose: Chooser) -> int:
    """Ask `choose` about every regular file (its cleaned name), write those it wants, and return how many.

    Links and device files are passed over, never made; an unsafe name anywhere in the archive refuses the whole of it.
    """
    archive = Path(archive)
    count = 0
    try:
        for name, opener in _entries(archive):
            target = choose(safe_name(name, archive))
            if target is None:
                continue
            Path(target).parent.mkdir(parents=True, exist_ok=True)
            with opener() as source, open(target, "wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
            count += 1
    except (
        tarfile.TarError, zipfile.BadZipFile, lzma.LZMAError, zlib.error, EOFError, OSError, NotImplementedError,
    ) as error:  # fmt: skip
        if isinstance(error, OSError) and error.errno is not None:
            raise  # a full disk or a missing permission is no fault of the archive
        raise ArchiveError(f"{archive}: damaged ({error})") from error
    return count


def _entries(archive: Path) -> Iterator[tuple[str, Callable[[], IO[bytes]]]]:
    with open(archive, "rb") as stream:
        magic = stream.read(8)
    if magic.startswith(b"PK\x03\x04"):
        with zipfile.ZipFile(archive) as package:
            for info in package.infolist():
                if not info.is_dir():
                    yield info.filename, lambda info=info: package.open(info)
    elif magic == b"!<arch>\n":
        with _deb_data(archive) as stream:
            yield from _tar_entries(stream)
    elif magic[:2] == b"\x1f\x8b" or magic[:6] == b"\xfd7zXZ\x00" or magic[:3] == b"BZh" or tarfile.is_tarfile(archive):
        with open(archive, "rb") as stream, _decompress(stream, magic) as plain:
            yield from _tar_entries(plain)
    else:
        raise ArchiveError(f"{archive}: neither a zip (wheel), a tar nor a Debian package")


def _tar_entries(stream: IO[bytes]) -> Iterator[tuple[str, Callable[[], IO[bytes]]]]:
    with tarfile.open(fileobj=stream, mode="r|") as package:
        for info in package:
            if info.isfile():
                yield info.name, lambda info=info: package.extractfile(info)
            elif not info.isdir():
                safe_name(info.name)


def _decompress(stream: IO[bytes], magic: bytes) -> IO[bytes]:
    if magic[:2] == b"\x1f\x8b":
        return gzip.GzipFile(fileobj=stream)
    if magic[:6] == b"\xfd7zXZ\x00":
        return lzma.LZMAFile(stream)
    if magic[:3] == b"BZh":
        return bz2.BZ2File(stream)
    return io.BufferedReader(stream) if isinstance(stream, io.RawIOBase) else stream


class _Window(io.RawIOBase):
    """The bytes [start, start + length) of an open file."""

    def __init__(self, stream: IO[bytes], start: int, length: int) -> None:
        self.stream, self.position, self.end = stream, start, start + length

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:
        self.stream.seek(self.position)
        data = self.stream.read(min(len(buffer), self.end - self.position))
        self.position += len(data)
        buffer[: len(data)] = data
        return len(data)


@contextmanager
def _deb_data(archive: Path) -> Iterator[IO[bytes]]:
    """The tar stream of a Debian package: an `ar` archive with a member data.tar[.xz|.gz|.zst|.bz2]."""
    with open(archive, "rb") as stream:
        name, start, length = _find_data(archive, stream)
        if not name.endswith(".zst"):
            stream.seek(start)
            magic = stream.read(8)
            with _decompress(io.BufferedReader(_Window(stream, start, length), 1 << 20), magic) as plain:
                yield plain
            return
    try:
        from compression import zstd  # Python 3.14
    except ImportError:
        pass
    else:
        with open(archive, "rb") as stream, zstd.open(io.BufferedReader(_Window(stream, start, length))) as plain:
            yield plain
        return
    with _deb_by_program(archive) as plain:
        yield plain


def _find_data(archive: Path, stream: IO[bytes]) -> tuple[str, int, int]:
    position = 8
    while True:
        stream.seek(position)
        header = stream.read(60)
        if len(header) < 60 or header[58:60] != b"`\n" or not header[48:58].strip().isdigit():
            raise ArchiveError(f"{archive}: damaged Debian package, no data.tar member found")
        name = header[:16].decode("ascii", "replace").strip().rstrip("/")
        length = int(header[48:58])
        if name.startswith("data.tar"):
            return name, position + 60, length
        position += 60 + length + length % 2


@contextmanager
def _deb_by_program(archive: Path) -> Iterator[IO[bytes]]:
    program = shutil.which("dpkg-deb")
    if program is None:
        raise ArchiveError(f"{archive}: compressed with zstd, which needs Python >= 3.14 or the program dpkg-deb")
    with subprocess.Popen(
        [program, "--fsys-tarfile", str(archive)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        yield process.stdout
        # tarfile stops at its end marker; the program would block, or die of a broken pipe, if the rest were not read.
        while process.stdout.read(1 << 20):
            pass
    if process.returncode:
        raise ArchiveError(f"{archive}: damaged (dpkg-deb ended with status {process.returncode})")
