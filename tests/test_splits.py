"""Query heads that share a key head, split over blocks of the backward pass where key heads are few."""

import cases
import pytest
from cases import Case, PackedCase

from jax_flash import _core

SPLIT = [case for case in (*cases.CASES, *cases.PACKED_CASES) if "split" in case.name]


def splits(
    q_length: int, kv_length: int, q_heads: int, kv_heads: int, head_dim: int, batch: int = 1, **options: object
) -> int:
    return _core.group_splits(
        batch=batch,
        q_length=q_length,
        kv_length=kv_length,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_head_dim=head_dim,
        options=options,
    )


@pytest.mark.parametrize("case", SPLIT, ids=lambda case: case.name)
def test_cases_are_split(case: Case | PackedCase) -> None:
    """Else they would show nothing."""
    if isinstance(case, PackedCase):
        lengths = {"q_length": sum(case.q_lengths) + case.tails[0], "kv_length": sum(case.kv_lengths) + case.tails[1]}
        options = {"documents": len(case.q_lengths), "has_cu_q_lengths": True, "has_cu_kv_lengths": True}
        batch = 1
    else:
        lengths, options, batch = {"q_length": case.q_length, "kv_length": case.kv_length}, {}, case.leading[0]
    head_dim = max(case.head_dim, case.value_head_dim or 0)
    assert (
        splits(
            **lengths,
            q_heads=case.q_heads,
            kv_heads=case.kv_heads,
            head_dim=head_dim,
            batch=batch,
            causal=case.causal,
            **options,
        )
        > 1
    )
