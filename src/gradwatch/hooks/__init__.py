"""Hooks of torch and who owns them: `HookSet` holds every handle and removes it.

Also hooks that survive in-place edits, gradients of views, and what torch forbids full backward hooks.
"""
