"""Interventions at work: what each of them does to one step of an optimizer, and the account of it."""
