"""FastSpeech as TensorRT engines: the network layer by layer, two plugins on the kernels of csrc/, engines kept."""
