"""dlx: the code that the tasks of this repository share. Importing it imports nothing else."""

__version__ = "0.1.0"
