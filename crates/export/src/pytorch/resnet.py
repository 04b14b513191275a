

def conv(inputs, outputs, size, stride=1):
    return nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)


class Block(nn.Module):
    """Convolutions beside a shortcut."""

    def __init__(self, inputs, width, stride):
        super().__init__()
        if BLOCK == "basic":
            self.outputs = width
            self.conv1, self.bn1 = conv(inputs, width, 3, stride), nn.BatchNorm2d(width)
            self.conv2, self.bn2 = conv(width, width, 3), nn.BatchNorm2d(width)
        else:
            self.outputs = 4 * width
            self.conv1, self.bn1 = conv(inputs, width, 1), nn.BatchNorm2d(width)
            self.conv2, self.bn2 = conv(width, width, 3, stride), nn.BatchNorm2d(width)
            self.conv3, self.bn3 = conv(width, 4 * width, 1), nn.BatchNorm2d(4 * width)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != self.outputs:
            self.shortcut = nn.Sequential(conv(inputs, self.outputs, 1, stride), nn.BatchNorm2d(self.outputs))

    def forward(self, x):
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if BLOCK == "bottleneck":
            y = self.bn3(self.conv3(F.relu(y)))
        return F.relu(y + self.shortcut(x))


class Net(nn.Module):
    """A residual network."""

    def __init__(self):
        super().__init__()
        size, stride = (3, 1) if STEM == "cifar" else (7, 2)
        self.conv1, self.bn1 = conv(CHANNELS, WIDTHS[0], size, stride), nn.BatchNorm2d(WIDTHS[0])
        inputs = WIDTHS[0]
        for stage, (count, width) in enumerate(zip(NUM_BLOCKS, WIDTHS)):
            blocks = []
            for number in range(count):
                blocks.append(Block(inputs, width, 2 if stage > 0 and number == 0 else 1))
                inputs = blocks[-1].outputs
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
        self.linear = nn.Linear(inputs, CLASSES)

    def forward(self, images):
        x = F.relu(self.bn1(self.conv1(images)))
        if STEM == "imagenet":
            x = F.max_pool2d(x, 3, 2, 1)
        for stage in range(len(WIDTHS)):
            x = getattr(self, f"layer{stage + 1}")(x)
        return self.linear(x.mean((2, 3)))
