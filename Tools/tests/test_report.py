"""dlx.report: one file that stands alone, shows everything the record holds, and embeds nothing from elsewhere."""

import math
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import dlx
from dlx.record import Record
from dlx.report import MAX_POINTS, _chart, _number, _thin, render

PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108000000003a7e9b550000000a49444154789c63600000000200015e9af62e"
    "0000000049454e44ae426082"
)


def make(folder):
    record = Record.start("PyTorch/Classification/ConvNets", "train", {"lr": 0.1, "betas": [0.9, 0.99]}, seed=1)
    record.metric("val.top1", 93.125, "%", "MAXIMIZE")
    record.metric("parameters", 1234567, "")
    for step in range(3):
        record.curve("train.loss", step, 1 / (step + 1))
        record.curve("val.loss", step, math.nan if step == 1 else 0.5)
        record.curve("val.top1", step, 90 + step)
    return record


def page_of(record, folder):
    record.finish().save(folder)
    path = render(folder)
    assert path == folder / "report.html"
    return path.read_text()


class Reader(HTMLParser):
    """Checks that tags nest, and collects every address and every text."""

    EMPTY = ("meta", "img", "line", "path", "br")

    def __init__(self):
        super().__init__()
        self.open, self.addresses, self.tags, self.text = [], [], [], ""

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.addresses += [value for name, value in attributes if name in ("src", "href")]
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def read(page):
    reader = Reader()
    reader.feed(page)
    assert not reader.open
    reader.text = " ".join(reader.text.split())
    return reader


def test_everything_is_shown(tmp_path, monkeypatch):
    monkeypatch.setenv("DLX_COMMAND", "./dlx run ConvNets train -- --lr 0.1")
    record = make(tmp_path)
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "0.png").write_bytes(PNG)
    (tmp_path / "a.wav").write_bytes(b"RIFF")
    (tmp_path / "model.onnx").write_bytes(b"x" * 2048)
    record.attach("samples", [
        {"image": "samples/0.png", "truth": "cat", "prediction": "dog", "top": [["dog", 0.7], ["cat", 0.3]]},
        {"image": "samples/1.png", "truth": "cat", "prediction": "cat"},
        {"image": "samples/0.png", "caption": "only a caption"},
    ])  # fmt: skip
    record.attach("audio", [{"file": "a.wav", "caption": "Good morning"}])
    record.attach("files", ["model.onnx", {"file": "none.txt", "caption": "labels"}])
    record.attach("confusion", {"labels": ["cat", "dog", "owl"], "matrix": [[8, 2, 0], [0, 10, 0], [0, 0, 0]]})
    record.attach("speed", {"ratio": 1.25})
    page = page_of(record, tmp_path)
    reader = read(page)
    for part in (
        "ConvNets", "93.12 %", "1,234,567", "higher is better", "./dlx run ConvNets train -- --lr 0.1", "train.loss",
        "cat taken for dog (2, 20.0%)", "80.0%", "Good morning", "2.0 KiB", "none.txt (not in this folder)",
        "only a caption", "samples/1.png not found", "dog70%", "[0.9, 0.99]", "ratio", "finished", record.run_id,
    ):  # fmt: skip
        assert part in reader.text, part
    assert reader.tags.count("svg") == 2 and reader.tags.count("img") == 2 and "audio" in reader.tags
    assert 'class="verdict wrong"' in page and 'class="verdict right"' in page
    assert "prefers-color-scheme: dark" in page and "width=device-width" in page


def test_nothing_is_loaded_from_elsewhere(tmp_path):
    record = make(tmp_path)
    secret = tmp_path.parent / "secret.png"
    secret.write_bytes(PNG)
    record.attach("samples", [{"image": name} for name in ("../secret.png", str(secret), "https://example.com/a.png")])
    record.attach("audio", [{"file": "https://example.com/a.wav"}])
    reader = read(page_of(record, tmp_path))
    assert reader.addresses == [] and not {"script", "link", "iframe"} & set(reader.tags)
    assert not re.search(r"url\(|@import", (tmp_path / "report.html").read_text())


def test_text_is_escaped(tmp_path):
    record = make(tmp_path)
    record.attach("samples", [{"image": "<script>", "caption": "<script>alert(1)</script>", "prediction": '"><b>'}])
    record.attach("<i>", "<script>")
    record.metric("<b>", 1, "<u>")
    reader = read(page_of(record, tmp_path))
    assert not {"script", "b>", "u"} & set(reader.tags) and "<script>alert(1)</script>" in reader.text


def test_an_empty_record_makes_a_page(tmp_path):
    record = Record.start("T", "infer", {})
    record.save(tmp_path)
    assert "running" in render(tmp_path).read_text()


def test_confusion_of_many_classes_and_bad_shape(tmp_path):
    record = make(tmp_path)
    size = 60
    matrix = [[int(i == j) for j in range(size)] for i in range(size)]
    record.attach("confusion", {"labels": list(range(size)), "matrix": matrix})
    reader = read(page_of(record, tmp_path))
    assert reader.tags.count("td") > size * size and "Most frequent" not in reader.text
    record.attach("confusion", {"labels": ["a", "b"], "matrix": [[1, 2]]})
    record.save(tmp_path)
    with pytest.raises(ValueError, match="confusion: 2 labels need a square matrix"):
        render(tmp_path)


def test_curves():
    chart = _chart("loss", {"a": [(1, 1.0), (2, math.nan), (3, 2.0), (4, 3.0)]})
    assert chart["lines"][0]["path"].count("M") == 2 and chart["lines"][0]["last"] == 3.0
    assert _chart("x", {"a": [(1, 1e-4), (2, 1.0)]})["log"] and not _chart("x", {"a": [(1, 0.0), (2, 1.0)]})["log"]
    for points in ([(5, 2.0)], [(0, 0.0), (1, 0.0)], [(0, -1e9), (1, 1e9)], [(0, 1e-12), (10**6, 2e-12)], [(0, -3.0)]):
        chart = _chart("x", {"a": points})
        assert 2 <= len(chart["y_ticks"]) <= 12
        assert all(-1 <= y <= 271 for y, _ in chart["y_ticks"]) and "nan" not in chart["lines"][0]["path"]
    spike = [(step, 1.0 + (step == 7777)) for step in range(20_000)]
    thinned = _thin(spike)
    assert len(thinned) <= MAX_POINTS + 2 and (7777, 2.0) in thinned and thinned[-1] == (19_999, 1.0)


@pytest.mark.parametrize(
    "value, text",
    [(1234567, "1,234,567"), (12345.6, "12,346"), (1234.56, "1,234.6"), (93.125, "93.12"), (5.0, "5"),
     (0.01234, "0.0123"), (1.2e-5, "1.2e-05"), (0.0, "0"), ("NaN", "NaN"), (-0.5, "-0.5")],
)  # fmt: skip
def test_numbers(value, text):
    assert _number(value) == text


def test_command_line(tmp_path):
    make(tmp_path).finish().save(tmp_path)
    path = os.pathsep.join([str(Path(dlx.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-m", "dlx.report"]
    done = subprocess.run([*command, str(tmp_path)], env=environment, capture_output=True, text=True)
    assert done.stdout == f"{tmp_path / 'report.html'}\n", done.stderr
    done = subprocess.run([*command, str(tmp_path / "none")], env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and "none: no such run folder" in done.stderr
