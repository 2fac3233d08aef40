"""From nothing to a report with sound in minutes on a CPU: make a corpus, train, evaluate, say a sentence.

./dlx quickstart Tacotron2                              150 sentences of flite-speech
./dlx quickstart Tacotron2 -- --max_steps 4             a short look
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


def main(args: list[str] | None = None) -> None:
    arguments = ["--config", "quickstart", *(sys.argv[1:] if args is None else args)]
    config = configs.parse(TrainConfig, arguments, configs_dir=CONFIGS, prog="quickstart")
    print("1/4  data")
    splits = config.open()
    if not isinstance(splits.get("val"), Split):
        raise ValueError(f"quickstart needs utterances to evaluate; {config.data} has none")
    print("2/4  train")
    train.run(config)
    print("3/4  evaluate the best checkpoint")
    output = Path(config.output_dir)
    source = ["--data", config.data, "--utterances", str(config.utterances), "--max_seconds", str(config.max_seconds)]
    if config.train_list:
        source = ["--train_list", config.train_list, "--val_list", config.val_list]
    result = evaluate.main(
        ["--checkpoint", str(output), "--output_dir", str(output / "evaluate"), "--device", config.device]
        + ["--batch_size", str(config.batch_size), *source]
    )
    print("4/4  say a sentence")
    infer.main(
        ["--checkpoint", str(output), "--text", SENTENCE, "--vocoder", "griffin-lim", "--limit", "300"]
        + ["--output_dir", str(output / "infer"), "--device", config.device]
    )
    print(
        f"\n{config.arch} on {config.data}: loss {result['loss']:.3f}, attention's focus {result['focus']:.2f} on "
        f"utterances never trained on.\nSound: {output / 'infer'}\nReport, with recordings to compare: "
        f"{output / 'report.html'}"
    )


if __name__ == "__main__":
    main()
