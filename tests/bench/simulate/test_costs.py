"""Costs of steps, and the files that hold them."""

from __future__ import annotations

import json

import pytest

from pageloom.contract.costs import StepCosts, StepProfile, StepWork


def test_a_steps_work_is_told_from_its_lengths():
    work = StepWork.of([1, 1, 4], [10, 1, 6], draws=3)
    assert work.tokens == 6
    assert (work.sequences, work.draws) == (3, 3)
    assert work.decode_context == 11
    assert work.prefill_context == 6
    assert work.prefill_pairs == 3 + 4 + 5 + 6  # what each of the four tokens attends to


def test_seconds_are_the_sum_of_what_a_step_has_to_do():
    costs = StepCosts(
        constant=1.0, tokens=((0, 0.0), (10, 5.0)), sequence=2.0, draw=3.0,
        decode_context=0.25, prefill_context=0.5, prefill_pair=0.125,
    )  # fmt: skip
    work = StepWork(10, 2, 1, 8, 4, 16)
    assert costs.seconds(work) == 1 + 5 + 2 * 2 + 3 + 8 * 0.25 + 4 * 0.5 + 16 * 0.125


@pytest.mark.parametrize(
    ("count", "seconds"), [(0, 1.0), (1, 1.0), (3, 2.0), (5, 3.0), (7, 3.5), (9, 4.0), (13, 5.0)]
)
def test_the_cost_of_tokens_is_interpolated_and_goes_on(count, seconds):
    costs = StepCosts(tokens=((1, 1.0), (5, 3.0), (9, 4.0)))
    assert costs.of_tokens(count) == seconds


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"constant": -1.0}, "0 or more"),
        ({"constant": float("inf")}, "finite"),
        ({"constant": "a"}, "must be a number"),
        ({"constnat": 1.0}, "there is no cost 'constnat'; there are"),
        ({"tokens": [[0, 1.0]]}, "at least two"),
        ({"tokens": [[0, 1.0], [1, 0.5]]}, "must rise"),
        ({"tokens": [[1, 1.0], [1, 2.0]]}, "must rise"),
        ({"tokens": 3}, "list of pairs"),
    ],
)
def test_wrong_costs_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        StepCosts.from_json(values)


def test_a_profile_is_read_as_it_was_written(profile, tmp_path):
    read = StepProfile.read(profile)
    read.write(tmp_path / "again.json")
    assert StepProfile.read(tmp_path / "again.json") == read
    assert read.costs.seconds(StepWork(1, 1, 1, 4, 0, 0)) > 0.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content.pop("format"), "is not a pageloom step profile"),
        (lambda content: content["worker"].pop("dtype"), "is wrong: .*dtype"),
        (lambda content: content["costs"].update(draw=-1), "is wrong: .*0 or more"),
    ],
)
def test_a_wrong_profile_is_refused_by_its_name(profile, change, message):
    content = json.loads(profile.read_text())
    change(content)
    profile.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"profile\.json {message}.*pageloom bench profile"):
        StepProfile.read(profile)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("num_blocks", "many", "worker.num_blocks: expected `int`, got `str`"),
        ("num_blocks", True, "worker.num_blocks: expected `int`, got `bool`"),
        ("num_blocks", 0, "worker.num_blocks must be from 1 to 2,147,483,647, not 0"),
        ("num_blocks", 2**33, "worker.num_blocks must be .*, not 8589934592"),
        ("host_blocks", 2**31, "worker.host_blocks must be from 0 to"),
        ("block_size", -4, "worker.block_size must be from 1 .*, not -4"),
        ("vocab_size", 0, "worker.vocab_size must be from 1"),
        ("max_model_len", 1000.5, "worker.max_model_len: expected `int`, got `float`"),
        ("weights", None, "worker.weights: expected `object`, got `null`"),
        ("weights", {"int4": -1}, "worker.weights.int4 must be from 0"),
        ("bytes_per_block", -1, "worker.bytes_per_block must be from 0 .*, not -1"),
        ("activations", -1, "worker.activations must be from 0"),
        ("blocks", 3, "worker.blocks is not known"),
    ],
)
def test_each_key_of_the_worker_is_checked(profile, key, value, message):
    content = json.loads(profile.read_text())
    content["worker"][key] = value
    profile.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"^the profile .*profile\.json is wrong: {message}"):
        StepProfile.read(profile)


@pytest.mark.parametrize("part", ["costs", "worker", "measured"])
def test_each_part_of_a_profile_is_an_object(profile, part):
    content = json.loads(profile.read_text())
    profile.write_text(json.dumps(content | {part: []}))
    with pytest.raises(ValueError, match=rf"profile\.json is wrong: {part} must be an object, not"):
        StepProfile.read(profile)


@pytest.mark.parametrize("part", ["costs", "worker"])
def test_a_profile_without_costs_or_worker_is_refused(profile, part):
    content = json.loads(profile.read_text())
    del content[part]
    profile.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"profile\.json is wrong: {part} is missing"):
        StepProfile.read(profile)


def test_a_profile_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"none\.json cannot be read.*bench profile"):
        StepProfile.read(tmp_path / "none.json")
