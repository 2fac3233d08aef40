"""Speech recognition the Kaldi way: HMM acoustic models, weighted finite-state graphs, decoding.

Importing this package imports nothing heavy. Arrays: features (T, D) float32 with T frames of 10 ms; log likelihoods
(T, P) with P pdfs; alignments are (T,) int32 transition ids, counted from 1 as in Kaldi.
"""
