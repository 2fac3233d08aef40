"""int8: quantisers against integer arithmetic in numpy, calibration, every family, the exported file, a whole run."""

from __future__ import annotations

import copy
import functools

import numpy as np
import pytest
import torch
from PIL import Image

from convnets import evaluate, export, pretrained, quantize, quantized_onnx, quantizers, registry, train
from convnets.efficientnet import EfficientNet, EfficientNetConfig
from convnets.mobilenet import MobileNetV2, MobileNetV2Config
from convnets.quantizers import ActivationQuantizer, Histogram, Scheme, WeightQuantizer
from convnets.resnet import ResNet, ResNetConfig
from convnets.step import TrainState, train_step
from dlx import checkpoint as checkpoints
from dlx import export as exports
from dlx import optim
from dlx import record as records
from dlx.inference import fold
from dlx.norm import BatchNormAct

LITE = {"se": "none", "act": "relu6", "padding": "same", "scales_stem_and_head": False}
FAMILIES = {
    "basic": lambda: ResNet(ResNetConfig((1, 1, 1), "basic", width=16, stem="half", stem_width=16), 10),
    "bottleneck": lambda: ResNet(ResNetConfig((1, 2), width=16, stem_width=16), 10),
    "se": lambda: ResNet(ResNetConfig((1, 1), width=16, expansion=2, groups=4, se_ratio=4, stem_width=16), 10),
    "efficientnet": lambda: EfficientNet(EfficientNetConfig(0.25, 0.3), 10),
    "lite": lambda: EfficientNet(EfficientNetConfig(0.25, 0.3, **LITE), 10),
    "mobilenet": lambda: MobileNetV2(MobileNetV2Config(0.35), 10),
}
SIZE = 40
STEPS = 25
LABELS = torch.arange(32) % 10


def images(count: int, seed: int = 0) -> torch.Tensor:
    """Smooth pictures: noise alone averages away before the classifier."""
    coarse = torch.randn(count, 3, 5, 5, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.interpolate(coarse, size=(SIZE, SIZE), mode="bilinear")


@functools.cache
def memorised(family: str) -> torch.nn.Module:
    """A model that has learnt 32 pictures by heart: a random one magnifies rounding until nothing is left."""
    torch.manual_seed(0)
    model = FAMILIES[family]().train()
    optimizer = optim.build_optimizer(model, "sgd", lr=0.05, momentum=0.9, weight_decay=0.0)
    state = TrainState(model, optimizer)
    for _ in range(STEPS):
        train_step(state, [(images(32), LABELS)])
    for module in model.modules():
        if isinstance(module, BatchNormAct):
            module.momentum = None  # the average of what comes now, undisturbed by the weights of earlier steps
            module.reset_running_stats()
    with torch.no_grad():
        model(images(32))
    return model.eval()


def build(family: str) -> torch.nn.Module:
    return copy.deepcopy(memorised(family))


def quantized(family: str, scheme: Scheme | None = None) -> quantizers.QuantizedClassifier:
    model = quantizers.quantize(build(family), scheme)
    quantizers.calibrate(model, [images(32)[:16], images(32)[16:]])
    return model


def classifier(model: torch.nn.Module, size: int = SIZE) -> pretrained.Classifier:
    shape = pretrained.default_preprocessing("resnet18", size)
    return pretrained.Classifier(model, "resnet18", shape, [f"class_{i}" for i in range(10)], "test")


# ------------------------------------------------------------------------------------------------ arithmetic


def integer_reference(x: np.ndarray, scale: float, zero_point: int, low: int, high: int) -> np.ndarray:
    """The stored integers, in float64 and int64, by the definition of ONNX's QuantizeLinear."""
    quotient = x.astype(np.float64) / scale
    floor = np.floor(quotient).astype(np.int64)
    rest = quotient - floor
    up = (rest > 0.5) | ((rest == 0.5) & (floor % 2 == 1))  # halves go to the even neighbour
    return np.minimum(np.maximum(floor + up + zero_point, low), high)


@pytest.mark.parametrize(("low", "high"), [(-1.0, 3.0), (0.0, 6.0), (-2.5, 0.0), (0.5, 2.0), (-3.0, -1.0)])
def test_activations_equal_the_integer_reference(low, high):
    quantizer = ActivationQuantizer()
    quantizer.set_range(low, high)
    scale, zero_point = quantizer.scale.item(), quantizer.zero_point.item()
    x = np.random.default_rng(0).uniform(low - 2, high + 2, 20000).astype(np.float32)
    near_tie = np.abs(x / np.float64(scale) % 1.0 - 0.5) < 1e-4  # float32 may fall to either side
    expected = (integer_reference(x, scale, zero_point, 0, 255) - zero_point) * scale
    found = quantizer(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(found[~near_tie], expected[~near_tie], atol=1e-6)
    assert found.min() == pytest.approx(min(low, 0.0), abs=scale) and found.max() == pytest.approx(
        max(high, 0), abs=scale
    )
    assert quantizer(torch.zeros(1)).item() == 0.0  # padding must be exact


def test_halves_go_to_the_even_neighbour_and_the_ends_saturate():
    quantizer = ActivationQuantizer()
    quantizer.scale.fill_(0.25)
    quantizer.zero_point.fill_(10)
    steps = np.array([-40.0, -10.5, -10.0, -2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 3.5, 244.5, 245.0, 245.5, 1000.0])
    found = quantizer(torch.from_numpy((steps * 0.25).astype(np.float32))).numpy() / 0.25
    np.testing.assert_array_equal(found, [-10, -10, -10, -2, -2, 0, 0, 2, 2, 4, 244, 245, 245, 245])
    np.testing.assert_array_equal(found, integer_reference(steps * 0.25, 0.25, 10, 0, 255) - 10)


def test_range_is_representable():
    for low, high in [(0.0, 6.0), (0.0, 1.0), (-1.0, 2.0), (0.0, 0.0), (-4.0, 0.0), (1e-30, 2e-30)]:
        scale, zero_point = quantizers.affine(low, high)
        assert scale > 0 and 0 <= zero_point <= 255
        assert (255 - zero_point) * scale >= high - scale and -zero_point * scale <= low + scale
    scale, zero_point = quantizers.affine(0.0, 6.0)
    assert zero_point == 0 and np.float32(scale) * np.float32(255) <= 6.0  # else the clipping stays a pass of its own


@pytest.mark.parametrize(("limit", "shape"), [(127, (6, 3, 3, 3)), (63, (6, 3, 3, 3)), (127, (5, 8))])
def test_weights_have_a_scale_per_output_channel(limit, shape):
    rng = np.random.default_rng(0)
    weight = (rng.normal(size=shape) * 10.0 ** rng.uniform(-4, 2, (shape[0],) + (1,) * (len(shape) - 1))).astype(
        np.float32
    )
    weight[2] = 0.0
    found = WeightQuantizer(limit)(torch.from_numpy(weight)).numpy()
    for channel in range(shape[0]):
        largest = np.abs(weight[channel]).max()
        scale = np.float32(max(largest / limit, quantizers.SMALLEST_SCALE))
        levels = integer_reference(weight[channel], scale, 0, -limit, limit)
        away = np.abs(weight[channel] / np.float64(scale) % 1.0 - 0.5) > 1e-4
        np.testing.assert_allclose(found[channel][away], (levels * scale)[away], rtol=1e-5)
        assert np.abs(levels).max() == (limit if largest else 0)


def test_gradient_passes_inside_the_range_only():
    quantizer = ActivationQuantizer()
    quantizer.set_range(-1.0, 2.0)
    x = torch.tensor([-3.0, -1.02, -0.9, 0.0, 0.1234, 1.9, 2.02, 5.0], requires_grad=True)
    (quantizer(x) * torch.arange(1.0, 9.0)).sum().backward()
    assert x.grad.tolist() == [0.0, 0.0, 3.0, 4.0, 5.0, 6.0, 0.0, 0.0]
    weight = torch.randn(4, 3, 3, 3, requires_grad=True)
    gradient = torch.randn(4, 3, 3, 3)
    WeightQuantizer(127)(weight).backward(gradient)
    assert torch.equal(weight.grad, gradient)


# ----------------------------------------------------------------------------------------------- calibration


@pytest.mark.parametrize("percent", [0.01, 1.0, 50.0, 99.0, 99.99, 100.0])
def test_percentile_equals_numpy(percent):
    rng = np.random.default_rng(0)
    parts = [rng.normal(0, scale, 50000).astype(np.float32) for scale in (0.3, 1.0, 4.0)]  # the reach has to grow
    histogram = Histogram()
    for part in parts:
        histogram.add(torch.from_numpy(part))
    values = np.concatenate(parts)
    width = 2 * histogram.reach / quantizers.BINS
    expected = float(np.percentile(values, percent))
    # In the tails the next sample may be several bins away: numpy interpolates between samples, we inside a bin.
    near = float(np.sort(np.abs(values - expected))[2])
    assert histogram.percentile(percent) == pytest.approx(expected, abs=width + near)
    assert histogram.counts.sum() == len(values)
    assert (histogram.low, histogram.high) == (values.min(), values.max())


def test_choices_of_range():
    values = torch.cat([torch.randn(100000, generator=torch.Generator().manual_seed(0)).relu(), torch.tensor([100.0])])
    histogram = Histogram()
    histogram.add(values)
    assert histogram.range(Scheme("max")) == (0.0, 100.0)
    low, high = histogram.range(Scheme("percentile", percentile=99.99))
    assert low == pytest.approx(0.0, abs=0.1) and 3 < high < 6
    normal = torch.randn(100000, generator=torch.Generator().manual_seed(1))
    values = torch.cat([normal, torch.tensor([-9.0, 9.0])])
    histogram = Histogram()
    histogram.add(values)
    errors = {}
    for calibration in quantizers.CALIBRATIONS:
        quantizer = ActivationQuantizer()
        quantizer.set_range(*histogram.range(Scheme(calibration)))
        errors[calibration] = (quantizer(values) - values).square().mean().item()
    assert errors["mse"] < 0.9 * errors["max"] and errors["mse"] < 1.01 * errors["percentile"], errors


def test_calibration_refuses_what_is_not_finite_and_nothing():
    model = quantizers.quantize(build("basic"))
    with pytest.raises(ValueError, match="at least one batch"):
        quantizers.calibrate(model, [])
    with pytest.raises(ValueError, match="finite"):
        quantizers.calibrate(model, [torch.full((1, 3, SIZE, SIZE), float("nan"))])
    assert all(quantizer.histogram is None for quantizer in quantizers.quantizers(model).values())


@pytest.mark.parametrize("values", [{"calibration": "median"}, {"percentile": 40.0}, {"weight_bits": 4}])
def test_scheme_refuses(values):
    with pytest.raises(ValueError, match=next(iter(values))):
        Scheme(**values)


# -------------------------------------------------------------------------------------------------- families


@pytest.mark.parametrize("family", FAMILIES)
def test_family_quantises_and_trains(family):
    source = build(family)
    model = quantized(family)
    x = images(8)
    with torch.no_grad():
        exact, rounded = source(x), model(x)
        with quantizers.float_arithmetic(model):
            weights_only = model(x)
    scale = exact.abs().max()
    assert 0 < (exact - rounded).square().mean().sqrt() < 0.1 * scale
    assert (exact - weights_only).square().mean().sqrt() < 0.03 * scale
    convolutions = sum(isinstance(module, torch.nn.Conv2d | torch.nn.Linear) for module in source.modules())
    assert sum(isinstance(module, WeightQuantizer) for module in model.modules()) == convolutions
    model.train()
    model(x).square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert all(parameter.grad is None for parameter in source.parameters())  # the original is left alone


@pytest.mark.parametrize("family", ["bottleneck", "mobilenet", "efficientnet"])
def test_every_activation_has_at_most_256_values(family):
    """What a convolution or linear layer reads lies on the grid of one quantiser."""
    model = quantized(family)
    levels = []

    def watch(module, arguments):
        levels.append(len(arguments[0].unique()))

    for module in model.modules():
        if isinstance(module, torch.nn.Conv2d | torch.nn.Linear):
            module.register_forward_pre_hook(watch)
    model(images(4))
    assert len(levels) > 5 and max(levels) <= 256


def test_first_and_last_layer_may_stay_float():
    model = quantized("mobilenet", Scheme(keep_first_last_float=True))
    plain = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Conv2d | torch.nn.Linear) and not hasattr(module, "parametrizations")
    ]
    assert plain == ["model.features.0.1.conv", "model.classifier.1"] and model.input is None


def test_quantised_twice_and_unknown_layers_are_refused():
    with pytest.raises(ValueError, match="quantised already"):
        quantizers.quantize(quantized("basic"))
    model = build("basic")
    model.layer1.add_module("extra", torch.nn.Conv2d(16, 16, 1))
    with pytest.raises(ValueError, match="layer1.extra"):
        quantizers.quantize(model)


def test_a_step_lowers_the_loss():
    model = quantized("basic").train()
    x, labels = images(32), LABELS.roll(1)  # not what it knows
    optimizer = optim.build_optimizer(model, "sgd", lr=0.05, momentum=0.9, weight_decay=0.0)
    state = TrainState(model, optimizer)
    losses = [train_step(state, [(x, labels)]).item() for _ in range(8)]
    assert losses[1] < losses[0] and losses[-1] < 0.8 * losses[0]


# ---------------------------------------------------------------------------------------------- exported file


@pytest.mark.parametrize("family", FAMILIES)
def test_file_equals_the_simulation_and_runs_on_integers(family, tmp_path):
    model = quantized(family)
    path = quantized_onnx.export(classifier(model), tmp_path / "int8.onnx")
    runtime = quantized_onnx.session(path)
    x = images(32) + 0.1 * torch.randn(32, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(9))
    with torch.no_grad():
        exact, expected = build(family)(x).numpy(), model(x).numpy()
    scale = np.abs(expected).max()
    found = np.concatenate([runtime.run(None, {"images": x[i : i + 3].numpy()})[0] for i in range(0, 32, 3)])
    alone = runtime.run(None, {"images": x[:1].numpy()})[0]
    np.testing.assert_allclose(alone, found[:1], atol=1e-5 * scale)
    # A sum within a hair's breadth of a tie may round differently, and later layers magnify it; the whole must stay
    # below the rounding noise itself.
    assert np.abs(found - expected).max() < 0.12 * scale
    assert np.sqrt(np.square(found - expected).mean()) < np.sqrt(np.square(exact - expected).mean())
    assert (found.argmax(1) == expected.argmax(1)).mean() >= 0.9
    operators = quantized_onnx.executed_operators(path)
    layers = sum(isinstance(module, torch.nn.Conv2d) for module in model.modules())
    assert operators["QLinearConv"] == layers and "Conv" not in operators, operators
    assert operators["QGemm"] >= 1 and not {"Gemm", "MatMul", "Add", "Mul", "Clip", "Relu"} & set(operators), operators
    assert exports.read_metadata(path)["classes"] == classifier(model).classes


def test_weights_are_stored_as_int8(tmp_path):
    import onnx

    model = quantized("basic", Scheme(weight_bits=7))
    path = quantized_onnx.export(classifier(model), tmp_path / "int8.onnx")
    tensors = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in onnx.load(str(path)).graph.initializer}
    integers = [value for value in tensors.values() if value.dtype == np.int8 and value.ndim > 1]
    assert sum(value.size for value in integers) == sum(p.numel() for p in model.parameters() if p.ndim > 1)
    assert all(np.abs(value).max() == 63 for value in integers)
    assert not any(value.dtype == np.float32 and value.ndim > 1 for value in tensors.values())
    assert path.stat().st_size < 1.5 * sum(p.numel() for p in model.parameters()) + 30000


def test_dead_channel_with_a_bias_fits_int32(tmp_path):
    """Folding a norm whose gain vanished leaves minute weights beside an ordinary bias."""
    model = build("basic")
    model.bn1.weight.data[3], model.bn1.bias.data[3] = 1e-12, 0.7
    model = quantizers.quantize(model)
    quantizers.calibrate(model, [images(16)])
    path = quantized_onnx.export(classifier(model), tmp_path / "int8.onnx")
    found = quantized_onnx.session(path).run(None, {"images": images(4).numpy()})[0]
    with torch.no_grad():
        expected = model(images(4)).numpy()
    assert np.abs(found - expected).max() < 0.05 * np.abs(expected).max()


def test_exporting_leaves_the_model_as_it_was(tmp_path):
    model = quantized("basic")
    with torch.no_grad():
        before = model(images(2))
        quantized_onnx.export(classifier(model), tmp_path / "int8.onnx")
        assert torch.equal(model(images(2)), before)
    with pytest.raises(ValueError, match="not a quantised model"):
        quantized_onnx.export(classifier(fold(build("basic"))), tmp_path / "no.onnx")
    with pytest.raises(ValueError, match="model_int8.onnx"):
        export.export(classifier(model), tmp_path / "no.onnx")
    assert not (tmp_path / "no.onnx").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "arch", ["resnet50", "resnext101_32x4d", "se_resnext101_32x4d", "efficientnet_b0", "efficientnet_widese_b0"]
    + ["efficientnet_lite0", "mobilenet_v2", "resnet14_small"]
)  # fmt: skip
def test_named_architecture_runs_on_integers(arch, tmp_path):
    torch.manual_seed(0)
    size = 28 if arch.endswith("small") else 64
    model = quantizers.quantize(registry.build(arch, 10))
    quantizers.calibrate(model, [torch.randn(2, 3, size, size)])
    path = quantized_onnx.export(classifier(model, size), tmp_path / "int8.onnx")
    operators = quantized_onnx.executed_operators(path)
    assert "Conv" not in operators and "Gemm" not in operators and operators["QLinearConv"] > 10


# -------------------------------------------------------------------------------------------------- the verb


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(folder of pictures, run) of a small ResNet that tells four kinds of stripes apart."""
    folder = tmp_path_factory.mktemp("quantize")
    rng = np.random.default_rng(0)
    y, x = np.mgrid[:28, :28]
    for split, count in (("train", 48), ("val", 40)):
        for kind, wave in enumerate((x, y, x + y, x - y)):
            where = folder / "pictures" / split / f"stripes{kind}"
            where.mkdir(parents=True)
            for index in range(count):
                pattern = np.sin(wave * rng.uniform(0.5, 1.2) + rng.uniform(0, 6))[..., None] * rng.uniform(0.2, 1, 3)
                pixels = np.clip(128 + 50 * pattern + rng.normal(0, 40, (28, 28, 3)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(where / f"{index}.png")
    run = folder / "float"
    arguments = f"--data_dir {folder / 'pictures'} --workers 0 --arch resnet8_small --batch_size 32 --epochs 6"
    arguments += " --lr 0.1 --lr_batch_size null --warmup_epochs 1 --augmentation none --evaluate_epochs 6 --device cpu"
    train.main([*arguments.split(), "--output_dir", str(run)])
    return folder, run


def arguments(folder, run, output, *more: str) -> list[str]:
    base = f"--checkpoint {run} --data_dir {folder / 'pictures'} --workers 0 --batch_size 32 --device cpu"
    base += f" --calibration_batches 3 --augmentation none --latency_iterations 6 --output_dir {output}"
    return [*base.split(), *more]


def test_run_from_checkpoint_to_file(trained, tmp_path):
    folder, run = trained
    quantize.main(arguments(folder, run, tmp_path, "--epochs", "2", "--max_steps", "9"))
    record = records.load(tmp_path)
    value = record.value
    assert value("val.top1.float") > 80
    for name in ("val.top1.calibrated", "val.top1", "val.top1.onnxruntime"):
        assert abs(value(name) - value("val.top1.float")) <= 3, name  # of 160 pictures, one is 0.6 %
    assert value("val.agreement") >= 97 and value("steps") == 9 and value("calibration.images") == 96
    assert value("size.int8") < 0.35 * value("size.float") and value("latency.int8") > 0
    assert record.fields["attachments"]["operators"]["QLinearConv"] == 9
    again = evaluate.main(
        f"--checkpoint {tmp_path} --data_dir {folder / 'pictures'} --workers 0 --output_dir {tmp_path / 'e'}".split()
    )
    assert again["top1"] == pytest.approx(value("val.top1"))
    with pytest.raises(ValueError, match="quantised already"):
        quantize.main(arguments(folder, tmp_path, tmp_path / "twice"))


def test_resumed_run_equals_the_whole_one(trained, tmp_path, monkeypatch):
    folder, run = trained
    monkeypatch.setattr(quantize, "_finish", lambda work, output, log, record, store: work.save(store))
    recipe = ["--epochs", "2", "--lr", "0.01"]
    quantize.main(arguments(folder, run, tmp_path / "whole", *recipe))
    step, calls = quantize.Quantizer.step, 0

    def interrupted(self, batch):
        nonlocal calls
        calls += 1
        if calls == 5:
            raise KeyboardInterrupt
        return step(self, batch)

    monkeypatch.setattr(quantize.Quantizer, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        quantize.main(arguments(folder, run, tmp_path / "parts", *recipe, "--save_steps", "3"))
    quantize.main(arguments(folder, run, tmp_path / "parts", *recipe))
    whole, parts = (checkpoints.resume(tmp_path / name / "checkpoints") for name in ("whole", "parts"))
    assert whole.step == parts.step == 12
    for name, tensor in whole.model["model"].items():
        assert torch.equal(tensor, parts.model["model"][name]), name
    with pytest.raises(ValueError, match="another output_dir"):
        quantize.main(arguments(folder, run, tmp_path / "parts", *recipe, "--weight_bits", "7"))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--checkpoint", "nowhere"], "nowhere"),
        (["--image_size", "32"], "28 pixels"),
        (["--data", "synthetic", "--data_dir", "null"], "calls class 0 'stripes0'"),
        (["--data", "fashion-mnist-of-old", "--data_dir", "null"], "fashion-mnist-of-old"),
    ],
)
def test_bad_input_is_named(trained, tmp_path, more, message):
    folder, run = trained
    with pytest.raises(ValueError, match=message):
        quantize.main(arguments(folder, run, tmp_path / "out", *more))
    assert not (tmp_path / "out" / "record.json").exists()


@pytest.mark.parametrize("more", [["--calibration", "median"], ["--weight_bits", "4"], ["--percentile", "20"]])
def test_bad_option_is_one_line(trained, tmp_path, more, capsys):
    with pytest.raises(SystemExit) as stopped:
        quantize.main(arguments(*trained, tmp_path, *more))
    assert stopped.value.code == 2 and more[0].strip("-") in capsys.readouterr().err


@pytest.mark.slow
def test_fashion_mnist_stays_within_a_point(tmp_path):
    """300 steps in floating point, 100 with rounding: the file's accuracy on all 10,000 test pictures."""
    from dlx import data

    try:
        data.prepare("fashion-mnist")
    except (OSError, ValueError) as error:
        pytest.skip(f"needs Fashion-MNIST: {error}")
    run = tmp_path / "float"
    train.main(["--config", "quickstart", "--max_steps", "300", "--epochs", "1", "--output_dir", str(run)])
    output = tmp_path / "int8"
    quantize.main(["--checkpoint", str(run), "--max_steps", "100", "--batch_size", "128", "--output_dir", str(output)])
    record = records.load(output)
    for name in ("val.top1.calibrated", "val.top1", "val.top1.onnxruntime"):
        assert abs(record.value(name) - record.value("val.top1.float")) <= 1.0, name
    assert record.value("val.agreement") > 99


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("arch", ["resnet8_small", "mobilenet_v2"])
def test_quantisers_are_where_the_model_is(arch):
    quantized = quantizers.quantize(registry.build(arch, 5).cuda())
    images = torch.randn(4, 3, 32, 32, device="cuda")
    quantizers.calibrate(quantized, [images])
    assert quantized(images).is_cuda
