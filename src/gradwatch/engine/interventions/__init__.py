"""Applies the interventions to each step of an optimizer, and counts what they change."""
