"""FastSpeech on CUDA kernels (csrc/): built when first needed, bound to PyTorch and, without PyTorch, to PyCUDA."""
