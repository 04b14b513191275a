

def read(path):
    """The tensors of a safetensors file: eight bytes of length, a header in JSON, the numbers."""
    data = Path(path).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header, numbers = json.loads(data[8 : 8 + length]), memoryview(data)[8 + length :]
    types = {"F32": torch.float32, "I64": torch.int64}

    def tensor(about):
        start, end = about["data_offsets"]
        flat = torch.frombuffer(bytearray(numbers[start:end]), dtype=types[about["dtype"]])
        return flat.reshape(about["shape"])

    return {name: tensor(about) for name, about in header.items() if name != "__metadata__"}


def load(path=None):
    """The network with its weights, in evaluation mode; from the file beside this one unless another is named."""
    net = Net()
    net.load_state_dict(read(path or Path(__file__).with_suffix(".safetensors")), strict=True)
    return net.eval()


if __name__ == "__main__":
    print(f"{sum(p.numel() for p in load().parameters())} parameters loaded")
