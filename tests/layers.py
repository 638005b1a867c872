"""Which tests `make test` runs: all but `long` and `exhaustive` ones.

Of the whole jobs in tests/chaos those listed here are in it, at least one for each feature; all others are
`long`, as some that are marked so elsewhere: `make test-all` runs them as well. Some more, of other layouts
and seeds, are marked `exhaustive`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

CHAOS = Path(__file__).parent / "chaos"
COLLECTED = pytest.StashKey[set[str]]()
"""Tests of tests/chaos that were found and are not `exhaustive`, also those that `-m` or `-k` leave out."""

QUICK: dict[str, tuple[str, ...]] = {
    "a worker is killed": ("test_policies.py::test_a_crashed_worker_is_restarted_where_it_was",),
    "a node is lost, and the controller": (
        "test_controller.py::test_training_goes_on_without_a_controller_and_its_successor_recovers",
    ),
    "one node speaks for all": ("test_relays.py::test_one_node_speaks_for_all_and_each_is_lost",),
    "the leader's machine is lost": (
        "test_succession.py::test_the_leader_is_lost_and_training_does_not_notice",
    ),
    "policies wait and stop": (
        "test_policies.py::test_without_a_spare_the_survivors_hold_until_a_node_joins",
        "test_policies.py::test_policy_stop",
    ),
    "durable checkpoints": (
        "test_policies.py::test_more_than_replicas_cover_falls_back_to_the_durable_checkpoint",
    ),
    "not each version is protected": ("test_every.py::test_megatron[2]",),
    "a job that ends saves": ("test_final_save.py::test_a_script_that_fails",),
    "Slurm": ("test_slurm.py::test_a_node_is_drained_and_another_one_lost",),
    "drills at every moment of a step": ("test_moments.py::test_every_moment[tp1pp2dp2-distopt-bf16]",),
    "groups leave and return": (
        "test_elastic.py::test_groups_leave_and_return[tp1pp1dp3-distopt-bf16--global-batch-size=12-4]",
    ),
    "standbys start roles ahead of need": (
        "test_ready.py::test_standbys_take_over[tp1pp1dp2-distopt-fp32-1-script0]",
    ),
    "under NCCL's rules": (
        "test_strict.py::test_every_moment[tp1pp2dp2-distopt-bf16]",
        "test_strict.py::test_every_moment_with_deepspeed[zero3-dp3-gas2-bf16-gpt2-clip1--num-workers=2-1]",
        "test_strict.py::test_a_link_fails_while_all_live",
    ),
    "commands on events": ("test_hooks.py::test_commands_are_told_of_a_node_that_is_lost",),
    "a node is taken out": ("test_drain.py::test_a_node_is_drained",),
    "a device is broken": ("test_devices.py::test_a_device_that_is_broken_costs_one_recovery",),
    "a node is slow": ("test_stragglers.py::test_who_is_slow_is_named_and_its_node_taken_out[compute]",),
    "who joins is checked": (
        "test_admission.py::test_a_sick_spare_is_not_used",
        "test_admission.py::test_a_sick_node_is_left_out_at_the_start",
    ),
    "a node that is about to go is drained": (
        "test_drain.py::test_a_node_that_is_about_to_go_is_drained[announced]",
    ),
    "the page": ("test_page.py::test_a_browser_walks_the_page_of_a_job",),
    "the flight record": ("test_flight.py::test_a_worker_that_is_stopped_is_read_and_found",),
    "hangs": ("test_hangs.py::test_a_worker_that_is_stopped_is_replaced",),
    "waits that are no hangs": ("test_waits.py::test_who_waits_for_data_is_not_replaced[2]",),
    "nodes that stop and go on": ("test_pauses.py::test_nodes_that_were_given_up_come_back_by_themselves",),
    "silent corruption": ("test_corruption.py::test_a_flipped_bit[tp1pp1dp2-plain-fp32]",),
    "corrupt copies": (
        "test_integrity.py::test_a_local_snapshot_with_a_flipped_bit_is_refused_and_the_replica_used",
    ),
    "strangers": ("test_integrity.py::test_strangers_are_refused_and_the_job_goes_on",),
    "loaders with processes": ("test_loaders.py::test_loaders_with_processes[kept]",),
    "scripts that end": ("test_endings.py::test_scripts_that_leave",),
    "an exception in the script": ("test_errors.py::test_an_exception_restarts_its_worker_from_memory",),
    "going on in place does not help": (
        "test_ladder.py::test_the_same_error_again_and_again[tp1pp1dp2-distopt-fp32-durable]",
        "test_ladder.py::test_a_script_that_never_does_the_same_again[0]",
        "test_ladder.py::test_roles_that_wait_for_each_other[tp1pp1dp2-distopt-fp32]",
    ),
    "settings of the script": ("test_configuration.py::test_settings_that_cannot_be_had",),
    "a loop of one's own": (
        "test_tutorial.py::test_tutorial",
        "test_own_loop.py::test_a_loop_of_ones_own[True]",
    ),
    "what is said while a job runs": (
        "test_voice.py::test_survivors_that_stand_still_do_no_steps",
        "test_voice.py::test_a_job_that_is_not_protected_says_so_at_once",
    ),
    "what is sent": ("test_accounting.py::test_bytes_between_hosts[tp1pp2dp2-distopt-bf16-2]",),
    "DeepSpeed, ZeRO 3": (
        "test_deepspeed.py::test_every_moment[zero3-dp3-gas2-bf16-gpt2-clip1--num-workers=2-1-1]",
    ),
    "DeepSpeed, Hugging Face's Trainer": (
        "test_deepspeed_loops.py::test_trainer[trainer-stream-hf-zero1-dp2-gas1--eval_strategy=steps--eval_steps=3-]",
    ),
    "a loop of one's own, with DeepSpeed": ("test_deepspeed_loops.py::test_a_loop_that_is_entered_again[1]",),
    "DeepSpeed, ZeRO 1, habits of scripts": ("test_deepspeed_variants.py::test_variant[habits-zero1-]",),
    "DeepSpeed, state wherever scripts have it": ("test_deepspeed_variants.py::test_variant[quirks-]",),
    "groups leave and return, with DeepSpeed": (
        "test_deepspeed_elastic.py::test_groups_leave_and_return"
        "[zero2-dp3-gas2-bf16-gpt2-clip1shrink--train-samples=100--dropout=0--num-workers=2-1-4]",
    ),
    "pretrain_gpt.py": ("test_pretrain.py::test_newcomer_to_a_job_that_was_resumed",),
    "pretrain_gpt.py, groups leave and return": (
        "test_pretrain_elastic.py::test_groups_leave_and_return[sharded]",
    ),
    "pretrain_gpt.py, layouts": ("test_pretrain_layouts.py::test_layout[7-tp2pp2-bf16]",),
}
"""Feature -> its tests in tests/chaos."""

MORE = {
    "test_deepspeed_accounting.py": "what is sent, with DeepSpeed",
    "test_weights.py": "DeepSpeed, ZeRO 3",
    "test_deepspeed_versions.py": "other versions",
    "test_metrics.py": "drills, seen by a real Prometheus",
    "test_pretrain_final_save.py": "a job that ends saves",
    "test_pretrain_corruption.py": "silent corruption",
    "test_pretrain_errors.py": "an exception in the script",
    "test_pretrain_strict.py": "under NCCL's rules",
    "test_pretrain_ready.py": "standbys start roles ahead of need",
    "test_pretrain_features.py": "what Megatron-LM does beside training",
    "test_racks.py": "a node is lost, and the controller",
    "test_random.py": "drills, at other moments",
    "test_soak.py": "drills, at other moments",
    "test_variants.py": "drills, in other layouts",
}
"""Files of tests/chaos of which nothing is quick, and which quick feature they have more of."""


def is_quick(test: str) -> bool:
    """Whether `make test` runs that test of tests/chaos (`FILE::NAME` or `FILE::NAME[PARAMETERS]`)."""
    listed = {name for names in QUICK.values() for name in names}
    return test in listed or test.partition("[")[0] in listed
