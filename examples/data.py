"""Scikit-learn's 1,797 handwritten digits, as loaders: four fifths to learn from, one fifth held out."""

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.utils.data import DataLoader, TensorDataset


def digits(white: float = 1.0) -> tuple[DataLoader, DataLoader]:
    """Batches of images [64, 64], pixels from 0 to `white`, with labels [64]; the held-out digits in one batch."""
    images, labels = load_digits(return_X_y=True)
    learn, held_out, named, hidden = train_test_split(
        torch.tensor(images / 16 * white).float(), torch.tensor(labels), test_size=0.2, random_state=0, stratify=labels
    )
    batches = DataLoader(TensorDataset(learn, named), batch_size=64, shuffle=True)
    return batches, DataLoader(TensorDataset(held_out, hidden), batch_size=len(held_out))
