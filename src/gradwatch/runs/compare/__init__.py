"""Two recorded runs compared: where and when they part, beyond what chance does to each of them."""
