"""The layers that make the queries and keys of an attention, as their names say."""

from __future__ import annotations

from functools import lru_cache

from gradwatch.core.record import Layout

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
}
"""What layers that make queries are called, and those beside them that make keys."""


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
