"""A small causal language model of Hugging Face's transformers, built without a download, across clients."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import fedsieve as fs

TEXT = "the quick brown fox jumps over the lazy dog. " * 400
letters = sorted(set(TEXT))
tokens = torch.tensor([letters.index(letter) for letter in TEXT])[: 16 * 1000].view(-1, 16)
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=len(letters), n_positions=16, n_embd=32, n_layer=2, n_head=2))

fed = fs.federate(
    model,
    train=({"input_ids": tokens[:, :-1]}, tokens[:, 1:]),  # a dict of inputs becomes keyword arguments
    clients=[torch.arange(len(tokens))[number::8].numpy() for number in range(8)],
    cohort=4,
    local=fs.Local(steps=4, batch_size=16),
    optimizer=fs.AdamW(lr=0.01),
    mask=fs.Sieve(rule="high_magnitude", sparsity=0.5),
    device="cpu",
)
before = fed.evaluate().loss
fed.train(10)
print(f"loss per letter {before:.3f} -> {fed.evaluate().loss:.3f}, {fed.mask}")
