"""Networks: sizes, the same numbers as other libraries under shared weights, fused norms, and that they learn."""

import importlib.util
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest

from rn50_mxnet import blocks, convert, registry

GOLDEN = Path(__file__).parent / "golden"


def load_maker():
    spec = importlib.util.spec_from_file_location("make_forward", GOLDEN / "make_forward.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


maker = load_maker()


@pytest.mark.parametrize("name", registry.ARCHITECTURES)
def test_parameter_counts_are_the_published_ones(name):
    assert blocks.count_parameters(registry.build(name)) == registry.ARCHITECTURES[name].parameters


@pytest.mark.parametrize(
    ("name", "size"), [("resnet18", 64), ("resnet50_v1", 64), ("xception", 96), ("resnet8_small", 28)]
)
def test_shapes(name, size):
    network = registry.build(name, 7, 3)
    assert network(mx.nd.zeros((2, 3, size, size))).shape == (2, 7)


def test_an_unknown_name_gets_its_neighbour():
    with pytest.raises(ValueError, match="'resnet51'.*did you mean.*resnet50"):
        registry.build("resnet51")
    with pytest.raises(ValueError, match="at least 2, got 1"):
        registry.build("resnet18", 1)


@pytest.mark.parametrize("name", maker.NAMES | maker.XCEPTION)
def test_logits_are_those_of_pytorch(name):
    channels, size = (maker.NAMES | maker.XCEPTION)[name]
    network = registry.build(name, 10, channels)
    shapes = {key: p.shape for key, p in blocks.named_parameters(network).items()}
    blocks.set_weights(network, {key: maker.draw(key, shape) for key, shape in shapes.items()})
    network.hybridize()
    ours = network(mx.nd.array(maker.images(channels, size))).asnumpy()
    theirs = np.load(GOLDEN / "forward.npz")[name]
    assert np.abs(ours - theirs).max() < 2e-5 * np.abs(theirs).max()


@pytest.mark.parametrize("name", ["resnet18_v1", "resnet50_v1"])
def test_logits_are_those_of_mxnets_model_zoo(name):
    """With biases that are not zero in the zoo's convolutions, which conversion moves into the norms."""
    zoo = getattr(mx.gluon.model_zoo.vision, name)(classes=11)
    zoo.initialize()
    images = mx.nd.array(np.random.default_rng(0).standard_normal((2, 3, 64, 64)))
    zoo(images)
    for parameter in zoo.collect_params().values():
        parameter.set_data(
            mx.nd.array(maker.draw(parameter.name.partition("_")[2].replace("gamma", "weight"), parameter.shape))
        )
    for key, parameter in zoo.collect_params().items():
        if key.endswith(("gamma", "running_var")):
            parameter.set_data(mx.nd.abs(parameter.data()) + 0.5)
    ours = registry.build(name, 11)
    blocks.set_weights(ours, convert.from_zoo(zoo, name, 11))
    expected = zoo(images).asnumpy()
    assert np.abs(ours(images).asnumpy() - expected).max() < 2e-5 * np.abs(expected).max()
    # The other version has the same tensors and computes something else.
    other = registry.build(name.removesuffix("_v1"), 11)
    blocks.set_weights(other, convert.from_zoo(zoo, name, 11))
    same = np.abs(other(images).asnumpy() - expected).max() < 2e-5 * np.abs(expected).max()
    assert same == (name == "resnet18_v1")


def test_fused_norms_compute_the_same():
    """Forward, gradients and running statistics; and the fused operator is really there."""
    found = []
    images = mx.nd.array(np.random.default_rng(0).standard_normal((4, 1, 28, 28)))
    for fused in (False, True):
        network = registry.build("resnet8_small", 5, 1, seed=3, fused=fused)
        network.hybridize()
        with mx.autograd.record():
            loss = (network(images) ** 2).sum()
        loss.backward()
        grads = {k: p.grad().asnumpy() for k, p in blocks.named_parameters(network).items() if p.grad_req != "null"}
        found.append((loss.asscalar(), grads, blocks.get_weights(network), network(mx.sym.var("data")).tojson()))
    (loss, grads, weights, graph), (fused_loss, fused_grads, fused_weights, fused_graph) = found
    assert "BatchNormWithReLU" in fused_graph and "BatchNormWithReLU" not in graph
    assert np.isclose(loss, fused_loss, rtol=1e-5)
    for name, value in grads.items():
        np.testing.assert_allclose(fused_grads[name], value, atol=1e-4 * np.abs(value).max() + 1e-7, err_msg=name)
    for name, value in weights.items():
        np.testing.assert_allclose(fused_weights[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def test_a_picture_does_not_depend_on_its_batch():
    network = registry.build("resnet18", 5, 3, seed=1)
    images = mx.nd.array(np.random.default_rng(0).standard_normal((3, 3, 64, 64)))
    together = network(images).asnumpy()
    alone = np.concatenate([network(images[i : i + 1]).asnumpy() for i in range(3)])
    np.testing.assert_allclose(together, alone, atol=1e-5 * np.abs(together).max())


def test_weights_are_set_strictly():
    network = registry.build("resnet8_small", 5, 1)
    weights = blocks.get_weights(network)
    blocks.set_weights(network, weights | {"bn1.num_batches_tracked": np.zeros(())})
    missing = {key: value for key, value in weights.items() if key != "fc.bias"}
    with pytest.raises(ValueError, match="file: fc.bias is missing; extra is not part"):
        blocks.set_weights(network, missing | {"extra": np.zeros(1)}, "file")
    with pytest.raises(ValueError, match=r"fc.weight has shape \(3, 128\), the network \(5, 128\)"):
        blocks.set_weights(network, weights | {"fc.weight": weights["fc.weight"][:3]})


def test_seeds_decide_the_weights():
    first, again, other = (blocks.get_weights(registry.build("resnet8_small", 5, 1, seed=s)) for s in (1, 1, 2))
    assert all(np.array_equal(first[k], again[k]) for k in first)
    assert not np.array_equal(first["conv1.weight"], other["conv1.weight"])
