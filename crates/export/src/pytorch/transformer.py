

class Norm(nn.Module):
    """Layer norm, or RMS norm, of the last axis."""

    def __init__(self, bias):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(EMB))
        self.bias = nn.Parameter(torch.zeros(EMB)) if bias and NORM == "layernorm" else None

    def forward(self, x):
        if NORM == "layernorm":
            return F.layer_norm(x, (EMB,), self.weight, self.bias, NORM_EPS)
        return x / (x.square().mean(-1, keepdim=True) + NORM_EPS).sqrt() * self.weight


def rotated(x):
    """Pairs of features, half a head apart, turned by angles that grow with the position: [batch, heads, tokens, size]."""
    tokens, size = x.shape[-2:]
    rates = ROPE_THETA ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angles = torch.arange(tokens, dtype=torch.float64)[:, None] * rates
    cos, sin = angles.cos().to(x), angles.sin().to(x)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def attend(q, k, v, causal):
    """Attention of [batch, tokens, features], whose heads stand side by side; neighbouring heads of queries share keys."""
    q, k, v = (x.unflatten(-1, (n, -1)).transpose(1, 2) for x, n in ((q, HEADS), (k, KV_HEADS), (v, KV_HEADS)))
    if POSITIONS == "rotary":
        q, k = rotated(q), rotated(k)
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2)


def gelu(x):
    return F.gelu(x, approximate="tanh" if ACTIVATION == "gelu_tanh" else "none")
