"""dlx in the environments of other frameworks, which have no torch: what they use imports and works."""

import subprocess
import sys

# The modules that need torch by nature (training, optim, checkpoint, boxes, ...) are not here.
MODULES = (
    "archive batcher bench cli coco cocoeval config configfile container data draws entry env export fetch files idx "
    "names paths picture_files readme record report rle runlog scene_sets scenes serve stores system task testrun "
    "vendor vision weights"
).split()
WITHOUT = "import sys; sys.modules['torch'] = sys.modules['safetensors.torch'] = None\n"


def run(code):
    return subprocess.run([sys.executable, "-c", WITHOUT + code], capture_output=True, text=True)


def test_without_it_torch_is_missing():
    assert "import of torch halted" in run("import dlx.boxes").stderr


def test_modules_import():
    """All in one process; one's failure does not hide another's."""
    code = f"""
import importlib
for name in {MODULES}:
    try:
        importlib.import_module(f"dlx.{{name}}")
    except ImportError as error:
        print(name, error)
"""
    done = run(code)
    assert (done.stdout, done.returncode) == ("", 0), done.stderr


def test_a_run_is_logged_recorded_measured_and_reported(tmp_path):
    code = f"""
from dlx import bench, report
from dlx.record import Record
from dlx.runlog import RunLog

log = RunLog({str(tmp_path)!r}, tensorboard=True)
log.log((0, 1), {{"train.loss": 2.0}})
log.close()
record = Record.start("A/B", "train", {{}})
record.curve("train.loss", 1, 2.0)
record.metric("speed", bench.measure(lambda: None, warmup=1, iterations=2).throughput, "items/s")
record.finish().save({str(tmp_path)!r})
print(report.render({str(tmp_path)!r}))
"""
    done = run(code)
    assert done.returncode == 0, done.stderr
    assert "train.loss" in (tmp_path / "report.html").read_text() and list((tmp_path / "tb").iterdir())
