"""Initial weights of unit variance make attention scores so large that attention picks one place. The fix: a norm."""

import torch
import torch.nn.functional as F
from torch import nn

import lightning as L
from data import digits
from gradwatch import GradWatch


class Reader(L.LightningModule):
    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(8, 128), nn.LayerNorm(128))
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(128, 128), nn.Linear(128, 128), nn.Linear(128, 128)
        self.q_norm, self.k_norm = (nn.LayerNorm(128), nn.LayerNorm(128)) if fixed else (nn.Identity(), nn.Identity())
        for projection in (self.q_proj, self.k_proj):
            nn.init.normal_(projection.weight)
        self.head = nn.Linear(8 * 128, 10)

    def forward(self, images):
        rows = self.embed(images.reshape(-1, 8, 8))
        queries, keys = self.q_norm(self.q_proj(rows)), self.k_norm(self.k_proj(rows))
        seen = F.scaled_dot_product_attention(queries, keys, self.v_proj(rows))
        return self.head(seen.flatten(1))

    def training_step(self, batch, index):
        images, labels = batch
        return F.cross_entropy(self(images), labels)

    def validation_step(self, batch, index):
        images, labels = batch
        self.log("accuracy", (self(images).argmax(1) == labels).float().mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def train(fixed: bool, **options) -> tuple[GradWatch, float]:
    L.seed_everything(0, verbose=False)
    learn, held_out = digits()
    watch = GradWatch()  # this line, and the callbacks argument below, are all that GradWatch needs
    trainer = L.Trainer(max_epochs=5, callbacks=[watch], enable_checkpointing=False, **options)
    trainer.fit(Reader(fixed), learn, held_out)
    return watch, float(trainer.callback_metrics["accuracy"])


if __name__ == "__main__":
    unhealthy, before = train(fixed=False, logger=False)
    fixed, after = train(fixed=True, logger=False)
    print(*unhealthy.alerts, sep="\n")
    print(f"As it was, it reads {before:.0%} of the digits it never saw; alerts: {len(unhealthy.alerts)}.")
    print(f"With the norms, {after:.0%}; alerts: {len(fixed.alerts)}.")
