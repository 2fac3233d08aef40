"""The way without PyTorch: the engine's launches go to a double of pycuda.driver whose device is the CPU, which runs
the kernels and checks every grid, block and size of shared memory against the launchers' own."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fastspeech.cuda import build, launches, native, pycuda_engine
from fastspeech.model import FastSpeech, FastSpeechConfig

HERE = Path(__file__).parent
CONFIG = FastSpeechConfig(
    num_symbols=20, num_mels=8, channels=32, heads=1, feed_forward=40, encoder_blocks=1, decoder_blocks=2, predictor=128
)


class Function:
    """A kernel: its arguments are handed to the launcher, whose launch must be the one that was asked for."""

    def __init__(self, host: native.Library, name: str) -> None:
        self.host, self.name, self.shared = host, name, 48 << 10

    def set_attribute(self, attribute, value) -> None:
        assert attribute == "shared"
        self.shared = value

    def __call__(self, *given, block, grid, shared, stream) -> None:
        assert stream.open and shared <= self.shared
        assert all(type(value) in (np.intp, np.int32, np.float32) for value in given)
        values = [value.item() for value in given]
        kind, _, rest = self.name.rpartition("_f16" if "_f16" in self.name else "_bf16")
        dtype, batch = launches.TYPES["float16" if "_f16" in self.name else "bfloat16"], grid[1]
        if kind == "length_regulation":
            arguments = [*values[:4], batch, *values[4:], dtype]
        elif kind == "positions":
            arguments = [*values[:4], batch, *values[4:], dtype]
        elif kind == "attention64":
            arguments = [*values[:3], grid[2], *values[3:], int(rest == "_many"), dtype]
        elif kind == "convolution":
            tile = [tile.name for tile in launches.TILES].index(rest[1:])
            arguments = [*values, tile, grid[2], dtype]
        else:
            arguments = [*values[:17], batch, *values[17:19], int(rest[1:]), *values[19:], dtype]
        self.host.launch(kind, *arguments, None)
        asked = ctypes.CDLL(str(self.host.path)).host_last_launch
        asked.restype = ctypes.POINTER(ctypes.c_uint)
        assert list(asked()[:5]) == [*grid, block[0], shared], self.name
        assert block[1:] == (1, 1)


class Driver:
    """pycuda.driver as far as the engine uses it, with the host's memory."""

    device_attribute = SimpleNamespace(MULTIPROCESSOR_COUNT="processors")
    function_attribute = SimpleNamespace(MAX_DYNAMIC_SHARED_SIZE_BYTES="shared")

    def __init__(self, host: native.Library) -> None:
        self.host, self.depth, self.allocated = host, 0, 0

    def init(self) -> None:
        pass

    def Device(self, index):  # noqa: N802
        context = SimpleNamespace(push=lambda: self.enter(1), pop=lambda: self.enter(-1))
        return SimpleNamespace(
            compute_capability=lambda: (9, 0), get_attribute=lambda what: 132, retain_primary_context=lambda: context
        )

    def enter(self, by) -> None:
        self.depth += by

    def Stream(self):  # noqa: N802
        return SimpleNamespace(open=True, synchronize=lambda: None)

    def mem_alloc(self, size):
        assert self.depth == 1 and size > 0
        self.allocated += 1
        return Allocation(size)

    def memcpy_htod(self, target, values) -> None:
        assert values.flags.c_contiguous and values.nbytes <= target.size
        ctypes.memmove(int(target), values.ctypes.data, values.nbytes)

    def memcpy_htod_async(self, target, values, stream) -> None:
        self.memcpy_htod(target, values)

    def memcpy_dtoh_async(self, values, source, stream) -> None:
        assert values.flags.c_contiguous and values.nbytes <= source.size
        ctypes.memmove(values.ctypes.data, int(source), values.nbytes)

    def memset_d32_async(self, target, value, count, stream) -> None:
        ctypes.memset(int(target), value, 4 * count)

    def module_from_file(self, path):
        return SimpleNamespace(get_function=lambda name: Function(self.host, name))


class Allocation:
    def __init__(self, size: int) -> None:
        self.size, self.values = size, np.full(size + 16, 0xFF, np.uint8)  # garbage, as a device's memory is

    def __int__(self) -> int:
        return (self.values.ctypes.data + 15) // 16 * 16


@pytest.fixture
def cuda(host, monkeypatch) -> Driver:
    made = Driver(host)
    monkeypatch.setattr(pycuda_engine, "driver", lambda: made)
    monkeypatch.setattr(build, "cubin", lambda name, arch: Path(f"{name}-{arch}.cubin"))
    return made


def voice() -> FastSpeech:
    torch.manual_seed(0)
    model = FastSpeech(CONFIG).eval()
    with torch.no_grad():  # norms and biases that do something
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
        model.durations.output.bias.fill_(1.2)
    return model


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_it_says_what_the_model_says(cuda, dtype, tmp_path):
    from safetensors.torch import save_file

    save_file(voice().state_dict(), tmp_path / "voice.safetensors")
    engine = pycuda_engine.PyCudaEngine.load(tmp_path / "voice.safetensors", dtype)
    generator = torch.Generator().manual_seed(1)
    text, lengths = torch.randint(1, 20, (3, 9), generator=generator), torch.tensor([9, 5, 0])
    emphasis, pauses = 1 + torch.rand(3, 9, generator=generator), torch.randint(0, 3, (3, 9), generator=generator)
    found = engine(text.numpy(), lengths.numpy(), 0.8, emphasis.numpy(), pauses.numpy())
    durations = torch.from_numpy(found.durations)
    with torch.inference_mode():
        exact = voice()(text, lengths, durations)
        half = voice().to(getattr(torch, dtype))(text, lengths, durations)
    assert found.mel.shape == tuple(exact.mel.shape) and found.mel_lengths.tolist() == exact.mel_lengths.tolist()
    for name in ("mel", "log_durations"):
        error = np.abs(getattr(found, name) - getattr(exact, name).numpy()).max()
        assert error <= 2 * float((getattr(half, name).float() - getattr(exact, name)).abs().max()), name
    assert found.durations[2].tolist() == [1] + [0] * 8 and found.durations.sum() > 20
    before = cuda.allocated
    again = engine(text.numpy(), lengths.numpy(), 0.8, emphasis.numpy(), pauses.numpy())
    assert cuda.allocated == before and np.array_equal(again.mel, found.mel)  # memory is used again
    short = engine(text[:1, :4].numpy(), np.array([4]))
    assert cuda.allocated == before and short.mel.shape[0] == 1 and cuda.depth == 0


def test_refusals(cuda):
    weights = {name: value.numpy() for name, value in voice().state_dict().items()}
    with pytest.raises(ValueError, match="'float32'"):
        pycuda_engine.PyCudaEngine(weights, "float32")
    with pytest.raises(ValueError, match="not a FastSpeech"):
        pycuda_engine.PyCudaEngine({"embedding.weight": weights["embedding.weight"]})
    with pytest.raises(ValueError, match="do not take these sizes"):
        pycuda_engine.PyCudaEngine({**weights, "embedding.weight": weights["embedding.weight"][:, :20]})
    engine = pycuda_engine.PyCudaEngine(weights)
    with pytest.raises(ValueError, match="from 0 to 19, got 1 to 20"):
        engine(np.array([[1, 20]]), np.array([2]))
    with pytest.raises(ValueError, match="from 0 to 2, got .3."):
        engine(np.array([[1, 2]]), np.array([3]))


def test_it_needs_no_pytorch_and_says_what_it_needs():
    code = (
        "import sys; from fastspeech.cuda import pycuda_engine; assert 'torch' not in sys.modules\n"
        "sys.modules['pycuda'] = None\n"
        "try: pycuda_engine.driver()\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "PyCUDA is not there" in done.stdout and "pip install pycuda" in done.stdout
