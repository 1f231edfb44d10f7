"""The architectures by package. A package that is not installed leaves its own out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from itertools import chain, islice, repeat
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.architectures.trained import (
    Architecture,
    completes_text,
    fills_text,
    fit,
    labels_nodes,
    reads_images,
    series,
    sorts_text,
    writes_text,
)
from benchmarks.zoo.case import Fit
from benchmarks.zoo.material import BYTES, CLASSES

TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}

PACKAGES = ("torchvision", "timm", "transformers", "torch_geometric", "pytorch_forecasting")


def installed(package: str) -> bool:
    return find_spec(package) is not None


def architectures() -> list[Architecture]:
    """All, whether their package is installed or not: nothing of it is imported before it is built."""
    found = [Architecture(name, "torchvision", make) for name, make in _torchvision()]
    found += [Architecture(f"timm {name}", "timm", partial(_timm, name)) for name in TIMM]
    found += [Architecture(name, "transformers", make) for name, make in _transformers()]
    found += [Architecture(name, "torch_geometric", make) for name, make in _geometric()]
    return [*found, Architecture("TemporalFusionTransformer", "pytorch_forecasting", _fusion)]


def torchvision_models() -> Any:
    import torchvision

    return torchvision.models


def _torchvision() -> Iterator[tuple[str, Callable[[], Fit]]]:
    plain = (
        "resnet18", "mobilenet_v3_small", "mobilenet_v2", "efficientnet_b0", "shufflenet_v2_x0_5", "mnasnet0_5",
        "regnet_y_400mf", "squeezenet1_1", "densenet121",
    )  # fmt: skip
    for name in plain:
        yield name, partial(_vision, name, rate=3e-4 if name == "squeezenet1_1" else 1e-3)
    yield "VisionTransformer", _vision_transformer
    yield "SwinTransformer", _swin
    yield "ConvNeXt", _convnext
    yield "lraspp_mobilenet_v3_large", partial(_vision, "segmentation.lraspp_mobilenet_v3_large", steps=40)


def _vision(name: str, *, rate: float = 1e-3, steps: int = 60) -> Fit:
    models = torchvision_models()
    for part in name.split(".")[:-1]:
        models = getattr(models, part)
    more = {"weights_backbone": None} if "lraspp" in name else {}
    net = getattr(models, name.rpartition(".")[2])(weights=None, num_classes=CLASSES, **more)
    return reads_images(net, rate=rate, steps=steps, size=64 if "lraspp" in name else 32)


def _vision_transformer() -> Fit:
    models = torchvision_models()
    net = models.VisionTransformer(32, 8, 3, 2, 48, 96, num_classes=CLASSES)
    nn.init.normal_(net.heads[0].weight, std=0.02)  # its own start is zero
    return reads_images(net, steps=150)


def _swin() -> Fit:
    models = torchvision_models()
    net = models.SwinTransformer([2, 2], 24, [2, 2], [2, 4], [4, 4], num_classes=CLASSES)
    return reads_images(net, steps=200, rate=2e-3)


def _convnext() -> Fit:
    models = torchvision_models()
    setting = models.convnext.CNBlockConfig
    blocks = [setting(16, 32, 2), setting(32, 64, 2), setting(64, None, 2)]
    return reads_images(models.ConvNeXt(blocks, num_classes=CLASSES, layer_scale=1e-6), steps=120, rate=2e-3)


TIMM = (
    "resnet10t",
    "ghostnet_050",
    "repvgg_a0",
    "mobilevit_xxs",
    "tinynet_e",
    "lcnet_050",
    "convit_tiny",
    "resmlp_12_224",
)


def _timm(name: str) -> Fit:
    import timm

    more = {"convit_tiny": {"img_size": 48}, "resmlp_12_224": {"img_size": 64}}.get(name, {})
    net = timm.create_model(name, num_classes=CLASSES, **more)
    slow = {"lcnet_050": (120, 2e-3), "resmlp_12_224": (120, 2e-3), "convit_tiny": (160, 3e-4)}
    steps, rate = slow.get(name, (50, 5e-4))
    return reads_images(net, size=more.get("img_size", 48), steps=steps, batch=12, rate=rate)


def _transformers() -> Iterator[tuple[str, Callable[[], Fit]]]:
    words = {"vocab_size": BYTES, "max_position_embeddings": 64}
    few = {**words, **TINY}
    for name in ("Bert", "Roberta", "Electra", "Albert"):
        more = {"embedding_size": 32} if name in ("Electra", "Albert") else {}
        yield f"{name}ForMaskedLM", partial(_hugging, f"{name}ForMaskedLM", name, fills_text, {**few, **more})
    yield "DistilBertForSequenceClassification", partial(
        _hugging, "DistilBertForSequenceClassification", "DistilBert", sorts_text,
        {**words, "dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64},
    )  # fmt: skip
    for name in ("Llama", "Mistral", "Qwen2", "Gemma", "GPTNeoX", "Falcon", "Phi", "Olmo"):
        more = {"num_key_value_heads": 1} if name in ("Llama", "Mistral", "Qwen2", "Gemma") else {}
        more |= {"head_dim": 16} if name == "Gemma" else {}
        yield f"{name}ForCausalLM", partial(_hugging, f"{name}ForCausalLM", name, writes_text, {**few, **more})
    small = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": BYTES}
    yield "GPT2LMHeadModel", partial(_hugging, "GPT2LMHeadModel", "GPT2", writes_text, small)
    yield (
        "OPTForCausalLM",
        partial(_hugging, "OPTForCausalLM", "OPT", writes_text, {**few, "ffn_dim": 64, "word_embed_proj_dim": 32}),
    )
    yield "BloomForCausalLM", partial(
        _hugging, "BloomForCausalLM", "Bloom", writes_text,
        {"vocab_size": BYTES, "hidden_size": 32, "n_layer": 2, "n_head": 2},
    )  # fmt: skip
    yield "MambaForCausalLM", partial(
        _hugging, "MambaForCausalLM", "Mamba", partial(writes_text, steps=60, span=12),
        {"vocab_size": BYTES, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
    )  # fmt: skip
    yield "T5ForConditionalGeneration", partial(
        _hugging, "T5ForConditionalGeneration", "T5", completes_text,
        {"vocab_size": BYTES, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2,
         "decoder_start_token_id": 0},
    )  # fmt: skip
    yield "BartForConditionalGeneration", partial(
        _hugging, "BartForConditionalGeneration", "Bart", completes_text,
        {**words, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
         "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64},
    )  # fmt: skip
    image = {**TINY, "image_size": 32, "patch_size": 8, "num_labels": CLASSES}
    for name in ("ViT", "DeiT"):
        yield (
            f"{name}ForImageClassification",
            partial(_hugging, f"{name}ForImageClassification", name, partial(reads_images, steps=120), image),
        )
    yield "PatchTSTForPrediction", _patches


def _hugging(model: str, config: str, train: Callable[[nn.Module], Fit], settings: dict[str, Any]) -> Fit:
    import transformers

    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    made = getattr(transformers, f"{config}Config")(**(settings if "image_size" in settings else settings | special))
    return train(getattr(transformers, model)(made))


def _patches() -> Fit:
    import transformers

    config = transformers.PatchTSTConfig(
        num_input_channels=2, context_length=32, prediction_length=8, d_model=32, num_attention_heads=2,
        num_hidden_layers=2, ffn_dim=64, patch_length=8, patch_stride=4,
    )  # fmt: skip
    batches = list(series(128, 16, 40, 2))

    def objective(net: Any, x: Tensor) -> Tensor:
        return net(past_values=x[:, :32], future_values=x[:, 32:]).loss

    return fit(transformers.PatchTSTForPrediction(config), batches, objective)


def _geometric() -> Iterator[tuple[str, Callable[[], Fit]]]:
    for name in ("GCN", "GAT", "GraphSAGE", "GIN", "EdgeCNN"):
        yield f"torch_geometric {name}", partial(_graph, name)


def _graph(name: str) -> Fit:
    import torch_geometric.nn as pyg

    return labels_nodes(getattr(pyg, name)(16, 32, num_layers=3, out_channels=4))


def _fusion() -> Fit:
    import pandas as pd
    from pytorch_forecasting import TemporalFusionTransformer, TimeSeriesDataSet
    from pytorch_forecasting.metrics import QuantileLoss

    waves = series(1, 20, 60)[0, :, :, 0]
    rows = [
        {"group": str(g), "time": t, "value": float(waves[g, t]), "known": float(t % 7)}
        for g in range(20)
        for t in range(60)
    ]
    data = TimeSeriesDataSet(
        pd.DataFrame(rows), time_idx="time", target="value", group_ids=["group"], max_encoder_length=16,
        max_prediction_length=4, static_categoricals=["group"], time_varying_known_reals=["known"],
        time_varying_unknown_reals=["value"],
    )  # fmt: skip
    net = TemporalFusionTransformer.from_dataset(
        data, hidden_size=8, attention_head_size=1, hidden_continuous_size=4, dropout=0.1, loss=QuantileLoss()
    )
    loader = data.to_dataloader(train=True, batch_size=16, num_workers=0)
    batches = list(islice(chain.from_iterable(repeat(loader)), 120))

    def objective(net: Any, batch: Any) -> Tensor:
        inputs, (target, _) = batch
        out = net(inputs)["prediction"]
        levels = torch.tensor(net.loss.quantiles)
        missing = target[..., None] - out
        return torch.maximum(levels * missing, (levels - 1) * missing).mean()

    return fit(net, batches, objective, rate=1e-2, gradient_clip_val=0.1)


__all__ = ["PACKAGES", "architectures", "installed"]
