"""The TensorRT networks, where TensorRT (or TensorRT-RTX, which needs no GPU to build) is installed: they compute,
layer by layer, what the model does, as a small interpreter of TensorRT's definition shows on the CPU; they build."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fastspeech.model import FastSpeech, FastSpeechConfig, regulate, round_durations
from fastspeech.tensorrt import layers, network, verify

try:
    trt = layers.load()
except ImportError as error:
    pytest.skip(f"needs tensorrt or tensorrt-rtx: {error}", allow_module_level=True)

CONFIG = FastSpeechConfig(
    num_symbols=20, num_mels=8, channels=32, heads=2, head_channels=16, feed_forward=40, encoder_blocks=2,
    decoder_blocks=1, predictor=24,
)  # fmt: skip
SHAPES = network.Shapes(batch=4, longest=40)


def voice() -> FastSpeech:
    torch.manual_seed(0)
    model = FastSpeech(CONFIG).eval()
    with torch.no_grad():  # norms and biases that do something
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
        model.durations.output.bias.fill_(1.2)
    return model


def weights_of(model: FastSpeech) -> dict[str, np.ndarray]:
    return {name: value.numpy() for name, value in model.state_dict().items()}


class Interpreter:
    """Computes a network definition with PyTorch on the CPU, from what TensorRT says of each layer."""

    def __init__(self, definition) -> None:
        self.definition = definition
        self.types = {
            trt.float32: torch.float32, trt.float16: torch.float16, trt.bfloat16: torch.bfloat16,
            trt.int32: torch.int32, trt.int64: torch.int64, trt.bool: torch.bool,
        }  # fmt: skip

    def __call__(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        values = dict(inputs)
        for number in range(self.definition.num_inputs):
            given = self.definition.get_input(number)
            assert values[given.name].dtype == self.types[given.dtype], given.name
        waiting = [self.definition.get_layer(number) for number in range(self.definition.num_layers)]
        while waiting:  # layers are in the order of their making, which need not be that of their inputs
            layer = waiting.pop(0)
            read = [layer.get_input(place) for place in range(layer.num_inputs)]
            if any(tensor is not None and tensor.name not in values for tensor in read):
                waiting.append(layer)
                continue
            arguments = [values[tensor.name] for tensor in read if tensor is not None]
            kind = str(layer.type).split(".")[-1].lower()
            found = getattr(self, kind)(layer, *arguments)
            made = layer.get_output(0)
            assert found.dtype == self.types[made.dtype], (kind, layer.name, found.dtype, made.dtype)
            assert len(made.shape) == found.dim()
            assert all(said in (-1, size) for said, size in zip(made.shape, found.shape, strict=True)), kind
            values[made.name] = found
        outputs = [self.definition.get_output(number).name for number in range(self.definition.num_outputs)]
        return {name: values[name] for name in outputs}

    def constant(self, layer):
        layer.__class__ = trt.IConstantLayer
        weights = layer.weights
        values = weights if isinstance(weights, np.ndarray) else weights.numpy()
        return torch.from_numpy(np.array(values)).reshape(tuple(layer.shape))

    def cast(self, layer, x):
        return x.to(self.types[layer.get_output(0).dtype])

    def elementwise(self, layer, x, y):
        layer.__class__ = trt.IElementWiseLayer
        assert x.dtype == y.dtype and x.dim() == y.dim()
        operations = {
            "SUM": torch.add, "PROD": torch.mul, "SUB": torch.sub, "DIV": torch.div, "MAX": torch.maximum,
            "MIN": torch.minimum, "LESS": torch.lt,
        }  # fmt: skip
        return operations[str(layer.op).split(".")[-1]](x, y)

    def unary(self, layer, x):
        layer.__class__ = trt.IUnaryLayer
        return {"EXP": torch.exp, "FLOOR": torch.floor}[str(layer.op).split(".")[-1]](x)

    def activation(self, layer, x):
        layer.__class__ = trt.IActivationLayer
        assert layer.type == trt.ActivationType.RELU
        return x.relu()

    def shuffle(self, layer, x):
        layer.__class__ = trt.IShuffleLayer
        x = x.permute(*list(layer.first_transpose)[: x.dim()])
        sizes = [x.shape[axis] if size == 0 else size for axis, size in enumerate(layer.reshape_dims)]
        x = x.reshape(sizes)
        return x.permute(*list(layer.second_transpose)[: x.dim()])

    def gather(self, layer, table, index):
        layer.__class__ = trt.IGatherLayer
        assert layer.axis == 0 and layer.num_elementwise_dims == 0
        return table[index.long()]

    def shape(self, layer, x):
        return torch.tensor(x.shape, dtype=torch.int64)

    def concatenation(self, layer, *parts):
        layer.__class__ = trt.IConcatenationLayer
        return torch.cat(parts, layer.axis)

    def slice(self, layer, x, sizes):
        layer.__class__ = trt.ISliceLayer
        assert not any(layer.start) and all(step == 1 for step in layer.stride)
        for axis, size in enumerate(sizes.tolist()):
            assert size <= x.shape[axis]
            x = x.narrow(axis, 0, size)
        return x

    def matrix_multiply(self, layer, x, y):
        layer.__class__ = trt.IMatrixMultiplyLayer
        assert layer.op0 == trt.MatrixOperation.NONE
        return x @ (y.transpose(-1, -2) if layer.op1 == trt.MatrixOperation.TRANSPOSE else y)

    def convolution(self, layer, x, kernel):
        layer.__class__ = trt.IConvolutionLayer
        assert layer.num_output_maps == kernel.shape[0] and tuple(layer.kernel_size_nd) == tuple(kernel.shape[2:])
        assert tuple(layer.stride_nd) == (1, 1) and tuple(layer.dilation_nd) == (1, 1) and layer.num_groups == 1
        return F.conv2d(x, kernel, padding=tuple(layer.padding_nd))

    def softmax(self, layer, x):
        layer.__class__ = trt.ISoftMaxLayer
        return x.softmax(int(layer.axes).bit_length() - 1)

    def select(self, layer, condition, x, y):
        return torch.where(condition, x, y)

    def normalization(self, layer, x, gain, shift):
        layer.__class__ = trt.INormalizationLayer
        assert x.dtype == torch.float32 and layer.axes == 1 << (x.dim() - 1)
        return F.layer_norm(x, x.shape[-1:], gain.flatten(), shift.flatten(), layer.epsilon)

    normalization_v2 = normalization


def defined(half: str, dtype: str = "float32", watch: bool = False):
    builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
    definition, kept = network.define(trt, builder, half, CONFIG, weights_of(voice()), SHAPES, dtype, watch=watch)
    return definition, (kept, builder)


def speech() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "text": torch.randint(1, 20, (3, 11), generator=generator, dtype=torch.int32),
        "lengths": torch.tensor([11, 6, 0], dtype=torch.int32),
        "speed": torch.tensor([1.0, 0.7, 1.0]),
        "emphasis": 1 + torch.rand(3, 11, generator=generator),
        "pauses": torch.randint(-3, 6, (3, 11), generator=generator, dtype=torch.int32),  # below 0: less, down to 0
    }


def test_the_encoder_is_the_models():
    model, given = voice(), speech()
    definition, kept = defined("encoder")
    found = Interpreter(definition)(**given)
    with torch.no_grad():
        hidden, logs = model.encode(given["text"].long(), given["lengths"])
    torch.testing.assert_close(found["hidden"], hidden, atol=2e-5, rtol=0)
    torch.testing.assert_close(found["log_durations"], logs, atol=2e-5, rtol=0)
    assert (given["pauses"] < 0).any()
    controls = (given["speed"], given["emphasis"], given["pauses"])
    expected = round_durations(found["log_durations"], given["lengths"], *controls)
    expected[2] = 0  # the one frame of an empty item comes later
    assert torch.equal(found["durations"].long(), expected) and found["durations"].sum() > 20


def test_the_decoder_is_the_models():
    model = voice()
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(3, 7, 32, generator=generator)
    durations = torch.randint(0, 5, (3, 7), generator=generator)
    durations[2] = 0
    definition, kept = defined("decoder")
    with torch.no_grad():
        expanded, lengths = regulate(hidden, durations, 23)
        mel, _ = model.decode(hidden, durations, 23)
    found = Interpreter(definition)(expanded=expanded, mel_lengths=lengths.int())
    torch.testing.assert_close(found["mel"].transpose(1, 2), mel, atol=2e-5, rtol=0)


def test_half_precision_is_typed_and_close():
    given = speech()
    definition, kept = defined("encoder", "float16")
    found = Interpreter(definition)(**given)
    with torch.no_grad():
        hidden, _ = voice().encode(given["text"].long(), given["lengths"])
    assert found["hidden"].dtype == torch.float16 and found["log_durations"].dtype == torch.float32
    assert (found["hidden"].float() - hidden).abs().max() < 2e-2 * hidden.abs().max()


def test_every_layer_can_be_watched():
    definition, kept = defined("encoder", watch=True)
    found = Interpreter(definition)(**speech())
    names = {f"encoder.blocks.{number}.{part}" for number in range(2) for part in ("attention", "feed_forward")}
    assert set(found) == names | {"encoder.positions", "hidden", "log_durations", "durations"}


def test_verification_finds_the_layer_that_is_wrong():
    model, given = voice(), speech()
    text, lengths = given["text"].long(), given["lengths"].long()
    exact = verify.activations(model, text, lengths)
    plain = verify.activations(voice().half(), text, lengths)
    ones = {"speed": torch.ones(3), "emphasis": torch.ones(3, 11), "pauses": torch.zeros(3, 11, dtype=torch.int32)}
    sides = {"encoder": lengths, "hidden": lengths, "log_durations": lengths}
    wrong = weights_of(model)
    wrong["encoder.blocks.1.feed_forward.first.bias"] = wrong["encoder.blocks.1.feed_forward.first.bias"] + 0.1
    for weights, failing in ((weights_of(model), set()), (wrong, {"encoder.blocks.1.feed_forward", "hidden"})):
        builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
        definition, kept = network.define(trt, builder, "encoder", CONFIG, weights, SHAPES, "float16", watch=True)
        found = Interpreter(definition)(**given | ones)
        found.pop("durations")
        rows = verify.compare(found, plain, exact, sides)
        assert [row.name for row in rows][0] == "encoder.positions" and len(rows) == 7
        assert {row.name for row in rows if not row.passes} - {"log_durations"} == failing
        assert ("WRONG" in verify.table(rows)) == bool(failing)
    with pytest.raises(ValueError, match="makes no 'postnet'"):
        verify.compare({"postnet": found["hidden"]}, plain, exact, sides)


@pytest.mark.skipif(not layers.is_rtx(trt), reason="needs tensorrt-rtx: TensorRT itself builds only beside a GPU")
@pytest.mark.parametrize("half", ["encoder", "decoder"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_engines_build_without_a_gpu(half, dtype):
    engine = network.build(trt, half, CONFIG, weights_of(voice()), SHAPES, dtype, capability="SM80")
    assert len(engine) > 50_000


def test_refusals():
    with pytest.raises(ValueError, match="no 'mel.weight'"):
        builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
        weights = {name: value for name, value in weights_of(voice()).items() if name != "mel.weight"}
        network.define(trt, builder, "decoder", CONFIG, weights, SHAPES, "float16")
    with pytest.raises(ValueError, match="got 'int8'"):
        defined("decoder", "int8")
    with pytest.raises(ValueError, match="in order"):
        network.Shapes(batch=1, longest=3, shortest=4)
