"""The tables: each measures when it is called with `quick`."""

from benchmarks.tables.fits import fit_table, logged_table, ways_table
from benchmarks.tables.parts import accuracy_table, rules_table, start_table
from benchmarks.tables.steps import growth_table, interventions_table, norms_table, unsampled_table, wandb_table

TABLES = {
    "norms": norms_table,
    "wandb": wandb_table,
    "logged": logged_table,
    "fit": fit_table,
    "ways": ways_table,
    "unsampled": unsampled_table,
    "rules": rules_table,
    "interventions": interventions_table,
    "start": start_table,
    "accuracy": accuracy_table,
    "growth": growth_table,
}
