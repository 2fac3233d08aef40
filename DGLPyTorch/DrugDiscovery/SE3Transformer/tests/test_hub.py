"""torch.hub entries: fresh weights without network or files, published ones that predict, a run's folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dlx import testing
from se3_transformer import hub
from se3_transformer.chemistry import from_smiles

ROOT = Path(__file__).resolve().parents[4]


def test_fresh_weights_need_nothing(tmp_path):
    with testing.offline(tmp_path):
        model = hub.se3_transformer(num_targets=2, num_layers=2, num_degrees=2, num_channels=8, num_heads=2)
    assert model.training and model.state_dict()
    with pytest.raises(ValueError, match="unknown model options: depth"):
        hub.se3_transformer(depth=3)
    for options, message in (
        ({"num_degrees": 9}, "num_degrees must be .* at most 7"),
        ({"num_targets": 0}, "num_targets"),
    ):
        with pytest.raises(ValueError, match=message):
            hub.se3_transformer(**options)


def test_the_published_model_predicts():
    predictor = hub.se3_transformer_predictor()
    found = predictor.smiles(["CCO", "c1ccccc1"])
    assert found.shape == (2, 1) and predictor.targets[0].unit == "eV" and not predictor.model.training
    assert np.allclose(found, predictor.predict([from_smiles("CCO"), from_smiles("c1ccccc1")]))
    assert np.allclose(found[:, 0], [-7.0, -6.7], atol=0.4)  # QM9 has -7.04 and -6.70, at geometries of its own
    assert np.array_equal(predictor.smiles("CCO"), found[:1])
    with pytest.raises(ValueError, match="not a valid SMILES"):
        predictor.smiles(["C1CC"])
    with pytest.raises(ValueError, match="nowhere"):
        hub.se3_transformer_predictor("nowhere")


@pytest.mark.skipif(not (ROOT / "hubconf.py").is_file(), reason="needs hubconf.py")
def test_torch_hub_calls_them(tmp_path):
    code = (
        "import sys, torch\n"
        f"model = torch.hub.load({str(ROOT)!r}, 'se3_transformer', source='local', num_layers=1, num_channels=16)\n"
        "assert 'convnets' not in sys.modules\n"
        "print(sum(p.numel() for p in model.parameters()))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) > 1000 and not list(tmp_path.iterdir())


@pytest.mark.skipif(
    not (ROOT / "docs" / "hub.md").is_file() or not (ROOT / "hubconf.py").is_file(),
    reason="needs the whole repository (docs/hub.md, hubconf.py)",
)
def test_the_documented_snippet_runs(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "hub.md").read_text(), re.DOTALL)
    code = next(block for block in blocks if "se3_transformer" in block).replace("path/to/this/clone", str(ROOT))
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.match(r"CCO: homo -[67]\.\d\d eV\nc1ccccc1: homo -[67]", done.stdout)
