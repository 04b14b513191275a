

class Bias(nn.Module):
    """The decoder has a bias of its own; its weight is the encoder's."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(VOCABULARY))


class Net(nn.Module):
    """An LSTM language model with tied embedding, as it is evaluated.

    What regularises its training in Taper (dropout of words, inputs, outputs and recurrent weights, AR and TAR) is not here.
    """

    def __init__(self):
        super().__init__()
        self.encoder = nn.Embedding(VOCABULARY, EMBEDDING)
        units = [HIDDEN] * (LAYERS - 1) + [EMBEDDING]
        self.rnns = nn.ModuleList(nn.LSTM(i, h) for i, h in zip([EMBEDDING, *units], units))
        self.decoder = Bias()

    def forward(self, tokens, states=None):
        """Logits [steps, batch, words] of the words after `tokens` [steps, batch], and the states to go on from."""
        x, after = self.encoder(tokens), []
        for rnn, state in zip(self.rnns, states or [None] * LAYERS):
            x, state = rnn(x, state)
            after.append(state)
        return F.linear(x, self.encoder.weight, self.decoder.bias), after
