"""A Transformers Trainer with dynamix's line (marked): a tiny language model. Needs the extra `transformers`.

torchrun --nproc-per-node 2 examples/transformers_trainer.py
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import dynamix  # dynamix


class Counting(Dataset[Any]):
    """Sentences of increasing numbers, from different starts."""

    def __len__(self) -> int:
        return 1024

    def __getitem__(self, i: int) -> dict[str, Any]:
        ids = torch.arange(i % 32, i % 32 + 16)
        return {"input_ids": ids, "labels": ids}


def main() -> None:
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            use_cpu=True,
            ddp_backend="gloo",
            per_device_train_batch_size=16,
            num_train_epochs=2,
            learning_rate=1e-2,
            logging_steps=16,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = Trainer(GPT2LMHeadModel(config), args, train_dataset=Counting())
        balance = dynamix.integrations.transformers.TrainerBalance(trainer, dynamix.Settings("lb_bsp"))  # dynamix
        trainer.train()
        print(f"{balance.controller.samples_seen} samples")


if __name__ == "__main__":
    main()
