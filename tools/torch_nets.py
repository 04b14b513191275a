"""The paper's CIFAR networks and airbench94's in PyTorch, under the parameter names that Taper uses."""

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += self.shortcut(x)
        return F.relu(y)


class ResNet(nn.Module):
    def __init__(self, blocks=(2, 2, 2, 2), classes=10):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        inputs = 64
        for stage, (count, width) in enumerate(zip(blocks, (64, 128, 256, 512)), 1):
            layers = []
            for i in range(count):
                layers.append(Block(inputs, width, 2 if stage > 1 and i == 0 else 1))
                inputs = width
            setattr(self, f"layer{stage}", nn.Sequential(*layers))
        self.linear = nn.Linear(512, classes)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.linear(F.avg_pool2d(x, 4).flatten(1))


class DenseLayer(nn.Module):
    def __init__(self, inputs, growth):
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, 4 * growth, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(4 * growth)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, x):
        y = self.conv1(F.relu(self.bn1(x)))
        return torch.cat([self.conv2(F.relu(self.bn2(y))), x], 1)


class Transition(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.bn = nn.BatchNorm2d(inputs)
        self.conv = nn.Conv2d(inputs, outputs, 1, bias=False)

    def forward(self, x):
        return F.avg_pool2d(self.conv(F.relu(self.bn(x))), 2)


class DenseNet(nn.Module):
    def __init__(self, blocks=(6, 12, 24, 16), growth=32, classes=10):
        super().__init__()
        channels = 2 * growth
        self.conv1 = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        self.stages = []
        for stage, count in enumerate(blocks, 1):
            layers = [DenseLayer(channels + i * growth, growth) for i in range(count)]
            channels += count * growth
            setattr(self, f"dense{stage}", nn.Sequential(*layers))
            self.stages.append(f"dense{stage}")
            if stage < len(blocks):
                setattr(self, f"trans{stage}", Transition(channels, channels // 2))
                self.stages.append(f"trans{stage}")
                channels //= 2
        self.bn = nn.BatchNorm2d(channels)
        self.linear = nn.Linear(channels, classes)

    def forward(self, x):
        x = self.conv1(x)
        for stage in self.stages:
            x = getattr(self, stage)(x)
        return self.linear(F.avg_pool2d(F.relu(self.bn(x)), 4).flatten(1))


class Shift(nn.BatchNorm2d):
    """A normalisation whose scale is one and not trained."""

    def __init__(self, channels, eps=1e-12, momentum=0.4):
        super().__init__(channels, eps=eps, momentum=momentum)
        self.weight.requires_grad_(False)


class Group(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.norm1 = Shift(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = Shift(outputs)
        for conv in (self.conv1, self.conv2):
            nn.init.dirac_(conv.weight.data[: conv.in_channels])

    def forward(self, x):
        x = F.gelu(self.norm1(F.max_pool2d(self.conv1(x), 2)))
        return F.gelu(self.norm2(self.conv2(x)))


class Airbench(nn.Module):
    """arXiv:2404.00498: fixed whitening filters, three groups of two convolutions, the largest pixel of each channel."""

    def __init__(self, widths=(64, 256, 256), classes=10, logit_scale=1 / 9, kernel=2):
        super().__init__()
        self.logit_scale = logit_scale
        inputs = 2 * 3 * kernel**2
        self.whiten = nn.Conv2d(3, inputs, kernel)
        self.whiten.weight.requires_grad_(False)
        nn.init.zeros_(self.whiten.bias)
        self.groups = []
        for number, width in enumerate(widths, 1):
            self.groups.append(f"group{number}")
            setattr(self, self.groups[-1], Group(inputs, width))
            inputs = width
        self.head = nn.Linear(inputs, classes, bias=False)

    def see(self, images, eps=5e-4):
        """Filters that whiten the patches of `images`, whose signs make each one's largest component positive."""
        size = self.whiten.kernel_size[0]
        patches = F.unfold(images, size).transpose(1, 2).flatten(0, 1)
        values, vectors = torch.linalg.eigh(patches.T @ patches / len(patches))
        filters = vectors.T.flip(0)
        filters = filters * filters.gather(1, filters.abs().argmax(1, keepdim=True)).sign()
        filters = filters / (values.flip(0).clamp(min=0) + eps).sqrt()[:, None]
        self.whiten.weight.data = torch.cat([filters, -filters]).reshape(-1, 3, size, size).to(self.whiten.weight.dtype)

    def forward(self, x):
        x = F.gelu(self.whiten(x))
        for group in self.groups:
            x = getattr(self, group)(x)
        return self.head(x.amax((2, 3))) * self.logit_scale


NETS = {
    "airbench": Airbench,
    "resnet18": lambda: ResNet((2, 2, 2, 2)),
    "resnet34": lambda: ResNet((3, 4, 6, 3)),
    "densenet121": DenseNet,
}
