"""Evaluate, infer, export and serve with a detector that knows two shapes, from its checkpoint on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image, ImageDraw
from safetensors.torch import save_file
from torch import nn

from dlx import checkpoint as checkpoints
from dlx import coco
from dlx import export as exports
from dlx import record as records
from dlx.boxes import Kept
from dlx.files import sha256
from dlx.serve import OnnxModel
from ssd import anchors, drawing, evaluate, export, infer, pretrained, registry, serve
from ssd.loss import MultiboxLoss

ARCH, CLASSES, CATEGORY_IDS = "ssd300_compact", ["square", "disc"], [5, 17]
# Corners in pixels of a picture of 640 x 480, and the label.
SQUARE, DISC = (64, 96, 320, 288, 1), (360, 200, 560, 400, 2)
SCENES = [[SQUARE], [DISC], [SQUARE, DISC]]


def scene(objects: list[tuple]) -> Image.Image:
    image = Image.new("RGB", (640, 480), (40, 60, 90))
    pen = ImageDraw.Draw(image)
    for left, top, right, bottom, label in objects:
        shape, colour = (pen.rectangle, (230, 40, 40)) if label == 1 else (pen.ellipse, (240, 220, 60))
        shape((left, top, right - 1, bottom - 1), fill=colour)
    return image


@pytest.fixture(scope="module")
def found() -> pretrained.Detector:
    """Seven seconds of training on the three scenes."""
    torch.manual_seed(0)
    preprocessing = pretrained.Preprocessing()
    images = torch.stack([preprocessing(scene(objects)) for objects in SCENES])
    images = images.contiguous(memory_format=torch.channels_last)
    boxes, labels = torch.zeros(3, 2, 4), torch.zeros(3, 2, dtype=torch.int64)
    for row, objects in enumerate(SCENES):
        for column, entry in enumerate(objects):
            boxes[row, column] = torch.tensor(entry[:4]) / torch.tensor([640, 480, 640, 480])
            labels[row, column] = entry[4]
    model = registry.build(ARCH, 2).to(memory_format=torch.channels_last)
    with torch.no_grad():
        for head in model.heads:  # a few steps could not teach it that nearly everything is background
            head.parts(head.bias)[1][:, 0] = 4.0
    loss_of = MultiboxLoss(anchors.default_boxes(300))
    optimizer = torch.optim.Adam(model.parameters(), 5e-4)
    for _ in range(25):
        loss = loss_of(model(images), boxes, labels).total
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_running_stats()
            module.momentum = None
    with torch.no_grad():
        model(images)
    return pretrained.Detector(model.eval(), ARCH, CLASSES, CATEGORY_IDS, preprocessing, "test")


@pytest.fixture(scope="module")
def run_folder(found, tmp_path_factory) -> Path:
    """A run with one checkpoint, whose averaged weights are the good ones."""
    folder = tmp_path_factory.mktemp("run")
    store = checkpoints.Checkpoints(folder / "checkpoints")
    fresh = registry.build(ARCH, 2).state_dict()
    store.save(1, model={"model": fresh, "ema": found.model.state_dict()}, metadata=found.describe())
    return folder


@pytest.fixture(scope="module")
def data_folder(tmp_path_factory) -> Path:
    """Seven pictures in COCO's layout: neither two processes nor a batch of three divide them. One holds nothing."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "val").mkdir()
    images, entries = [], []
    for index, objects in enumerate([*SCENES, [], *SCENES]):
        scene(objects).save(folder / "val" / f"{index}.png")
        images.append({"id": 100 + index, "file_name": f"{index}.png", "width": 640, "height": 480})
        for left, top, right, bottom, label in objects:
            box = [left, top, right - left, bottom - top]
            entries.append(
                {
                    "id": len(entries) + 1,
                    "image_id": 100 + index,
                    "category_id": CATEGORY_IDS[label - 1],
                    "bbox": box,
                    "area": box[2] * box[3],
                    "iscrowd": 0,
                }
            )
    categories = [{"id": number, "name": name} for number, name in zip(CATEGORY_IDS, CLASSES, strict=True)]
    (folder / "annotations").mkdir()
    coco.write(folder / "annotations" / "instances_val.json", images=images, annotations=entries, categories=categories)
    return folder


# ------------------------------------------------------------------------------------------- infer


def detect(run_folder: Path, image: Path, output: Path, *more: str) -> dict:
    arguments = ["--checkpoint", str(run_folder), "--image", str(image), "--output_dir", str(output), "--device", "cpu"]
    return infer.main([*arguments, *more])


def overlap(box: list[float], entry: tuple) -> float:
    width = min(box[2], entry[2]) - max(box[0], entry[0])
    height = min(box[3], entry[3]) - max(box[1], entry[1])
    both = max(width, 0) * max(height, 0)
    return both / ((box[2] - box[0]) * (box[3] - box[1]) + (entry[2] - entry[0]) * (entry[3] - entry[1]) - both)


def test_infer_a_folder_of_frames(run_folder, tmp_path, capsys):
    """In the order of their numbers; boxes in original pixels; category ids of the data; batches of any size."""
    frames = tmp_path / "frames"
    frames.mkdir()
    for number, objects in zip((1, 2, 10), SCENES, strict=True):
        scene(objects).save(frames / f"frame_{number}.png")
    content = detect(run_folder, frames, tmp_path / "out", "--batch_size", "2")
    assert [Path(entry["image"]).name for entry in content["pictures"]] == [f"frame_{n}.png" for n in (1, 2, 10)]
    for entry, objects in zip(content["pictures"], SCENES, strict=True):
        assert (entry["width"], entry["height"]) == (640, 480)
        assert len(entry["detections"]) == len(objects)
        for wanted in objects:
            same = [d for d in entry["detections"] if d["category_id"] == CATEGORY_IDS[wanted[4] - 1]]
            assert len(same) == 1 and same[0]["category"] == CLASSES[wanted[4] - 1] and same[0]["score"] > 0.4
            assert overlap(same[0]["box"], wanted) > 0.75
        with Image.open(entry["annotated"]) as drawn:
            assert drawn.size == (640, 480)
    assert json.loads((tmp_path / "out" / "detections.json").read_text()) == content
    assert "3 pictures, 0 skipped" in capsys.readouterr().out
    alone = detect(run_folder, frames / "frame_10.png", tmp_path / "alone")
    for one, two in zip(alone["pictures"][0]["detections"], content["pictures"][2]["detections"], strict=True):
        assert one["category"] == two["category"] and one["score"] == pytest.approx(two["score"], abs=2e-4)
        np.testing.assert_allclose(one["box"], two["box"], atol=0.1)


def test_infer_finds_nothing(run_folder, tmp_path):
    """User case O09: drawing and JSON accept it."""
    Image.new("RGB", (50, 30), (40, 60, 90)).save(tmp_path / "empty.png")
    content = detect(run_folder, tmp_path / "empty.png", tmp_path / "out")
    assert content["pictures"][0]["detections"] == []
    assert (tmp_path / "out" / "empty.png").is_file()


def test_infer_bad_files(run_folder, tmp_path, capsys):
    """User case O13: strict and tolerant."""
    folder = tmp_path / "in"
    folder.mkdir()
    scene([DISC]).save(folder / "a.png")
    (folder / "b.png").write_bytes((folder / "a.png").read_bytes()[:500])
    with pytest.raises(ValueError, match=r"b\.png: unreadable"):
        detect(run_folder, folder, tmp_path / "strict")
    content = detect(run_folder, folder, tmp_path / "out", "--tolerant", "true")
    assert len(content["pictures"]) == 1 and content["skipped"][0][0].endswith("b.png")
    captured = capsys.readouterr()
    assert "1 skipped" in captured.out and "b.png" in captured.err
    (folder / "a.png").unlink()
    with pytest.raises(ValueError, match="not one of 1 pictures could be read"):
        detect(run_folder, folder, tmp_path / "out", "--tolerant", "true")
    with pytest.raises(ValueError, match="nowhere: there is no such picture"):
        detect(run_folder, tmp_path / "nowhere", tmp_path / "out")


def test_low_precision_finds_the_same(found):
    pictures = [scene(objects) for objects in SCENES]
    exact = infer.Predictor(found, threshold=0.4)(pictures)
    rough = infer.Predictor(found, dtype=torch.bfloat16, threshold=0.4)(pictures)
    for one, two in zip(exact, rough, strict=True):
        assert one["labels"].tolist() == two["labels"].tolist()
        np.testing.assert_allclose(one["boxes"], two["boxes"], atol=8)


def test_drawing(tmp_path):
    """The box lies where it should, in its class's colour; captions stay inside; nothing to draw changes nothing."""
    image = Image.new("RGB", (640, 480), "grey")
    boxes = np.array([[100, 50, 300, 250], [600, 0, 640, 20], [0, 470, 30, 480]], np.float32)
    drawn = drawing.draw(image, boxes, [1, 2, 3], ["first 90%", "second with a long name 80%", "third 70%"])
    assert drawn.size == image.size and drawn.getpixel((100, 150)) == drawing.class_colour(0)
    assert drawn.getpixel((299, 150)) == drawing.class_colour(0) and drawn.getpixel((200, 150)) == (128, 128, 128)
    assert np.array_equal(drawing.draw(image, boxes[:0], [], []), np.asarray(image))
    small = drawing.draw(image.resize((64, 48)), boxes[:1] / 10, [1], ["first"])
    assert max(small.size) == drawing.SMALLEST
    assert max(drawing.draw(image.resize((4000, 30)), boxes[:0], [], []).size) == drawing.LARGEST
    colours = [drawing.class_colour(index) for index in range(20)]
    assert len(set(colours)) == 20
    with pytest.raises(ValueError, match="3 boxes, 1 labels and 1 captions"):
        drawing.draw(image, boxes, [1], ["a"])


# ------------------------------------------------------------------------------------------- evaluate


def evaluation_arguments(run_folder: Path, data_folder: Path, output: Path, *more: str) -> list[str]:
    given = ["--checkpoint", run_folder, "--data_dir", data_folder, "--output_dir", output, "--device", "cpu"]
    return [*map(str, given), "--workers", "0", "--batch_size", "3", *more]


@pytest.fixture(scope="module")
def evaluated(run_folder, data_folder, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("evaluated")
    result = evaluate.main(evaluation_arguments(run_folder, data_folder, output))
    assert result["images"] == 7 and result["objects"] == 8
    assert result["map_50"] > 0.95 and 0.3 < result["map"] <= 1
    assert result["confusion"] == [[4, 0, 0], [0, 4, 0], [0, 0, 0]] and result["agreement"] == [1.0] * 7
    return output


def test_evaluation_writes_ids_of_the_data(evaluated, data_folder):
    """User case O12, and the record."""
    entries = json.loads((evaluated / "detections.json").read_text())
    assert {entry["category_id"] for entry in entries} == set(CATEGORY_IDS)
    assert {entry["image_id"] for entry in entries} <= set(range(100, 107))
    best = max((entry for entry in entries if entry["image_id"] == 100), key=lambda entry: entry["score"])
    left, top, width, height = best["bbox"]
    assert best["category_id"] == 5 and overlap([left, top, left + width, top + height], SQUARE) > 0.75
    record = records.load(evaluated)
    assert record.value("val.map_50") > 0.95 and record.value("val.images") == 7
    assert record.fields["attachments"]["model"]["category_ids"] == CATEGORY_IDS
    assert record.fields["attachments"]["confusion"]["labels"] == ["square", "disc", "nothing"]
    curve = record.fields["curve"]["all classes.precision at recall %"]
    assert len(curve) == 101 and curve[0] == [0, pytest.approx(1)]


def test_two_processes_measure_the_same(evaluated, run_folder, data_folder, tmp_path):
    program = "dlx.entry torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node 2 -m".split()
    arguments = evaluation_arguments(run_folder, data_folder, tmp_path / "two")
    done = subprocess.run(
        [sys.executable, "-m", *program, "dlx.entry", "ssd.evaluate", *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    one, two = records.load(evaluated), records.load(tmp_path / "two")
    for name, metric in one.fields["metrics"].items():
        if metric["value"] == "NaN":
            assert two.fields["metrics"][name]["value"] == "NaN"
        else:
            assert two.value(name) == pytest.approx(metric["value"], abs=1e-6), name
    entries = [json.loads((folder / "detections.json").read_text()) for folder in (evaluated, tmp_path / "two")]
    assert len(entries[0]) == len(entries[1]) > 0
    for first, second in zip(*entries, strict=True):
        assert (first["image_id"], first["category_id"]) == (second["image_id"], second["category_id"])


def test_evaluation_passes_over_unreadable_pictures(run_folder, data_folder, tmp_path):
    broken = tmp_path / "val"
    broken.mkdir()
    for path in (data_folder / "val").iterdir():
        content = path.read_bytes()
        (broken / path.name).write_bytes(content[:-200] if path.name == "0.png" else content)
    arguments = evaluation_arguments(run_folder, data_folder, tmp_path / "out")
    place = arguments.index("--data_dir")
    arguments[place : place + 2] = [
        "--val_json", str(data_folder / "annotations" / "instances_val.json"), "--val_images", str(broken)
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"0\.png"):
        evaluate.main(arguments)
    result = evaluate.main([*arguments, "--tolerant", "true"])
    assert result["images"] == 6 and result["skipped"] == 1 and result["objects"] == 7


def test_a_picture_that_comes_twice_is_an_error(found, data_folder):
    from dlx import dist

    annotations = coco.read(data_folder / "annotations" / "instances_val.json", data_folder / "val")
    batch = torch.zeros(2, 3, 300, 300, dtype=torch.uint8), torch.tensor([1, 1])
    with pytest.raises(ValueError, match=r"1\.png was evaluated twice"):
        evaluate.collect(
            found.model,
            [batch],
            annotations,
            normalize=found.preprocessing.normalize(),
            world=dist.World(0, 1, 0, 1, torch.device("cpu"), None),
        )


def test_other_classes_are_refused(found):
    with pytest.raises(ValueError, match="test knows 2 classes, the data has 3"):
        evaluate.check_classes(found, ["a", "b", "c"], "test")
    with pytest.raises(ValueError, match="test calls a class 'disc' that the data calls 'disk'"):
        evaluate.check_classes(found, ["square", "disk"], "test")


# ------------------------------------------------------------------------------------------- sources of models


def test_sources(found, run_folder, tmp_path):
    loaded = pretrained.load(run_folder)
    assert loaded.describe() == found.describe() and not loaded.model.training
    for name, value in loaded.model.state_dict().items():
        assert torch.equal(value, found.model.state_dict()[name]), name
    plain = pretrained.load(run_folder, averaged=False)
    assert not torch.equal(plain.model.heads[0].weight, found.model.heads[0].weight)
    torch.save(found.model.state_dict(), tmp_path / "bare.pt")
    with pytest.raises(ValueError, match="does not say what it is; give --arch"):
        pretrained.load(tmp_path / "bare.pt")
    bare = pretrained.load(tmp_path / "bare.pt", arch=ARCH)
    assert bare.classes == ["class_1", "class_2"] and bare.category_ids == [1, 2]
    with pytest.raises(ValueError, match="holds a ssd300_compact, not a ssd300_resnet50"):
        pretrained.load(run_folder, arch="ssd300_resnet50")
    with pytest.raises(ValueError, match="no folder, no file, and no name"):
        pretrained.load("nowhere")
    with pytest.raises(ValueError, match="no checkpoint"):
        pretrained.load(tmp_path)
    store = checkpoints.Checkpoints(tmp_path / "other")
    store.save(1, model={"model": found.model.state_dict()}, metadata={"arch": "resnet50", "classes": ["a"]})
    with pytest.raises(ValueError, match="does not say its category_ids, preprocessing"):
        pretrained.load(tmp_path / "other")


def test_published_weights(found, tmp_path, monkeypatch):
    """A card with its file beside it, in half precision as published ones are; other tasks' cards are refused."""
    (tmp_path / "weights").mkdir()
    path = tmp_path / "weights" / "compact.shapes.safetensors"
    save_file({name: value.half().contiguous() for name, value in found.model.state_dict().items()}, path)
    card = {"name": "compact.shapes", "task": "SSD", "source": {"kind": "file", "path": path.name}, "licence": "MIT"}
    card |= {"sha256": sha256(path), "size": path.stat().st_size, "credit": "us", "metric": {"map": 1.0}}
    card |= {key: value for key, value in found.describe().items() if key != "classes"}
    (tmp_path / "weights" / "compact.shapes.json").write_text(json.dumps(card | {"class_names": CLASSES}))
    monkeypatch.setenv("DLX_ROOT", str(tmp_path))
    loaded = pretrained.load("compact.shapes")
    assert loaded.describe() == found.describe() and loaded.extra["metric"] == {"map": 1.0}
    pictures = [scene(objects) for objects in SCENES]
    for one, two in zip(*(infer.Predictor(d, threshold=0.4)(pictures) for d in (found, loaded)), strict=True):
        assert one["labels"].tolist() == two["labels"].tolist()
        np.testing.assert_allclose(one["boxes"], two["boxes"], atol=2)
    with pytest.raises(ValueError, match=r"nowhere: no folder, no file, .*\(compact.shapes\)"):
        pretrained.load("nowhere")
    (tmp_path / "weights" / "compact.shapes.json").write_text(json.dumps(card))
    with pytest.raises(ValueError, match="not one of a detector"):
        pretrained.load("compact.shapes")


def test_other_classes_start_from_trained_weights(found, run_folder):
    model = registry.build(ARCH, 7)
    assert pretrained.start_from(model, run_folder).classes == CLASSES
    assert torch.equal(model.extra[0].conv1.weight, found.model.extra[0].conv1.weight)


# ------------------------------------------------------------------------------------------- export and serve


@pytest.fixture(scope="module")
def exported(run_folder, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    arguments = ["--checkpoint", str(run_folder), "--output_dir", str(folder), "--score_threshold", "0.02"]
    result = export.main(arguments)
    assert result["compared"] >= 4 and result["difference"] <= 1e-3
    return Path(result["path"])


def test_the_exported_graph_detects(exported, found):
    """From stored pictures to boxes without a line of our code, at several batch sizes."""
    session = onnxruntime.InferenceSession(str(exported), providers=["CPUExecutionProvider"])
    pictures = torch.stack([found.preprocessing.pixels(scene(objects)) for objects in SCENES])
    for rows in ([0], [2, 1, 0], [2] * 5):
        boxes, scores, labels, count = session.run(None, {"images": pictures[rows].numpy()})
        assert boxes.shape == (len(rows), 200, 4) and labels.dtype == np.int64 and count.shape == (len(rows),)
        for place, row in enumerate(rows):
            sure = scores[place] > 0.4
            assert sorted(labels[place][sure].tolist()) == [entry[4] for entry in SCENES[row]]
            for entry in SCENES[row]:
                box = boxes[place][sure & (labels[place] == entry[4])][0] * [640, 480, 640, 480]
                assert overlap(box.tolist(), entry) > 0.75
            assert not scores[place, count[place] :].any() and not boxes[place, count[place] :].any()
    metadata = exports.read_metadata(exported)
    assert metadata["classes"] == CLASSES and metadata["category_ids"] == CATEGORY_IDS
    assert metadata["preprocessing"]["size"] == 300
    assert metadata["detection"]["score_threshold"] == 0.02 and metadata["detection"]["max_detections"] == 200


def test_a_graph_that_detects_otherwise_is_refused_and_removed(found, tmp_path, monkeypatch):
    original = export.OnnxModel.__call__

    def shifted(self, *arrays):
        return (found := original(self, *arrays)) | {"boxes": found["boxes"] + 0.01}

    monkeypatch.setattr(export.OnnxModel, "__call__", shifted)
    with pytest.raises(exports.ParityError, match="has no detection of label"):
        export.export(found, tmp_path / "model.onnx", (1,), score_threshold=0.01)
    assert not list(tmp_path.iterdir())


def kept(boxes, scores) -> Kept:
    count = torch.tensor([len(scores)])
    return Kept(torch.tensor([boxes]), torch.tensor([scores]), torch.ones(1, len(scores), dtype=torch.int64), count)


def test_comparison_of_detections():
    box, near, far = [0.1, 0.1, 0.5, 0.5], [0.12, 0.1, 0.5, 0.5], [0.6, 0.6, 0.9, 0.9]
    low = [0.0, 0.0, 0.2, 0.2]
    assert export.compare(kept([box, low], [0.9, 0.1]), kept([box, low], [0.9, 0.1]), 1e-3) == (2, 0.0)
    # Equal scores on one object: either may be the survivor. The last one given back may differ.
    assert export.compare(kept([box, low], [0.9, 0.1]), kept([near, far], [0.9, 0.1]), 1e-3) == (0, 0.0)
    for other in (kept([far, low], [0.9, 0.1]), kept([near, low], [0.8, 0.1]), kept([low], [0.1])):
        with pytest.raises(exports.ParityError):
            export.compare(kept([box, low], [0.9, 0.1]), other, 1e-3)
        with pytest.raises(exports.ParityError):
            export.compare(other, kept([box, low], [0.9, 0.1]), 1e-3)


def test_a_borderline_overlap_may_go_either_way():
    strong, weak = [0.1, 0.1, 0.5, 0.5], [0.1, 0.1 + 0.4 / 3, 0.5, 0.5 + 0.4 / 3]  # they overlap by a half
    last = [0.8, 0.8, 0.9, 0.9]
    both, one = kept([strong, weak, last], [0.9, 0.8, 0.1]), kept([strong, last], [0.9, 0.1])
    assert export.compare(both, one, 1e-3) == export.compare(one, both, 1e-3) == (2, 0.0)
    with pytest.raises(exports.ParityError):
        export.compare(both, one, 1e-3, iou_threshold=0.7)


def test_the_server_s_repository(run_folder, tmp_path):
    result = serve.main(["--checkpoint", str(run_folder), "--output_dir", str(tmp_path), "--name", "shapes"])
    folder = Path(result["folder"])
    text = (folder / "config.pbtxt").read_text()
    assert 'name: "shapes"' in text and "TYPE_UINT8" in text and "dims: [ 3, 300, 300 ]" in text
    assert "dims: [ 200, 4 ]" in text and "max_batch_size: 64" in text
    assert (folder / "classes.txt").read_text() == "square\ndisc\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["shapes"]
    answer = OnnxModel(folder / "1" / "model.onnx", max_batch_size=2)(np.zeros((3, 3, 300, 300), np.uint8))
    assert answer["boxes"].shape == (3, 200, 4)
