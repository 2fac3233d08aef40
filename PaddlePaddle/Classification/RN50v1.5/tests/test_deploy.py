"""Export, predictor, inference on pictures, evaluation, benchmark, quickstart."""

from __future__ import annotations

import json
import time

import numpy as np
import paddle
import pytest
from PIL import Image

from dlx import record
from rn50_paddle import (
    benchmark,
    checkpoint,
    evaluate,
    export,
    fold,
    infer,
    predictor,
    prepare,
    pretrained,
    quantize,
    quickstart,
    train,
)  # fmt: skip

SMALL = ["--data", "synthetic", "--num_classes", "4", "--num_samples", "64", "--batch_size", "16"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """What the quickstart makes of little."""
    folder = tmp_path_factory.mktemp("run")
    quickstart.main([*SMALL, "--output_dir", str(folder)])
    return folder


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    differences = export.main(["--checkpoint", str(run), "--output_dir", str(folder)])
    return folder, differences


def test_the_quickstart_goes_all_the_way(run):
    assert "val.top1" in (run / "report.html").read_text()
    assert json.loads((run / "infer/predictions.json").read_text())[0]["top"][0]["class"].startswith("class_")
    assert record.load(run / "evaluate").fields["verb"] == "evaluate"


def test_exports_compute_what_the_model_does(run, exported):
    folder, differences = exported
    assert differences.keys() == {"paddle", "onnx"} and max(differences.values()) < 1e-4
    found = pretrained.load(run)
    images = np.random.default_rng(3).normal(size=(5, 3, 28, 28)).astype(np.float32)
    with paddle.no_grad():
        expected = found.model(paddle.to_tensor(images)).numpy()
    for engine in ("paddle", "onednn"):
        run_engine = predictor.Predictor(folder / "paddle", engine)
        for batch in (5, 2):
            np.testing.assert_allclose(run_engine(images[:batch]), expected[:batch], rtol=1e-3, atol=1e-4)
    assert run_engine.classes == found.classes and run_engine.preprocessing == found.preprocessing


def test_a_model_that_is_nhwc_inside_is_exported_and_measured(tmp_path):
    """As the recipe resnet50 trains it; neither oneDNN nor paddle2onnx take the layout."""
    arguments = [*SMALL, "--arch", "resnet8_small", "--data_layout", "NHWC", "--max_steps", "1"]
    train.main([*arguments, "--output_dir", str(tmp_path / "run")])
    differences = export.main(["--checkpoint", str(tmp_path / "run"), "--output_dir", str(tmp_path / "out")])
    assert differences.keys() == {"paddle", "onnx"} and max(differences.values()) < 1e-4
    quantize.main([
        *SMALL, "--checkpoint", str(tmp_path / "run"), "--calibration_batches", "1", "--steps", "0",
        "--output_dir", str(tmp_path / "int8"),
    ])  # fmt: skip
    assert (tmp_path / "int8/model_int8.onnx").is_file()
    rows = benchmark.main([
        "--checkpoint", str(tmp_path / "run"), "--batch_sizes", "[1]", "--warmup", "1", "--iterations", "2",
        "--engines", "[eager]", "--output", str(tmp_path / "bench.json"),
    ])  # fmt: skip
    assert len(rows) == 1
    with pytest.raises(ValueError, match="mode training measures fresh weights"):
        benchmark.main(["--mode", "training", "--checkpoint", str(tmp_path / "run"), "--output", "unused.json"])


def test_an_export_with_other_numbers_is_refused(run, tmp_path, monkeypatch):
    original = fold.fold

    def wrong(*arguments):
        model = original(*arguments)
        model.fc.bias.set_value(model.fc.bias + 0.01)
        return model

    monkeypatch.setattr(export.fold, "fold", wrong)
    for kind in ("paddle", "onnx"):
        with pytest.raises(ValueError, match="differ from the model's"):
            export.main(["--checkpoint", str(run), "--output_dir", str(tmp_path), "--formats", kind])
    assert list(tmp_path.iterdir()) == []


def test_pictures_get_the_same_classes_from_checkpoint_and_export(run, exported, tmp_path):
    generator = np.random.default_rng(0)
    (tmp_path / "pictures").mkdir()
    for number in range(3):
        pixels = generator.integers(0, 256, (40, 50, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / "pictures" / f"{number}.png")
    arguments = ["--image", str(tmp_path / "pictures"), "--output_dir", str(tmp_path / "out"), "--topk", "2"]
    first = infer.main(["--checkpoint", str(run), *arguments])
    second = infer.main(["--exported", str(exported[0] / "paddle"), *arguments])
    assert len(first) == 3 and all(len(row["top"]) == 2 for row in first)
    for one, two in zip(first, second, strict=True):
        assert [item["class"] for item in one["top"]] == [item["class"] for item in two["top"]]
        assert abs(one["top"][0]["probability"] - two["top"][0]["probability"]) < 1e-4


def test_preprocessing_of_training_and_inference_agree(run):
    found = pretrained.load(run)
    pixels = np.random.default_rng(1).integers(0, 256, (28, 28, 3), np.uint8)
    one = pretrained.normalised_array([Image.fromarray(pixels)], found.preprocessing)
    two = pretrained.normalise(paddle.to_tensor(pixels.transpose(2, 0, 1)[None]), found.preprocessing).numpy()
    np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)
    mean, std = np.array(found.preprocessing.mean), np.array(found.preprocessing.std)
    np.testing.assert_allclose(one[0], ((pixels / 255 - mean) / std).transpose(2, 0, 1), rtol=1e-4, atol=1e-5)


def test_engines_that_need_a_gpu_say_so(exported, tmp_path):
    if paddle.is_compiled_with_cuda():
        pytest.skip("this Paddle has CUDA; the test is about the build for CPUs")
    with pytest.raises(ValueError, match="tensorrt needs a GPU build"):
        predictor.Predictor(exported[0] / "paddle", "tensorrt")
    with pytest.raises(ValueError, match="classifier.json is missing"):
        predictor.Predictor(tmp_path)
    with pytest.raises(SystemExit):
        infer.main(["--image", "x.png"])


def test_accuracy_and_loss_against_brute_force():
    generator = np.random.default_rng(0)
    logits, labels = generator.normal(size=(50, 7)), generator.integers(0, 7, 50)
    logits[3] = 0.0  # all alike: the first class is the answer
    labels[7] = -1
    found = evaluate.evaluate(lambda rows: rows, [(logits[:20], labels[:20]), (logits[20:], labels[20:])], 7)
    counted = [row for row in range(50) if labels[row] >= 0]
    order = np.argsort(-logits, axis=1, kind="stable")
    losses = [-np.log(np.exp(logits[row])[labels[row]] / np.exp(logits[row]).sum()) for row in counted]
    assert found["samples"] == 49 and abs(found["loss"] - np.mean(losses)) < 1e-12
    assert found["top1"] == pytest.approx(100 * np.mean([order[row, 0] == labels[row] for row in counted]))
    assert found["top5"] == pytest.approx(100 * np.mean([labels[row] in order[row, :5] for row in counted]))
    matrix = np.zeros((7, 7), int)
    for row in counted:
        matrix[labels[row], order[row, 0]] += 1
    assert found["confusion"] == matrix.tolist()


def test_other_classes_are_refused(run):
    with pytest.raises(ValueError, match="the model knows 4 classes"):
        evaluate.main(["--checkpoint", str(run), "--data", "fashion-mnist"])
    with pytest.raises(checkpoint.CheckpointError, match="neither a checkpoint nor"):
        evaluate.main(["--checkpoint", str(run / "samples")])


def test_the_benchmark_measures(run, tmp_path):
    output = tmp_path / "benchmark.json"
    common = ["--warmup", "1", "--iterations", "3", "--output", str(output)]
    rows = benchmark.main(["--checkpoint", str(run), "--batch_sizes", "[1, 4]", *common])
    assert [(row["batch"], row["engine"]) for row in rows] == [
        (batch, engine) for batch in (1, 4) for engine in ("eager", "onednn", "onnxruntime")
    ]
    for row in rows:
        assert 0 < row["p50_ms"] <= row["p90_ms"] <= row["p95_ms"] <= row["p99_ms"] and row["unit"] == "images/s"
        assert row["throughput"] == pytest.approx(row["batch"] * 3 / row["seconds"])
    assert record.load(output).fields["attachments"]["rows"] == rows
    (row,) = benchmark.main(
        ["--mode", "training", "--arch", "resnet8_small", "--image_size", "28", "--batch_sizes", "[4]", *common]
    )
    assert row["throughput"] > 0


def test_prepare_counts_pictures(tmp_path):
    for split in ("train", "val"):
        (tmp_path / split / "cat").mkdir(parents=True)
        Image.new("RGB", (9, 9)).save(tmp_path / split / "cat" / "a.png")
    assert prepare.main(["--data_dir", str(tmp_path)]) == {"train": 1, "val": 1}


@pytest.mark.slow
def test_the_whole_quickstart_reaches_89_5_percent_in_five_minutes(tmp_path):
    begin = time.monotonic()
    assert quickstart.main(["--output_dir", str(tmp_path)]) >= 89.5
    assert time.monotonic() - begin < 300
