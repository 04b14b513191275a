

def normalize(pixels):
    """Pixels as the network wants them, from numbers [n, channels, rows, columns]."""
    mean, std = (torch.tensor(c).reshape(1, -1, 1, 1) for c in (MEAN, STD))
    return (pixels.float() / SCALE - mean) / std
