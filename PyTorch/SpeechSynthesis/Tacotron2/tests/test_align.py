"""The attention of every utterance, as it is read with the true frames."""

import numpy as np
import pytest
import torch

from dlx.speech.frontend import FrontEnd
from dlx.speech.mel import MelConfig
from dlx.speech.symbols import SymbolTable
from tacotron2 import align
from tacotron2.data import open_data
from tacotron2.model import Tacotron2, Tacotron2Config
from tacotron2.pretrained import Found

audio = pytest.importorskip("dlx.speech.audio", reason="needs soundfile")


@pytest.fixture
def lists(tmp_path, monkeypatch):
    monkeypatch.setenv("DLX_HOME", str(tmp_path / "home"))
    for split, count in (("train", 3), ("val", 2)):
        lines = []
        for number in range(count):
            time = np.arange(8000 + 3000 * number) / 22050
            audio.write_wav(tmp_path / f"{split}{number}.wav", 0.3 * np.sin(2000 * time).astype(np.float32), 22050)
            lines.append(f"{tmp_path}/{split}{number}.wav|number {'one two three'.split()[number]}")
        (tmp_path / f"{split}.txt").write_text("\n".join(lines) + "\n")
    return {"train": tmp_path / "train.txt", "val": tmp_path / "val.txt"}


def test_every_utterance_gets_its_attention(lists, tmp_path, monkeypatch):
    torch.manual_seed(0)
    model = Tacotron2(Tacotron2Config(encoder=16, prenet=8, rnn=16, postnet=8)).eval()
    voice = Found(model, "tacotron2", MelConfig(), FrontEnd(), "fresh")
    monkeypatch.setattr(align.pretrained, "load_voice", lambda *args, **options: voice)
    options = ["--checkpoint", "x", "--train_list", str(lists["train"]), "--val_list", str(lists["val"])]
    options += ["--device", "cpu", "--workers", "0", "--batch_size", "2", "--output_dir", str(tmp_path / "attention")]
    assert align.main(options) == 5
    for split in open_data(lists=lists, home=tmp_path / "home").values():
        for index, utterance in enumerate(split.utterances):
            weights = np.load(tmp_path / "attention" / f"{utterance.id}.npy", allow_pickle=False)
            assert weights.shape == (split.frames[index], len(split.text[index]))
            np.testing.assert_allclose(weights.sum(1), 1, atol=1e-5)
    voice.front_end = FrontEnd(SymbolTable.of_letters("abc"), "basic")
    with pytest.raises(ValueError, match="different symbol tables"):
        align.main(options)
