"""Train a model of Hugging Face's transformers with a recipe: python hugging_face.py [RECIPE].

The model is small and has random weights, so nothing is downloaded. A pretrained model from
`AutoModelForCausalLM.from_pretrained(NAME)` is quantized in the same way.
"""

import sys
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fewbits import load_recipe, quantize

STEPS = 10


def main(recipe: str = "nvfp4") -> float:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=2,
        max_position_embeddings=128,
    )
    model = LlamaForCausalLM(config).bfloat16()
    quantization = quantize(model, load_recipe(recipe, {"keep.last": 1}), seed=1)  # keep.last=1: the last block in BF16
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    quantization.attach(model, optimizer, steps=STEPS)
    print(quantization)
    tokens = torch.randint(256, (4, 64))
    model.train()
    for step in range(STEPS):
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step + 1}/{STEPS}  loss {loss:.4f}")

    with tempfile.TemporaryDirectory() as folder:  # the weights are ordinary tensors, so transformers can save them
        model.save_pretrained(folder)
        loaded = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        with torch.no_grad():
            print(f"loaded again, without quantization: loss {loaded(input_ids=tokens, labels=tokens).loss:.4f}")
    return loss.item()


if __name__ == "__main__":
    main(*sys.argv[1:])
