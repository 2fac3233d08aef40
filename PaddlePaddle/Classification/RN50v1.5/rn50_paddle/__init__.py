"""ResNet v1.5 in PaddlePaddle: training, 2:4 sparsity, int8, deployment. Importing this imports nothing else."""

import warnings

# Of every import of Paddle, about compiling extensions; and of every norm in training, which does as ever.
warnings.filterwarnings("ignore", message="No ccache found")
warnings.filterwarnings("ignore", message="When training, we now always track global mean and variance")
