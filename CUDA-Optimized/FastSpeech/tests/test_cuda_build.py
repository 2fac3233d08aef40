"""Every kernel compiles for three generations of GPUs, results are kept by content, errors are clear; without a GPU."""

from __future__ import annotations

import re

import pytest

from fastspeech.cuda import build, launches, native


@pytest.fixture
def nvcc() -> str:
    try:
        return build.find_nvcc()
    except build.BuildError as error:
        pytest.skip(f"needs nvcc: {error}")


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("DLX_HOME", str(tmp_path))
    return tmp_path


def kernel_names(name: str) -> list[str]:
    return re.findall(r"^DEFINE\((\w+),", (build.SOURCES / f"{name}.cu").read_text(), re.MULTILINE)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_90a", "sm_100"])
@pytest.mark.parametrize("name", build.KERNELS)
def test_every_kernel_compiles(nvcc, home, name, arch):
    content = build.cubin(name, arch).read_bytes()
    assert content[:4] == b"\x7fELF" and len(kernel_names(name)) >= 4
    for kernel in kernel_names(name):
        assert kernel.encode() in content  # under its own name, for cuModuleGetFunction


def test_the_library_has_every_launcher(nvcc, home):
    library = native.Library(build.library("sm_90"))
    assert set(library.functions) == set(native.SIGNATURES)
    with pytest.raises(ValueError, match="does not take these sizes"):  # said before CUDA is asked for anything
        library.launch("residual_norm", *[None] * 7, 1, 1, 4096, 1e-5, 1, None)


def test_results_are_kept_by_content(home, monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(build, "find_nvcc", lambda: "nvcc")
    monkeypatch.setattr(build, "compiler_version", lambda nvcc: "13.0")

    def run(command):
        calls.append(command)
        open(command[command.index("-o") + 1], "w").close()
        return ""

    monkeypatch.setattr(build, "_run", run)
    first = build.cubin("positions", "sm_90")
    assert build.cubin("positions", "sm_90") == first and len(calls) == 1
    assert build.cubin("positions", "sm_80") != first and len(calls) == 2
    sources = tmp_path / "csrc"
    sources.mkdir()
    for path in build.SOURCES.iterdir():
        (sources / path.name).write_text(path.read_text())
    monkeypatch.setattr(build, "SOURCES", sources)
    assert build.cubin("positions", "sm_90") == first and len(calls) == 2  # the same wherever it lies
    (sources / "positions.cuh").write_text("// changed\n")
    second = build.cubin("positions", "sm_90")
    assert second != first and len(calls) == 3
    monkeypatch.setattr(build, "compiler_version", lambda nvcc: "13.1")
    assert build.cubin("positions", "sm_90") not in (first, second)


def test_what_is_missing_is_said(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match="sm_80 or newer, got 'sm_75'"):
        build.library("sm_75")
    with pytest.raises(ValueError, match="unknown kernel 'gemm'"):
        build.cubin("gemm", "sm_90")
    monkeypatch.setattr(build.Path, "is_file", lambda self: False)
    with pytest.raises(build.BuildError, match="nvcc was not found"):
        build.find_nvcc()


def test_a_refusal_of_the_compiler_is_shown_and_leaves_nothing(nvcc, home, monkeypatch, tmp_path):
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "positions.cu").write_text("int broken(")
    monkeypatch.setattr(build, "SOURCES", sources)
    with pytest.raises(build.BuildError, match="positions.cu"):
        build.cubin("positions", "sm_90")
    assert not list(home.rglob("*.cubin"))


def test_figures_of_launches_are_those_of_the_sources():
    text = (build.SOURCES / "conv_ff.cu").read_text()
    found = re.findall(r"using (\w+) = Convolution<T, (\d+), (\d+), (\d+), (\d+), (\d+)(, true)?>", text)
    assert [
        launches.Tile(name.lower(), int(rows), int(columns), 32 * int(down) * int(across), int(stages), bool(groups))
        for name, rows, columns, down, across, stages, groups in found
    ] == list(launches.TILES)
    assert all(tile.shared <= 113 << 10 for tile in launches.TILES)  # two blocks at once on a processor with 227 KiB


@pytest.mark.parametrize("norm", [False, True])
def test_plans(norm):
    for batch, length, inputs, outputs, kernel in [(1, 1, 8, 8, 1), (1, 128, 384, 1536, 3), (32, 800, 1536, 384, 3)]:
        plan = launches.plan_convolution(batch, length, inputs, outputs, kernel, norm)
        across, down, splits = plan.grid(batch, length, outputs)
        tile = launches.TILES[plan.tile]
        assert (across // batch) * tile.rows >= length and down * tile.columns >= outputs
        assert 1 <= splits <= kernel * -(-inputs // 64) and (norm or splits == 1)
        assert launches.tickets(batch, length) >= across
    assert launches.plan_convolution(32, 800, 384, 1536, 3, False).tile == 2
    assert launches.plan_convolution(1, 30, 1536, 384, 3, True).splits > 1
