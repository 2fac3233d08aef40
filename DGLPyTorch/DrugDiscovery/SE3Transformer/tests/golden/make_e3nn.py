"""Write e3nn.json with e3nn's coefficients and harmonics, where e3nn is installed: python tests/golden/make_e3nn.py"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import e3nn
import torch
from e3nn import o3

VECTORS = [[0.3, -1.2, 0.5], [2.0, 0.1, -0.4], [-0.7, -0.7, 1.9]]


def main() -> None:
    coefficients = {}
    for l1, l2, l3 in itertools.product(range(7), range(4), range(4)):
        if abs(l2 - l3) <= l1 <= l2 + l3:
            coefficients[f"{l1},{l2},{l3}"] = o3.wigner_3j(l1, l2, l3, dtype=torch.float64).tolist()
    vectors = torch.tensor(VECTORS, dtype=torch.float64)
    harmonics = {
        str(degree): o3.spherical_harmonics(degree, vectors, normalize=True, normalization="integral").tolist()
        for degree in range(7)
    }
    content = {"e3nn": e3nn.__version__, "vectors": VECTORS, "wigner_3j": coefficients, "harmonics": harmonics}
    Path(__file__).with_name("e3nn.json").write_text(json.dumps(content) + "\n")


if __name__ == "__main__":
    main()
