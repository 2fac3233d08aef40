from apex.submodules import give_submodules
from fusedops.ops.multi_tensor import clip_grad_norm_

__all__ = ["clip_grad_norm_"]

give_submodules(__name__)
