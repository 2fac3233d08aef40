"""Operators as functions. Each module holds one family: its plain form, its kernels' launchers, its derivative."""
