"""Text to speech in parallel: FastSpeech makes the spectrogram of a text in one go."""
