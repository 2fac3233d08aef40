"""The network: shapes, what it may see, its constraint, the pieces it learns from, its export."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kaldi_asr import export, tdnn
from kaldi_asr.chunks import Chunks

CONFIG = tdnn.TdnnConfig(num_features=5, num_pdfs=7, hidden=12, bottleneck=6, dilations=(1, 0, 2), splice=1)


@pytest.fixture
def network():
    torch.manual_seed(0)
    model = tdnn.build(CONFIG, np.arange(5.0), np.full(5, 2.0), [10, 20, 30, 0, 1, 5, 34])
    for _ in range(3):  # the norms' statistics leave their start
        model(torch.randn(8, 30, 5) * 2 + torch.arange(5.0))
    return model.eval()


def test_shapes_and_probabilities(network):
    found = network(torch.randn(2, 2 * CONFIG.context + 9, 5))
    assert CONFIG.context == 4 and found.shape == (2, 9, 7)
    assert torch.allclose(found.exp().sum(2), torch.ones(2, 9), atol=1e-5)
    ratio = network.log_likelihoods(torch.randn(1, 9, 5)) - network(torch.randn(1, 9, 5)) * 0
    assert torch.isfinite(ratio).all() and network.log_prior.exp().sum() == pytest.approx(1, abs=1e-3)


def test_a_frame_sees_its_context_and_no_more(network):
    x = torch.randn(1, 30, 5, requires_grad=True)
    network(x)[0, 10].sum().backward()
    seen = x.grad[0].abs().sum(1).nonzero().flatten()
    network.zero_grad()
    x2 = x.detach().clone()
    x2[0, [9, 19]] += 100.0  # output 10 sees inputs 10..18
    assert torch.equal(network(x.detach())[0, 10], network(x2)[0, 10])
    assert seen.min() >= 10 and seen.max() <= 18


def test_the_plain_computation(network):
    """A layer written out with matrices, in float64."""
    layer = network.layers[2].double()
    x = torch.randn(1, 12, 9, dtype=torch.float64)
    found = layer(x)
    factor, affine = layer.factor.weight, layer.affine.weight
    for t in range(5):
        narrow = [factor[:, :, 0] @ x[0, :, t + s] + factor[:, :, 1] @ x[0, :, t + s + 2] for s in (0, 2)]
        y = affine[:, :, 0] @ narrow[0] + affine[:, :, 1] @ narrow[1] + layer.affine.bias
        y = (y.relu() - layer.norm.running_mean) / (layer.norm.running_var + layer.norm.eps).sqrt()
        assert torch.allclose(found[0, :, t], y + 0.66 * x[0, :, t + 2], atol=1e-9)


def test_the_constraint_makes_factors_semi_orthogonal(network):
    before = tdnn.orthogonality(network)
    for _ in range(30):
        network.constrain()
    assert before > 0.1 and tdnn.orthogonality(network) < 1e-3


def test_a_padded_batch_is_its_items(network):
    items = [torch.randn(1, n, 5) for n in (6, 11)]
    alone = [network(tdnn.pad_context(item, CONFIG.context)) for item in items]
    assert [x.shape[1] for x in alone] == [6, 11]
    together = torch.cat(
        [torch.nn.functional.pad(tdnn.pad_context(items[0], 4), (0, 0, 0, 5)), tdnn.pad_context(items[1], 4)]
    )
    found = network(together)
    assert torch.allclose(found[0, :6], alone[0][0], atol=1e-5) and torch.allclose(found[1], alone[1][0], atol=1e-5)


def test_hiding_hides_stretches():
    x = torch.ones(64, 50, 20)
    found = tdnn.mask(x, torch.Generator().manual_seed(0), 10, 5)
    hidden_frames = (found.sum(2) == 0).sum(1)
    hidden_bands = (found.sum(1) == 0).sum(1)
    assert hidden_frames.max() == 10 and hidden_bands.max() == 5 and hidden_frames.min() == 0
    assert torch.equal(tdnn.mask(x, torch.Generator().manual_seed(0), 0, 0), x)


def pieces(train, **options):
    lengths = (3, 25, 40)
    items = [np.arange(n, dtype=np.float32)[:, None] + 1000 * k for k, n in enumerate(lengths)]
    pdfs = [np.arange(n) + 1000 * k for k, n in enumerate(lengths)]
    return Chunks(items, pdfs, size=10, context=2, batch_size=2, seed=3, train=train, **options), lengths


def test_pieces_show_every_frame_with_its_label_and_context():
    loader, lengths = pieces(False)
    seen = []
    for features, labels in loader:
        assert features.shape[1:] == (14, 1) and labels.shape[1:] == (10,)
        for item, row in zip(features[..., 0], labels, strict=True):
            for place, label in enumerate(row.tolist()):
                if label >= 0:
                    seen.append(label)
                    last = label // 1000 * 1000 + lengths[label // 1000] - 1
                    for offset in range(-2, 3):  # frames around it, the first and last repeated
                        expected = min(max(label + offset, label // 1000 * 1000), last)
                        assert item[place + 2 + offset] == expected
    assert sorted(seen) == [k * 1000 + i for k, n in enumerate(lengths) for i in range(n)]


def test_training_pieces_are_labelled_right_and_differ_by_epoch():
    loader, _ = pieces(True)
    starts = []
    for epoch in (0, 1, 0):
        loader.set_epoch(epoch)
        batches = list(loader)
        for features, labels in batches:
            assert torch.equal(features[:, 2:12, 0][labels >= 0].long(), labels[labels >= 0])
        starts.append([tuple(labels[:, 0].tolist()) for _, labels in batches])
    assert starts[0] == starts[2] != starts[1]
    loader.set_epoch(0, 2)
    assert [tuple(labels[:, 0].tolist()) for _, labels in loader] == starts[0][2:]
    with pytest.raises(ValueError, match="no utterance"):
        Chunks([], [], size=10, context=2, batch_size=2, seed=3, train=True)


def test_export_equals_the_network(network, tmp_path):
    assert export.export_network(network, tmp_path / "n.onnx", {"context": 4}) < 1e-4


def test_wrong_architectures():
    with pytest.raises(ValueError, match="bottleneck 20"):
        tdnn.TdnnConfig(5, 7, hidden=12, bottleneck=20)
    with pytest.raises(ValueError, match="dilations"):
        tdnn.TdnnConfig(5, 7, dilations=(1, -1))
    assert tdnn.TdnnConfig.from_dict(CONFIG.to_dict()) == CONFIG
