"""The layers that make the queries and keys of an attention, as their names say."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import numpy as np

from gradwatch.core.record import Layout, Sites

QUERIES_AND_KEYS = {"q": "k", "query": "key", "wq": "wk"}
"""Words in the names of layers that make queries, and those in the names of the layers beside them that make keys."""

KEYS_AND_VALUES = {"q": "kv", "query": "key_value", "wq": "wkv"}
"""The same of layers that make keys and values together."""

SCORES = {*QUERIES_AND_KEYS, *QUERIES_AND_KEYS.values(), "pos"}
"""Words in the names of layers of which an attention makes its scores: "pos" of relative positions."""


@lru_cache(maxsize=8)
def makers_of_scores(layout: Layout) -> Sites:
    """The layers that make queries, keys and relative positions, or parts of them: adapters beside weights, too."""
    names = {int(i): layout.sites[i].name.split(".") for i in layout.layers}
    modules = {tuple(parts[:end]) for parts in names.values() for end in range(1, len(parts) + 1)}
    pairs = [
        (module, (*module[:-1], _beside(module[-1], words)))
        for words in (QUERIES_AND_KEYS, KEYS_AND_VALUES)
        for module in modules
    ]
    attentions = {query[:-1] for query, key in pairs if key != query and key in modules}
    scores = {module for module in modules if module[:-1] in attentions and SCORES & {*module[-1].split("_")}}
    found = [i for i, parts in names.items() if any(tuple(parts[:end]) in scores for end in range(1, len(parts) + 1))]
    return np.array(found, dtype=np.intp)


@lru_cache(maxsize=8)
def queries_and_keys(layout: Layout) -> tuple[tuple[int, int], ...]:
    """Pairs of sites of the layers that make the queries and the keys of one attention."""
    known, found = {layout.sites[i].name: int(i) for i in layout.layers}, []
    for name, query in known.items():
        parent, dot, last = name.rpartition(".")
        key = known.get(f"{parent}{dot}{_beside(last, QUERIES_AND_KEYS)}")
        if key is not None and key != query:
            found.append((query, key))
    return tuple(found)


def _beside(query: str, words: Mapping[str, str]) -> str:
    """What a layer that makes keys is called beside one that makes queries: 'k_proj' for 'q_proj'."""
    return "_".join(words.get(word, word) for word in query.split("_"))
