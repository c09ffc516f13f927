"""Known architectures in small, as traces: what the published systems were built for.

Sizes and times are round numbers; what is true to life is who makes, reads, saves and releases what, in which order.
"""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.core.trace import Trace
from lowtide.testing.networks import INPUT, MIB, Layer, network_trace


def vgg_trace(blocks: int = 3, *, nbytes: int = 2 * MIB, in_place: bool = True) -> Trace:
    """Return a plain convolutional chain: two convolutions with ReLU and a pooling a block, then two linear layers."""
    layers: list[Layer] = []
    relu = "relu_" if in_place else "relu"
    for block in range(blocks):
        size = max(4096, nbytes >> block)
        for half in range(2):
            name = f"features.{block}.{half}"
            layers.append(_conv(len(layers) - 1, size, name))
            layers.append(_next(layers, relu, size, f"{name}.relu", share=0.1))
        layers.append(_next(layers, "pool", size // 2, f"features.{block}.pool", share=0.3))
    for index in range(2):
        layers.append(_next(layers, "linear", 4096, f"classifier.{index}", share=0.2, param_bytes=MIB))
    return network_trace(layers, input_bytes=nbytes // 2, model="vgg")


def resnet_trace(blocks: int = 4, *, nbytes: int = MIB) -> Trace:
    """Return residual blocks of convolution, batch norm and ReLU, with the shortcut added at their end."""
    layers = [_conv(INPUT, nbytes, "stem")]
    for block in range(blocks):
        shortcut = len(layers) - 1
        for part in range(2):
            name = f"layer.{block}.{part}"
            layers.append(_conv(len(layers) - 1, nbytes, f"{name}.conv"))
            layers.append(_next(layers, "norm", nbytes, f"{name}.norm", share=0.2, param_bytes=4096))
            if part == 0:
                layers.append(_next(layers, "relu", nbytes, f"{name}.relu", share=0.1))
        join = (len(layers) - 1, shortcut)
        layers.append(Layer(kind="add", inputs=join, nbytes=nbytes, duration_s=1e-4, module=f"layer.{block}.add"))
        layers.append(_next(layers, "relu", nbytes, f"layer.{block}.relu", share=0.1))
    layers.append(_next(layers, "linear", 4096, "fc", share=0.2, param_bytes=MIB))
    return network_trace(layers, input_bytes=nbytes, model="resnet")


def unet_trace(depth: int = 3, *, nbytes: int = 2 * MIB) -> Trace:
    """Return an encoder and a decoder whose levels are joined: what is made first is read again last."""
    layers: list[Layer] = []
    skips = []
    for level in range(depth):
        size = max(4096, nbytes >> level)
        layers.append(_conv(len(layers) - 1, size, f"down.{level}.conv"))
        layers.append(_next(layers, "relu", size, f"down.{level}.relu", share=0.1))
        skips.append(len(layers) - 1)
        layers.append(_next(layers, "pool", size // 2, f"down.{level}.pool", share=0.3))
    for level in reversed(range(depth)):
        size = max(4096, nbytes >> level)
        layers.append(_conv(len(layers) - 1, size, f"up.{level}.upsample"))
        join = (len(layers) - 1, skips[level])
        layers.append(Layer(kind="cat", inputs=join, nbytes=2 * size, duration_s=2e-4, module=f"up.{level}.cat"))
        layers.append(_conv(len(layers) - 1, size, f"up.{level}.conv"))
        layers.append(_next(layers, "relu", size, f"up.{level}.relu", share=0.1))
    return network_trace(layers, input_bytes=nbytes, model="unet")


def branches_trace(blocks: int = 2, *, branches: int = 3, nbytes: int = MIB) -> Trace:
    """Return blocks of parallel branches that are concatenated, as in Inception."""
    layers = [_conv(INPUT, nbytes, "stem")]
    for block in range(blocks):
        source = len(layers) - 1
        ends = []
        for branch in range(branches):
            name = f"mixed.{block}.{branch}"
            layers.append(_conv(source, nbytes // branches, f"{name}.conv"))
            layers.append(_next(layers, "norm", nbytes // branches, f"{name}.norm", share=0.2, param_bytes=4096))
            layers.append(_next(layers, "relu_", nbytes // branches, f"{name}.relu", share=0.1))
            ends.append(len(layers) - 1)
        layers.append(
            Layer(kind="cat", inputs=tuple(ends), nbytes=nbytes, duration_s=2e-4, module=f"mixed.{block}.cat")
        )
    layers.append(_next(layers, "linear", 4096, "fc", share=0.2, param_bytes=MIB))
    return network_trace(layers, input_bytes=nbytes, model="branches")


def transformer_trace(blocks: int = 2, *, nbytes: int = MIB, dropout: bool = True) -> Trace:
    """Return transformer blocks with attention spelled out: scores, softmax, dropout, and a wide two-layer part."""
    layers = [Layer(kind="linear", inputs=(INPUT,), nbytes=nbytes, module="embed", param_bytes=MIB)]
    for block in range(blocks):
        name = f"h.{block}"
        entry = len(layers) - 1
        layers.append(_next(layers, "layer_norm", nbytes, f"{name}.ln_1", share=0.1, param_bytes=4096))
        layers.append(_next(layers, "linear", 3 * nbytes, f"{name}.attn.qkv", param_bytes=3 * MIB // 4))
        qkv = len(layers) - 1
        layers.append(Layer(kind="bmm", inputs=(qkv,), nbytes=2 * nbytes, module=f"{name}.attn.scores"))
        layers.append(_next(layers, "softmax", 2 * nbytes, f"{name}.attn.softmax", share=0.2))
        if dropout:
            layers.append(_next(layers, "dropout", 2 * nbytes, f"{name}.attn.dropout", share=0.2))
        layers.append(Layer(kind="bmm", inputs=(len(layers) - 1, qkv), nbytes=nbytes, module=f"{name}.attn.values"))
        layers.append(_next(layers, "linear", nbytes, f"{name}.attn.proj", share=0.3, param_bytes=MIB // 4))
        join = (len(layers) - 1, entry)
        layers.append(Layer(kind="add", inputs=join, nbytes=nbytes, duration_s=1e-4, module=f"{name}.add_1"))
        middle = len(layers) - 1
        layers.append(_next(layers, "layer_norm", nbytes, f"{name}.ln_2", share=0.1, param_bytes=4096))
        layers.append(_next(layers, "linear", 4 * nbytes, f"{name}.mlp.fc", share=1.2, param_bytes=MIB))
        layers.append(_next(layers, "gelu", 4 * nbytes, f"{name}.mlp.gelu", share=0.2))
        layers.append(_next(layers, "linear", nbytes, f"{name}.mlp.proj", share=1.2, param_bytes=MIB))
        join = (len(layers) - 1, middle)
        layers.append(Layer(kind="add", inputs=join, nbytes=nbytes, duration_s=1e-4, module=f"{name}.add_2"))
    return network_trace(layers, input_bytes=4096, model="transformer")


def _conv(source: int, nbytes: int, module: str) -> Layer:
    return Layer(
        kind="conv", inputs=(source,), nbytes=nbytes, module=module, scratch_bytes=nbytes // 4, param_bytes=65536
    )


def _next(
    layers: Sequence[Layer], kind: str, nbytes: int, module: str, *, share: float = 1.0, param_bytes: int = 0
) -> Layer:
    """Return a layer on the last one that takes `share` of a millisecond."""
    return Layer(
        kind=kind,
        inputs=(len(layers) - 1,),
        nbytes=nbytes,
        duration_s=share * 1e-3,
        module=module,
        param_bytes=param_bytes,
    )
