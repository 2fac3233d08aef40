"""What a first implementation would be, on the same weights: peers of measurements and references of tests.

`decoding.decode_plainly` is the like for speaking. B batch, T symbols, F frames, M mels.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .decoding import Generators, check_text, decode_plainly
from .masking import length_mask
from .model import Prediction, Tacotron2

TORCHAUDIO = (
    ("encoder.embedding.", "embedding."),
    ("encoder.forward_lstm.", "encoder.lstm."),
    ("decoder.attention.location_", "decoder.attention_layer.location_layer.location_"),
    ("decoder.attention.query.", "decoder.attention_layer.query_layer."),
    ("decoder.attention.memory.", "decoder.attention_layer.memory_layer."),
    ("decoder.attention.score.", "decoder.attention_layer.v."),
    ("decoder.mel.", "decoder.linear_projection."),
    ("decoder.gate.", "decoder.gate_layer."),
)


def teacher_forced(
    model: Tacotron2, text: Tensor, text_lengths: Tensor, mel: Tensor, mel_lengths: Tensor, keep: Tensor | None = None
) -> Prediction:
    """What ``model(...)`` computes, frame by frame through its layers, gradients left to autograd."""
    decoder, config = model.decoder, model.config
    memory = model.encoder(text, text_lengths)
    attention, mask = decoder.attention, length_mask(text_lengths, text.shape[1])
    projected = attention.memory(memory)
    told = F.pad(mel, (1, 0))[:, :, :-1].permute(2, 0, 1)
    known = decoder.prenet(told, None if keep is None else keep.permute(2, 0, 1, 3))
    hidden = cell = second = second_cell = memory.new_zeros(len(text), config.rnn)
    context = memory.new_zeros(len(text), config.encoder)
    weights = total = memory.new_zeros(text.shape)
    frames, gates, alignments = [], [], []
    for x in known.unbind(0):
        hidden, cell = decoder.attention_rnn(torch.cat((x, context), 1), (hidden, cell))
        hidden = F.dropout(hidden, config.rnn_dropout, model.training)
        history = F.pad(torch.stack((weights, total), 1), [config.location_kernel // 2] * 2)
        location = attention.location_dense(attention.location_conv(history).transpose(1, 2))
        energies = attention.score(torch.tanh(attention.query(hidden)[:, None] + location + projected))[:, :, 0]
        weights = energies.masked_fill(~mask, float("-inf")).softmax(1)
        total = total + weights
        context = torch.bmm(weights[:, None], memory.to(weights.dtype))[:, 0]
        second, second_cell = decoder.decoder_rnn(torch.cat((hidden, context), 1), (second, second_cell))
        second = F.dropout(second, config.rnn_dropout, model.training)
        output = torch.cat((second, context), 1)
        frames.append(decoder.mel(output))
        gates.append(decoder.gate(output)[:, 0])
        alignments.append(weights)
    known_frames = length_mask(mel_lengths, mel.shape[2])[:, None]
    found = torch.stack(frames, 2) * known_frames
    refined = model.postnet(found, known_frames)
    return Prediction(found, refined, torch.stack(gates, 1), torch.stack(alignments, 1))


def to_torchaudio(model: Tacotron2) -> dict[str, Tensor]:
    """The weights under torchaudio's names."""
    converted = {}
    for name, value in model.state_dict().items():
        for own, other in TORCHAUDIO:
            name = name.replace(own, other)
        if name.startswith("encoder.backward_lstm."):
            name = name.replace("backward_lstm", "lstm") + "_reverse"
        if ".layers." in name and not name.startswith("decoder."):
            name = name.replace(".layers.", ".convolutions.").replace(".conv.", ".0.").replace(".norm.", ".1.")
        converted[name] = value
    return converted


def torchaudio_decoder(model: Tacotron2, limit: int) -> Callable[[Tensor, Tensor], Tensor]:
    """(text, lengths) -> refined spectrograms (B, M, F) by torchaudio's Tacotron 2 with the same weights.

    ImportError without torchaudio.
    """
    import torchaudio

    config = model.config
    other = torchaudio.models.Tacotron2(
        n_mels=config.num_mels,
        n_symbol=config.num_symbols,
        symbol_embedding_dim=config.encoder,
        encoder_embedding_dim=config.encoder,
        encoder_n_convolution=config.encoder_layers,
        encoder_kernel_size=config.kernel,
        decoder_rnn_dim=config.rnn,
        decoder_max_step=limit,
        attention_rnn_dim=config.rnn,
        attention_hidden_dim=config.attention,
        attention_location_n_filter=config.location_filters,
        attention_location_kernel_size=config.location_kernel,
        prenet_dim=config.prenet,
        postnet_n_convolution=config.postnet_layers,
        postnet_kernel_size=config.kernel,
        postnet_embedding_dim=config.postnet,
    )
    other.load_state_dict(to_torchaudio(model))
    weight = model.decoder.mel.weight
    other.to(weight.device, weight.dtype).eval()
    return lambda text, lengths: other.infer(text, lengths)[0]


@torch.no_grad()
def decode_fixed(model: Tacotron2, text: Tensor, lengths: Tensor, generator: Generators, frames: int) -> Tensor:
    """So many frames, layer by layer: refined (B, M, F). The gates' biases must rule out that they fire."""
    check_text(model, text, lengths)
    return decode_plainly(model, text, lengths, generator=generator, limit=frames).refined
