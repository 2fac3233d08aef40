from fusedops.sparsity import ASP, create_mask

__all__ = ["ASP", "create_mask"]
