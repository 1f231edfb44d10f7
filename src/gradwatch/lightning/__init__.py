"""All code that depends on Lightning: the callbacks, information from the Trainer, and `GRADWATCH=1`.

Supports both packages, `lightning` and `pytorch_lightning`.
"""
