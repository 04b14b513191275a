

class Net(nn.Sequential):
    """Linear layers with ReLU between them."""

    def __init__(self):
        sizes = [CHANNELS * ROWS * COLUMNS, *HIDDEN, CLASSES]
        layers = []
        for inputs, outputs in zip(sizes, sizes[1:]):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        super().__init__(*layers[:-1])

    def forward(self, images):
        return super().forward(images.flatten(1))
