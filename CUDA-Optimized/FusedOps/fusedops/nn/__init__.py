"""Modules around the operators, with the parameter names of torch.nn where it has the module."""
