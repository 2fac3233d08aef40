"""The network, its anchors, targets, losses and suppression, against brute force, golden vectors and Keras' ResNet."""

from __future__ import annotations

import json
import math
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_ssd import anchors, backbone, loss, model, nms, targets

VECTORS = json.loads((Path(__file__).parent / "golden" / "vectors.json").read_text())
PARITY = backbone.BackboneConfig(stride_first=True, epsilon=1.001e-5)


# Anchors and offsets


def test_anchors_are_those_of_the_paper():
    expected = []
    for level, cells in zip((3, 4, 5, 6, 7), (40, 20, 10, 5, 3), strict=True):
        for row in range(cells):
            for column in range(cells):
                for octave in (0, 0.5):
                    for aspect in (1, 2, 0.5):
                        side = 4 * 2 ** (level + octave) / 320
                        height, width = side / math.sqrt(aspect), side * math.sqrt(aspect)
                        y, x = (row + 0.5) / cells, (column + 0.5) / cells
                        expected.append([y - height / 2, x - width / 2, y + height / 2, x + width / 2])
    found = anchors.make_anchors(320)
    assert found.dtype == np.float32 and found.shape == (12804, 4)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    # The first: a square of 32 pixels around the middle of a cell of 8.
    np.testing.assert_allclose(found[0] * 320, [-12, -12, 20, 20], atol=1e-4)


@pytest.mark.parametrize("size", [0, 16, 300, -32])
def test_sides_that_do_not_fit_the_pyramid(size):
    with pytest.raises(ValueError, match=str(size)):
        anchors.make_anchors(size)


def test_offsets_agree_with_the_other_ssd():
    vectors = VECTORS["matching"]
    boxes, places = np.array(vectors["boxes"][0], np.float32), np.array(vectors["anchors"][:10], np.float32)
    found = anchors.encode(boxes[None], places[:, None])
    np.testing.assert_allclose(found, vectors["offsets"], atol=2e-4)
    back = anchors.decode(found, places[:, None])
    np.testing.assert_allclose(back, np.broadcast_to(boxes, (10, 6, 4)), atol=1e-5)


def brute_overlap(a, b) -> float:
    height, width = (max(min(a[i + 2], b[i + 2]) - max(a[i], b[i]), 0) for i in (0, 1))
    union = sum((box[2] - box[0]) * (box[3] - box[1]) for box in (a, b)) - height * width
    return height * width / union if union else 0.0


def test_overlaps_by_brute_force():
    first = np.array(VECTORS["matching"]["boxes"][0] + [[0.5, 0.5, 0.5, 0.5]])
    second = np.array(VECTORS["matching"]["anchors"])
    found = anchors.overlaps(tf.constant(first, tf.float32), tf.constant(second, tf.float32))
    np.testing.assert_allclose(found, [[brute_overlap(a, b) for b in second] for a in first], atol=1e-5)


# Targets


@pytest.mark.parametrize("jit", [False, True])
def test_matching_agrees_with_the_other_ssd(jit):
    vectors = VECTORS["matching"]
    assign = tf.function(targets.assign, jit_compile=jit)
    boxes, places = (tf.constant(vectors[name], tf.float32) for name in ("boxes", "anchors"))
    found = assign(boxes, tf.constant(vectors["labels"]), places)
    np.testing.assert_array_equal(found, vectors["rows"])


def test_every_object_is_learnt_at_320():
    boxes = tf.constant([[[0.1, 0.1, 0.11, 0.12], [0.0, 0.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]]])
    labels = tf.constant([[3, 1, 0]], tf.int64)
    places = tf.constant(anchors.make_anchors())
    found = targets.match(boxes, labels, places)
    assert set(np.unique(found.labels)) == {0, 1, 3}
    assert np.sum(found.labels == 3) == 1
    at = np.flatnonzero(found.labels[0] == 3)[0]
    np.testing.assert_allclose(anchors.decode(found.offsets[0, at], places[at]), boxes[0, 0], atol=1e-6)
    assert np.isfinite(found.offsets).all()
    np.testing.assert_array_equal(found.offsets[0][found.labels[0] == 0], 0)


# Losses


def test_focal_loss_is_the_formula():
    logits = np.linspace(-6, 6, 25)
    chance = 1 / (1 + np.exp(-logits))
    hit = -0.25 * (1 - chance) ** 2 * np.log(chance)
    miss = -0.75 * chance**2 * np.log(1 - chance)
    values = tf.constant(logits, tf.float32)
    np.testing.assert_allclose(loss.focal_loss(values, tf.ones(25)), hit, rtol=1e-5, atol=1e-8)
    np.testing.assert_allclose(loss.focal_loss(values, tf.zeros(25)), miss, rtol=1e-5, atol=1e-8)
    other = -0.6 * (1 - chance) ** 1.5 * np.log(chance)
    np.testing.assert_allclose(loss.focal_loss(values, tf.ones(25), 0.6, 1.5), other, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("truth", [0.0, 1.0])
def test_focal_loss_has_finite_gradients_at_extreme_logits(truth):
    logits = tf.constant([-1e4, -100.0, 0.0, 100.0, 1e4])
    with tf.GradientTape() as tape:
        tape.watch(logits)
        value = tf.reduce_sum(loss.focal_loss(logits, tf.fill([5], truth)))
    assert np.isfinite(value) and np.isfinite(tape.gradient(value, logits)).all()


def test_detection_loss_by_hand():
    generator = np.random.default_rng(1)
    offsets, wanted = generator.normal(size=(2, 2, 5, 4)) * 1.5
    logits = generator.normal(size=(2, 5, 3))
    labels = np.array([[0, 2, 0, 3, 0], [0, 0, 1, 0, 0]])
    box = category = 0.0
    for picture in range(2):
        for place in range(5):
            label = labels[picture, place]
            for number in range(3):
                chance = 1 / (1 + math.exp(-logits[picture, place, number]))
                if number + 1 == label:
                    category -= 0.25 * (1 - chance) ** 2 * math.log(chance)
                else:
                    category -= 0.75 * chance**2 * math.log(1 - chance)
            if label:
                for difference in np.abs(offsets[picture, place] - wanted[picture, place]):
                    box += (difference**2 / 2 if difference < 1 else difference - 0.5) / 4
    aims = targets.Targets(tf.constant(wanted, tf.float32), tf.constant(labels, tf.int32))
    found = loss.detection_loss(tf.constant(offsets), tf.constant(logits), aims)
    np.testing.assert_allclose(found, [(box + category) / 3, box / 3, category / 3], rtol=1e-5)
    halves = [
        loss.detection_loss(offsets[i : i + 1], logits[i : i + 1], targets.Targets(*(x[i : i + 1] for x in aims)), 3.0)
        for i in (0, 1)
    ]
    np.testing.assert_allclose(halves[0].total + halves[1].total, found.total, rtol=1e-5)


def test_a_batch_without_objects_has_a_finite_loss():
    aims = targets.Targets(tf.zeros([1, 4, 4]), tf.zeros([1, 4], tf.int32))
    found = loss.detection_loss(tf.zeros([1, 4, 4]), tf.zeros([1, 4, 2]), aims)
    assert float(found.box) == 0
    np.testing.assert_allclose(found.category, 8 * 0.75 * 0.25 * math.log(2), rtol=1e-5)


# Suppression


@pytest.mark.parametrize("jit", [False, True])
def test_suppression_agrees_with_the_other_ssd(jit):
    vectors = VECTORS["suppression"]
    boxes, scores = (tf.constant(vectors[name], tf.float32) for name in ("boxes", "scores"))
    options = {name: vectors[name] for name in ("iou_threshold", "detections")}
    found = tf.function(lambda *tensors: nms.suppress(*tensors, **options), jit_compile=jit)(boxes, scores)
    np.testing.assert_array_equal(found.count, vectors["found_count"])
    np.testing.assert_array_equal(found.labels, vectors["found_labels"])
    np.testing.assert_allclose(found.scores, vectors["found_scores"], atol=1e-6)
    np.testing.assert_allclose(found.boxes, np.clip(vectors["found_boxes"], 0, 1), atol=1e-6)


def test_suppression_by_brute_force_and_by_tensorflow():
    generator = np.random.default_rng(5)
    low = generator.uniform(0, 0.5, (1, 200, 2))
    boxes = np.concatenate([low, low + generator.uniform(0.1, 0.5, (1, 200, 2))], -1).astype(np.float32)
    scores = generator.uniform(0, 1, (1, 200, 4)).astype(np.float32)
    expected = []
    for label in range(4):
        kept = []
        for place in np.argsort(-scores[0, :, label]):
            if scores[0, place, label] > 0.3 and all(
                brute_overlap(boxes[0, place], boxes[0, other]) <= 0.6 for other in kept
            ):
                kept.append(place)
        expected += [(scores[0, place, label], label + 1, place) for place in kept]
    expected = sorted(expected, reverse=True)[:50]
    found = nms.suppress(tf.constant(boxes), tf.constant(scores), score_threshold=0.3, detections=50)
    np.testing.assert_allclose(found.scores[0], [score for score, _, _ in expected])
    np.testing.assert_array_equal(found.labels[0], [label for _, label, _ in expected])
    np.testing.assert_allclose(found.boxes[0], boxes[0, [place for _, _, place in expected]].clip(0, 1))
    other = tf.image.combined_non_max_suppression(boxes[:, :, None], scores, 200, 50, 0.6, 0.3, clip_boxes=True)
    np.testing.assert_allclose(found.scores, other.nmsed_scores)
    np.testing.assert_array_equal(found.labels, other.nmsed_classes + 1)


def test_suppression_of_a_long_chain_needs_as_many_rounds():
    # Each box overlaps only its neighbours: every other one survives, which only the last round knows.
    low = np.arange(30, dtype=np.float32) / 100
    boxes = np.stack([low, np.zeros(30), low + 0.04, np.ones(30)], -1)[None].astype(np.float32)
    scores = np.linspace(0.9, 0.1, 30, dtype=np.float32)[None, :, None]
    found = nms.suppress(tf.constant(boxes), tf.constant(scores), iou_threshold=0.5)
    assert int(found.count[0]) == 15
    np.testing.assert_allclose(found.scores[0, :15], scores[0, ::2, 0])
    assert found.boxes.shape == (1, 100, 4) and not np.any(found.scores[0, 15:])


def test_candidates_limit_and_unknown_shapes():
    boxes = tf.constant([[[0.0, 0.0, 0.1, 0.1], [0.5, 0.5, 0.9, 0.9], [0.2, 0.6, 0.3, 0.9]]])
    found = nms.suppress(boxes, tf.constant([[[0.3], [0.9], [0.5]]]), candidates=2, detections=5)
    np.testing.assert_allclose(found.scores, [[0.9, 0.5, 0, 0, 0]])
    with pytest.raises(ValueError, match="known number"):
        tf.function(nms.suppress).get_concrete_function(tf.TensorSpec([None, None, 4]), tf.TensorSpec([None, None, 3]))


def test_detect_finds_what_the_targets_say():
    """Perfect outputs, made from the targets, give the objects back."""
    boxes = tf.constant([[[0.1, 0.2, 0.4, 0.7], [0.5, 0.1, 0.9, 0.3]], [[0.25, 0.25, 0.75, 0.75], [0, 0, 0, 0]]])
    labels = tf.constant([[2, 1], [3, 0]])
    places = tf.constant(anchors.make_anchors())
    aims = targets.match(boxes, labels, places)
    logits = tf.one_hot(aims.labels - 1, 3, on_value=8.0, off_value=-30.0)
    found = nms.detect(aims.offsets, logits, places, score_threshold=0.5)
    assert found.count.numpy().tolist() == [2, 1]
    for picture, count in enumerate((2, 1)):
        order = np.argsort(found.labels[picture, :count])
        wanted = np.argsort(labels[picture, :count])
        np.testing.assert_allclose(
            found.boxes.numpy()[picture, :count][order], boxes.numpy()[picture, :count][wanted], atol=1e-5
        )


# The network


def expected_parameters(config: model.ModelConfig, classes: int) -> int:
    """All variables, norms with four per channel, counted from the papers' tables."""
    width, trunk = config.backbone.width, 3 * 49 * config.backbone.width + 4 * config.backbone.width
    before = width
    outs = []
    for stage, blocks in enumerate(config.backbone.blocks):
        inner = width * 2**stage
        out = inner * (4 if config.backbone.bottleneck else 1)
        for number in range(blocks):
            if config.backbone.bottleneck:
                trunk += before * inner + 9 * inner**2 + inner * out + 4 * (2 * inner + out)
            else:
                trunk += 9 * before * inner + 9 * inner**2 + 8 * inner
            if number == 0 and (before != out or stage):
                trunk += before * out + 4 * out
            before = out
        outs.append(out)
    side = config.channels
    pyramid = sum(out * side + side for out in outs[1:]) + 2 * (9 * side**2 + side) + 2 * (9 * side**2 + 4 * side)
    heads = sum(
        config.depth * (9 * side**2 + 5 * 4 * side) + 9 * side * 6 * values + 6 * values for values in (4, classes)
    )
    return trunk + pyramid + heads


@pytest.mark.parametrize("name, classes, count", [("full", 90, 32_900_852), ("compact", 10, None)])
def test_parameter_counts(name, classes, count):
    found = model.build_model(name, classes).count_params()
    assert found == expected_parameters(model.config_of(name), classes)
    assert count is None or found == count


@pytest.fixture(scope="module")
def compact() -> keras.Model:
    keras.utils.set_random_seed(0)
    return model.build_model("compact", 5, 64)


def test_outputs_follow_the_anchors(compact):
    outputs = compact(np.random.default_rng(0).uniform(0, 255, (2, 64, 64, 3)).astype(np.float32))
    number = len(anchors.make_anchors(64))
    assert outputs["offsets"].shape == (2, number, 4) and outputs["logits"].shape == (2, number, 5)
    # A fresh network says 1 % everywhere.
    scores = np.asarray(tf.sigmoid(outputs["logits"]))
    assert abs(scores.mean() - 0.01) < 0.001 and scores.max() < 0.05
    assert np.std(outputs["logits"]) > 0


def test_where_an_output_looks(compact):
    """Pixels that an anchor's logit depends on most: upper right ones for a cell there, lower left ones for another."""
    picture = tf.Variable(np.random.default_rng(0).uniform(0, 255, (1, 64, 64, 3)).astype(np.float32))
    middles = []
    for row, column in ((1, 6), (6, 1)):
        with tf.GradientTape() as tape:
            value = compact(picture)["logits"][0, (row * 8 + column) * 6, 0]
        weight = np.square(tape.gradient(value, picture)[0]).sum(-1)
        middles.append([np.average(np.arange(64), weights=weight.sum(1 - axis)) for axis in (0, 1)])
    assert middles[1][0] - middles[0][0] > 4 and middles[0][1] - middles[1][1] > 4


@pytest.mark.parametrize("dtype, error", [("mixed_bfloat16", 0.1), ("mixed_float16", 0.02)])
def test_mixed_precision_keeps_variables_and_outputs_in_float32(compact, dtype, error):
    halved = model.build_model("compact", 5, 64, dtype=dtype)
    halved.set_weights(compact.get_weights())
    assert {variable.dtype for variable in halved.variables} == {"float32"}
    assert halved.get_layer("smooth3").compute_dtype == dtype.removeprefix("mixed_")
    picture = np.random.default_rng(0).uniform(0, 255, (1, 64, 64, 3)).astype(np.float32)
    outputs, exact = halved(picture), compact(picture)
    for name, value in outputs.items():
        assert value.dtype == tf.float32
        assert 0 < np.max(np.abs(value - exact[name])) < error


def test_all_variables_learn_and_the_loss_falls():
    keras.utils.set_random_seed(0)
    small = model.ModelConfig(backbone.BackboneConfig(False, (1, 1, 1, 1), 8, momentum=0.9), channels=16, depth=1)
    network = model.build_model(small, 2, 64)
    picture = tf.constant(np.random.default_rng(0).uniform(0, 255, (2, 64, 64, 3)), tf.float32)
    boxes, labels = tf.constant([[[0.1, 0.1, 0.6, 0.6]], [[0.4, 0.2, 0.9, 0.9]]]), tf.constant([[1], [2]])
    aims = targets.match(boxes, labels, tf.constant(anchors.make_anchors(64)))
    optimizer = keras.optimizers.SGD(0.02, momentum=0.9)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            outputs = network(picture, training=True)
            value = loss.detection_loss(outputs["offsets"], outputs["logits"], aims).total
        gradients = tape.gradient(value, network.trainable_variables)
        optimizer.apply_gradients(zip(gradients, network.trainable_variables, strict=True))
        return value, [tf.reduce_max(tf.abs(gradient)) for gradient in gradients]

    value, sizes = step()
    # A level's own norms in the head of offsets get none where no anchor of that level has an object.
    silent = [
        variable.path
        for variable, size in zip(network.trainable_variables, sizes, strict=True)
        if not size > 0 and not variable.path.startswith("offsets_bn")
    ]
    assert silent == []
    for _ in range(30):
        last, _ = step()
    assert float(last) < 0.5 * float(value)


def test_weight_penalty_is_of_kernels_only(compact):
    kernels = [layer.kernel.numpy() for layer in compact.get_layer("backbone").layers if hasattr(layer, "kernel")]
    kernels += [layer.kernel.numpy() for layer in compact.layers if hasattr(layer, "kernel")]
    expected = 4e-4 * sum(np.sum(np.square(kernel, dtype=np.float64)) for kernel in kernels) / 2
    np.testing.assert_allclose(loss.weight_penalty(compact, 4e-4), expected, rtol=1e-5)


@pytest.mark.parametrize("given, message", [(("ful",), "did you mean 'full'"), (("full", 0), "got 0")])
def test_wrong_networks(given, message):
    with pytest.raises(ValueError, match=message):
        model.build_model(*given)


# Keras' ResNet-50


@pytest.fixture(scope="module")
def resnet() -> keras.Model:
    """Keras' own, with biases and statistics that are none of the neutral ones it starts with."""
    keras.utils.set_random_seed(3)
    network = keras.applications.ResNet50(weights=None, include_top=False, input_shape=(64, 64, 3))
    generator = np.random.default_rng(3)
    for layer in network.layers:
        for variable in layer.weights:
            if variable.name in ("bias", "beta", "moving_mean"):
                variable.assign(generator.normal(0, 0.2, variable.shape))
            elif variable.name in ("gamma", "moving_variance"):
                variable.assign(generator.uniform(0.5, 1.5, variable.shape))
    return network


def stages_of(network: keras.Model, picture: np.ndarray) -> list[np.ndarray]:
    names = [f"conv{stage}_block{blocks}_out" for stage, blocks in zip((2, 3, 4, 5), (3, 4, 6, 3), strict=True)]
    outputs = keras.Model(network.input, [network.get_layer(name).output for name in names])(picture)
    return [np.asarray(value) for value in outputs]


def test_weights_of_keras_resnet_give_the_same_network(resnet):
    ours = backbone.build_backbone(PARITY, 64)
    backbone.set_weights(ours, backbone.from_keras_resnet(backbone.weights_of(resnet)))
    picture = np.random.default_rng(4).normal(0, 1, (2, 64, 64, 3)).astype(np.float32)
    for found, expected in zip(ours(picture), stages_of(resnet, picture), strict=True):
        assert np.std(expected) > 0
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())


def test_version_1_5_has_the_same_weights_and_only_other_strides(resnet):
    """Stage 2 has no stride and is equal; from stage 3 on the same weights are another function of the same shapes."""
    ours = backbone.build_backbone(backbone.BackboneConfig(epsilon=1.001e-5), 64)
    backbone.set_weights(ours, backbone.from_keras_resnet(backbone.weights_of(resnet)))
    picture = np.random.default_rng(4).normal(0, 1, (1, 64, 64, 3)).astype(np.float32)
    found, expected = [np.asarray(value) for value in ours(picture)], stages_of(resnet, picture)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-3, atol=1e-4 * np.abs(expected[0]).max())
    assert [value.shape for value in found] == [value.shape for value in expected]
    assert np.max(np.abs(found[1] - expected[1])) > 0.1 * np.abs(expected[1]).max()


def test_weights_that_do_not_fit_change_nothing():
    small = backbone.build_backbone(backbone.BackboneConfig(False, (1, 1, 1, 1), 4), 32)
    weights = backbone.weights_of(small)
    with pytest.raises(ValueError, match="missing .'conv1_conv/kernel'"):
        backbone.set_weights(small, {name: value for name, value in weights.items() if name != "conv1_conv/kernel"})
    with pytest.raises(ValueError, match=r"conv1_bn/gamma: shape \(3,\)"):
        backbone.set_weights(small, {**{n: v + 1 for n, v in weights.items()}, "conv1_bn/gamma": np.zeros(3)})
    for name, value in backbone.weights_of(small).items():
        np.testing.assert_array_equal(value, weights[name])
