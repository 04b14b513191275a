"""Checks that weights move both ways under the names of timm and of Hugging Face's transformers, with their own code.

    python tools/check_names.py FOLDER

FOLDER holds for each CASE a CASE.json (`network`: vit or llama, `config`: its keys, and the sizes of its data), CASE.safetensors as
`export` writes it, and CASE.record.safetensors: an `input` and Taper's `logits`. The weights are loaded strictly. Then a network of
theirs is written for Taper to load: CASE.theirs.safetensors, its state, and CASE.theirs.record.safetensors, the same input and its
logits. Prints a JSON object a case: what is missing, or the largest difference to Taper's logits.

nanoGPT is no package: what `gpt` exports is loaded by its definition written out (tools/check_export.py).
"""

import json
import sys
from pathlib import Path


def vit(config, sizes):
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(
        img_size=(sizes["height"], sizes["width"]),
        patch_size=config["patch"],
        in_chans=sizes["channels"],
        num_classes=sizes["classes"],
        embed_dim=config["emb"],
        depth=config["layers"],
        num_heads=config["heads"],
        mlp_ratio=config["hidden"] / config["emb"],
        qkv_bias=config["qkv_bias"],
        class_token=config["class_token"],
        global_pool=config["global_pool"],
        fc_norm=config["fc_norm"],
    )


def llama(config, sizes):
    from transformers import LlamaConfig, LlamaForCausalLM

    theirs = LlamaConfig(
        vocab_size=sizes["vocab"],
        hidden_size=config["emb"],
        intermediate_size=config["hidden"],
        num_hidden_layers=config["layers"],
        num_attention_heads=config["heads"],
        num_key_value_heads=config["kv_heads"],
        max_position_embeddings=config["block"],
        rms_norm_eps=config["norm_eps"],
        rope_theta=config["rope_theta"],
        tie_word_embeddings=config["tied"],
    )
    # Older ones have the base as a key of its own, newer ones among the parameters of the angles.
    angles = getattr(theirs, "rope_parameters", None) or {"rope_theta": theirs.rope_theta}
    assert angles["rope_theta"] == config["rope_theta"], angles
    return LlamaForCausalLM(theirs)


NETWORKS = {"vit": vit, "llama": llama}


def main():
    folder = Path(sys.argv[1])
    for about in sorted(folder.glob("*.json")):
        case, told = about.stem, json.loads(about.read_text())
        try:
            import torch
            from safetensors.torch import load_file, save_file

            net = NETWORKS[told["network"]](told["config"], told["sizes"]).eval()
        except ImportError as e:
            print(json.dumps({"case": case, "missing": str(e)}))
            continue

        def logits(images_or_tokens):
            with torch.no_grad():
                out = net(images_or_tokens)
            return out if told["network"] == "vit" else out.logits

        # A network of theirs, larger than it starts so that no part of it is close to nothing.
        torch.manual_seed(3)
        with torch.no_grad():
            for tensor in net.parameters():
                tensor.add_(torch.randn_like(tensor) * 0.2)
        record = load_file(folder / f"{case}.record.safetensors")
        # A tied head is one tensor under two names, which a safetensors file has twice.
        state = {name: tensor.clone().contiguous() for name, tensor in net.state_dict().items()}
        save_file(state, folder / f"{case}.theirs.safetensors")
        theirs = {"input": record["input"], "logits": logits(record["input"]).contiguous()}
        save_file(theirs, folder / f"{case}.theirs.record.safetensors")

        net.load_state_dict(load_file(folder / f"{case}.safetensors"), strict=True)
        found, expected = logits(record["input"]), record["logits"]
        assert found.shape == expected.shape, (found.shape, expected.shape)
        difference, largest = float((found - expected).abs().max()), float(expected.abs().max())
        print(json.dumps({"case": case, "difference": difference, "largest": largest}))


main()
