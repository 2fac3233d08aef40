"""dlx.config: precedence, types, and errors that name file, line, key and value."""

import dataclasses
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from dlx import config as config_module
from dlx.config import ConfigError, field, from_dict, parse, save, to_dict


@dataclass
class Recipe:
    """A small training recipe."""

    batch_size: int = field(64, help="images per device", ge=1, group="data")
    learning_rate: float = field(0.1, help="peak rate, 100% of it after warm-up", gt=0, group="optimiser")
    precision: Literal["fp32", "bf16", "fp16"] = field("bf16", help="arithmetic of the products")
    arch: str = field("resnet50", help="model", choices=["resnet50", "resnet18"], group="model")
    resume: str | None = field(None, help="checkpoint folder or auto")
    ema: float | None = field(None, help="decay", ge=0, lt=1)
    steps: list[int] = field([30, 60], help="epochs at which the rate drops", ge=1)
    betas: tuple[float, float] = field((0.9, 0.999), help="Adam")
    mixup: bool = field(False, help="mix pairs of images")
    weights: dict[str, float] = field(default_factory=dict, help="loss weights")
    plain: int = 3


def run(*args, **options):
    return parse(Recipe, list(args), exit_on_error=False, **options)


def error_of(*args, **options) -> str:
    with pytest.raises(ConfigError) as caught:
        run(*args, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_defaults_and_lists_are_not_shared():
    first, second = run(), run()
    assert first == Recipe() and first.steps == [30, 60]
    first.steps.append(1)
    assert second.steps == [30, 60] and Recipe().steps == [30, 60]


def test_order_of_precedence(folder):
    (folder / "root.yaml").write_text("batch_size: 1\nlearning_rate: 1e-3\nplain: 7\n")
    (folder / "a.yaml").write_text("base: root.yaml\nbatch_size: 2\nmixup: true\n")
    (folder / "b.yaml").write_text("batch_size: 3\n")
    config = run("--config", "a", "--config=b.yaml", "--mixup=false", configs_dir=folder)
    assert (config.batch_size, config.learning_rate, config.plain, config.mixup) == (3, 1e-3, 7, False)
    assert run("--batch_size", "9", "--config", "a", configs_dir=folder).batch_size == 9


@pytest.mark.parametrize(
    "args, key, value",
    [
        (["--learning_rate", "1e-3"], "learning_rate", 1e-3),
        (["--learning-rate=5"], "learning_rate", 5.0),
        (["--mixup"], "mixup", True),
        (["--mixup", "no"], "mixup", False),
        (["--resume", "null"], "resume", None),
        (["--resume", "5"], "resume", "5"),
        (["--resume", ""], "resume", ""),
        (["--ema", "0.99"], "ema", 0.99),
        (["--ema=null"], "ema", None),
        (["--steps", "1", "2"], "steps", [1, 2]),
        (["--steps", "[4, 5]"], "steps", [4, 5]),
        (["--steps", "4"], "steps", [4]),
        (["--steps=[]"], "steps", []),
        (["--betas", "0.5", "1e-1"], "betas", (0.5, 0.1)),
        (["--weights", "{box: 1e-1}"], "weights", {"box": 0.1}),
        (["--plain", "-4"], "plain", -4),
        (["--mixup", "--plain", "1"], "mixup", True),
    ],
)
def test_command_line_values(args, key, value):
    found = getattr(run(*args), key)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    "line, key, value",
    [
        ("learning_rate: 1e-3", "learning_rate", 1e-3),
        ('learning_rate: "1e-3"', "learning_rate", 1e-3),
        ("learning_rate: 1E+2", "learning_rate", 100.0),
        ("learning_rate: .5", "learning_rate", 0.5),
        ("learning_rate: 2", "learning_rate", 2.0),
        ("resume: 12:30", "resume", "12:30"),
        ("resume: no", "resume", "no"),
        ("resume: 2024-01-02", "resume", "2024-01-02"),
        ("resume:", "resume", None),
        ("resume: ~", "resume", None),
        ("mixup: yes", "mixup", True),
        ("batch_size: 1_000", "batch_size", 1000),
        ("steps: [1, 2]", "steps", [1, 2]),
        ("betas: [1e-1, 5e-1]", "betas", (0.1, 0.5)),
        ("weights: {box: 1e-1}", "weights", {"box": 0.1}),
        ("", "plain", 3),
    ],
)
def test_file_values(folder, line, key, value):
    (folder / "c.yaml").write_text(line + "\n")
    found = getattr(run("--config", "c.yaml"), key)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    "line, message",
    [
        ("batchsize: 3", "c.yaml:2: unknown key 'batchsize'; did you mean 'batch_size'?"),
        ("zzz: 3", "c.yaml:2: unknown key 'zzz'"),
        ("batch_size: many", "c.yaml:2: batch_size: expected int, got 'many'"),
        ('batch_size: "8"', "c.yaml:2: batch_size: expected int, got '8'"),
        ("batch_size: 1e3", "c.yaml:2: batch_size: expected int, got 1000.0"),
        ("batch_size: true", "c.yaml:2: batch_size: expected int, got true"),
        ("batch_size:", "c.yaml:2: batch_size: expected int, got null"),
        ("batch_size: 0", "c.yaml:2: batch_size: must be at least 1, got 0"),
        ("learning_rate: 0.0", "c.yaml:2: learning_rate: must be greater than 0, got 0.0"),
        ("learning_rate: .nan", "c.yaml:2: learning_rate: must be greater than 0, got nan"),
        ("ema: 1", "c.yaml:2: ema: must be less than 1, got 1.0"),
        ("ema: x", "c.yaml:2: ema: expected float or null, got 'x'"),
        ("steps: [5, 0]", "c.yaml:2: steps: must be at least 1, got 0"),
        ("steps: 5", "c.yaml:2: steps: expected list of int, got 5"),
        ("betas: [1]", "c.yaml:2: betas: expected list [float, float], got [1]"),
        ("weights: [1]", "c.yaml:2: weights: expected mapping of string to float, got [1]"),
        ("resume: 5", "c.yaml:2: resume: expected string or null, got 5 (put it in quotes)"),
        ("mixup: maybe", "c.yaml:2: mixup: expected true or false, got 'maybe'"),
        ("precision: fp61", "c.yaml:2: precision: expected one of fp32, bf16, fp16, got 'fp61'; did you mean 'fp16'?"),
        ("arch: resnet5", "c.yaml:2: arch: expected one of resnet50, resnet18, got 'resnet5'; did you mean"),
        ("plain: 4", "c.yaml:2: plain: given twice, first at c.yaml:1"),
        ("base: none.yaml", "c.yaml:2: base: no such file: none.yaml"),
        ("base: [a]", "c.yaml:2: base: expected a file name, got ['a']"),
        ("steps: [1, 2", "c.yaml:3: not valid YAML: expected ',' or ']', but got '<stream end>'"),
        ("resume: !!python/object/apply:os.getcwd []", "c.yaml:2: not valid YAML: could not determine a constructor"),
    ],
)
def test_errors_in_a_file(folder, line, message):
    (folder / "c.yaml").write_text(f"plain: 1\n{line}\n")
    assert error_of("--config", "c.yaml").startswith(message)


@pytest.mark.parametrize(
    "args, message",
    [
        (["--batchsize", "3"], "command line: unknown key '--batchsize'; did you mean '--batch_size'?"),
        (["--batchsize"], "command line: unknown key '--batchsize'; did you mean '--batch_size'?"),
        (["--batch", "3"], "command line: unknown key '--batch'"),
        (["--batch_size", "x"], "command line: batch_size: expected int, got 'x'"),
        (["--batch_size"], "command line: --batch_size needs a value"),
        (["--batch_size", "-1"], "command line: batch_size: must be at least 1, got -1"),
        (["--batch_size", "null"], "command line: batch_size: expected int, got 'null'"),
        (["--learning_rate", "nan"], "command line: learning_rate: expected float, got 'nan'"),
        (["batch_size=3"], "command line: unexpected 'batch_size=3': options are written --key value"),
        (["--batch_size", "3", "4"], "command line: unexpected '4'"),
        (["--config"], "command line: --config needs a value"),
        (["--config", "none.yaml"], "--config none.yaml: no such file or name"),
    ],
)
def test_errors_on_the_command_line(args, message):
    assert error_of(*args).startswith(message)


def test_unknown_name_suggests(folder):
    (folder / "quickstart.yaml").write_text("plain: 1\n")
    assert "did you mean 'quickstart'?" in error_of("--config", "quikstart", configs_dir=folder)


def test_base_circle_and_not_a_mapping(folder):
    (folder / "a.yaml").write_text("base: b.yaml\n")
    (folder / "b.yaml").write_text("base: a.yaml\n")
    assert "circle" in error_of("--config", "a.yaml")
    (folder / "c.yaml").write_text("- 1\n")
    assert error_of("--config", "c.yaml") == "c.yaml: expected `key: value` lines, got a sequence"


def test_error_in_a_base_names_the_base(folder):
    (folder / "root.yaml").write_text("batch_size: 0\n")
    (folder / "a.yaml").write_text("base: root\n")
    assert error_of("--config", "a.yaml") == "root.yaml:1: batch_size: must be at least 1, got 0"


def test_required_key_and_cross_check():
    @dataclass
    class Needs:
        size: int = 3
        data_dir: str = field(help="pictures")

        def __post_init__(self):
            if self.size % 2:
                raise ValueError(f"size must be even, got {self.size}")

    config_module.Needs = Needs
    with pytest.raises(ConfigError, match="missing key 'data_dir': set it with --data_dir"):
        parse(Needs, [], exit_on_error=False)
    with pytest.raises(ConfigError, match="size must be even, got 3"):
        parse(Needs, ["--data_dir", "x"], exit_on_error=False)
    assert parse(Needs, ["--data_dir", "x", "--size=4"], exit_on_error=False).data_dir == "x"


@pytest.mark.parametrize("text", ["no", "1e-3", "12:30", "a # b", "two\nlines", "null", "é: {", " x ", "", "'", "5"])
def test_save_and_load_round_trip(folder, text):
    config = dataclasses.replace(
        run("--learning_rate", "1e-05", "--weights", "{a: 2}"), resume=text, ema=0.5, steps=[], betas=(1e-8, 0.5)
    )
    save(config, folder / "saved.yaml")
    assert run("--config", "saved.yaml") == config
    assert from_dict(Recipe, to_dict(config)) == config
    assert to_dict(config)["betas"] == [1e-8, 0.5]
    with pytest.raises(ConfigError, match="checkpoint: unknown key 'x'"):
        from_dict(Recipe, {"x": 1}, source="checkpoint")
    assert math.isinf(from_dict(Recipe, {"learning_rate": math.inf}).learning_rate)


def test_print_config_reads_back(folder, capsys):
    with pytest.raises(SystemExit) as caught:
        run("--plain", "5", "--print_config")
    assert caught.value.code == 0
    (folder / "printed.yaml").write_text(capsys.readouterr().out)
    assert run("--config", "printed.yaml") == dataclasses.replace(Recipe(), plain=5)


def test_help(folder, capsys):
    (folder / "quickstart.yaml").write_text("")
    with pytest.raises(SystemExit) as caught:
        run("--help", configs_dir=folder)
    text = " ".join(capsys.readouterr().out.split())
    assert caught.value.code == 0
    for part in (
        "A small training recipe.", "data:", "optimiser:", "--batch_size INT", "at least 1 (default: 64)",
        "100% of it", "--precision {fp32,bf16,fp16}", "one of resnet50, resnet18", "a name of quickstart",
    ):  # fmt: skip
        assert part in text, part


def test_help_shows_the_launcher_s_call_and_examples(folder, capsys, monkeypatch):
    (folder / "fits.yaml").write_text("batch_size: 2\n")
    (folder / "of_another_verb.yaml").write_text("no_such_key: 2\n")
    document = "Train.\n\n    ./dlx run Nets train -- --config fits\n    ./dlx run Nets train\n\nRecipes: ./dlx list"
    monkeypatch.setattr(sys.modules["__main__"], "__doc__", document)
    monkeypatch.setenv("DLX_COMMAND", "./dlx run Nets train --nproc 2 -- --help")
    with pytest.raises(SystemExit):
        run("--help", configs_dir=folder)
    text = capsys.readouterr().out
    assert text.startswith("usage: ./dlx run Nets train --nproc 2 -- [--config NAME|FILE] [--KEY VALUE ...]\n")
    assert text.endswith("\nexamples:\n  ./dlx run Nets train -- --config fits\n  ./dlx run Nets train\n")
    assert "a name of fits;" in " ".join(text.split()) and "of_another_verb" not in text
    (folder / "fits.yaml").unlink()
    monkeypatch.setenv("DLX_COMMAND", "./dlx test Tools")
    with pytest.raises(SystemExit):
        run("--help", configs_dir=folder)
    text = capsys.readouterr().out
    assert "--config FILE" in text and "./dlx test" not in text


def test_a_program_prints_one_line_and_exits_with_2(folder):
    code = (
        "import dataclasses, dlx.config\n"
        "@dataclasses.dataclass\nclass C:\n    n: int = 1\n"
        "print(dlx.config.parse(C).n)\n"
    )
    (folder / "program.py").write_text(code)
    options = {"capture_output": True, "text": True}
    tools = str(Path(config_module.__file__).parents[1])
    options["env"] = {**os.environ, "PYTHONPATH": os.pathsep.join([tools, os.environ.get("PYTHONPATH", "")])}
    good = subprocess.run([sys.executable, "program.py", "--n", "3"], **options)
    assert good.stdout == "3\n", good.stderr
    bad = subprocess.run([sys.executable, "program.py", "--m", "3"], **options)
    assert bad.returncode == 2 and bad.stdout == ""
    assert bad.stderr == "program.py: error: command line: unknown key '--m'\n"


@dataclass
class Data:
    data: str = field("none", help="which")
    batch_size: int = field(8, help="images per device", ge=1)


@dataclass
class Training(Data):
    learning_rate: float = field(0.1, help="peak rate")
    output_dir: str = field("runs/train", help="folder")


@dataclass
class Evaluation(Data):
    judge: str = field("none", help="who listens")
    output_dir: str = field("runs/evaluate", help="folder")


def test_a_recipe_of_another_verb_says_which_data(tmp_path, capsys):
    def evaluation(*args):
        return parse(Evaluation, list(args), configs_dir=tmp_path, exit_on_error=False, recipe=Training, shared=Data)

    (tmp_path / "big.yaml").write_text("data: flowers\nbatch_size: 64\nlearning_rate: 3.0\noutput_dir: runs/big\n")
    (tmp_path / "own.yaml").write_text("judge: whisper\noutput_dir: here\n")
    assert evaluation("--config", "big") == Evaluation(data="flowers", batch_size=64)
    assert evaluation("--config", "big", "--config", "own").output_dir == "here"
    assert evaluation("--config", "big", "--batch_size", "2").batch_size == 2
    with pytest.raises(ConfigError, match="unknown key '--learning_rate'"):
        evaluation("--learning_rate", "2.0")
    (tmp_path / "bad.yaml").write_text("learning_rate: 3.0\nlearning_rte: 4.0\n")
    with pytest.raises(ConfigError, match="bad.yaml:2: unknown key 'learning_rte'"):
        evaluation("--config", "bad")
    with pytest.raises(SystemExit):
        evaluation("--help")
    assert "big, own" in capsys.readouterr().out
