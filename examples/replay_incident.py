"""A training fails on one blank image among 1,437; its incident file brings back the batch, the noise and the NaN."""

import tempfile

import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn

import lightning as L
from data import digits
from gradwatch import GradWatch, default_sinks, load_incident


class Reader(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))

    def training_step(self, batch, index):
        images, labels = batch
        images = images / images.std(1, keepdim=True)  # which is 0 for a blank image
        return F.cross_entropy(self.net(images), labels)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def train(folder: str) -> GradWatch:
    L.seed_everything(0, verbose=False)
    learn, _ = digits()
    learn.dataset.tensors[0][1000] = 0.0
    watch = GradWatch(on_alert="stop", sinks=default_sinks(keep_batch=True))
    saver = ModelCheckpoint(every_n_train_steps=5)
    trainer = L.Trainer(max_epochs=3, callbacks=[watch, saver], logger=CSVLogger(folder), enable_progress_bar=False)
    trainer.fit(Reader(), learn)
    return watch


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        (alert,) = train(folder).alerts

        incident = load_incident(alert.incident_file)
        model = Reader.load_from_checkpoint(incident.checkpoint)
        loss = incident.replay(model)  # the batch of then, with the dropout of then: set a breakpoint in training_step

        print(f"\nStep {incident.step} once more: the loss is {loss:.3f}.")
        images, _ = incident.batch
        print(f"Images of one grey only: {(images.std(1) == 0).nonzero().flatten().tolist()} of {len(images)}.")
