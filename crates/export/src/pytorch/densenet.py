

def conv(inputs, outputs, size):
    return nn.Conv2d(inputs, outputs, size, 1, size // 2, bias=False)


class Layer(nn.Module):
    """Adds channels to those that it sees."""

    def __init__(self, inputs):
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(inputs), conv(inputs, 4 * GROWTH, 1)
        self.bn2, self.conv2 = nn.BatchNorm2d(4 * GROWTH), conv(4 * GROWTH, GROWTH, 3)

    def forward(self, x):
        y = self.conv2(F.relu(self.bn2(self.conv1(F.relu(self.bn1(x))))))
        return torch.cat([y, x], 1)


class Transition(nn.Module):
    """Fewer channels, and half the rows and columns."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.bn, self.conv = nn.BatchNorm2d(inputs), conv(inputs, outputs, 1)

    def forward(self, x):
        return F.avg_pool2d(self.conv(F.relu(self.bn(x))), 2)


class Net(nn.Module):
    """A densely connected network."""

    def __init__(self):
        super().__init__()
        channels = 2 * GROWTH
        self.conv1 = conv(CHANNELS, channels, 3)
        for stage, count in enumerate(NUM_BLOCKS):
            layers = [Layer(channels + number * GROWTH) for number in range(count)]
            self.add_module(f"dense{stage + 1}", nn.Sequential(*layers))
            channels += count * GROWTH
            if stage + 1 < len(NUM_BLOCKS):
                kept = math.floor(channels * REDUCTION)
                self.add_module(f"trans{stage + 1}", Transition(channels, kept))
                channels = kept
        self.bn = nn.BatchNorm2d(channels)
        self.linear = nn.Linear(channels, CLASSES)

    def forward(self, images):
        x = self.conv1(images)
        for stage in range(len(NUM_BLOCKS)):
            x = getattr(self, f"dense{stage + 1}")(x)
            if stage + 1 < len(NUM_BLOCKS):
                x = getattr(self, f"trans{stage + 1}")(x)
        return self.linear(F.relu(self.bn(x)).mean((2, 3)))
