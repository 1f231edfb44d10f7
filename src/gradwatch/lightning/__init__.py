"""All that knows Lightning: the callbacks, what a Trainer says of its run, and the watch that `GRADWATCH=1` adds.

Both packages are served, `lightning` and `pytorch_lightning`.
"""
