"""What a finished run says, for its report: validation texts as sound, with spectrograms, beside their recordings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from dlx.speech import audio
from dlx.speech.vocoder import Vocoder

from .data import TimedSplit
from .plots import draw_speech
from .pretrained import Found
from .synthesis import Synthesizer


def say(
    voice: Found, vocoder: Vocoder, split: TimedSplit, folder: Path, count: int, device: torch.device
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Say the first `count` texts, and copy their recordings: entries of the report for pictures and for sounds."""
    folder.mkdir(parents=True, exist_ok=True)
    utterances = split.utterances[:count]
    speeches = Synthesizer(voice, vocoder, device)([utterance.text for utterance in utterances])
    pictures, sounds = [], []
    for index, (utterance, speech) in enumerate(zip(utterances, speeches, strict=True)):
        rate = speech.sample_rate
        said = speech.audio / max(1.0, float(np.abs(speech.audio).max(initial=0.0)))
        for kind, sound in (("said", said), ("recording", audio.read(utterance.path, rate)[0])):
            name = f"{index:02d}_{kind}.wav"
            audio.write_wav(folder / name, sound, rate)
            sounds.append({"file": f"{folder.name}/{name}", "caption": f"{kind}: {utterance.text}"})
        draw_speech(folder / f"{index:02d}.png", speech.mel, speech.chunks, utterance.text)
        pictures.append({"image": f"{folder.name}/{index:02d}.png", "caption": utterance.text})
    return pictures, sounds
