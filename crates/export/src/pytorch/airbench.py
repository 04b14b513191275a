

class Norm(nn.Module):
    """A batch normalisation with running statistics and without a scale."""

    def __init__(self, channels):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))
        self.register_buffer("num_batches_tracked", torch.tensor(0))

    def forward(self, x):
        scale = torch.ones_like(self.bias)
        return F.batch_norm(x, self.running_mean, self.running_var, scale, self.bias, False, 0.0, NORM_EPS)


class Group(nn.Module):
    """Two convolutions, half the rows and columns."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inputs, outputs, 3, 1, 1, bias=False), Norm(outputs)
        self.conv2, self.norm2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), Norm(outputs)

    def forward(self, x):
        x = F.gelu(self.norm1(F.max_pool2d(self.conv1(x), 2)))
        return F.gelu(self.norm2(self.conv2(x)))


class Net(nn.Module):
    """Convolutions on whitened images (airbench94)."""

    def __init__(self):
        super().__init__()
        inputs = 2 * CHANNELS * WHITEN_KERNEL**2
        self.whiten = nn.Conv2d(CHANNELS, inputs, WHITEN_KERNEL)
        for number, width in enumerate(WIDTHS):
            self.add_module(f"group{number + 1}", Group(inputs, width))
            inputs = width
        self.head = nn.Linear(inputs, CLASSES, bias=False)

    def forward(self, images):
        x = F.gelu(self.whiten(images))
        for number in range(len(WIDTHS)):
            x = getattr(self, f"group{number + 1}")(x)
        return self.head(x.amax((2, 3))) * LOGIT_SCALE
