"""Image models that are one chain of layers: AlexNet and VGG-16."""

from __future__ import annotations

from torch import nn

from lowtide.zoo.workload import Workload, images


def alexnet(*, batch: int, image: int = 224, classes: int = 1000, width: int = 64) -> Workload:
    """Return AlexNet; `width` is the number of channels of its first layer."""
    features = nn.Sequential(
        nn.Conv2d(3, width, 11, stride=4, padding=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2),
        nn.Conv2d(width, 3 * width, 5, padding=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2),
        nn.Conv2d(3 * width, 6 * width, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(6 * width, 4 * width, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(4 * width, 4 * width, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2),
        nn.AdaptiveAvgPool2d(6),
        nn.Flatten(),
    )
    classifier = nn.Sequential(
        nn.Dropout(0.5),
        nn.Linear(4 * width * 36, 64 * width),
        nn.ReLU(inplace=True),
        nn.Dropout(0.5),
        nn.Linear(64 * width, 64 * width),
        nn.ReLU(inplace=True),
        nn.Linear(64 * width, classes),
    )
    model = nn.Sequential(features, classifier)
    return images(model, batch=batch, image=image, classes=classes)


# Channels, in units of the first layer's, of each group of 3x3 convolutions; a pooling follows each group.
_VGG16 = ((1, 1), (2, 2), (4, 4, 4), (8, 8, 8), (8, 8, 8))


def vgg16(*, batch: int, image: int = 224, classes: int = 1000, width: int = 64, norm: bool = False) -> Workload:
    """Return VGG-16; with `norm`, BatchNorm follows each convolution."""
    layers: list[nn.Module] = []
    before = 3
    for group in _VGG16:
        for factor in group:
            layers.append(nn.Conv2d(before, factor * width, 3, padding=1))
            if norm:
                layers.append(nn.BatchNorm2d(factor * width))
            layers.append(nn.ReLU(inplace=True))
            before = factor * width
        layers.append(nn.MaxPool2d(2))
    classifier = nn.Sequential(
        nn.Linear(before * 49, 64 * width),
        nn.ReLU(inplace=True),
        nn.Dropout(0.5),
        nn.Linear(64 * width, 64 * width),
        nn.ReLU(inplace=True),
        nn.Dropout(0.5),
        nn.Linear(64 * width, classes),
    )
    model = nn.Sequential(nn.Sequential(*layers), nn.AdaptiveAvgPool2d(7), nn.Flatten(), classifier)
    return images(model, batch=batch, image=image, classes=classes)
