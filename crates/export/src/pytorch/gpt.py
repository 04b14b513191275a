

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.widths = [EMB, KV_HEADS * EMB // HEADS, KV_HEADS * EMB // HEADS]
        self.c_attn = nn.Linear(EMB, sum(self.widths), bias=BIAS)
        self.c_proj = nn.Linear(EMB, EMB, bias=BIAS)

    def forward(self, x):
        return self.c_proj(attend(*self.c_attn(x).split(self.widths, -1), causal=True))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_fc = nn.Linear(EMB, HIDDEN, bias=BIAS)
        self.c_proj = nn.Linear(HIDDEN, EMB, bias=BIAS)
        if ACTIVATION == "swiglu":
            self.c_gate = nn.Linear(EMB, HIDDEN, bias=BIAS)

    def forward(self, x):
        y = F.silu(self.c_gate(x)) * self.c_fc(x) if ACTIVATION == "swiglu" else gelu(self.c_fc(x))
        return self.c_proj(y)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.attn, self.ln_2, self.mlp = Norm(BIAS), Attention(), Norm(BIAS), Mlp()

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Net(nn.Module):
    """A language model under nanoGPT's names, as it is evaluated: logits [batch, tokens, vocabulary] of what comes after each
    of `tokens` [batch, tokens], and the loss if there are targets (IGNORE_INDEX does not count)."""

    def __init__(self):
        super().__init__()
        self.transformer = nn.Module()
        self.transformer.wte = nn.Embedding(VOCABULARY, EMB)
        if POSITIONS == "learned":
            self.transformer.wpe = nn.Embedding(BLOCK, EMB)
        self.transformer.h = nn.ModuleList(Block() for _ in range(LAYERS))
        self.transformer.ln_f = Norm(BIAS)
        self.lm_head = nn.Linear(EMB, VOCABULARY, bias=False)
        if TIED:
            self.lm_head.weight = self.transformer.wte.weight

    def forward(self, tokens, targets=None):
        x = self.transformer.wte(tokens)
        if POSITIONS == "learned":
            x = x + self.transformer.wpe.weight[: tokens.shape[1]]
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        if targets is None:
            return logits
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX)
