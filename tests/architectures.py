"""A catalogue of small models that no one wrote our hooks for, each with a loss that depends on the step alone."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

Loss = Callable[[nn.Module, int], Tensor]
"""(model, step) -> loss, 0-d; the batch is made from the step's own generator."""


@dataclass(frozen=True)
class Architecture:
    """How to build a model and what it is trained on."""

    build: Callable[[], nn.Module]
    loss: Loss
    clips: bool = True
    """Whether torch's clip_grad_norm_ takes its gradients (it raises for sparse ones)."""
    adam: bool = True
    """Whether AdamW takes them; SGD otherwise."""


CATALOGUE: dict[str, Architecture] = {}

Builder = Callable[[], nn.Module]


def entry(loss: Loss, **more: Any) -> Callable[[Builder], Builder]:
    def put(build: Builder) -> Builder:
        CATALOGUE[build.__name__] = Architecture(build, loss, **more)
        return build

    return put


def randn(step: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 + step), dtype=dtype)


def tokens(step: int, *shape: int, vocabulary: int = 50) -> Tensor:
    return torch.randint(3, vocabulary, shape, generator=torch.Generator().manual_seed(2000 + step))


def regression(*shape: int, dtype: torch.dtype = torch.float32) -> Loss:
    """Mean square of the output for random inputs of `shape`, against a target of one half."""
    return lambda model, step: (model(randn(step, *shape, dtype=dtype)) - 0.5).abs().square().mean()


# ---- torch's own


@entry(regression(8, 12))
def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 4))


@entry(regression(8, 256))
def wide_mlp() -> nn.Module:
    """Weights large enough to be measured inside their hooks."""
    return nn.Sequential(nn.Linear(256, 256), nn.ReLU(inplace=True), nn.Dropout(0.1), nn.Linear(256, 128))


@entry(regression(8, 16, dtype=torch.float64))
def float64_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 160), nn.GELU(), nn.Linear(160, 160), nn.Linear(160, 2)).double()


@entry(regression(8, 16, dtype=torch.bfloat16))
def bfloat16_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 160), nn.GELU(), nn.Linear(160, 160), nn.Linear(160, 2)).bfloat16()


@entry(lambda model, step: (model(randn(step, 6, 2, 16), randn(step + 1, 4, 2, 16)) - 0.5).square().mean())
def torch_transformer() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about nested tensors, which the encoder could not use
        return nn.Transformer(16, 2, 2, 2, 32, dropout=0.1)


class SelfAttention(nn.Module):
    """nn.MultiheadAttention takes a short cut where query, key and value are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.MultiheadAttention(16, 4, dropout=0.1, batch_first=True)
        self.second = nn.MultiheadAttention(16, 2, batch_first=True, add_bias_kv=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x, x, x)[0]
        return self.second(x, x, x, need_weights=False)[0]


@entry(regression(3, 5, 16))
def multihead_attention() -> nn.Module:
    return SelfAttention()


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn = kind(8, 80, num_layers=2, dropout=0.2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(160, 1)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.rnn(x)
        return self.head(states[:, -1])


@entry(regression(4, 6, 8))
def lstm() -> nn.Module:
    return Recurrent(nn.LSTM)


@entry(regression(4, 6, 8))
def gru() -> nn.Module:
    return Recurrent(nn.GRU)


class Cells(nn.Module):
    """One cell called once per time step, its own state going in again."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(6, 10)
        self.out = nn.Linear(10, 1)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), 10)
        for moment in x.unbind(1):
            state = self.cell(moment, state)
        return self.out(state)


@entry(regression(4, 7, 6))
def recurrent_cell() -> nn.Module:
    return Cells()


class Residual(nn.Module):
    def __init__(self, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width * stride, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width * stride)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width * stride, width * stride, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width * stride)
        self.down = nn.Conv2d(width, width * stride, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += self.down(x)
        return self.relu(out)


@entry(regression(2, 3, 12, 12))
def in_place_resnet() -> nn.Module:
    stem = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
    body = nn.Sequential(Residual(8), Residual(8, 2), Residual(16, 2))
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2, inplace=True), nn.Linear(32, 4))
    return nn.Sequential(stem, body, head)


@entry(regression(2, 3, 12, 12))
def channels_last_convnet() -> nn.Module:
    net = nn.Sequential(nn.Conv2d(3, 64, 3), nn.SiLU(inplace=True), nn.Conv2d(64, 64, 3), nn.Hardswish(inplace=True))
    return net.to(memory_format=torch.channels_last)


class Dense(nn.Module):
    """Every layer sees all before it, concatenated; the activation works in place on the concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(4 + 4 * i, 4, 3, padding=1) for i in range(4))
        self.norms = nn.ModuleList(nn.GroupNorm(2, 4 + 4 * i) for i in range(4))

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer, norm in zip(self.layers, self.norms, strict=True):
            features.append(layer(F.relu_(norm(torch.cat(features, 1)))))
        return torch.cat(features, 1)


@entry(regression(2, 4, 6, 6))
def densenet() -> nn.Module:
    return Dense()


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1 = nn.Conv2d(3, 8, 3, 2, 1)
        self.down2 = nn.Conv2d(8, 16, 3, 2, 1)
        self.up1 = nn.ConvTranspose2d(16, 8, 4, 2, 1)
        self.up2 = nn.ConvTranspose2d(16, 3, 4, 2, 1)
        self.norm = nn.InstanceNorm2d(8, affine=True)

    def forward(self, x: Tensor) -> Tensor:
        first = F.leaky_relu_(self.down1(x))
        second = F.leaky_relu_(self.down2(first))
        up = self.norm(self.up1(second)).relu_()
        return self.up2(torch.cat([up, first], 1))


@entry(regression(2, 3, 16, 16))
def unet() -> nn.Module:
    return UNet()


class Bag(nn.Module):
    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(600, 32, mode="sum", sparse=sparse)
        self.single = nn.Embedding(50, 32, sparse=sparse, padding_idx=0)
        self.head = nn.Linear(32, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.bag(ids) + self.single(ids[:, 0]))


@entry(lambda model, step: model(tokens(step, 6, 5)).square().mean())
def embedding_bag() -> nn.Module:
    return Bag(sparse=False)


@entry(lambda model, step: model(tokens(step, 6, 5, vocabulary=8)).square().mean(), clips=False, adam=False)
def sparse_embedding() -> nn.Module:
    """Repeated tokens: the gradients come uncoalesced."""
    return Bag(sparse=True)


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 8), nn.Linear(5, 9)
        self.joint = nn.Bilinear(8, 9, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.joint(self.left(x[:, :6]).tanh(), self.right(x[:, 6:]).sigmoid())


@entry(regression(4, 11))
def bilinear() -> nn.Module:
    return TwoTowers()


@entry(regression(4, 128))
def weight_norm() -> nn.Module:
    wrapped = parametrizations.weight_norm
    return nn.Sequential(wrapped(nn.Linear(128, 160)), nn.Tanh(), wrapped(nn.Linear(160, 4)))


@entry(regression(4, 12))
def spectral_norm() -> nn.Module:
    wrapped = parametrizations.spectral_norm
    return nn.Sequential(wrapped(nn.Linear(12, 20)), nn.Tanh(), wrapped(nn.Linear(20, 4, bias=False)))


class Spectral(nn.Module):
    """A Fourier layer: complex parameters, real inputs and outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(9, 4, 4, dtype=torch.complex64) / 4)
        self.shift = nn.Parameter(torch.zeros(9, 1, dtype=torch.complex64))
        self.mix = nn.Linear(4, 4, dtype=torch.complex64)

    def forward(self, x: Tensor) -> Tensor:
        modes = torch.fft.rfft(x, dim=-1)
        modes = torch.einsum("bcm,mcd->bdm", modes, self.weight) + self.shift.T
        return torch.fft.irfft(self.mix(modes.mT).mT, dim=-1)


@entry(regression(3, 4, 16))
def complex_fourier() -> nn.Module:
    return Spectral()


@dataclass
class Outputs:
    hidden: Tensor
    more: dict[str, Tensor | None]
    label: str = "not a tensor"


class Structured(nn.Module):
    """Outputs a dataclass that holds a dict; owns parameters in a list, in a dict, and itself."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.rows = nn.ParameterList(torch.randn(5) for _ in range(3))
        self.named = nn.ParameterDict({"a": torch.randn(5, 5), "b": torch.randn(5)})
        self.empty = nn.Parameter(torch.zeros(0, 5))

    def forward(self, x: Tensor, *, flag: bool) -> Outputs:
        y = x @ self.named["a"] + self.named["b"]
        for row in self.rows:
            y = y * row if flag else y
        return Outputs(y * self.scale, {"extra": (x * self.rows[0]).tanh(), "nothing": None})


class StructuredNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 5)
        self.block = Structured()

    def forward(self, x: Tensor) -> Tensor:
        out = dataclasses.replace(self.block(self.stem(x), flag=True))
        return out.hidden + out.more["extra"]


@entry(regression(4, 5))
def structured_output() -> nn.Module:
    return StructuredNet()


class Shared(nn.Module):
    """One layer at three places, an embedding tied to the head, a layer that never runs, one that runs at times."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(600, 32)
        self.block = nn.Linear(32, 32)
        self.unused = nn.Linear(32, 3)
        self.sometimes = nn.Linear(32, 32)
        self.head = nn.Linear(32, 600, bias=False)
        self.head.weight = self.embed.weight

    def loss(self, ids: Tensor, step: int) -> Tensor:
        x = self.embed(ids)
        for _ in range(3):
            x = x + self.block(x).tanh()
        if step % 2:
            x = x + self.sometimes(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


@entry(lambda model, step: model.loss(tokens(step, 3, 5), step))
def shared_and_tied() -> nn.Module:
    return Shared()


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.stem = nn.Linear(6, 12)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(12, 12), nn.Dropout(0.2), nn.ReLU(inplace=True)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@entry(regression(4, 6))
def checkpointed() -> nn.Module:
    return Checkpointed(reentrant=False)


@entry(regression(4, 6))
def checkpointed_reentrant() -> nn.Module:
    return Checkpointed(reentrant=True)


def _penalized(model: nn.Module, step: int) -> Tensor:
    """WGAN-GP: the loss holds a gradient with respect to the inputs."""
    x = randn(step, 5, 8).requires_grad_()
    score = model(x)
    (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
    return score.mean() + (slope.norm(dim=1) - 1).square().mean()


@entry(_penalized)
def gradient_penalty() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 130), nn.Softplus(), nn.Linear(130, 130), nn.Softplus(), nn.Linear(130, 1))


class Straight(torch.autograd.Function):
    """Rounds; its gradient is the identity, and None for its threshold."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, threshold: Tensor) -> Tensor:
        return (x > threshold).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Quantized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(6, 10), nn.Linear(10, 2)
        self.threshold = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(Straight.apply(self.encode(x), self.threshold))


@entry(regression(4, 6))
def straight_through() -> nn.Module:
    return Quantized()


@entry(regression(4, 3, 8, 8))
def frozen_backbone() -> nn.Module:
    backbone = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.Flatten())
    return nn.Sequential(backbone.requires_grad_(False), nn.Linear(216, 80), nn.PReLU(), nn.Linear(80, 3))


class Adaptive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16, max_norm=1.0)
        self.softmax = nn.AdaptiveLogSoftmaxWithLoss(16, 50, [10, 30])

    def loss(self, ids: Tensor) -> Tensor:
        return self.softmax(self.embed(ids[:, 0]).clone(), ids[:, 1]).loss


@entry(lambda model, step: model.loss(tokens(step, 6, 2)))
def adaptive_softmax() -> nn.Module:
    return Adaptive()


# ---- transformers: tiny sizes, random weights


def _language(model: nn.Module, step: int) -> Tensor:
    ids = tokens(step, 2, 7)
    return model(input_ids=ids, labels=ids).loss


def _classify(*shape: int) -> Loss:
    return lambda model, step: (
        model(pixel_values=randn(step, *shape), labels=tokens(step, shape[0], vocabulary=5) % 2).loss
    )


_SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 600,
    "max_position_embeddings": 32,
}


def _transformers(model: str, config: str, **sizes: Any) -> nn.Module:
    import transformers

    return getattr(transformers, model)(getattr(transformers, config)(**sizes))


@entry(_language)
def bert() -> nn.Module:
    return _transformers("BertForMaskedLM", "BertConfig", **_SMALL)


@entry(_language)
def distilbert() -> nn.Module:
    sizes = {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 48, "vocab_size": 600, "max_position_embeddings": 32}
    return _transformers("DistilBertForMaskedLM", "DistilBertConfig", **sizes)


@entry(_language)
def albert() -> nn.Module:
    """One transformer block run several times."""
    return _transformers("AlbertForMaskedLM", "AlbertConfig", embedding_size=16, **_SMALL)


@entry(_language)
def gpt2() -> nn.Module:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 600, "n_positions": 32}
    return _transformers("GPT2LMHeadModel", "GPT2Config", bos_token_id=1, eos_token_id=1, **sizes)


@entry(_language)
def opt() -> nn.Module:
    sizes = {"ffn_dim": 48, "word_embed_proj_dim": 32, **_SMALL}
    return _transformers("OPTForCausalLM", "OPTConfig", **sizes)


@entry(_language)
def llama_tied() -> nn.Module:
    return _transformers("LlamaForCausalLM", "LlamaConfig", tie_word_embeddings=True, num_key_value_heads=1, **_SMALL)


@entry(_language)
def mixtral() -> nn.Module:
    """A mixture of experts: most of them idle at any one step."""
    sizes = {"num_local_experts": 6, "num_experts_per_tok": 1, "num_key_value_heads": 1, **_SMALL}
    return _transformers("MixtralForCausalLM", "MixtralConfig", **sizes)


@entry(_language)
def mamba() -> nn.Module:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 60, "state_size": 4}
    return _transformers("MambaForCausalLM", "MambaConfig", **sizes)


@entry(_language)
def t5() -> nn.Module:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 2, "vocab_size": 600}
    return _transformers("T5ForConditionalGeneration", "T5Config", decoder_start_token_id=0, **sizes)


@entry(_classify(2, 3, 16, 16))
def vit() -> nn.Module:
    sizes = {key: _SMALL[key] for key in list(_SMALL)[:4]}
    return _transformers("ViTForImageClassification", "ViTConfig", image_size=16, patch_size=4, **sizes)


@entry(_classify(2, 3, 16, 16))
def swin() -> nn.Module:
    """Shifted windows and stochastic depth."""
    sizes = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4}
    return _transformers("SwinForImageClassification", "SwinConfig", drop_path_rate=0.3, **sizes)


@entry(_classify(2, 3, 32, 32))
def convnext() -> nn.Module:
    sizes = {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "drop_path_rate": 0.2}
    return _transformers("ConvNextForImageClassification", "ConvNextConfig", **sizes)


@entry(_classify(2, 3, 32, 32))
def resnet() -> nn.Module:
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "layer_type": "basic"}
    return _transformers("ResNetForImageClassification", "ResNetConfig", **sizes)


@entry(_classify(2, 3, 32, 32))
def mobilenet_v2() -> nn.Module:
    sizes = {"depth_multiplier": 0.1, "min_depth": 4, "depth_divisible_by": 4}
    return _transformers("MobileNetV2ForImageClassification", "MobileNetV2Config", **sizes)


@entry(_classify(2, 3, 32, 32))
def segformer() -> nn.Module:
    sizes = {
        "hidden_sizes": [8, 8, 16, 16],
        "depths": [1, 1, 1, 1],
        "num_attention_heads": [1, 1, 2, 2],
        "decoder_hidden_size": 16,
    }
    return _transformers("SegformerForImageClassification", "SegformerConfig", **sizes)


@entry(lambda model, step: model(input_features=randn(step, 1, 8, 20), labels=tokens(step, 1, 6)).loss)
def whisper() -> nn.Module:
    """Speech to text: convolutions, an encoder and a decoder, layer drop."""
    sizes = {
        "d_model": 16,
        "encoder_layers": 2,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 24,
        "decoder_ffn_dim": 24,
        "num_mel_bins": 8,
        "max_source_positions": 10,
        "max_target_positions": 16,
        "vocab_size": 60,
        "encoder_layerdrop": 0.3,
        "apply_spec_augment": False,
    }
    tokens_of = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 1)
    return _transformers("WhisperForConditionalGeneration", "WhisperConfig", **sizes, **tokens_of)


@entry(lambda model, step: model(randn(step, 1, 400), labels=tokens(step, 1, 3, vocabulary=8)).loss)
def wav2vec2() -> nn.Module:
    """A weight-normed positional convolution, group norms, layer drop."""
    sizes = {
        "conv_dim": (8, 8),
        "conv_kernel": (8, 4),
        "conv_stride": (4, 4),
        "num_conv_pos_embeddings": 8,
        "num_conv_pos_embedding_groups": 2,
        "num_feat_extract_layers": 2,
        "mask_time_prob": 0.0,
        "layerdrop": 0.2,
    }
    return _transformers("Wav2Vec2ForCTC", "Wav2Vec2Config", **sizes, **{**_SMALL, "vocab_size": 10})


def _contrast(model: nn.Module, step: int) -> Tensor:
    return model(input_ids=tokens(step, 2, 6), pixel_values=randn(step, 2, 3, 16, 16), return_loss=True).loss


@entry(_contrast)
def clip() -> nn.Module:
    """Two towers and a temperature of the model's own."""
    both = {key: _SMALL[key] for key in list(_SMALL)[:4]}
    text = {**both, "vocab_size": 60, "max_position_embeddings": 8, "eos_token_id": 59, "projection_dim": 16}
    vision = {**both, "image_size": 16, "patch_size": 8, "projection_dim": 16}
    return _transformers("CLIPModel", "CLIPConfig", text_config=text, vision_config=vision, projection_dim=16)
