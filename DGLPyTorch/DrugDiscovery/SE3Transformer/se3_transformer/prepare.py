"""Get QM9 ready: fetch its tables (104 MB), perceive the bonds, keep flat arrays, and say what is there.

./dlx run SE3Transformer prepare
./dlx run SE3Transformer prepare -- --data_dir /data/qm9        from tables that you have
"""

from __future__ import annotations

from typing import Any

from dlx import config as configs

from . import qm9
from .options import CONFIGS, DataOptions


def main(args: list[str] | None = None) -> dict[str, Any]:
    config = configs.parse(DataOptions, args, configs_dir=CONFIGS, prog="prepare")
    splits = config.open()
    for name, molecules in splits.items():
        atoms, edges = (molecules.arrays[kind].mean() for kind in ("atoms", "edges"))
        print(f"{name:5s}: {len(molecules):,} molecules, {atoms:.1f} atoms and {edges:.1f} directed bonds each")
    scale = config.scale(splits["train"])
    print(f"{scale.name} over the training split: mean {scale.mean:.4g}, deviation {scale.std:.4g} {scale.unit}")
    print(f"ready: {qm9.folder()}")
    return {"splits": {name: len(molecules) for name, molecules in splits.items()}, "scale": scale.to_json()}


if __name__ == "__main__":
    main()
