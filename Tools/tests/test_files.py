"""Atomic writes, locks, hashes, and where things are kept."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dlx import paths
from dlx.files import atomic_path, atomic_write, human_bytes, lock, sha256


def test_atomic_write_replaces_whole(tmp_path):
    target = tmp_path / "new" / "a.txt"
    atomic_write(target, "eins")
    atomic_write(target, "zwei\u00e4".encode())
    assert target.read_text() == "zweiä"
    assert os.listdir(target.parent) == ["a.txt"]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_atomic_path_on_success(tmp_path, kind):
    target = tmp_path / "result.safetensors"
    for content in ("first", "second"):
        with atomic_path(target) as temporary:
            assert temporary.suffix == ".safetensors" and not temporary.exists()
            if kind == "folder":
                (temporary / "inner").mkdir(parents=True)
                (temporary / "inner" / "file").write_text(content)
            else:
                temporary.write_text(content)
        assert (target / "inner" / "file" if kind == "folder" else target).read_text() == content
    assert os.listdir(tmp_path) == [target.name]


def test_atomic_path_on_failure_leaves_the_old(tmp_path):
    target = tmp_path / "a"
    target.write_text("old")
    with pytest.raises(RuntimeError), atomic_path(target) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    with pytest.raises(FileNotFoundError), atomic_path(target):
        pass  # nothing was made
    assert target.read_text() == "old" and os.listdir(tmp_path) == ["a"]


def test_sha256_and_human_bytes(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    assert sha256(tmp_path / "a") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert [human_bytes(n) for n in (0, 1023, 1536, 5 * 2**30, 2**41)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "5.0 GiB",
        "2.0 TiB",
    ]


def test_lock_excludes_another_process_says_so_once_and_times_out(tmp_path, capsys):
    code = (
        "import sys, time, dlx.files as f\nwith f.lock(sys.argv[1]):\n    print('held', flush=True)\n    time.sleep(60)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "l")]
    variables = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(TimeoutError, match="still locked"), lock(tmp_path / "l", timeout=0.2, message="waiting"):
            pass
        assert capsys.readouterr().err == "waiting\n"
        holder.kill()  # the system frees the lock of a dead process
    with lock(tmp_path / "l", timeout=5):
        pass


def test_lock_excludes_threads(tmp_path):
    inside, most = [0], [0]

    def work() -> None:
        with lock(tmp_path / "l"):
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            time.sleep(0.01)
            inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]


def test_homes_and_root(tmp_path, monkeypatch):
    monkeypatch.setenv("DLX_HOME", str(tmp_path / "cache"))
    assert paths.home() == tmp_path / "cache" and not paths.home().exists()
    folders = (paths.env_dir(), paths.data_dir(), paths.package_dir(), paths.weight_dir())
    assert [folder.name for folder in folders] == ["envs", "data", "packages", "weights"]
    monkeypatch.delenv("DLX_HOME")
    assert paths.home() == Path.home() / ".cache" / "dlx"
    (tmp_path / "Tools" / "dlx").mkdir(parents=True)
    (tmp_path / "dlx").touch()
    (tmp_path / "deep" / "er").mkdir(parents=True)
    monkeypatch.delenv("DLX_ROOT", raising=False)
    monkeypatch.chdir(tmp_path / "deep" / "er")
    assert paths.repo_root() == tmp_path
    monkeypatch.setenv("DLX_ROOT", str(tmp_path / "other"))
    assert paths.repo_root() == tmp_path / "other"


def test_the_launcher_imports_the_standard_library_only():
    names = "cli task env stores system paths files container vendor testrun readme entry data weights".split()
    code = f"""
import sys, importlib
for name in {names}:
    importlib.import_module("dlx." + name)
known = set(sys.stdlib_module_names) | {{"dlx", "__main__"}}
print(sorted({{m.split(".")[0] for m in sys.modules}} - known))
"""
    root = Path(__file__).resolve().parents[1]
    command, variables = [sys.executable, "-S", "-c", code], {"PYTHONPATH": str(root)}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_lock_is_free_though_a_forked_child_lives(tmp_path):
    """A loader's worker holds the open file, too."""
    with lock(tmp_path / "lock"):
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
    try:
        with lock(tmp_path / "lock", timeout=0):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
