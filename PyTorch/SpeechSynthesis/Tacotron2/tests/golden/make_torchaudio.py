"""Write torchaudio_tacotron2.npz beside this file: a small Tacotron 2 of torchaudio, its weights, inputs and outputs.

    python tests/golden/make_torchaudio.py

Needs torchaudio, which the tests do not. The prenet's dropout, which torchaudio never turns off, is replaced by stored
factors (F, B, layers, P); row t is for the frame before frame t.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
import torchaudio

SYMBOLS, FRAMES, BATCH = 7, 11, 2
CONFIG = {
    "num_symbols": 20, "num_mels": 8, "encoder": 16, "prenet": 12, "rnn": 24, "attention": 10, "location_filters": 4,
    "location_kernel": 5, "postnet": 16,
}  # fmt: skip


def build() -> torch.nn.Module:
    model = torchaudio.models.Tacotron2(
        n_mels=CONFIG["num_mels"],
        n_symbol=CONFIG["num_symbols"],
        symbol_embedding_dim=CONFIG["encoder"],
        encoder_embedding_dim=CONFIG["encoder"],
        decoder_rnn_dim=CONFIG["rnn"],
        attention_rnn_dim=CONFIG["rnn"],
        attention_hidden_dim=CONFIG["attention"],
        attention_location_n_filter=CONFIG["location_filters"],
        attention_location_kernel_size=CONFIG["location_kernel"],
        prenet_dim=CONFIG["prenet"],
        postnet_embedding_dim=CONFIG["postnet"],
    )
    for module in model.modules():  # norms that do something
        if isinstance(module, torch.nn.BatchNorm1d):
            module.running_mean.uniform_(-0.5, 0.5)
            module.running_var.uniform_(0.5, 2)
    return model.eval()


def main() -> None:
    torch.manual_seed(0)
    model = build()
    text = torch.randint(1, CONFIG["num_symbols"], (BATCH, SYMBOLS))
    mel = torch.randn(BATCH, CONFIG["num_mels"], FRAMES)
    lengths = torch.full((BATCH,), SYMBOLS), torch.full((BATCH,), FRAMES)
    keep = torch.randint(2, (FRAMES, BATCH, 2, CONFIG["prenet"])).float() * 2
    original, layer = torch.nn.functional.dropout, 0

    def dropout(x, p=0.5, training=True, inplace=False):
        nonlocal layer
        if not training:
            return x
        rows = keep[:, :, layer]
        layer += 1
        if len(x) == FRAMES + 1:  # it also reads the last frame, which nothing depends on
            rows = torch.cat((rows, rows[:1]))
        return x * rows

    torch.nn.functional.dropout = dropout
    try:
        with torch.no_grad():
            mel_out, refined, gate, alignments = model(text, lengths[0], mel, lengths[1])
    finally:
        torch.nn.functional.dropout = original
    if layer != 2:
        raise RuntimeError(f"expected 2 calls of dropout in the prenet, found {layer}")
    content = {f"weight.{name}": value.numpy() for name, value in model.state_dict().items()}
    content |= {
        "version": np.array(torchaudio.__version__),
        "config": np.array(json.dumps(CONFIG)),
        "text": text.numpy(),
        "text_lengths": lengths[0].numpy(),
        "mel": mel.numpy(),
        "mel_lengths": lengths[1].numpy(),
        "keep": keep.numpy(),
        "mel_out": mel_out.numpy(),
        "refined": refined.numpy(),
        "gate": gate.reshape(BATCH, FRAMES).numpy(),
        "alignments": alignments.numpy(),
    }
    path = Path(__file__).with_name("torchaudio_tacotron2.npz")
    np.savez_compressed(path, **content)
    print(f"{path}: torchaudio {torchaudio.__version__}, {path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
