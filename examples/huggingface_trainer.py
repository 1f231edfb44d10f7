"""GradWatch in a Hugging Face Trainer: a callback around `Watch`. With `--lr 1` an alert ends it."""

import argparse
import tempfile

import torch
from sklearn.datasets import load_digits
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from gradwatch import Watch


class GradWatchCallback(TrainerCallback):
    """Takes the options of `Watch`. The Trainer clips before it calls this; `max_grad_norm=0` switches that off."""

    def __init__(self, **options):
        self.options = options

    def on_train_begin(self, args, state, control, model, **more):
        self.watch = Watch(model, **self.options)
        self.watch.__enter__()

    def on_pre_optimizer_step(self, args, state, control, optimizer, **more):
        self.watch.step(optimizer)
        control.should_training_stop |= self.watch.should_stop

    def on_train_end(self, args, state, control, **more):
        self.watch.__exit__(None, None, None)
        print(self.watch.verdict)


class Digits(torch.utils.data.Dataset):
    """Scikit-learn's digits as text: 64 tokens, one for each pixel's grey."""

    def __init__(self):
        images, labels = load_digits(return_X_y=True)
        self.tokens, self.labels = torch.tensor(images).long(), torch.tensor(labels)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.labels[index]}


def train(lr: float, epochs: float) -> Watch:
    set_seed(0)
    config = BertConfig(
        vocab_size=17,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
        num_labels=10,
    )
    callback = GradWatchCallback(on_alert="stop")
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            learning_rate=lr,
            num_train_epochs=epochs,
            per_device_train_batch_size=64,
            max_grad_norm=0,
            report_to="none",
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
        )
        model = BertForSequenceClassification(config)
        Trainer(model, arguments, train_dataset=Digits(), callbacks=[callback]).train()
    return callback.watch


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--epochs", type=float, default=1)
    options = parser.parse_args()
    watch = train(options.lr, options.epochs)
