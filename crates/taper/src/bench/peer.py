"""PyTorch's side of `bench --peer`, in its best mode. `side.rs` puts the networks of `tools/torch_nets.py` above this.

The first line of input is the task, in JSON; the answer says who this is and the most memory it held after two runs.
Every further line runs the work once and is answered with the seconds of one call. Argument: the number of threads.
With `bf16` in the task, forward passes and losses run under autocast, as PyTorch's users train in bf16.
"""
import contextlib
import json
import math
import sys
import time


AMP = contextlib.nullcontext()


def optim(task):
    """One step of an optimizer in its best mode, on the numbers that our own benchmark uses."""
    wave = lambda shape, scale: (scale * ((torch.arange(math.prod(shape)) % 251).float() - 125.5)).reshape(shape)
    params = [nn.Parameter(wave(shape, 0.01)) for shape in task["shapes"]]
    for param in params:
        param.grad = wave(param.shape, 0.001)
    name = task["optimizer"]
    if name == "muon":
        return muon(params[0])
    if name == "soap":
        return soap(params[0], task["what"])
    if name == "lbfgs":
        return lbfgs(params)
    kinds = {
        "adam": "Adam", "adamw": "AdamW", "nadam": "NAdam", "adamax": "Adamax", "adafactor": "Adafactor",
        "muon-bf16": "Muon",
    }
    best = {"fused": True} if name in ("adam", "adamw") else {} if name == "muon-bf16" else {"foreach": True}
    return getattr(torch.optim, kinds[name])(params, lr=1e-4, **best).step


def lbfgs(params):
    """Steps with a history of ten pairs: as in our own benchmark, gradients alternate with their halves, at a rate of one half."""
    optimizer = torch.optim.LBFGS(params, lr=0.5, max_iter=1, history_size=10)
    grads = [[param.grad for param in params], [param.grad / 2 for param in params]]

    def step():
        for param, grad in zip(params, grads[0]):
            param.grad = grad
        grads.reverse()
        optimizer.step(lambda: torch.tensor(1.0))

    for _ in range(22):
        step()
    return step


def muon(param, lr=1e-4, momentum=0.95, decay=0.1, coefficients=(3.4445, -4.775, 2.0315)):
    """A step of torch.optim.Muon with its iteration in float32, as ours, in place of bfloat16."""
    buffer = torch.zeros_like(param)
    a, b, c = coefficients

    @torch.no_grad()
    def step():
        buffer.lerp_(param.grad, 1 - momentum)
        x = param.grad.lerp(buffer, momentum)
        x /= x.norm().clamp(min=1e-7)
        for _ in range(5):
            gram = x @ x.T
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        param.mul_(1 - lr * decay).add_(x, alpha=-lr)

    return step


def soap(param, what, lr=1e-4, beta=0.95, eps=1e-8, decay=0.01):
    """A step of SOAP on a matrix, factored by LAPACK in float64 as the reference trajectories are."""
    m, v, t = torch.zeros_like(param), torch.zeros_like(param), 0
    left, right = torch.zeros(2, *param.shape)
    bases = None

    @torch.no_grad()
    def step():
        nonlocal bases, v, t
        g, t = param.grad, t + 1
        eigen = bases is None or what == "eigen"
        if not eigen:
            q, r = bases
            m.lerp_(g, 1 - beta)
            v.mul_(beta).addcmul_(q.T @ g @ r, q.T @ g @ r, value=1 - beta)
            u = q @ ((q.T @ m @ r) / v.sqrt().add_(eps)) @ r.T
            param.sub_(u, alpha=lr * (1 - beta**t) ** 0.5 / (1 - beta**t)).mul_(1 - lr * decay)
        left.lerp_(g @ g.T, 1 - beta)
        right.lerp_(g.T @ g, 1 - beta)
        if eigen:
            bases = [torch.linalg.eigh(k.double())[1].flip(1).float() for k in (left, right)]
        elif what == "qr":
            moved = [left @ bases[0], right @ bases[1]]
            orders = [(basis * k).sum(0).argsort(descending=True) for basis, k in zip(bases, moved)]
            v = v[orders[0]][:, orders[1]]
            bases = [torch.linalg.qr(k[:, order].double())[0].float() for k, order in zip(moved, orders)]

    return step


def gemm(task):
    x, w = torch.randn(task["m"], task["k"]), torch.randn(task["n"], task["k"])

    def product():
        with torch.inference_mode(), AMP:
            F.linear(x, w)

    return product


def training(net, loss, lr, name="adam"):
    """A training step: gradients start as None, the optimizer is fused and has what is trained."""
    params = [param for param in net.parameters() if param.requires_grad]
    if name == "adamw":
        optimizer = torch.optim.AdamW(params, lr=lr, fused=True)
    elif name == "nag":
        optimizer = torch.optim.SGD(params, lr=lr, momentum=0.9, nesterov=True, fused=True)
    else:
        optimizer = torch.optim.Adam(params, lr=lr, fused=True)

    def step():
        optimizer.zero_grad(set_to_none=True)
        with AMP:
            value = loss()
        value.backward()
        optimizer.step()

    return step


class Mlp(nn.Sequential):
    def __init__(self, hidden):
        widths = [784, *hidden, 10]
        layers = [layer for a, b in zip(widths, widths[1:]) for layer in (nn.Linear(a, b), nn.ReLU())]
        super().__init__(nn.Flatten(), *layers[:-1])


class Attention(nn.Module):
    def __init__(self, emb, heads, bias, causal):
        super().__init__()
        self.qkv, self.proj = nn.Linear(emb, 3 * emb, bias=bias), nn.Linear(emb, emb, bias=bias)
        self.heads, self.causal = heads, causal

    def forward(self, x):
        q, k, v = (y.unflatten(2, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.proj(y.transpose(1, 2).flatten(2))


class TransformerBlock(nn.Module):
    def __init__(self, emb, heads, bias, causal, eps):
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(emb, eps=eps, bias=bias) for _ in range(2))
        self.attn = Attention(emb, heads, bias, causal)
        self.fc1, self.fc2 = nn.Linear(emb, 4 * emb, bias=bias), nn.Linear(4 * emb, emb, bias=bias)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class Gpt(nn.Module):
    """A transformer for text, without biases, its head tied to the embedding."""

    def __init__(self, layers, heads, emb, block, vocab):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab, emb), nn.Embedding(block, emb)
        self.blocks = nn.ModuleList(TransformerBlock(emb, heads, False, True, 1e-5) for _ in range(layers))
        self.norm = nn.LayerNorm(emb, bias=False)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def loss(self, tokens, target):
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())


class Vit(nn.Module):
    """A transformer for images of 32 x 32, with a class token."""

    def __init__(self, layers, heads, emb, patch):
        super().__init__()
        self.patches = nn.Conv2d(3, emb, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, emb))
        self.places = nn.Parameter(0.02 * torch.randn(1, (32 // patch) ** 2 + 1, emb))
        self.blocks = nn.ModuleList(TransformerBlock(emb, heads, True, False, 1e-6) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(emb, eps=1e-6), nn.Linear(emb, 10)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class LanguageModel(nn.Module):
    """AWD-LSTM with all its dropouts, AR and TAR; masks are as small as they can be."""

    def __init__(self, layers, hidden, emb, vocab):
        super().__init__()
        self.encoder = nn.Parameter(torch.empty(vocab, emb).uniform_(-0.1, 0.1))
        self.bias = nn.Parameter(torch.zeros(vocab))
        sizes = [emb] + [hidden] * (layers - 1) + [emb]
        self.rnns = nn.ModuleList(nn.LSTM(a, b) for a, b in zip(sizes, sizes[1:]))
        self.carry = None

    def loss(self, tokens, target):
        batch = tokens.shape[1]
        keep = lambda p, *shape: torch.empty(shape).bernoulli_(1 - p).div_(1 - p)
        rows = keep(0.1, self.encoder.shape[0])
        x = F.embedding(tokens, self.encoder) * (rows[tokens].unsqueeze(2) * keep(0.4, 1, batch, self.encoder.shape[1]))
        carry = []
        for i, rnn in enumerate(self.rnns):
            zeros = torch.zeros(1, batch, rnn.hidden_size)
            state = self.carry[i] if self.carry else (zeros, zeros)
            weights = [rnn.weight_ih_l0, F.dropout(rnn.weight_hh_l0, 0.5), rnn.bias_ih_l0, rnn.bias_hh_l0]
            x, h, c = torch._VF.lstm(x, state, weights, True, 1, 0.0, True, False, False)
            # Under autocast they come in bf16, and go in only as the input does.
            carry.append((h.detach().float(), c.detach().float()))
            undropped = x
            x = x * keep(0.25 if i + 1 < len(self.rnns) else 0.4, 1, batch, rnn.hidden_size)
        self.carry = carry
        nll = F.cross_entropy(F.linear(x, self.encoder, self.bias).flatten(0, 1), target.flatten())
        return nll + 2 * x.square().mean() + (undropped[1:] - undropped[:-1]).square().mean()


def step(task):
    model, config, batch = task["model"], task["config"], task["batch"]
    if model == "lstm":
        net = LanguageModel(config["layers"], config["hidden"], config["emb"], 10_000)
        tokens = torch.randint(10_000, (task["length"] + 1, batch))
        return training(net, lambda: net.loss(tokens[:-1], tokens[1:]), task["lr"])
    if model == "gpt":
        net = Gpt(config["layers"], config["heads"], config["emb"], config["block"], 65)
        tokens = torch.randint(65, (batch, task["length"] + 1))
        return training(net, lambda: net.loss(tokens[:, :-1], tokens[:, 1:]), task["lr"], task["optimizer"])
    target = torch.arange(batch) % 10
    if model == "vit":
        net = Vit(config["layers"], config["heads"], config["emb"], config["patch"])
        x = torch.randn(batch, 3, 32, 32)
        return training(net, lambda: F.cross_entropy(net(x), target), task["lr"], task["optimizer"])
    if model == "mlp":
        net, x = Mlp(config["hidden"]), torch.randn(batch, 28, 28)
    else:
        net = NETS[model]().to(memory_format=torch.channels_last)
        x = torch.randn(batch, 3, 32, 32).to(memory_format=torch.channels_last)
    return training(net, lambda: F.cross_entropy(net(x), target), task["lr"], task["optimizer"])


def mnist_epoch(task):
    """Epochs on images of MNIST's number and size, each with an evaluation and its loss and accuracy."""
    images, labels = torch.randint(256, (70_000, 28, 28), dtype=torch.uint8), torch.randint(10, (70_000,))
    normal = lambda x: x.float().div_(255).sub_(0.1307).div_(0.3081)

    def batches(part, size, shuffle):
        x, y = images[part], labels[part]
        if task["input"] == "loader":
            data = torch.utils.data.TensorDataset(x, y)
            for x, y in torch.utils.data.DataLoader(data, size, shuffle=shuffle):
                yield normal(x), y
            return
        order = torch.randperm(len(x)) if shuffle else torch.arange(len(x))
        for chosen in order.split(size):
            yield normal(x[chosen]), y[chosen]

    def epochs():
        net = Mlp([100])
        adam = torch.optim.Adam(net.parameters(), lr=0.001, fused=True)
        for _ in range(task["epochs"]):
            total, right = torch.zeros(()), torch.zeros((), dtype=torch.int64)
            for x, y in batches(slice(60_000), 128, True):
                adam.zero_grad(set_to_none=True)
                with AMP:
                    logits = net(x)
                    loss = F.cross_entropy(logits, y)
                loss.backward()
                adam.step()
                total += loss.detach() * len(y)
                right += (logits.detach().argmax(1) == y).sum()
            with torch.inference_mode(), AMP:
                for x, y in batches(slice(60_000, None), 1000, False):
                    logits = net(x)
                    total += F.cross_entropy(logits, y)
                    right += (logits.argmax(1) == y).sum()
            total.item(), right.item()

    return epochs


def peak_megabytes():
    try:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) // 1024 for line in status if line.startswith("VmHWM"))
    except OSError:
        return None


def main():
    global AMP
    torch.set_num_threads(int(sys.argv[1]))
    torch.manual_seed(1)
    answer = lambda value: print(json.dumps(value), flush=True)
    task = json.loads(sys.stdin.readline())
    if task["bf16"]:
        AMP = torch.autocast("cpu", torch.bfloat16)
        if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            # oneDNN has no LSTM in bf16 for such a CPU; PyTorch's own is slow everywhere.
            torch.backends.mkldnn.set_flags(False)
    wait = lambda: None
    if task["device"] != "cpu":
        torch.set_default_device(task["device"])
        wait = torch.mps.synchronize if task["device"] == "mps" else torch.cuda.synchronize
    work = {"optim": optim, "gemm": gemm, "step": step, "mnist-epoch": mnist_epoch}[task["work"]](task)
    work()
    work()
    answer({"who": f"PyTorch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}", "peak_mb": peak_megabytes()})
    for _ in sys.stdin:
        wait()
        started = time.perf_counter()
        for _ in range(task["repeat"]):
            work()
        wait()
        answer((time.perf_counter() - started) / task["repeat"])


main()
