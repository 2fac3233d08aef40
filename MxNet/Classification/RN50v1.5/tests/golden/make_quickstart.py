"""Write quickstart.json: the first 20 losses of the quick start.   python make_quickstart.py"""

import json
import tempfile
from pathlib import Path

from dlx import record
from dlx.files import atomic_write
from rn50_mxnet import train

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        words = ["--config", "quickstart", "--mode", "train", "--max_steps", "20", "--log_every", "1"]
        train.main([*words, "--output_dir", folder])
        curve = record.load(folder).fields["curve"]["train.loss"]
    path = Path(__file__).with_name("quickstart.json")
    atomic_write(path, json.dumps({"losses": [loss for _, loss in curve]}, indent=1) + "\n")
