"""What a voice looks at while it reads: the attention of every utterance, for models that must be told durations.

    python -m tacotron2.align --checkpoint runs/flite --config flite --output_dir attention

Writes `<id>.npy` for each, float32 (frames, symbols), with the true frames given to the decoder.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from dlx import config as configs
from dlx import dist
from dlx.files import atomic_path

from . import pretrained
from .data import Split
from .options import CONFIGS, DataOptions


@dataclass
class AlignConfig(DataOptions):
    """Write the attention of a voice over all utterances of the data."""

    checkpoint: str = configs.field(help="the voice: a run's folder, a checkpoint, a file or a published name")
    output_dir: str = configs.field("attention", help="where the arrays go")


@torch.no_grad()
def align(found: pretrained.Found, config: AlignConfig, folder: Path, world: dist.World) -> int:
    """The arrays of every split in ``folder``; how many. The voice must read the data's symbols (ValueError)."""
    found.front_end.require_same(config.front_end())
    count = 0
    with torch.random.fork_rng([world.device] if world.device.type == "cuda" else []):
        torch.manual_seed(config.seed)  # of the prenet's dropout, which is never off
        splits = {name: split for name, split in config.open().items() if isinstance(split, Split)}
        for name, split in splits.items():
            loader = config.loader(name, splits, False, world)
            order = loader.plan.batches(0)
            for batch, indices in zip(loader, order, strict=True):
                said = found.model(batch.text, batch.text_lengths, batch.mel, batch.mel_lengths)
                attention = said.alignments.float().cpu().numpy()
                for row, index in enumerate(indices[indices >= 0]):
                    weights = attention[row, : split.frames[index], : len(split.text[index])]
                    with atomic_path(folder / f"{split.utterances[index].id}.npy") as temporary:
                        with open(temporary, "wb") as stream:
                            np.save(stream, weights, allow_pickle=False)
                    count += 1
    return count


def main(args: list[str] | None = None) -> int:
    config = configs.parse(AlignConfig, args, configs_dir=CONFIGS, prog="align")
    folder = Path(config.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    with dist.init(config.device) as world:
        world.require_alone("align")
        count = align(pretrained.load_voice(config.checkpoint, device=world.device), config, folder, world)
    print(f"{count} utterances; {folder}")
    return count


if __name__ == "__main__":
    main()
