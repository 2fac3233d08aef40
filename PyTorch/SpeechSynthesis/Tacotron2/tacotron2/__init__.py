"""Text to speech: Tacotron 2 makes spectrograms of text, WaveGlow makes sound of spectrograms."""
