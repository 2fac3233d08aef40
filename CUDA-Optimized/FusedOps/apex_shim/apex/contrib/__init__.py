"""The parts of apex.contrib that fusedops has; each is imported by itself."""
