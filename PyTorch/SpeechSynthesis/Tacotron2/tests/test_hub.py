"""torch.hub entries: the calls that users know, offline use, weights from any device and of any damage (O01-O06)."""

from __future__ import annotations

import ast
import os
import pickle
import re
import subprocess
import sys
import textwrap
import wave
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from dlx import checkpoint as checkpoints
from dlx import fetch, testing
from dlx.speech.frontend import FrontEnd
from dlx.speech.mel import MelConfig
from dlx.speech.symbols import SymbolTable, UnpronounceableText
from tacotron2 import hub, pretrained, registry
from tacotron2.model import Tacotron2
from tacotron2.waveglow import WaveGlow

ROOT = Path(__file__).resolve().parents[4]
ARCHS = {"tacotron2": "tacotron2_compact", "waveglow": "waveglow_compact"}
ENTRIES = {"tacotron2": hub.nvidia_tacotron2, "waveglow": hub.nvidia_waveglow}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("weights")
    found = {}
    for kind, arch in ARCHS.items():
        torch.manual_seed(0)
        found[kind] = folder / f"{kind}.pt"
        state = {f"module.{name}": value for name, value in registry.build(arch).state_dict().items()}
        torch.save({"state_dict": state, "epoch": 3, "config": {"n": 1}}, found[kind])
    return found


@pytest.fixture
def offline(tmp_path):
    """Sockets blocked, the cache in a folder that may not be written."""
    with testing.offline(tmp_path) as locked:
        yield locked


# Models


def test_untrained_needs_no_network_and_writes_nothing(offline):
    """User case O02."""
    for kind, entry in ENTRIES.items():
        model = entry(pretrained=False, arch=ARCHS[kind])
        assert model.training and model.mel == MelConfig()
    assert hub.nvidia_tts_utils().prepare_input_sequence("Hi")[0].shape == (1, 2)
    with torch.device("meta"):
        full = hub.nvidia_tacotron2(pretrained=False, device="meta")
    assert sum(parameter.numel() for parameter in full.parameters()) == 28_193_153
    assert isinstance(full, Tacotron2) and len(full.front_end.symbols) == 148


@pytest.mark.parametrize("kind", list(ENTRIES))
def test_weights_saved_on_a_gpu_load_on_the_cpu(files, tmp_path, kind):
    """User case O01: the storages are tagged cuda:0 in the file."""
    path = tmp_path / "tagged.pt"
    with zipfile.ZipFile(files[kind]) as source, zipfile.ZipFile(path, "w") as target:
        for entry in source.infolist():
            content = source.read(entry)
            if entry.filename.endswith("data.pkl"):
                assert content.count(b"X\x03\x00\x00\x00cpu") >= 1
                content = content.replace(b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:0")
            target.writestr(entry, content)
    model = ENTRIES[kind](checkpoint=path)
    expected = torch.load(files[kind], weights_only=True)["state_dict"]
    assert not model.training
    for name, value in model.state_dict().items():
        assert value.device.type == "cpu" and torch.equal(value, expected[f"module.{name}"])


@pytest.mark.filterwarnings("ignore:items")
def test_half_precision_and_inputs_of_any_kind(files):
    sequences, lengths = hub.nvidia_tts_utils().prepare_input_sequence(["Hello there.", "Hi."])
    for math in ("fp32", "bf16"):
        tacotron2 = hub.nvidia_tacotron2(checkpoint=files["tacotron2"], model_math=math)
        mel, mel_lengths, alignments = tacotron2.infer(sequences, lengths, limit=6)
        frames = int(mel_lengths.max())
        assert mel.shape == (2, 80, frames) and alignments.shape == (2, frames, 12)
        assert tacotron2.infer(sequences[1:, :3], limit=6)[0].shape[0] == 1
        waveglow = hub.nvidia_waveglow(checkpoint=files["waveglow"], model_math=math)
        waveglow = waveglow.remove_weightnorm(waveglow).eval()
        audio = waveglow.infer(mel, sigma=0.6)
        assert audio.shape == (2, frames * 256) and audio.dtype == torch.float32
        assert waveglow.denoiser()(audio, strength=0.01).shape == audio.shape
    with pytest.raises(ValueError, match="model_math 'int8' is none of fp32, fp16, bf16"):
        hub.nvidia_waveglow(pretrained=False, model_math="int8", arch="waveglow_compact")
    with pytest.raises(ValueError, match="call eval"):
        hub.nvidia_tacotron2(pretrained=False, arch=ARCHS["tacotron2"]).infer(sequences, lengths)
    with pytest.raises(ValueError, match="holds a waveglow_compact, not a tacotron2"):
        hub.nvidia_tacotron2(checkpoint=files["waveglow"])


@pytest.mark.filterwarnings("ignore:items")
def test_changed_weights_are_seen(files):
    """Fine-tuning between two calls of infer."""
    sequences, lengths = hub.nvidia_tts_utils().prepare_input_sequence("Hi.")
    model = hub.nvidia_tacotron2(checkpoint=files["tacotron2"])
    first = model.infer(sequences, lengths, limit=4)[0]
    assert torch.equal(model.infer(sequences, lengths, limit=4)[0], first)
    with torch.no_grad():
        model.decoder.mel.bias.add_(1)
    assert not torch.allclose(model.infer(sequences, lengths, limit=4)[0], first)


class Exploit:
    def __init__(self, marker: Path):
        self.marker = str(marker)

    def __reduce__(self):
        return (open, (self.marker, "w"))


@pytest.mark.parametrize("kind", list(ENTRIES))
def test_a_pickle_that_would_run_code_is_refused(tmp_path, kind):
    """User case O04: the oldest WaveGlow files hold the whole model, too."""
    marker, path = tmp_path / "marker", tmp_path / "bad.pt"
    torch.save({"model": {"a": torch.zeros(1)}, "x": Exploit(marker)}, path)
    with pytest.raises(ValueError, match="convert"):
        ENTRIES[kind](checkpoint=path)
    plain = tmp_path / "plain.pkl"
    plain.write_bytes(pickle.dumps(Exploit(marker), protocol=2))
    with pytest.raises(ValueError):
        ENTRIES[kind](checkpoint=plain)
    assert not marker.exists()


def test_metadata_of_training_scripts_is_no_obstacle(files, tmp_path):
    """User case O04: plain and numpy values beside the tensors."""
    content = torch.load(files["waveglow"], weights_only=True)
    content |= {"loss": np.float64(0.25), "n": np.int64(3), "list": [1, "a", 2.5], "map": {0: "background"}}
    torch.save(content, tmp_path / "more.pt")
    assert isinstance(hub.nvidia_waveglow(checkpoint=tmp_path / "more.pt"), WaveGlow)


def test_other_widths_are_reported_key_by_key(tmp_path):
    """User case O05: a file of no architecture here is compared with the published one."""
    state = registry.build("waveglow_compact").state_dict()
    state = {name: value for name, value in state.items() if not name.startswith("narrow")}
    torch.save(state, tmp_path / "odd.pt")
    with pytest.raises(ValueError) as caught:
        hub.nvidia_waveglow(checkpoint=tmp_path / "odd.pt")
    text = str(caught.value)
    assert "flows.0.wn.start.bias: [64] in the file, [256] in the model" in text
    assert "upsample.weight: [80, 1, 1024] in the file, [80, 80, 1024] in the model" in text


@pytest.mark.filterwarnings("ignore:items")
def test_a_run_knows_its_symbols(tmp_path):
    front_end = FrontEnd(SymbolTable.of_letters("абвгде"), "basic")
    model = registry.build(ARCHS["tacotron2"], len(front_end.symbols))
    store = checkpoints.Checkpoints(tmp_path / "checkpoints")
    metadata = pretrained.describe(ARCHS["tacotron2"], MelConfig(), front_end)
    store.save(1, model={"model": model.state_dict()}, metadata=metadata)
    found = hub.nvidia_tacotron2(checkpoint=tmp_path)
    sequences, lengths = hub.nvidia_tts_utils(found).prepare_input_sequence(["Где"])
    assert front_end.symbols.decode(sequences[0].tolist()) == "где."
    assert found.infer(sequences, lengths, limit=3)[0].shape[1] == 80


# Texts


def test_order_is_kept():
    utils = hub.nvidia_tts_utils()
    texts = ["Hi", "A longer text, Dr. Lee.", "Mid one"]
    sequences, lengths = utils.prepare_input_sequence(texts, cpu_run=True)
    assert lengths.tolist() == [2, len("a longer text, doctor lee."), 7]
    assert sequences.dtype == torch.int64 and sequences.shape == (3, int(lengths.max()))
    decode = utils.front_end.symbols.decode
    assert [decode(row.tolist()) for row in sequences] == ["hi", "a longer text, doctor lee.", "mid one"]
    assert not sequences[0, 2:].any()
    assert torch.equal(utils.prepare_input_sequence("Hi")[0], sequences[:1, :2])
    with pytest.raises(UnpronounceableText, match="nothing of"):
        utils.prepare_input_sequence(["..."])
    with pytest.raises(ValueError, match="there are no texts"):
        utils.prepare_input_sequence([])


# NVIDIA's files


@pytest.fixture
def publisher(monkeypatch, tmp_path):
    monkeypatch.setenv("DLX_HOME", str(tmp_path))
    with testing.publisher() as server:
        addresses = {key: f"{server.url}/nvidia_{'_'.join(key)}" for key in hub.FILES}
        monkeypatch.setattr(hub, "FILES", addresses)
        yield server


@pytest.mark.parametrize("kind", list(ENTRIES))
def test_a_damaged_file_is_replaced_once(publisher, files, tmp_path, kind):
    """User case O03."""
    publisher.content = files[kind].read_bytes()
    place = tmp_path / "weights" / "nvidia" / f"nvidia_{kind}_fp32.pt"
    with pytest.warns(UserWarning, match="no hash"):
        ENTRIES[kind]()
    ENTRIES[kind]()
    assert publisher.requests == 1 and place.read_bytes() == publisher.content
    place.write_bytes(publisher.content[: len(publisher.content) * 9 // 10])
    ENTRIES[kind]()
    assert publisher.requests == 2 and place.read_bytes() == publisher.content
    publisher.content = publisher.content[:-1] + b"x"  # another file than before
    with pytest.raises(fetch.FetchError, match="sha256"):
        ENTRIES[kind](force_reload=True)


@pytest.mark.parametrize("answer", [(404, b"gone"), (200, b"{}")])
def test_nothing_good_to_be_had(publisher, answer, tmp_path):
    """User case O03: one error with address and place; nothing half-done stays."""
    publisher.status, publisher.content = answer
    with pytest.warns(UserWarning, match="no hash"), pytest.raises(fetch.FetchError) as caught:
        hub.nvidia_tacotron2()
    text = str(caught.value)
    assert hub.FILES["tacotron2", "fp32"] in text
    assert str(tmp_path / "weights" / "nvidia" / "nvidia_tacotron2_fp32.pt") in text
    assert ("pass checkpoint=PATH" if answer[0] == 404 else "2 bytes") in text
    assert not list((tmp_path / "weights").rglob("*.pt*"))


# Documentation


@pytest.fixture
def brief(files, tmp_path) -> dict[str, Path]:
    """Files with a voice that stops after one frame."""
    content = torch.load(files["tacotron2"], weights_only=True)
    content["state_dict"]["module.decoder.gate.bias"].fill_(20)
    torch.save(content, tmp_path / "brief.pt")
    return files | {"tacotron2": tmp_path / "brief.pt"}


def local_load(files: dict[str, Path]):
    def load(repository, entry, source="github", **options):
        kind = entry.removeprefix("nvidia_")
        if kind in files:
            options["checkpoint"] = files[kind]
        return getattr(hub, entry)(**options)

    return load


def test_the_snippet_of_the_module_runs(brief, monkeypatch):
    """User case O06: against random weights."""
    code = textwrap.dedent(hub.__doc__.split("\n\n")[1])
    monkeypatch.setattr(torch.hub, "load", local_load(brief))
    space = {"torch": torch, "REPOSITORY": "."}
    exec(compile(ast.parse(code), "snippet", "exec"), space)
    assert space["audio"].shape == (1, 256)


@pytest.mark.skipif(
    not (ROOT / "docs" / "hub.md").is_file() or not (ROOT / "hubconf.py").is_file(),
    reason="needs the whole repository (docs/hub.md, hubconf.py)",
)
def test_the_documented_snippet_runs(brief, tmp_path):
    """User case O06: docs/hub.md with this repository and random weights in place of the names there."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "hub.md").read_text(), re.DOTALL)
    code = next(block for block in blocks if "nvidia_tacotron2" in block)
    code = code.replace("path/to/this/clone", str(ROOT))
    for kind, name in (("tacotron2", "runs/voice"), ("waveglow", "runs/waveglow")):
        assert f'"{name}"' in code
        code = code.replace(f'"{name}"', repr(str(brief[kind])))
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with wave.open(str(tmp_path / "speech.wav")) as file:
        assert file.getnframes() == 256 and file.getframerate() == 22050


@pytest.mark.skipif(
    not (ROOT / "hubconf.py").is_file() or "tacotron2.hub" not in (ROOT / "hubconf.py").read_text(),
    reason="lacks a hubconf.py with entries of this task",
)
def test_entries_of_the_repository(tmp_path):
    """User case O06: listing imports no task; only the entry that reads text needs what reads text."""
    code = """
import sys
import torch
hidden = {"librosa", "inflect", "unidecode", "soundfile"}
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name.split(".")[0])
sys.meta_path.insert(0, Hide())
sys.path.insert(0, ROOT)
import hubconf
names = dir(hubconf)
assert {"nvidia_tacotron2", "nvidia_waveglow", "nvidia_tts_utils"} <= set(names), names
assert "tacotron2" not in sys.modules
model = torch.hub.load(ROOT, "nvidia_tacotron2", source="local", pretrained=False, arch="tacotron2_compact")
utils = torch.hub.load(ROOT, "nvidia_tts_utils", source="local")
print(utils.prepare_input_sequence(["Hello 2 you"])[1].tolist())
"""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", f"ROOT = {str(ROOT)!r}\n{code}"],
        capture_output=True,
        text=True,
        env=environment | {"TORCH_HOME": str(tmp_path)},
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[13]"
