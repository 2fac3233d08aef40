"""From nothing to a report with sound in minutes on a CPU: make a corpus, train, evaluate, say a sentence; where
training begins with given weights, say it with them first.

./dlx quickstart Tacotron2                                                  150 sentences of flite-speech
./dlx quickstart Tacotron2 -- --max_steps 4                                 a short look
./dlx quickstart Tacotron2 -- --init_from runs/flite --voices "[slt]"       teach your voice to speak as another
"""

from __future__ import annotations

import sys
from pathlib import Path

from dlx import config as configs

from . import evaluate, infer, train
from .data import Split
from .options import CONFIGS
from .recipe import TrainConfig

SENTENCE = "This voice has been trained for a few minutes only."
VOCODER = "griffin-lim"


def say(checkpoint: str, folder: Path, device: str) -> None:
    infer.main(
        ["--checkpoint", checkpoint, "--text", SENTENCE, "--vocoder", VOCODER, "--limit", "300"]
        + ["--output_dir", str(folder), "--device", device]
    )


def main(args: list[str] | None = None) -> None:
    arguments = ["--config", "quickstart", *(sys.argv[1:] if args is None else args)]
    config = configs.parse(TrainConfig, arguments, configs_dir=CONFIGS, prog="quickstart")
    output = Path(config.output_dir)
    steps = ["data", "train", "evaluate the best checkpoint", "say a sentence"]
    if config.init_from:
        steps.insert(0, f"say a sentence with {config.init_from}")
    titles = (f"{number}/{len(steps)}  {step}" for number, step in enumerate(steps, 1))
    print(next(titles))
    if config.init_from:
        say(config.init_from, output / "before", config.device)
        print(next(titles))
    splits = config.open()
    if not isinstance(splits.get("val"), Split):
        raise ValueError(f"quickstart needs utterances to evaluate; {config.data} has none")
    print(next(titles))
    train.run(config)
    print(next(titles))
    source = ["--data", config.data, "--utterances", str(config.utterances), "--max_seconds", str(config.max_seconds)]
    source += ["--voices", f"[{', '.join(config.voices)}]"]
    if config.train_list:
        source = ["--train_list", config.train_list, "--val_list", config.val_list]
    result = evaluate.main(
        ["--checkpoint", str(output), "--output_dir", str(output / "evaluate"), "--device", config.device]
        + ["--batch_size", str(config.batch_size), *source]
    )
    print(next(titles))
    say(str(output), output / "infer", config.device)
    print(
        f"\n{config.arch} on {config.data}: loss {result['loss']:.3f}, attention's focus {result['focus']:.2f} on "
        f"utterances never trained on.\nSound: {output / 'infer'}\nReport, with recordings to compare: "
        f"{output / 'report.html'}"
    )


if __name__ == "__main__":
    main()
