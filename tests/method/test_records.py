from __future__ import annotations

from adaptivespec.method.acceptance import Margin
from adaptivespec.method.records import StepRecord
from adaptivespec.method.tree import TreeShape
from method.fakes import FakeDrafter, FakeTarget, PrescribedPolicy, run


def _record(tokens: list[int], parents: list[int], path: list[int], promoted: list[bool]) -> StepRecord:
    return StepRecord(
        shape=TreeShape(8, 1, 9),
        tokens=tokens,
        parents=parents,
        path=path,
        promoted=promoted,
        log_margins=[-0.5 if p else 0.0 for p in promoted],
        bonus=1,
        confidence=0.5,
        rar=0.5,
        spent=0.5 * sum(promoted),
        batch=1,
        seconds_draft=0.1,
        seconds_verify=0.2,
        seconds_rest=0.3,
    )


def test_counts_are_of_the_tree_not_of_the_shape() -> None:
    record = _record([9, 1, 2, 3], [-1, 0, 1, 1], [1, 3], [False, True])
    assert (record.num_drafted, record.num_accepted, record.num_promoted) == (3, 2, 1)


def test_steps_that_drafted_0_3_and_8_tokens_report_11() -> None:
    records = [_record([9] * (count + 1), list(range(-1, count)), [], []) for count in (0, 3, 8)]
    assert [record.num_drafted for record in records] == [0, 3, 8]
    assert sum(record.num_drafted for record in records) == 11


def test_the_same_in_a_generation() -> None:
    target = FakeTarget()
    policy = PrescribedPolicy([TreeShape.off(), TreeShape(3, 1, 4), TreeShape(4, 3, 9)])
    [request] = run(target, FakeDrafter(target, 0), Margin(), policy, [[1]], 3, kappa=1.0)
    assert sum(record.num_drafted for record in request.records) == 11
    assert sum(record.num_accepted for record in request.records) == 0
