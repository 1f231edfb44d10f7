"""What the watching needs of Lightning: the callbacks, information from the Trainer, and `GRADWATCH=1`.

Supports both packages, `lightning` and `pytorch_lightning`.
"""
