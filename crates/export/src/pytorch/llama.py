

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        few = KV_HEADS * EMB // HEADS
        self.q_proj, self.k_proj = nn.Linear(EMB, EMB, bias=BIAS), nn.Linear(EMB, few, bias=BIAS)
        self.v_proj, self.o_proj = nn.Linear(EMB, few, bias=BIAS), nn.Linear(EMB, EMB, bias=BIAS)

    def forward(self, x):
        return self.o_proj(attend(self.q_proj(x), self.k_proj(x), self.v_proj(x), causal=True))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up_proj = nn.Linear(EMB, HIDDEN, bias=BIAS)
        self.down_proj = nn.Linear(HIDDEN, EMB, bias=BIAS)
        if ACTIVATION == "swiglu":
            self.gate_proj = nn.Linear(EMB, HIDDEN, bias=BIAS)

    def forward(self, x):
        y = F.silu(self.gate_proj(x)) * self.up_proj(x) if ACTIVATION == "swiglu" else gelu(self.up_proj(x))
        return self.down_proj(y)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layernorm, self.self_attn = Norm(BIAS), Attention()
        self.post_attention_layernorm, self.mlp = Norm(BIAS), Mlp()

    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Net(nn.Module):
    """A language model under the names of Llama in Hugging Face's transformers, as it is evaluated: logits [batch, tokens,
    vocabulary] of what comes after each of `tokens` [batch, tokens], and the loss if there are targets (IGNORE_INDEX does not count)."""

    def __init__(self):
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(VOCABULARY, EMB)
        if POSITIONS == "learned":
            self.model.embed_positions = nn.Embedding(BLOCK, EMB)
        self.model.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.model.norm = Norm(BIAS)
        self.lm_head = nn.Linear(EMB, VOCABULARY, bias=False)
        if TIED:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens, targets=None):
        x = self.model.embed_tokens(tokens)
        if POSITIONS == "learned":
            x = x + self.model.embed_positions.weight[: tokens.shape[1]]
        for block in self.model.layers:
            x = block(x)
        logits = self.lm_head(self.model.norm(x))
        if targets is None:
            return logits
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX)
