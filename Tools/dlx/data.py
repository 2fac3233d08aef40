"""The registry of data sets: what each is, where it comes from, and how it gets, verified, into $DLX_HOME/data.

`prepare("fashion-mnist")` gives a folder with exactly the members of the set; it is made once, whole or not at all, and
shared by all tasks. Sources are packages of registries (see `fetch`), the authors' URLs, or the user's own folder.
"""

from __future__ import annotations

import fnmatch
import gzip
import hashlib
import json
import os
import re
import shutil
import sys
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from . import archive, files, paths
from .fetch import FetchError, Package, Progress, WrongContent, fetch, package_folder
from .idx import read_idx

__all__ = [
    "DataSet", "Entry", "FetchError", "Member", "Package", "Source", "WrongContent", "data_folder", "entries", "fetch",
    "get", "identity", "names", "package_folder", "prepare", "read_idx", "register", "verify",
]  # fmt: skip

STAMP = ".dlx-complete.json"
# Debian's archive of all releases, for machines without apt; hashes are checked.
DEBIAN_HOSTS = ("http://snapshot.debian.org/archive/debian/20230601T000000Z/pool/main",)


@dataclass(frozen=True)
class Member:
    """One file of a data set.

    `path` is its place in the package, `target` its name in the prepared folder. `sha256` is of the file as it is;
    `content_sha256` is of what a .gz file holds, for files that different hands have compressed differently. With
    neither, the package's own hash vouches for it. A `target` that ends in '/' makes `path` a glob: all matches land
    below it, named relative to the last folder of the pattern before its first wildcard. `size` in bytes, 0 when it
    varies.
    """

    path: str
    target: str
    sha256: str = ""
    size: int = 0
    content_sha256: str = ""

    def __post_init__(self) -> None:
        archive.safe_name(self.path, f"member {self.path!r}")
        archive.safe_name(self.target, f"target {self.target!r}")
        if self.target.endswith("/") and (self.sha256 or self.content_sha256):
            raise ValueError(f"member {self.path!r}: a glob cannot have one hash")


# All the packages of a source together hold the members.
Source = tuple[tuple[Package, tuple[Member, ...]], ...]


@dataclass(frozen=True)
class DataSet:
    """`sources` are tried in order until one gives every member. `terms` says what a user must know before using it."""

    name: str
    version: str
    licence: str
    citation: str
    summary: str
    sources: tuple[Source, ...]
    terms: str = ""

    def __post_init__(self) -> None:
        for package, members in (pair for source in self.sources for pair in source):
            for member in members:
                if not (package.sha256 or member.sha256 or member.content_sha256):
                    raise ValueError(f"data set {self.name}: neither {package} nor {member.path} has a hash")


@dataclass(frozen=True)
class Entry:
    """One thing in the cache, for `./dlx cache`: kind 'data', 'index' or 'package', state 'complete' or 'partial'."""

    kind: str
    name: str
    path: Path
    size: int
    state: str


_SETS: dict[str, DataSet] = {}


def register(data_set: DataSet) -> DataSet:
    """Add a set; a name cannot be given twice."""
    if _SETS.get(data_set.name, data_set) != data_set:
        raise ValueError(f"data set {data_set.name!r} is already registered")
    _SETS[data_set.name] = data_set
    return data_set


def names() -> list[str]:
    return sorted(_SETS)


def get(name: str) -> DataSet:
    if name not in _SETS:
        raise ValueError(f"unknown data set {name!r}; known are {', '.join(names())}")
    return _SETS[name]


def data_folder(data_set: DataSet, home: str | os.PathLike[str] | None = None) -> Path:
    """Where the prepared set lies or would lie."""
    return _home(home) / "data" / f"{data_set.name}-{data_set.version}"


def identity(name_or_set: str | DataSet, home: str | os.PathLike[str] | None = None) -> str:
    """One SHA-256 over the names and hashes of a prepared set's members: what a run record says it was trained on."""
    data_set = _set(name_or_set)
    stamp = _stamp(data_folder(data_set, home))
    if stamp is None:
        raise ValueError(f"data set {data_set.name} is not prepared in {_home(home)}")
    listing = {target: found.get("content_sha256") or found["sha256"] for target, found in stamp["files"].items()}
    return hashlib.sha256(json.dumps(listing, sort_keys=True).encode()).hexdigest()


# Preparing


def prepare(
    name_or_set: str | DataSet,
    *,
    home: str | os.PathLike[str] | None = None,
    source: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    check: bool = False,
) -> Path:
    """The folder with the set's members, verified; fetched and made if it is not there or is damaged.

    A file that has the size and the time it was left with is taken for whole; `check` reads every byte instead.

    `source`: a folder of the user's that holds the member files (under their target names, .gz ones also unpacked);
    they are copied and verified in place of a download. FetchError names every source that failed.
    """
    data_set = _set(name_or_set)
    folder = data_folder(data_set, home)
    if not _damage(folder, check):
        _remember_times(folder)
        return folder
    lock = folder.with_name(folder.name + ".lock")
    with files.lock(lock, message=f"waiting for another process to prepare {data_set.name}"):
        damage = _damage(folder, check)
        if not damage:
            return folder
        if _stamp(folder) is not None:
            print("\n".join(damage) + f"\npreparing {data_set.name} again", file=sys.stderr, flush=True)
        if source is not None:
            _from_folder(data_set, Path(source), folder)
            return folder
        failures = []
        for packages in data_set.sources:
            try:
                _from_packages(data_set, packages, folder, home, progress)
            except (FetchError, archive.ArchiveError) as error:
                failures.append(str(error))
                for package in (package for package, _ in packages if not package.sha256):
                    shutil.rmtree(package_folder(package, home), ignore_errors=True)  # without a hash: perhaps damaged
            else:
                return folder
    raise FetchError(
        f"data set {data_set.name}: no source worked. Put its files into a folder and name it as the source, or:\n"
        + "\n".join(f"- {failure}" for failure in failures)
    )


def _from_packages(
    data_set: DataSet, source: Source, folder: Path, home: str | os.PathLike[str] | None, progress: Progress | None
) -> None:
    downloads = [fetch(package, home=home, progress=progress) for package, _ in source]
    with files.atomic_path(folder) as temporary:
        temporary.mkdir()
        for download, (package, members) in zip(downloads, source, strict=True):
            if package.kind == "url" and [member.path for member in members] == [package.filename]:
                shutil.copyfile(download, temporary / members[0].target)  # a bare file, not an archive
                continue
            plain = {member.path: temporary / member.target for member in members if not member.target.endswith("/")}
            if plain:
                archive.extract(download, plain)
            for member in members:
                if member.target.endswith("/"):
                    _extract_glob(download, member, temporary)
        everything = tuple(member for _, members in source for member in members)
        _finish(data_set, temporary, everything, ", ".join(str(package) for package, _ in source))


def _extract_glob(download: Path, member: Member, folder: Path) -> None:
    fixed = member.path[: re.search(r"[*?[]|$", member.path).start()]
    fixed = fixed[: fixed.rfind("/") + 1]

    def choose(name: str) -> Path | None:
        return folder / member.target / name[len(fixed) :] if fnmatch.fnmatchcase(name, member.path) else None

    if not archive.extract_chosen(download, choose):
        raise archive.ArchiveError(f"{download}: holds nothing that matches {member.path}")


def _from_folder(data_set: DataSet, source: Path, folder: Path) -> None:
    if not source.is_dir():
        raise ValueError(f"{source}: the source of data set {data_set.name} is not a folder")
    members = tuple(member for _, members in data_set.sources[0] for member in members)
    with files.atomic_path(folder) as temporary:
        temporary.mkdir()
        missing = []
        for member in members:
            target = temporary / member.target
            if member.target.endswith("/"):
                if not (source / member.target).is_dir():
                    missing.append(member.target)
                else:
                    shutil.copytree(source / member.target, target)
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            unpacked = source / member.target.removesuffix(".gz")
            if (source / member.target).is_file():
                shutil.copyfile(source / member.target, target)
            elif member.content_sha256 and unpacked.is_file():
                target.write_bytes(gzip.compress(unpacked.read_bytes(), 6, mtime=0))
            else:
                missing.append(member.target)
        if missing:
            raise ValueError(f"{source}: data set {data_set.name} lacks {', '.join(missing)}")
        _finish(data_set, temporary, members, str(source))


def _finish(data_set: DataSet, folder: Path, members: tuple[Member, ...], source: str) -> None:
    """Verify the members in `folder` and write the stamp, last."""
    found = {}
    by_target = {member.target: member for member in members}
    for path in _files(folder):
        target = path.relative_to(folder).as_posix()
        found[target] = _verify_file(path, by_target.get(target, Member(target, target)), source)
    stamp = {
        "name": data_set.name,
        "version": data_set.version,
        "licence": data_set.licence,
        "source": source,
        "prepared": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "files": found,
    }
    files.atomic_write(folder / STAMP, json.dumps(stamp, indent=1) + "\n")


def _verify_file(path: Path, member: Member, source: str) -> dict[str, object]:
    """What the stamp says about one file. Bytes that are not the expected ones may still hold the expected content."""
    status = path.stat()
    entry: dict[str, object] = {"sha256": files.sha256(path), "size": status.st_size, "mtime_ns": status.st_mtime_ns}
    if member.content_sha256:
        entry["content_sha256"] = _content_sha256(path)
        if entry["content_sha256"] != member.content_sha256:
            raise WrongContent(
                f"{source}: {member.target} holds the wrong content, expected sha256 {member.content_sha256} "
                f"of the unpacked bytes, found {entry['content_sha256'] or 'a damaged file'}"
            )
    elif member.sha256 and entry["sha256"] != member.sha256:
        raise WrongContent(
            f"{source}: {member.target} has the wrong content, expected {member.size or 'any number of'} bytes with "
            f"sha256 {member.sha256}, found {entry['size']} bytes with sha256 {entry['sha256']}"
        )
    return entry


def _content_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with gzip.open(path) as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    except (OSError, EOFError, zlib.error):
        return ""
    return digest.hexdigest()


# Looking after the cache


def verify(name_or_set: str | DataSet, home: str | os.PathLike[str] | None = None) -> list[str]:
    """Read every byte of a prepared set again; the faults found (none: an empty list). ValueError: not prepared."""
    data_set = _set(name_or_set)
    folder = data_folder(data_set, home)
    if _stamp(folder) is None:
        raise ValueError(f"data set {data_set.name} is not prepared in {_home(home)}")
    return verify_folder(folder)


def verify_folder(folder: Path) -> list[str]:
    """The like for the folder of a prepared set, whose stamp says what belongs in it."""
    stamp = _stamp(folder)
    if stamp is None:
        return [f"{folder}: not complete"]
    extra = {path.relative_to(folder).as_posix() for path in _files(folder)} - set(stamp["files"])
    return _damage(folder, True) + [f"{folder / name}: does not belong here; remove it" for name in sorted(extra)]


def entries(home: str | os.PathLike[str] | None = None) -> list[Entry]:
    """Everything of data and packages in the cache; what is not complete can be removed without loss."""
    found = []
    root = _home(home)
    for folder in sorted((root / "data").glob("*")):
        if folder.is_dir():
            state = "partial" if _damage(folder) else "complete"
            found.append(Entry("data", folder.name, folder, _size(folder), state))
    for folder in sorted((root / "packages").glob("*/*")):
        if folder.is_dir():
            state = "partial" if folder.suffix in (".partial", ".tmp") else "complete"
            found.append(Entry("package", f"{folder.parent.name}/{folder.name}", folder, _size(folder), state))
    # Package lists; what tasks know of users' folders; scenes and speech that were made.
    for kind, name in (("package", "apt"), ("index", "index"), ("data", "scenes"), ("data", "speech")):
        if (root / name).is_dir():
            found.append(Entry(kind, name, root / name, _size(root / name), "complete"))
    return found


def _home(home: str | os.PathLike[str] | None) -> Path:
    return Path(home).absolute() if home is not None else paths.home()


def _set(name_or_set: str | DataSet) -> DataSet:
    return name_or_set if isinstance(name_or_set, DataSet) else get(name_or_set)


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != STAMP)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _stamp(folder: Path) -> dict | None:
    try:
        return json.loads((folder / STAMP).read_text())
    except (OSError, ValueError):
        return None


def _damage(folder: Path, check: bool = False) -> list[str]:
    """What is wrong with a prepared set; bytes are read where size or time changed, or all of them with `check`."""
    stamp = _stamp(folder)
    if stamp is None:
        return [f"{folder}: not complete"]
    faults = []
    for target, entry in stamp["files"].items():
        path = folder / target
        if not path.is_file():
            faults.append(f"{path}: missing")
            continue
        status = path.stat()
        same = status.st_size == entry["size"]
        if same and (check or status.st_mtime_ns != entry.get("mtime_ns")):
            same = files.sha256(path) == entry["sha256"]
        if not same:
            faults.append(f"{path}: changed, expected {entry['size']} bytes with sha256 {entry['sha256']}")
    return faults


def _remember_times(folder: Path) -> None:
    """Files found whole although their times differ (copied, restored) need not be read the next time."""
    stamp = _stamp(folder)
    times = {target: (folder / target).stat().st_mtime_ns for target in stamp["files"]}
    if all(stamp["files"][target].get("mtime_ns") == time_ns for target, time_ns in times.items()):
        return
    for target, time_ns in times.items():
        stamp["files"][target]["mtime_ns"] = time_ns
    try:
        files.atomic_write(folder / STAMP, json.dumps(stamp, indent=1) + "\n")
    except OSError:
        pass  # a shared, read-only cache works, too


# The sets


def _fashion_mnist() -> DataSet:
    # File, hash of its unpacked content, size and hash of the authors' .gz. Debian has compressed the content anew.
    listing = (
        (
            "train-images-idx3-ubyte.gz",
            "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            26421880,
            "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        ),
        (
            "train-labels-idx1-ubyte.gz",
            "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            29515,
            "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        ),
        (
            "t10k-images-idx3-ubyte.gz",
            "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            4422102,
            "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        ),
        (
            "t10k-labels-idx1-ubyte.gz",
            "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
            5148,
            "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
        ),
    )
    name = "dataset-fashion-mnist"
    debian = tuple(Member(f"usr/share/datasets/fashion-mnist/{n}", n, content_sha256=c) for n, c, _, _ in listing)
    pinned = Package(
        kind="apt",
        name=name,
        version="0.0~git20200523.55506a9-1",
        filename=f"{name}_*.deb",
        sha256="39e172fe32dd318ebb3e512220c3beea2fa47d7e20bab348fb4e0922d6beefc0",
        size=30900652,
    )
    another_release = Package(kind="apt", name=name, version="", filename=f"{name}_*.deb", sha256="")
    hosts = (
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
        "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion",
    )
    authors = tuple(
        (
            Package(
                "url", f"fashion-mnist-{n.removesuffix('.gz')}", "1", n, sha, size, tuple(f"{h}/{n}" for h in hosts)
            ),
            (Member(n, n, content_sha256=content),),
        )
        for n, content, size, sha in listing
    )
    return DataSet(
        name="fashion-mnist",
        version="1",
        licence="MIT",
        citation="Xiao, Rasul, Vollgraf: Fashion-MNIST, arXiv:1708.07747, 2017. Copyright 2017 Zalando SE",
        summary="60,000 training and 10,000 test pictures of clothes, 28x28 grey, 10 classes",
        sources=(((pinned, debian),), ((another_release, debian),), authors),
    )


def _foolbox_images() -> DataSet:
    package = Package(
        kind="pip",
        name="foolbox",
        version="3.3.4",
        filename="foolbox-3.3.4-py3-none-any.whl",
        sha256="11049d515d38e765e206a73ace9cc648b81a0d6d1da9ad9057e149ee117989cb",
        size=1677112,
    )
    return DataSet(
        name="foolbox-images",
        version="3.3.4",
        licence="MIT (the package); the photos come from ImageNet",
        citation="Rauber, Zimmermann, Bethge, Brendel: Foolbox Native, JOSS 5(53), 2020",
        summary="20 photos, 512x512 or so, named imagenet_<number>_<class index of ImageNet-1k>.jpg",
        sources=(((package, (Member("foolbox/data/imagenet_*.jpg", "images/"),)),),),
        terms="ImageNet photos are for non-commercial research and education.",
    )


def _debian_pictures(
    package: Package, path: str, *, licence: str, citation: str, summary: str, members: tuple[Member, ...]
) -> DataSet:
    """A set out of one Debian package, or the same file from Debian's servers; `path` is its folder in their pool."""
    version = package.version.split(":")[-1]
    file = f"{package.name}_{version}_all.deb"
    urls = tuple(f"{host}/{path}/{file}" for host in DEBIAN_HOSTS)
    from_url = Package("url", package.name, version, file, package.sha256, package.size, urls)
    return DataSet(
        name=package.name.removesuffix("-default"),
        version=version,
        licence=licence,
        citation=citation,
        summary=summary,
        sources=(((package, members),), ((from_url, members),)),
        terms="Copyleft: pictures made of it, where they are passed on, keep the licence and the credit.",
    )


def _tuxpaint_stamps() -> DataSet:
    name = "tuxpaint-stamps-default"
    return _debian_pictures(
        Package(
            kind="apt",
            name=name,
            version="2022.06.04-1",
            filename=f"{name}_*.deb",
            sha256="6db6c1bfc870a47f1499d6203b083522eacb57c5f9c87d468f2e92eb6d9d5f34",
            size=160880444,
        ),
        "t/tuxpaint-stamps",
        licence="GPL-2",
        citation="Tux Paint stamps, copyright 2002-2022 Bill Kendrick and contributors",
        summary="796 pictures of single objects in folders by kind, most cut out (alpha channel)",
        members=(
            Member("usr/share/tuxpaint/stamps/*.png", "stamps/"),
            Member(f"usr/share/doc/{name}/copyright", "copyright"),
        ),
    )


def _wallpapers() -> DataSet:
    name = "plasma-workspace-wallpapers"
    return _debian_pictures(
        Package(
            kind="apt",
            name=name,
            version="4:5.27.5-2",
            filename=f"{name}_*.deb",
            sha256="32cd18b71c8c938a18b3b351f217c02ac590e323caa3cf322fbb875ce8892f8b",
            size=94047772,
        ),
        f"p/{name}",
        licence="GPL-2+",
        citation="Plasma workspace wallpapers, copyright 2014 KDE Visual Design Group and contributors",
        summary="30 wallpapers, photos and paintings, in several sizes",
        members=(
            Member("usr/share/wallpapers/*/contents/images/*", "wallpapers/"),
            Member(f"usr/share/doc/{name}/copyright", "copyright"),
        ),
    )


register(_fashion_mnist())
register(_foolbox_images())
register(_tuxpaint_stamps())
register(_wallpapers())
