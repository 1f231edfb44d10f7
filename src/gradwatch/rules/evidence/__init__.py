"""Evidence: what several rules read from the history, and how alerts word it.

The functions depend on the history alone and keep no state.
"""
