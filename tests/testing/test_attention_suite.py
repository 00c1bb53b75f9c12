"""The suite passes a sound backend, and fails faulty ones in the test that says why."""

from __future__ import annotations

import re
from pathlib import Path

import attention_backends

pytest_plugins = ["pytester"]

BACKENDS = Path(attention_backends.__file__).read_text()

QUICK = """
from hypothesis import Phase, settings

from pageloom.testing import AttentionSuite

# Failures need not be shrunk.
settings.register_profile("quick", phases=[Phase.generate], derandomize=True)
settings.load_profile("quick")
"""

SUITE = """

class Test{0}(AttentionSuite):
    backend = {0}
    scale = "small"
"""

MIX = "test_decodes_chunks_and_prefix_hits_mix[{}]"
ENDS = "test_contexts_end_before_on_and_after_block_edges[{}]"
RANDOM = "test_any_steps_may_follow_each_other"
SAME_STEP = "test_a_prefix_may_be_written_in_the_same_step[{}]"
COPIES = "test_copies_are_exact_and_happen_all_at_once[layers of several kinds]"
SWAPS = "test_swapped_blocks_come_back_elsewhere[one layer]"
FAR = "test_slots_may_lie_beyond_two_gigabytes"
FORMAT = "an unregistered format"
TURNS = "test_q_and_k_are_rotated_where_that_is_asked[{}]"
TURNS_CODED = f"test_k_is_rotated_before_it_is_coded[{FORMAT}]"

CAUGHT = {
    "MissesTheLastTokenOfAFullBlock": {MIX.format("block size 64"), ENDS.format(300)},
    "SeesOneTokenTooMany": {MIX.format("head size 64"), RANDOM},
    "ReadsUnwrittenSlots": {MIX.format("head size 64"), ENDS.format(17), RANDOM},
    "ReadsBlocksInOrder": {MIX.format("block size 16"), ENDS.format(300)},
    "ForgetsWhatIsFarBack": {ENDS.format(8192)},
    "IgnoresTheWindow": {MIX.format("window 17"), "test_long_contexts[window]"},
    "WindowOneTooWide": {MIX.format("window 16"), MIX.format("bfloat16, window")},
    "IgnoresTheSoftcap": {MIX.format("softcap")},
    "IgnoresSinks": {MIX.format("sinks")},
    "SharesTheWrongHeads": {MIX.format("9 heads over 3"), MIX.format("4 heads over 2")},
    "SubtractsNoMaximum": {"test_large_scores_do_not_overflow[default dtype]"},
    "ComputesInBfloat16": {MIX.format("head size 64"), ENDS.format(8192)},
    "AttendsBeforeAllIsStored": {SAME_STEP.format(1), SAME_STEP.format(40)},
    "AssumesContiguousQueries": {MIX.format("head size 64"), RANDOM},
    "AssumesThatKLiesLikeV": {MIX.format("head size 64")},
    "ScalesQueriesInPlace": {MIX.format("head size 64")},
    "ChangesTheBatch": {MIX.format("head size 64")},
    "WritesBesideOut": {MIX.format("head size 64")},
    "AddsToOut": {MIX.format("head size 64")},
    "KeepsOneCacheForLikeLayers": {MIX.format("layers of several kinds")},
    "CopiesKOnly": {
        COPIES,
        MIX.format("head size 64"),
        f"test_coded_blocks_are_moved_unchanged[{FORMAT}]",
    },
    "CopiesOneLayer": {COPIES, MIX.format("layers of several kinds")},
    "HandsOutItsCache": {SWAPS},
    "WritesBlocksInOrder": {SWAPS, MIX.format("head size 64")},
    "CountsIn32Bits": {FAR},
    "BelongsToOneThread": {"test_steps_may_come_from_another_thread"},
    "AttendsToWhatItDidNotStore": {f"test_tokens_are_attended_to_as_they_are_stored[{FORMAT}]"},
    "RotatesTheOtherWay": {TURNS.format("head size 128"), TURNS_CODED},
    "RotatesNeighbours": {TURNS.format("head size 34"), TURNS.format("bfloat16")},
    "RotatesKeysOnly": {TURNS.format("float16"), TURNS_CODED},
    "RotatesAllAsTheFirst": {TURNS.format("9 heads over 3, block size 3")},
    "RotatesUnasked": {TURNS.format("layers with sinks and with a window")},
    "ChangesTheTables": {TURNS.format("head size 2")},
    "RefusesWithoutReason": {MIX.format("head size 64")},
    "TakesAnotherBlockSize": {MIX.format("block size 64")},
}


def test_each_fault_is_caught_where_it_belongs(pytester, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # threads only wait for each other here
    classes = "".join(SUITE.format(name) for name in ["Sound", "Rotates", *CAUGHT])
    pytester.makepyfile(test_backends=BACKENDS + QUICK + classes)
    wanted = [f"test_backends.py::Test{n}::{test}" for n, tests in CAUGHT.items() for test in tests]
    command = ["-q", "-p", "no:cacheprovider", "--tb=no", "-rfs", "test_backends.py::TestSound"]
    rotated = [test.partition("[")[0] for test in (TURNS, TURNS_CODED)]
    command += [f"test_backends.py::TestRotates::{test}" for test in rotated]
    output = pytester.runpytest_subprocess(*command, *wanted).stdout.str()
    failed = re.findall(r"^FAILED (test_backends.py::.*?)(?: - .*)?$", output, re.M)
    if "GiB are free" in output:  # too few to try it
        wanted.remove(f"test_backends.py::TestCountsIn32Bits::{FAR}")
    assert sorted(failed) == sorted(wanted), output
    assert " passed" in output
