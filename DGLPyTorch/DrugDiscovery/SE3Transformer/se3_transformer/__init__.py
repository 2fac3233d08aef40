"""SE(3)-Transformer for molecules: equivariant attention on graphs with 3-D coordinates."""
