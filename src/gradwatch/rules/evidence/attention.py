"""The layers that make the queries and keys of an attention, as their names say."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from gradwatch.core.record import Layout, Sites

QUERIES_AND_KEYS = {
    "query": "key",
    "q": "k",
    "q_proj": "k_proj",
    "to_q": "to_k",
    "wq": "wk",
    "q_lin": "k_lin",
    "linear_q": "linear_k",
    "query_proj": "key_proj",
    "query_layer": "key_layer",
    "add_q_proj": "add_k_proj",
}
"""What layers that make queries are called, and those beside them that make keys."""


@lru_cache(maxsize=8)
def makers_of_scores(layout: Layout) -> Sites:
    """The layers that make queries and keys, or parts of them: adapters beside their weights, too."""
    names = {int(i): layout.sites[i].name.split(".") for i in layout.layers}
    modules = {tuple(parts[:end]) for parts in names.values() for end in range(1, len(parts) + 1)}
    scores = set()
    for module in modules:
        key = (*module[:-1], QUERIES_AND_KEYS.get(module[-1], ""))
        if key in modules:
            scores |= {module, key}
    found = [i for i, parts in names.items() if any(tuple(parts[:end]) in scores for end in range(1, len(parts) + 1))]
    return np.array(found, dtype=np.intp)


@lru_cache(maxsize=8)
def queries_and_keys(layout: Layout) -> tuple[tuple[int, int], ...]:
    """Pairs of sites of the layers that make the queries and the keys of one attention."""
    known, found = {layout.sites[i].name: int(i) for i in layout.layers}, []
    for name, query in known.items():
        parent, dot, last = name.rpartition(".")
        key = known.get(f"{parent}{dot}{QUERIES_AND_KEYS.get(last, '')}")
        if key is not None and key != query:
            found.append((query, key))
    return tuple(found)
