"""Downloads: resumed, verified, done once; through fake package clients and a server on this machine."""

import hashlib
import http.server
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dlx import fetch
from dlx.fetch import FetchError, Package, WrongContent

CONTENT = bytes(range(256)) * 40
SIZE = len(CONTENT)
SHA = hashlib.sha256(CONTENT).hexdigest()


class Server:
    """Serves `files` by path; `cuts` holds, per path, after how many bytes the next answers break off."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.cuts: dict[str, list[int]] = {}
        self.requests: list[tuple[str, str | None]] = []
        self.status: dict[str, list[int]] = {}
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                span = self.headers.get("Range")
                outer.requests.append((self.path, span))
                if outer.status.get(self.path):
                    self.send_error(outer.status[self.path].pop(0))
                    return
                if self.path not in outer.files:
                    self.send_error(404)
                    return
                body = outer.files[self.path]
                start = int(span.removeprefix("bytes=").rstrip("-")) if span else 0
                if span and start >= len(body):
                    self.send_error(416)
                    return
                self.send_response(206 if span else 200)
                if span:
                    self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
                self.send_header("Content-Length", str(len(body) - start))
                self.end_headers()
                cut = outer.cuts[self.path].pop(0) if outer.cuts.get(self.path) else len(body)
                self.wfile.write(body[start : start + cut])

            def log_message(self, *args):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server.server_port}{path}"


@pytest.fixture
def server():
    made = Server()
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(fetch.time, "sleep", lambda seconds: None)
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def package(server, *paths, sha=SHA, size=SIZE):
    return Package("url", "thing", "1", "thing.bin", sha, size, tuple(server.url(path) for path in paths))


def test_broken_connection_is_resumed(server, tmp_path):
    server.files["/a"] = CONTENT
    server.cuts["/a"] = [3000, 2000]
    seen = []
    path = fetch.fetch(package(server, "/a"), home=tmp_path, progress=lambda done, total: seen.append((done, total)))
    assert path.read_bytes() == CONTENT
    assert server.requests == [("/a", None), ("/a", "bytes=3000-"), ("/a", "bytes=5000-")]
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    fetch.fetch(package(server, "/a"), home=tmp_path)
    assert len(server.requests) == 3, "a second fetch asks nobody"


def test_interrupted_fetch_goes_on_in_the_next_call(server, tmp_path):
    server.files["/a"] = CONTENT
    server.cuts["/a"] = [1000, 0, 0, 0]
    with pytest.raises(FetchError, match="connection closed after 1000 of 10240 bytes"):
        fetch.fetch(package(server, "/a"), home=tmp_path)
    server.requests.clear()
    assert fetch.fetch(package(server, "/a"), home=tmp_path).read_bytes() == CONTENT
    assert server.requests == [("/a", "bytes=1000-")]
    assert not list(tmp_path.rglob("*.part"))


def test_first_bytes_of_another_file_are_given_up(server, tmp_path):
    server.files["/a"] = CONTENT
    target = tmp_path / "x.bin"
    target.with_name("x.bin.part").write_bytes(b"z" * 500)
    fetch.download([server.url("/a")], target, sha256=SHA, size=len(CONTENT))
    assert target.read_bytes() == CONTENT
    assert [span for _, span in server.requests] == ["bytes=500-", None]


def test_server_without_ranges_starts_over(server, tmp_path, monkeypatch):
    server.files["/a"] = CONTENT
    (tmp_path / "x.bin.part").write_bytes(CONTENT[:500])
    monkeypatch.setattr(fetch, "_starts_at", lambda *args: False)
    fetch.download([server.url("/a")], tmp_path / "x.bin", sha256=SHA, size=len(CONTENT))
    assert (tmp_path / "x.bin").read_bytes() == CONTENT


@pytest.mark.parametrize("size", [0, len(CONTENT)])
def test_wrong_hash_refuses_and_deletes(server, tmp_path, size):
    server.files["/a"] = CONTENT[:-1] + b"!"
    with pytest.raises(WrongContent, match=SHA) as caught:
        fetch.fetch(package(server, "/a", size=size), home=tmp_path)
    assert server.url("/a") in str(caught.value)
    assert [p for p in tmp_path.rglob("*") if p.is_file() and p.suffix != ".lock"] == []


def test_mirrors_are_tried_in_order_and_all_are_named(server, tmp_path):
    server.files["/good"] = CONTENT
    server.files["/json"] = b"{}"
    server.status["/busy"] = [503, 503]
    server.files["/busy"] = b"{}"
    found = fetch.fetch(package(server, "/gone", "/json", "/busy", "/good"), home=tmp_path)
    assert found.read_bytes() == CONTENT
    assert [path for path, _ in server.requests] == ["/gone", "/json", "/busy", "/busy", "/busy", "/good"]
    with pytest.raises(FetchError) as caught:
        fetch.fetch(package(server, "/gone", "/json"), home=tmp_path / "other")
    text = str(caught.value)
    assert server.url("/gone") in text and "404" in text
    assert server.url("/json") in text and "expected 10240 bytes, the server has 2" in text
    assert not [p for p in (tmp_path / "other").rglob("*") if p.is_file() and p.suffix != ".lock"]


def test_damaged_file_in_the_cache_is_replaced_by_one_fetch(server, tmp_path):
    server.files["/a"] = CONTENT
    path = fetch.fetch(package(server, "/a"), home=tmp_path)
    path.write_bytes(CONTENT[:9000])
    server.requests.clear()
    assert fetch.fetch(package(server, "/a"), home=tmp_path).read_bytes() == CONTENT
    assert server.requests == [("/a", None)]


def test_processes_fetch_once(server, tmp_path):
    server.files["/a"] = CONTENT
    code = (
        "import sys; from dlx import fetch\n"
        "url, sha, home = sys.argv[1:]\n"
        "print(fetch.fetch(fetch.Package('url', 'thing', '1', 'thing.bin', sha, 0, (url,)), home=home))"
    )
    command = [sys.executable, "-c", code, server.url("/a"), SHA, str(tmp_path)]
    workers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    found = {worker.communicate(timeout=60)[0].strip() for worker in workers}
    assert len(found) == 1 and Path(found.pop()).read_bytes() == CONTENT
    assert len(server.requests) == 1


# Package clients, played by little programs


def program(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!{sys.executable}\nimport sys, os, pathlib\nCONTENT = bytes(range(256)) * 40\n{text}")
    path.chmod(0o755)


def test_pip(tmp_path, monkeypatch):
    (tmp_path / "fake" / "pip").mkdir(parents=True)
    (tmp_path / "fake" / "pip" / "__init__.py").write_text("")
    (tmp_path / "fake" / "pip" / "__main__.py").write_text(
        "import sys, pathlib\n"
        "a = sys.argv\n"
        "assert a[-1] == 'thing==1.0' and '--no-deps' in a and 'download' in a and ':all:' in a, a\n"
        "pathlib.Path(a[a.index('--dest') + 1], 'thing-1.0-py3-none-any.whl').write_bytes(bytes(range(256)) * 40)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"))
    item = Package("pip", "thing", "1.0", "thing-*.whl", SHA, len(CONTENT))
    path = fetch.fetch(item, home=tmp_path / "home")
    assert path == tmp_path / "home/packages/pip/thing-1.0/thing-1.0-py3-none-any.whl"
    wrong = Package("pip", "thing", "1.0", "thing-*.whl", "0" * 64, len(CONTENT))
    with pytest.raises(WrongContent, match="thing 1.0 \\(pip\\)"):
        fetch.fetch(wrong, home=tmp_path / "home2")
    assert not list((tmp_path / "home2").rglob("*.whl"))
    (tmp_path / "fake" / "pip" / "__main__.py").write_text(
        "print('WARNING: Retrying (Retry(total=4, ...))')\nraise SystemExit('No matching distribution found')\n"
    )
    with pytest.raises(FetchError, match="ended with status 1\n  No matching distribution found"):
        fetch.fetch(item, home=tmp_path / "home3")
    (tmp_path / "fake" / "pip" / "__main__.py").write_text("raise SystemExit('x: No module named pip')\n")
    with pytest.raises(FetchError, match="has no pip: run"):
        fetch.fetch(item, home=tmp_path / "home3")


def test_apt_uses_a_private_state_and_updates_once(tmp_path, monkeypatch):
    program(
        tmp_path / "bin",
        "apt-get",
        "log = pathlib.Path(os.environ['LOG']); log.open('a').write(' '.join(sys.argv[3:]) + '\\n')\n"
        "conf = pathlib.Path(sys.argv[sys.argv.index('-c') + 1]).read_text()\n"
        'assert f\'Dir::State::lists "{os.environ["HOME_"]}/apt/lists"\' in conf, conf\n'
        "if sys.argv[-2] == 'download': pathlib.Path('thing_1.0_all.deb').write_bytes(CONTENT)\n",
    )
    home = tmp_path / "home"
    monkeypatch.setenv("PATH", str(tmp_path / "bin") + os.pathsep + os.environ["PATH"])
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    monkeypatch.setenv("HOME_", str(home))
    item = Package("apt", "thing", "1.0", "thing_*.deb", SHA, len(CONTENT))
    assert fetch.fetch(item, home=home).name == "thing_1.0_all.deb"
    assert fetch.fetch(Package("apt", "thing", "", "thing_*.deb", ""), home=home).read_bytes() == CONTENT
    assert (tmp_path / "log").read_text().splitlines() == ["-q update", "-q download thing=1.0", "-q download thing"]


def test_apt_updates_stale_lists_once(tmp_path, monkeypatch):
    program(
        tmp_path / "bin",
        "apt-get",
        "log = pathlib.Path(os.environ['LOG']); n = log.read_text().count('update') if log.exists() else 0\n"
        "log.open('a').write(sys.argv[-1] + '\\n')\n"
        "if sys.argv[-2] == 'download' and n < 2: sys.exit('E: Version not found')\n"
        "if sys.argv[-2] == 'download': pathlib.Path('thing_1.0_all.deb').write_bytes(CONTENT)\n",
    )
    monkeypatch.setenv("PATH", str(tmp_path / "bin") + os.pathsep + os.environ["PATH"])
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    item = Package("apt", "thing", "1.0", "thing_*.deb", SHA, len(CONTENT))
    with pytest.raises(FetchError, match="E: Version not found"):
        fetch.fetch(item, home=tmp_path / "home")
    assert fetch.fetch(item, home=tmp_path / "home").is_file()
    assert (tmp_path / "log").read_text().split() == ["update", "thing=1.0", "thing=1.0", "update", "thing=1.0"]


def test_npm(tmp_path, monkeypatch):
    program(
        tmp_path / "bin",
        "npm",
        "assert sys.argv[1:3] == ['pack', 'thing@1.0'] and '--ignore-scripts' in sys.argv\n"
        "pathlib.Path(sys.argv[sys.argv.index('--pack-destination') + 1], 'thing-1.0.tgz').write_bytes(CONTENT)\n",
    )
    monkeypatch.setenv("PATH", str(tmp_path / "bin") + os.pathsep + os.environ["PATH"])
    item = Package("npm", "thing", "1.0", "thing-1.0.tgz", SHA, len(CONTENT))
    assert fetch.fetch(item, home=tmp_path / "home").read_bytes() == CONTENT


@pytest.mark.parametrize(("kind", "name"), [("apt", "apt-get"), ("npm", "npm")])
def test_missing_program_is_named(tmp_path, monkeypatch, kind, name):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FetchError, match=f"needs the program '{name}', which is not on PATH"):
        fetch.fetch(Package(kind, "thing", "1.0", "*", SHA), home=tmp_path / "home")


def test_package_is_checked_when_it_is_made():
    for bad in (
        {"kind": "conda"}, {"sha256": ""}, {"filename": "../x"}, {"filename": "a/b"}, {"kind": "url"},
    ):  # fmt: skip
        with pytest.raises(ValueError):
            Package(**({"kind": "pip", "name": "x", "version": "1", "filename": "x.whl", "sha256": SHA} | bad))
