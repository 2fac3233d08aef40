"""Measurements of fusedops against its peers; one module per family of operators. `dlx run FusedOps benchmark`."""
