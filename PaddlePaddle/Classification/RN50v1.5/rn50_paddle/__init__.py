"""ResNet v1.5 in PaddlePaddle: training, 2:4 sparsity, int8, deployment. Importing this imports nothing else."""
