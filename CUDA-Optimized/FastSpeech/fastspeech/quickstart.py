"""From nothing to a report with sound in minutes on a CPU: make a corpus, train, evaluate, say a sentence.

./dlx quickstart FastSpeech                              200 sentences of flite-speech
./dlx quickstart FastSpeech -- --max_steps 4             a short look
"""

from __future__ import annotations

import sys
from pathlib import Path

from dlx import config as configs

from . import evaluate, infer, train
from .data import TimedSplit
from .options import CONFIGS
from .recipe import TrainConfig

SENTENCE = "This voice has been trained for a few minutes only."


def main(args: list[str] | None = None) -> None:
    arguments = ["--config", "quickstart", *(sys.argv[1:] if args is None else args)]
    config = configs.parse(TrainConfig, arguments, configs_dir=CONFIGS, prog="quickstart")
    print("1/4  data and the durations of its symbols")
    if not isinstance(config.open_timed().get("val"), TimedSplit):
        raise ValueError(f"quickstart needs utterances to evaluate; {config.data} has none")
    print("2/4  train")
    train.run(config)
    print("3/4  evaluate the best checkpoint")
    output = Path(config.output_dir)
    names = ("data", "utterances", "max_seconds", "batch_size", "durations", "device")
    options = [word for name in names for word in (f"--{name}", str(getattr(config, name)))]
    if config.train_list:
        options = [*options[2:], "--train_list", config.train_list, "--val_list", config.val_list]
    result = evaluate.main(["--checkpoint", str(output), "--output_dir", str(output / "evaluate"), *options])
    print("4/4  say a sentence")
    infer.main(
        ["--checkpoint", str(output), "--text", SENTENCE, "--vocoder", "griffin-lim"]
        + ["--output_dir", str(output / "infer"), "--device", config.device]
    )
    print(
        f"\n{config.arch} on {config.data}: loss {result['loss']:.3f}, lengths off by {result['length_percent']:.1f} % "
        f"on utterances never trained on.\nSound: {output / 'infer'}\nReport, with recordings to compare: "
        f"{output / 'report.html'}"
    )


if __name__ == "__main__":
    main()
