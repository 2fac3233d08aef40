"""What a finished run says, for its report: validation texts as sound, with spectrograms and alignments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from dlx.speech import audio
from dlx.speech.vocoder import Vocoder

from .data import Split
from .plots import draw_speech
from .pretrained import Found
from .synthesis import Synthesizer


def say(
    voice: Found, vocoder: Vocoder, split: Split, folder: Path, count: int, device: torch.device, before: bool = False
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Say the first ``count`` texts, and copy their recordings: entries of the report for pictures and for sounds.

    A voice that never ends is stopped at twice the recordings' longest. ``before``: it is the one that training began
    with, so its files are named for that, and there is no need of the recordings.
    """
    folder.mkdir(parents=True, exist_ok=True)
    utterances = split.utterances[:count]
    limit = int(2 * split.frames[:count].max()) + 50
    synthesizer = Synthesizer(voice, vocoder, device, limit=limit)
    pictures, sounds = [], []
    for index, (utterance, speech) in enumerate(
        zip(utterances, synthesizer([utterance.text for utterance in utterances]), strict=True)
    ):
        stem = folder / (f"{index:02d}_before" if before else f"{index:02d}")
        peak = max(1.0, float(np.abs(speech.audio).max(initial=0.0)))
        audio.write_wav(stem.with_suffix(".wav"), speech.audio / peak, speech.sample_rate)
        draw_speech(stem.with_suffix(".png"), speech.mel, [chunk.alignment for chunk in speech.chunks], utterance.text)
        stopped = "" if not any(chunk.reached_limit for chunk in speech.chunks) else " (did not find its end)"
        text = f"(before training) {utterance.text}" if before else utterance.text
        pictures.append({"image": f"{folder.name}/{stem.name}.png", "caption": f"{text}{stopped}"})
        sounds.append({"file": f"{folder.name}/{stem.name}.wav", "caption": f"said: {text}{stopped}"})
        if not before:
            recording, rate = audio.read(utterance.path, voice.mel.sample_rate)
            audio.write_wav(folder / f"{index:02d}_recording.wav", recording, rate)
            sounds.append({"file": f"{folder.name}/{index:02d}_recording.wav", "caption": f"recording: {text}"})
    return pictures, sounds
