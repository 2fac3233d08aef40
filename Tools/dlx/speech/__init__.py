"""What speech tasks share: text and symbols, mel spectrograms, sound files, corpora, vocoders.

Importing this package imports nothing heavy; `text`, `numbers`, `rules`, `transliteration` and `symbols` need the
standard library only, `audio`, `corpora`, `flite` and `overview` numpy and soundfile, `mel` and `vocoder` torch.
"""
