

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(EMB, 3 * EMB, bias=QKV_BIAS)
        self.proj = nn.Linear(EMB, EMB)

    def forward(self, x):
        return self.proj(attend(*self.qkv(x).chunk(3, -1), causal=False))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(EMB, HIDDEN), nn.Linear(HIDDEN, EMB)

    def forward(self, x):
        return self.fc2(gelu(self.fc1(x)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = Norm(True), Attention(), Norm(True), Mlp()

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Net(nn.Module):
    """A vision transformer under timm's names, as it is evaluated."""

    def __init__(self):
        super().__init__()
        self.patch_embed = nn.Module()
        self.patch_embed.proj = nn.Conv2d(CHANNELS, EMB, PATCH, PATCH)
        if CLASS_TOKEN:
            self.cls_token = nn.Parameter(torch.zeros(1, 1, EMB))
        tokens = (ROWS // PATCH) * (COLUMNS // PATCH) + CLASS_TOKEN
        self.pos_embed = nn.Parameter(torch.zeros(1, tokens, EMB))
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.add_module("fc_norm" if FC_NORM else "norm", Norm(True))
        self.head = nn.Linear(EMB, CLASSES)

    def forward(self, images):
        x = self.patch_embed.proj(images).flatten(2).transpose(1, 2)
        if CLASS_TOKEN:
            x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1)
        x = x + self.pos_embed
        for block in self.blocks:
            x = block(x)
        if not FC_NORM:
            x = self.norm(x)
        x = x[:, 0] if GLOBAL_POOL == "token" else x[:, int(CLASS_TOKEN) :].mean(1)
        return self.head(self.fc_norm(x) if FC_NORM else x)
