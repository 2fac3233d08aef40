"""task.toml: every fault is an error that names the file and the key."""

from __future__ import annotations

import pytest

from dlx.task import TaskError, default, discover, find, nearest, read


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"summary": '""'}, "key 'summary' is missing or empty"),
        ({"sumary": '"x"'}, "unknown key 'sumary'; did you mean 'summary'?"),
        ({"framework": "3"}, "key 'framework' must be a str, not 3"),
        ({"state": '"done"'}, "key 'state' is 'done', not one of complete, partial, planned"),
        ({"state": '"partial"'}, "key 'state_note' must say"),
        ({"kind": '"thing"'}, "key 'kind' is 'thing'"),
        ({"package": '"no-import"'}, "key 'package' is 'no-import'"),
        ({"env": '"Py Torch"'}, "key 'env' is 'Py Torch'"),
        ({"apt": '["a", 1]'}, "key 'apt' must be a list of strings"),
        ({"verbs": 'trian = "x.y"'}, "key 'verbs.trian': not one of"),
        ({"verbs": "train = 1"}, "key 'verbs.train' must be a module or a list of words"),
        ({"test": 'arg = ["x"]'}, "unknown key 'test.arg'; did you mean 'args'?"),
        ({"summary": "not toml"}, "not valid TOML"),
    ],
)
def test_faults_name_file_and_key(tree, keys, message):
    folder = tree.task(**keys)
    with pytest.raises(TaskError) as error:
        read(folder / "task.toml", tree.root)
    assert str(folder / "task.toml") in str(error.value) and message in str(error.value)


def test_the_name_is_the_folder(tree):
    path = tree.task() / "task.toml"
    path.write_text(path.read_text().replace("PyTorch/Area/Alpha", "Some/Where"))
    with pytest.raises(TaskError, match="key 'name' is 'Some/Where', but the folder is 'PyTorch/Area/Alpha'"):
        read(path, tree.root)


def test_library_comes_first_and_hidden_folders_are_not_tasks(tree):
    tree.task("PyTorch/Area/Alpha")
    tree.task("Kaldi/Beta")
    tree.task("Tools", kind='"library"', package="dlx")
    tree.task("PyTorch/.hidden/Gamma")
    tree.task("runs/Delta")
    tree.task("PyTorch/build/Delta")
    tree.write("mine/product/dlx", "")  # what `./dlx copy` writes, or another clone
    tree.write("mine/product/Tools/dlx/__init__.py", "")
    tree.write("mine/product/Tools/task.toml", 'name = "Tools"')
    assert [task.name for task in discover(tree.root)] == ["Tools", "Kaldi/Beta", "PyTorch/Area/Alpha"]


def test_default_is_convnets_or_what_there_is(tree):
    tree.task("A/B/Other", verbs='quickstart = "other.quickstart"')
    assert default(tree.root).name == "A/B/Other"
    tree.task("PyTorch/Classification/ConvNets", verbs='quickstart = "convnets.quickstart"')
    assert default(tree.root).name == "PyTorch/Classification/ConvNets"
    assert find("convnets", tree.root) == default(tree.root)


def test_nearest_is_silent_when_nothing_is_near():
    assert nearest("zzz", ["train", "test"]) == ""
    assert nearest("TRAIM", ["train", "test"]) == "; did you mean 'train'?"


def test_a_package_name_is_found_before_a_folder_of_another_package(tree):
    tree.task("PyTorch/Detection/SSD", package='"ssd"')
    tree.task("TensorFlow2/Detection/SSD", package='"tf_ssd"')
    for name, framework in {"SSD": "PyTorch", "ssd": "PyTorch", "TF_SSD": "TensorFlow2"}.items():
        assert find(name, tree.root).name == f"{framework}/Detection/SSD"
    assert find("tensorflow2/detection/ssd", tree.root).package == "tf_ssd"
