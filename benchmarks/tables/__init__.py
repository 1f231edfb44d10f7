"""The tables, one a file: each has `table(quick)`, which measures."""

from benchmarks.tables import accuracy, fit, growth, interventions, logged, norms, rules, start, unsampled, wandb

TABLES = {
    "norms": norms.table,
    "wandb": wandb.table,
    "logged": logged.table,
    "fit": fit.table,
    "unsampled": unsampled.table,
    "rules": rules.table,
    "interventions": interventions.table,
    "start": start.table,
    "accuracy": accuracy.table,
    "growth": growth.table,
}
