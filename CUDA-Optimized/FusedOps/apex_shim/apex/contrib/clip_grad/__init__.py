from fusedops.ops.multi_tensor import clip_grad_norm_

__all__ = ["clip_grad_norm_"]
