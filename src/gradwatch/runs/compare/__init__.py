"""Two recorded runs compared: where and when they differ by more than their noise."""
