"""A small text classifier of Hugging Face's transformers, built without a download, on token tensors."""

import torch
from transformers import BertConfig, BertForSequenceClassification

import fedsieve as fs

torch.manual_seed(0)
tokens = torch.randint(5, 60, (600, 12))
labels = (tokens > 32).sum(1).gt(6).long()  # whether most tokens come late in the vocabulary
config = BertConfig(
    vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, num_labels=2
)

fed = fs.federate(
    BertForSequenceClassification(config),
    train=({"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}, labels),
    clients=fs.partition(labels, clients=10, kind="dirichlet", alpha=1.0),
    cohort=5,
    local=fs.Local(steps=4, batch_size=16),
    optimizer=fs.AdamW(lr=0.003),
    mode="train",  # dropout draws by address: a resumed run repeats it
    device="cpu",
)
before = fed.evaluate()
fed.train(15)
print(f"accuracy {before.accuracy:.3f} -> {fed.evaluate().accuracy:.3f}")
