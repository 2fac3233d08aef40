"""READMEs generated from records: tables, values, the task table, drift, and faults that name file and key."""

from __future__ import annotations

import json

import pytest

from dlx.readme import ReadmeError, render

RECORD = {
    "comparison": [
        {"name": "ours|eager", "speed": {"img/s": 6931.4}, "ratio": 1.256, "note": None},
        {"name": "peer", "speed": {"img/s": 5519}, "ratio": 1, "note": "compiled"},
    ],
    "metrics": {"val.top1": {"value": 0.9231, "unit": ""}},
}
TABLE = (
    '<!-- dlx:table file="results/x.json" rows="comparison" '
    'columns="Model:name, img/s:speed.img/s|,.0f, x: 2:ratio|.2f, Note:note" -->'
)


@pytest.fixture
def path(tmp_path):
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "x.json").write_text(json.dumps(RECORD))
    return tmp_path / "README.md"


def test_table(path):
    text = render(f"before\n{TABLE}\nold\n<!-- /dlx -->\nafter", path, [])
    assert text.splitlines() == [
        "before",
        TABLE,
        "| Model | img/s | x: 2 | Note |",
        "|---|---:|---:|---|",
        "| ours\\|eager | 6,931 | 1.26 | – |",
        "| peer | 5,519 | 1.00 | compiled |",
        "<!-- /dlx -->",
        "after",
    ]
    assert render(text, path, []) == text


def test_a_key_that_not_every_row_has(path):
    record = {"rows": [{"name": "ours", "ratio": 2.0}, {"name": "baseline"}]}
    (path.parent / "results" / "gap.json").write_text(json.dumps(record))
    marker = '<!-- dlx:table file="results/gap.json" rows="rows" columns="Program:name, x:{key}|.1f" --><!-- /dlx -->'
    assert "| ours | 2.0 |\n| baseline | – |" in render(marker.format(key="ratio?"), path, [])
    with pytest.raises(ReadmeError, match=r"no key 'rows\[1\]\.ratio'"):
        render(marker.format(key="ratio"), path, [])
    with pytest.raises(ReadmeError, match="no row of 'rows' has the key 'ration'"):
        render(marker.format(key="ration?"), path, [])


def test_a_record_that_is_to_come(path):
    table = TABLE.replace("x.json", "later.json?") + "old<!-- /dlx -->"
    value = '<!-- dlx:value file="results/later.json?" key="ratio" -->3<!-- /dlx -->'
    assert render(table, path, []) == table.replace("old", "\nNot measured yet.\n")
    assert render(value, path, []) == value.replace(">3<", ">not measured yet<")
    (path.parent / "results" / "later.json").write_text(json.dumps(RECORD | {"ratio": 2}))
    assert "| peer | 5,519 | 1.00 | compiled |" in render(table, path, [])
    assert render(value, path, []) == value.replace(">3<", ">2<")
    with pytest.raises(ReadmeError, match=r"later\.json: no key 'ration'"):
        render(value.replace('"ratio"', '"ration"'), path, [])


def test_values_in_a_line(path):
    value = '<!-- dlx:value file="results/x.json" key="metrics.val.top1.value" format=".2%" -->'
    index = '<!-- dlx:value file="results/x.json" key="comparison.1.name" -->'
    text = render(f"top-1 {value}?<!-- /dlx --> with {index}?<!-- /dlx -->.", path, [])
    assert text == f"top-1 {value}92.31%<!-- /dlx --> with {index}peer<!-- /dlx -->."


def test_markers_in_code_are_left_alone(path):
    text = f"`<!-- dlx:tasks -->`\n```\n{TABLE}\n<!-- /dlx -->\n```\n`x` <!-- dlx:run -->\n"
    assert render(text, path, []) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('<!-- dlx:value file="results/y.json" key="a" --><!-- /dlx -->', r"y\.json does not exist"),
        (
            '<!-- dlx:value file="results/x.json" key="metrics.top5" --><!-- /dlx -->',
            r"x\.json: no key 'metrics\.top5'",
        ),
        ('<!-- dlx:value file="results/x.json" --><!-- /dlx -->', 'needs key="..."'),
        ('<!-- dlx:value fil="results/x.json" key="a" --><!-- /dlx -->', "unknown option 'fil'; did you mean 'file'"),
        ('<!-- dlx:value file="results/x.json" key="comparison.0.name" format=".2f" --><!-- /dlx -->', "does not fit"),
        (TABLE.replace("ratio", "ration") + "<!-- /dlx -->", r"no key 'comparison\[0\]\.ration'.*did you mean 'ratio'"),
        (TABLE.replace('"comparison"', '"metrics"') + "<!-- /dlx -->", "key 'metrics' is not a list"),
        (TABLE + "\nnever closed", "has no <!-- /dlx -->"),
    ],
)
def test_faults_name_file_and_key(path, text, message):
    with pytest.raises(ReadmeError, match=message):
        render(text, path, [])


def test_command_writes_and_check_shows_drift(tree):
    folder = tree.task(state='"partial"', state_note='"no export"')
    tree.write("README.md", "# All\n<!-- dlx:tasks -->\n<!-- /dlx -->\n")
    tree.write("PyTorch/Area/Alpha/results/x.json", json.dumps(RECORD))
    (folder / "README.md").write_text(TABLE + "\n<!-- /dlx -->\n")
    done = tree.dlx("readme", "--check")
    assert done.returncode == 1
    assert "+| peer | 5,519 | 1.00 | compiled |" in done.stdout and "--- PyTorch/Area/Alpha/README.md" in done.stdout
    assert "peer" not in (folder / "README.md").read_text()
    assert tree.dlx("readme").stdout.splitlines() == ["updated README.md", "updated PyTorch/Area/Alpha/README.md"]
    row = "| [PyTorch/Area/Alpha](PyTorch/Area/Alpha/README.md) | PyTorch | Does Alpha. | partial: no export |"
    assert row in tree.root.joinpath("README.md").read_text()
    done = tree.dlx("readme", "--check")
    assert done.returncode == 0 and done.stdout == ""
