"""2:4 sparsity in processes of the old representation: masks by brute force, kept through training and a resume."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dlx import record
from rn50_paddle import checkpoint, framework, sparsity, train

SMALL = ["--data", "synthetic", "--num_classes", "4", "--num_samples", "64", "--batch_size", "16", "--epochs", "2",
         "--arch", "resnet8_small", "--lr", "0.05", "--lr_batch_size", "null", "--warmup_epochs", "0",
         "--asp", "true", "--run_scope", "train_only"]  # fmt: skip

PRUNE = """
import json, sys
from rn50_paddle import framework
assert framework.choose_old_ir()
import numpy as np, paddle
from rn50_paddle import sparsity
from rn50_paddle.convert import arrays_of
from rn50_paddle.model import build
paddle.seed(1)
model = build("resnet8_small", 12)
dense = arrays_of(model)
trained = [value for value in model.parameters() if not value.stop_gradient]
optimizer = sparsity.decorate(paddle.optimizer.Momentum(0.1, 0.9, trained), trained)
sparsity.prune(model, optimizer, sys.argv[1])
masks = sparsity.masks(model, optimizer)
np.savez(sys.argv[2], **{f"dense/{k}": dense[k] for k in masks}, **{f"sparse/{k}": arrays_of(model)[k] for k in masks})
x = paddle.randn([4, 3, 28, 28])
for _ in range(2):  # Paddle's own decorated optimiser leaves the weights alone from the second step on
    before = arrays_of(model)
    before = {name: value.copy() for name, value in before.items()}
    paddle.nn.functional.cross_entropy(model(x), paddle.arange(4)).backward()
    optimizer.step()
    optimizer.clear_grad()
    assert all(np.abs(arrays_of(model)[name] - before[name]).max() > 0 for name in before if name.endswith("weight"))
assert all((value.numpy()[masks[name] == 0] == 0).all() for name, value in model.named_parameters() if name in masks)
print(json.dumps(sparsity.check(model, masks)))
"""


def directions(weight):
    """(.., inputs) and (.., outputs): along the first lie the neighbours that a sparse matrix product pairs up."""
    if weight.ndim == 2:
        return weight.T, weight
    return weight.transpose(0, 2, 3, 1).reshape(-1, weight.shape[1]), weight.transpose(1, 2, 3, 0).reshape(
        -1, weight.shape[0]
    )


def at_most_two_of_four(matrix):
    width = matrix.shape[1] // 4 * 4
    return bool((np.count_nonzero(matrix[:, :width].reshape(len(matrix), -1, 4), axis=2) <= 2).all())


@pytest.mark.parametrize("algorithm", ["mask_1d", "mask_2d_greedy", "mask_2d_best"])
def test_masks_are_two_of_four(algorithm, tmp_path):
    command = [sys.executable, "-c", PRUNE, algorithm, str(tmp_path / "weights.npz")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    densities = json.loads(done.stdout.splitlines()[-1])
    assert len(densities) == 9 and "fc.weight" in densities and "conv1.weight" not in densities
    assert all(0.45 < value <= 0.5 for value in densities.values())
    kept_share = {}
    with np.load(tmp_path / "weights.npz") as content:
        for name in densities:
            dense, sparse = content[f"dense/{name}"], content[f"sparse/{name}"]
            kept = sparse != 0
            np.testing.assert_array_equal(sparse[kept], dense[kept])
            inputs, outputs = (at_most_two_of_four(matrix) for matrix in directions(sparse))
            assert inputs and (outputs or algorithm == "mask_1d"), name
            if algorithm == "mask_1d":  # the two largest of every four, whatever is left over is dense
                width = dense.shape[0 if dense.ndim == 2 else 1] // 4 * 4
                size, taken = (np.abs(directions(matrix)[0][:, :width]) for matrix in (dense, sparse))
                largest = np.sort(size.reshape(len(size), -1, 4), axis=2)[:, :, 2:].sum()
                assert abs(taken.sum() / largest - 1) < 1e-6
            kept_share[name] = np.abs(sparse).sum() / np.abs(dense).sum()
    # Half of the weights chosen at random hold half of the size; Paddle's own mask_2d_best is no better than that.
    assert min(kept_share.values()) > (0.68 if algorithm == "mask_1d" else 0.62)


def test_the_best_mask_by_brute_force():
    generator = np.random.default_rng(0)
    weight = generator.normal(size=(8, 6, 3, 1)).astype(np.float32)
    mask = sparsity.best_mask(weight)
    assert mask.shape == weight.shape and set(np.unique(mask)) == {0.0, 1.0}
    block = np.abs(weight[4:8, :4, 2, 0])
    pairs = list(itertools.combinations(range(4), 2))
    best = max(
        sum(block[row, list(pair)].sum() for row, pair in enumerate(choice))
        for choice in itertools.product(pairs, repeat=4)
        if (np.bincount(np.concatenate(choice), minlength=4) == 2).all()
    )
    assert abs((block * mask[4:8, :4, 2, 0]).sum() - best) < 1e-5
    linear = generator.normal(size=(8, 5)).astype(np.float32)
    assert all(at_most_two_of_four(matrix) for matrix in directions(sparsity.best_mask(linear)))


def test_the_new_representation_is_refused_and_the_verb_takes_a_process_of_its_own(tmp_path):
    assert not framework.has_old_ir()  # this process, whose tests import Paddle without the flag
    with pytest.raises(ValueError, match="FLAGS_enable_pir_api=0"):
        sparsity.decorate(None, [])
    whole = tmp_path / "whole"
    fields = train.main([*SMALL, "--output_dir", str(whole)])
    found = checkpoint.load(checkpoint.find(whole))
    assert fields["status"] == "finished" and found.step == 8
    density = record.load(whole).fields["attachments"]["density"]
    assert len(density) == 9 and max(density.values()) <= 0.5
    assert len(fields["curve"]["sparsity.density"]) == 2  # after every epoch
    for name in density:
        assert np.mean(found.model[name] != 0) == density[name] <= 0.5
        assert at_most_two_of_four(directions(found.model[name])[0])
        assert (found.model[name] != 0).any()
    # Sparse weights are taken as they are, without pruning again; dense ones are not taken for sparse.
    again = [*SMALL, "--prune_model", "false", "--max_steps", "1", "--output_dir", str(tmp_path / "adopted")]
    train.main([*again, "--init_from", str(whole)])
    adopted = checkpoint.load(checkpoint.find(tmp_path / "adopted"))
    for name in density:
        mask = adopted.optimizer[f"{name}.asp_mask"]
        assert not adopted.model[name][mask == 0].any() and mask[found.model[name] != 0].all()
        assert not np.array_equal(adopted.model[name], found.model[name])
    # A run that begins at the first epoch's checkpoint ends in the same weights, masks included.
    store = checkpoint.Checkpoints(whole / "checkpoints")
    (again := tmp_path / "again/checkpoints").mkdir(parents=True)
    store.list()[0].rename(again / store.list()[0].name)
    train.main([*SMALL, "--output_dir", str(tmp_path / "again")])
    second = checkpoint.load(Path(again) / "step_00000008")
    for first_arrays, second_arrays in ((found.model, second.model), (found.optimizer, second.optimizer)):
        assert first_arrays.keys() == second_arrays.keys()
        assert not [key for key in first_arrays if not np.array_equal(first_arrays[key], second_arrays[key])]


def test_a_failed_process_is_a_failure():
    with pytest.raises(SystemExit) as left:
        train.main([*SMALL, "--asp", "true", "--init_from", "nowhere.npz", "--output_dir", "unused"])
    assert left.value.code == 1


def test_dense_weights_are_not_taken_for_sparse(tmp_path):
    code = PRUNE.split("sparsity.prune")[0] + "sparsity.adopt(model, optimizer)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode and "9 layers of these weights are not 2:4 sparse" in done.stderr


def test_lost_masks_are_found():
    from rn50_paddle.model import build

    model = build("resnet8_small", 4)
    with pytest.raises(ValueError, match="1 of 1 masked layers are denser"):
        sparsity.check(model, ["layer1.0.conv1.weight"])
    with pytest.raises(ValueError, match="0 of 0"):
        sparsity.check(model, [])
