"""Hooks of torch: `HookSet` holds their handles and removes them.

Also hooks that work with in-place edits, gradients of views, and clearer errors of torch's full backward hooks.
"""
