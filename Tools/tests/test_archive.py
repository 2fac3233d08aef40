"""Members out of wheels, tars and Debian packages; nothing outside, nothing half."""

import gzip
import io
import lzma
import shutil
import subprocess
import tarfile
import zipfile

import pytest

from dlx import archive
from dlx.archive import ArchiveError

FILES = {"usr/share/x/a.txt": b"alpha" * 1000, "usr/share/x/deep/b.txt": b"beta"}


def tar_bytes(files, mode="w", prefix="./", links=()):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as tar:
        folder = tarfile.TarInfo(prefix or "usr")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        for name, content in files.items():
            info = tarfile.TarInfo(prefix + name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        for name, target in links:
            info = tarfile.TarInfo(prefix + name)
            info.type, info.linkname = tarfile.SYMTYPE, target
            tar.addfile(info)
    return buffer.getvalue()


def deb_bytes(data, name):
    parts = [
        ("debian-binary", b"2.0\n"),
        ("control.tar.xz", lzma.compress(tar_bytes({"control": b"x" * 7}))),
        (name, data),
    ]
    out = b"!<arch>\n"
    for member, content in parts:
        out += f"{member:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(content):<10}`\n".encode()
        out += content + b"\n" * (len(content) % 2)
    return out


def make(kind, path, files=FILES, **options):
    plain = tar_bytes(files, **options) if kind not in ("zip",) else b""
    if kind == "zip":
        with zipfile.ZipFile(path, "w") as package:
            for name, content in files.items():
                package.writestr(name, content)
    elif kind == "deb.zst":
        program = shutil.which("zstd")
        if program is None or shutil.which("dpkg-deb") is None:
            pytest.skip("needs the programs zstd and dpkg-deb")
        packed = subprocess.run([program, "-q", "-c"], input=plain, capture_output=True, check=True).stdout
        path.write_bytes(deb_bytes(packed, "data.tar.zst"))
    elif kind.startswith("deb"):
        pack = {"xz": lzma.compress, "gz": gzip.compress, "": bytes}[kind[4:]]
        path.write_bytes(deb_bytes(pack(plain), "data.tar" + kind[3:]))
    else:
        path.write_bytes({"tar": bytes, "tgz": gzip.compress, "txz": lzma.compress}[kind](plain))
    return path


@pytest.mark.parametrize("kind", ["zip", "tar", "tgz", "txz", "deb", "deb.gz", "deb.xz", "deb.zst"])
def test_members_are_read(tmp_path, kind):
    package = make(kind, tmp_path / "p")
    archive.extract(
        package, {"usr/share/x/a.txt": tmp_path / "out" / "one", "./usr/share/x/deep/b.txt": tmp_path / "two"}
    )
    assert (tmp_path / "out" / "one").read_bytes() == FILES["usr/share/x/a.txt"]
    assert (tmp_path / "two").read_bytes() == b"beta"
    with pytest.raises(ArchiveError, match="holds no gone, missing"):
        archive.extract(package, {"gone": tmp_path / "x", "missing": tmp_path / "y"})
    found = []
    assert archive.extract_chosen(package, lambda name: found.append(name)) == 0
    assert sorted(found) == sorted(FILES)


@pytest.mark.parametrize("kind", ["zip", "tgz", "deb.xz"])
@pytest.mark.parametrize("name", ["../evil", "/etc/evil", "a/../../evil", "a\\evil", "C:/evil"])
def test_unsafe_names_are_refused(tmp_path, kind, name):
    package = make(kind, tmp_path / "p", {name: b"x", **FILES}, **({} if kind == "zip" else {"prefix": ""}))
    with pytest.raises(ArchiveError, match="unsafe member name"):
        archive.extract_chosen(package, lambda name: tmp_path / "out" / name)
    assert not (tmp_path / "evil").exists()


def test_links_are_not_made(tmp_path):
    package = make("tgz", tmp_path / "p", links=[("link", "/etc/passwd")])
    assert archive.extract_chosen(package, lambda name: tmp_path / "out" / name) == 2
    assert not (tmp_path / "out" / "link").exists()
    with pytest.raises(ArchiveError, match="holds no link"):
        archive.extract(package, {"link": tmp_path / "x"})


@pytest.mark.parametrize("kind", ["zip", "tgz", "txz", "deb.gz", "deb.xz"])
def test_cut_archives_are_errors(tmp_path, kind):
    package = make(kind, tmp_path / "p")
    package.write_bytes(package.read_bytes()[: package.stat().st_size // 2])
    with pytest.raises(ArchiveError, match=str(package)):
        archive.extract(package, {name: tmp_path / "out" for name in FILES})


def test_other_files_are_errors(tmp_path):
    path = tmp_path / "p"
    for content in (b"", b"{}", b"<html>" * 100, b"!<arch>\n", b"!<arch>\n" + b"x" * 200):
        path.write_bytes(content)
        with pytest.raises(ArchiveError, match=str(path)):
            archive.extract(path, {"a": tmp_path / "out"})
