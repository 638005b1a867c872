"""Thousands of schedules of failures, and mutations of the rules, each of which must be found."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable

import pytest

from . import node
from .__main__ import failure, failures
from .mutations import CHECKS, DERIVED, DRAINED, ELECTED, FLIPPED, LADDERS, MUTATIONS, READY_MADE
from .schedules import (
    CHECKED,
    DERIVES,
    DRAINS,
    EVERY,
    FLIPS,
    LADDER,
    NOTICED,
    READY,
    RELAYS,
    SICK,
    SLOWS,
    VERIFIES,
    simulate,
)

SCHEDULES = int(os.environ.get("SCHEDULES", "2000"))
FAILED_ONCE = {
    -855573752: "the oracle: a node was gone, and the leader that would have said so, both at the same time",
    81533656: "the oracle: a job began when nobody saw a former checkpoint, and a role failed early",
    80479248: "two machines that do not reach the only holder took turns with a role, until the job ended",
    85839008: "the oracle: storage failed between a question and its answer; and nobody asked again",
    81086657: "the oracle: a job that had begun when nobody saw a former checkpoint, and had done no step",
    701044: "the oracle: who had been cut off and was given up restored what it had in the epoch it knew of",
    81173758: "the oracle: nothing was recorded between nobody seeing a former checkpoint and the step",
    339639: "SIGTERM as an epoch ended: the node never said what it held, and nothing was saved",
    84257763: "the ledger lacked the epoch in which the script said what becomes of lost groups",
    82712195: "the oracle read what took the time from a file whose disk was full",
    85543721: "the only node left was told to end, and ended before others came for what it held",
    3812269799: "the oracle: who had stopped between two steps was lost before the controller heard of that",
    -3655402511: "the oracle: a clock that had stood still was right again, and what it had said was not",
    -2987081085: "all was lost, also which job it was: its checkpoint, found later, was left out",
    83613885: "the oracle: what the job was to begin with had gone with the mount of its directory",
    579817: "a node told to end left while the job waited for another, with the only copy that there was",
    468176: "the oracle wanted to be written at the end what had been read from storage, and was there",
    599690: "the oracle: no node had the storage mounted as the job began: nobody knew of a checkpoint",
    83941461: "the oracle: the only node left was told to end, which is the job",
    -1729828380: "agents stayed with a leader that was stopped before its first word, while another one led",
    1021: "a node without the plan was told once to bring a group back (what_to_prepare_is_said_once)",
    1718: "a newcomer waited in start-up for roles that had just come back (newcomers_have_no_records)",
    1070: "a successor took over without the spares, and their copies",
    7014: "what a role had said of its state was lost with its node (what_was_lost_on_the_way_is_unknown)",
    671: "what had failed where was unknown to a successor (strikes_are_forgotten_by_a_new_controller)",
    3902: "all nodes with a role and the controller were lost, and training began anew in silence",
    180: "a durable checkpoint was of before a part's end, and newcomers passed the part (a_part_stays_over)",
    191: "that a part was over was lost with the controller",
    391: "the ledger entered steps of an epoch that it had not entered",
    1311: "a spare was left, which knew the first plan alone, and training began anew in silence "
    "(the_first_plan_is_all_there_is)",
    5960: "a node was replaced for a broken link again and again, and no other node was there",
    8665: "everybody who had seen a link break had died, and it was waited for what others would say",
    2341: "a role that came back was asked for records that it did not have",
    101434: "all that had been restored from a durable checkpoint was lost, which was damaged since, and "
    "training began anew in silence",
    105020: "the same where the script goes on from a checkpoint of its own, which it has not made yet",
    104564: "a copy was overwritten by an equal one",
    106020: "the line of an epoch was lost with a controller whose disk was full",
    205553: "a dead worker was given a role: to the agent it has failed, and was none to the oracle",
    2520: "roles began to come back to an epoch that was ending (a_role_comes_back_to_an_older_epoch)",
    302375: "a durable checkpoint was older than the script's own, and newcomers were replaced for ever "
    "(where_scripts_begin_is_unknown)",
    106746: "a node that trained alone, unheard, was lost, and the others began anew without waiting for it",
    25054: "roles lost their connections, and a link to a spare broke: it was replaced, and they hung",
    954147: "a node was taken for lost while the only other one that reached it had only just come",
    914492: "a worker died at the end of a step of which nobody had heard, and the oracle counted it",
    921281: "a spare alone had begun the first plan of a controller that was killed then, and was given up",
    406: "who was to tell of a step's samples was lost with that (steps_that_nobody_told_of_stay_unknown)",
    500017949: "the same, and it had no record that the controller knew of",
    40168: "a controller was killed before anybody had heard its decision, and the oracle held on to that",
    500031446: "all who had trained were lost with the controller, which had heard of no step, and training "
    "began anew beside a durable checkpoint",
    500002119: "a newcomer of a former controller's was there when all scripts were to begin anew",
    -309995444: "a leader was stopped between a decision and saying so, and its successor was held to it",
    -309998986: "the same, and what it said afterwards was of a time that it had accounted for otherwise",
    -309990520: "the same, and its successor's account had nothing of that",
    24984: "a node was told to end, and a new controller that had heard of nobody else yet ended the job",
    77126587: "the oracle took the version of a former job's checkpoint for a step that this one had done",
    77128703: "a node that a new controller waited for in vain was missed only from then on by the oracle",
    77130016: "a role that had read its part of a damaged checkpoint was lost, and the oracle held that all "
    "of it had been there",
    -1541971562: "a controller gave up while it heard the last words of a connection, and the simulator fell",
    -424139290: "a successor was left the first of two lines of one moment, and its account "
    "had nothing of the other",
    -249240743: "the only durable checkpoint was damaged as it was read, and the oracle wanted no restart",
    -309995218: "a node of the simulator's took longer than a real one to go over to a new leader, and came "
    "too late, and the oracle took it for well",
    -13983973: "the same",
    -570086033: "a leader that led no more without knowing it gave up draining a node, the next one went on "
    "with that, and the oracle believed the former",
    -309968012: "what had died long before a new leader heard of it was new to that, and its node avoided "
    "(a_death_is_as_new_as_the_word_of_it)",
    110000026: "a role that did something else than its peers again and again was replaced for it in place, "
    "each time after as long as nobody would know, and all rungs were as slow",
    110004655: "a group had started ahead when all began anew from storage: its worker was ended, as nobody "
    "noted, and ended again for ever",
    110000651: "scripts began anew from a former job's checkpoint, and the oracle took that for steps",
    -968977275: "a worker had started a role ahead for a leader that was lost then, and was given it by the "
    "next one, which did not know what it had on record: its peers waited for it in start-up for ever",
    -675418565: "a leader was lost that had just moved roles to such workers: the next one waited for "
    "others, in whose places those were",
    1863661474: "a worker of the simulator's that was stopped while it held looked at its deadline once, too "
    "early, and held for ever",
    -968977373: "a step took long since copies had to be waited for, was called a hang, and was done: the "
    "oracle did not take it for a step",
    -968976572: "the same",
    -260667577: "a node of the simulator's that had hung up on a former leader took longer than a real one "
    "to call the next, came too late, and the oracle took it for well",
    -675417608: "the same",
    -675411894: "the same",
    -968982707: "the same",
    -968978214: "the same",
    -968979508: "a leader that led no more lost a node, and the oracle held that those who had just left it "
    "for the next one spoke for that",
    -675412321: "a worker of the simulator's was stopped as it waited for roles that move, did not wake at "
    "the end of that as a real one does, stood still for ever, and the oracle took it for well",
    -968980967: "the same",
    -968976612: "the same",
    -969099808: "a node had no answer who leads for longer than a new leader waits, came too late, and the "
    "oracle took it for well",
    1705214639: "the one node in sight was told to end, and the job did, though others came back",
    969198483: "the same, and the oracle asked that one which was out of sight be waited for",
    -1052442203: "who trained a step, and was to tell of its samples, was lost before the next leader heard",
    -1368074761: "a script raised in its first step after a start with its own checkpoint, and the oracle "
    "held that steps had been done before",
    1763685793: "a node was out of reach when the roles that it had started were to move there, and kept "
    "them for ever: their places were missing",
    -236150636: "a part of a replica group was withdrawn for another one, and the rest of it was placed",
    -1139192242: "all who had trained a part of the script were lost with the controller, and training began "
    "anew behind that part",
    -1222341117: "a leader was stopped before it ended the job, and the simulator let it do so when "
    "another led",
    -3775223545: "the table of nodes was heard once in vain and said again, and a spare that had gone "
    "meanwhile stayed in it for ever",
    -3481537753: "a leader that led no more lost a node that had gone over to the next one, which went on "
    "with that, and the oracle took the node for well",
    990018: "a controller was killed while the job saved, and its successor, which heard why it had ended, "
    "ended it and saved nothing",
    990613: "no node was left to save anything, and the controller failed of that",
    3820011950: "a node was lost before the version that its epoch went on from was anywhere else, as only "
    "the last step before the next version waited for that",
    7010537492: "who spoke for a node was lost for a moment, and what nobody had compared was gone on from",
    -7576704810: "a leader did not know what the one before it had found alike, and went on from newer state",
    7031686929: "what holders had of a version was said again before they had done the step again, and was "
    "taken for that",
    6153476976: "a bit flipped of what nobody else had, and the oracle held that it could be found",
    -6502026511: "a leader was drained, and nobody compared what roles held until the next one led",
    -2984944931: "a leader that had the plan, and had yet to take over, ended the job and did not write what "
    "was in memory",
    -1939001406: "a node was let go, did not hear of it and came back: it was to go yet, and the oracle held "
    "that it could take a lost one's place",
    2110007167: "waiting for copies in steps that were done again was called the price of saving",
    -1076389710: "a leader whose clock stood still missed a node that had greeted it before it went over to "
    "the next one",
    201150583: "an end of a broken link was replaced, under the policy shrink, where nothing could be shrunk",
    1080286876: "a newcomer asked a role for records that had been ready, and was not used",
    2712120538: "an error of a script's ended the job: a device that failed had made its role raise the same",
    707216956: "the oracle took nodes away when all was to be well",
    -3642916864: "the oracle missed that an end of a broken link came back before it heard so",
    2983776956: "the oracle had not as many nodes come as were about to go",
    2468623280: "what a node was to write at the end was lost with its connection, and waited for",
    83060748: "scripts that were to go on from a durable checkpoint went on without, and without their own",
    1588565358: "the oracle took a node with a broken device for one that may be used before others",
    3853797084: "the oracle had as many nodes come as there were, though one was about to go",
    80420794: "a node that had not begun the newest plan was to write at the end, and refused; another could",
    2362083965: "the oracle held that nodes that came to a job that ended already could have gone on with it",
    913930: "a node that was told to end in a recovery left at once, with what the others were to go back to",
    -2713566039: "what a past that the job had gone back behind had written counted as saved at its end",
    -250000184: "the oracle held that checkpoints were there which no node that was asked could see",
    3650056527: "the oracle counted the try of a worker on a node that had just been given up",
}
"""Seeds of schedules that have failed: what was wrong, and the mutation that makes it wrong again."""

FAILED_ONCE_ABOUT_LEADERS = {
    624704: "the oracle asked what is true of those who had been given up, and trained on unheard",
    216228: "a node that had gone over to the next leader was missed by the former one, and avoided for it",
    101778: "a successor saw no node with a role: they were with its predecessor yet; and began anew",
}

FOUND_BY = {
    "steps_that_nobody_told_of_stay_unknown": 406,
    "what_is_cut_off_was_well_spent": 4214,
    "what_to_prepare_is_said_once": 1005,
    "a_report_differs_from_the_greeting": 1022,
    "a_report_before_all_are_quiet": 1141,
    "a_report_is_final": 797,
    "a_busy_agent_is_a_silent_machine": 147,
    "a_successor_is_not_told_of_steps": 5221,
    "newcomers_have_no_records": 9968,
    "one_copy_is_enough": 8830,
    "commit_after_the_barrier": 8830,
    "out_of_sight_is_dead": 12102,
    "the_first_plan_is_all_there_is": 10353,
    "a_role_comes_back_to_an_older_epoch": 11217,
    "strikes_are_forgotten_by_a_new_controller": 298,
    "strikes_never_decay": 1822,
    "what_was_lost_on_the_way_is_unknown": 10680,
    "a_pause_of_the_controller_counts": 1690,
    "silence_alone_is_a_verdict": 505,
    "who_cannot_be_reached_has_ended": 104,
    "roles_move_at_any_time": 500000055,
    "a_drained_node_is_used_again": 500000040,
    "a_notice_is_heard_once": 590000077,
    "a_sick_node_is_like_any_other": 582000212,
    "who_is_being_checked_is_used": 582000081,
    "a_device_that_has_failed_is_like_any_other": 585000040,
    "who_was_moved_is_forgotten": 581000022,
    "who_is_drained_is_forgotten_by_a_new_controller": 500000219,
    "a_standby_is_ready_for_ever": 250007809,
    "what_a_standby_has_from_records_is_done": 250000106,
    "a_step_that_is_done_again_is_progress": 110000053,
    "there_is_no_rung_above_memory": 110000053,
    "what_all_see_is_all_there_is": 4429,
}
"""Seeds that find mutations which few do: tried first, for time.

A schedule's seed means another one when the simulator draws anew, so none of these is relied on: what comes
after is short of a test's two minutes by far."""


def processes() -> int:
    return len(os.sched_getaffinity(0))


FEW = SCHEDULES // 10
STARTS = {
    "most": (0,),
    "leaders that are elected": (-FEW,),
    "nodes that speak for others": (RELAYS, RELAYS + FEW, -RELAYS - FEW),
    "nodes that are drained": (DRAINS, RELAYS + DRAINS, -DRAINS - FEW),
    "nodes that are about to go": (DRAINS + NOTICED, RELAYS + DRAINS + NOTICED, -DRAINS - NOTICED - FEW),
    "devices that fail": (DRAINS + SICK, RELAYS + DRAINS + SICK, -DRAINS - SICK - FEW),
    "roles that are slow": (DRAINS + SLOWS, RELAYS + DRAINS + SLOWS, -DRAINS - SLOWS - FEW),
    "nodes that are sick when they come": (
        DRAINS + CHECKED,
        RELAYS + DRAINS + CHECKED,
        -DRAINS - CHECKED - FEW,
    ),
    "standbys that start roles ahead of need": (READY, DRAINS + READY, RELAYS + READY, -READY - FEW),
    "the rest is derived": (DERIVES, DRAINS + READY + DERIVES, RELAYS + DERIVES, -DERIVES - FEW),
    "roles begin anew": (LADDER, -LADDER - FEW),
    "what roles hold alike is compared": (VERIFIES, FLIPS),
    "not each version is protected": (EVERY, EVERY + DRAINS, -EVERY - READY - FEW, EVERY + LADDER),
}
"""The first seeds of kinds of schedules: `FEW` from each are tried."""


@pytest.mark.parametrize("kind", STARTS)
def test_schedules(kind: str) -> None:
    many = SCHEDULES if kind == "most" else FEW
    seeds = itertools.chain(*(range(start, start + many) for start in STARTS[kind]))
    found = list(itertools.islice(failures(seeds, processes()), 5))
    assert not found, "\n".join(
        f"seed {seed} (python -m tests.simulation --repeat={seed}): {why}" for seed, why in found
    )


def machines_are_in_racks() -> None:
    """Copies go to other racks, as far as those are of like size, and lost roles to the least crowded one."""
    node.domain_of = lambda machine_name: f"rack{sum(map(ord, machine_name)) % 3}/{machine_name}"


def test_schedules_of_machines_in_racks() -> None:
    """Whatever rack copies are in, any machine may be lost."""
    starts = [start for starts in STARTS.values() for start in starts]
    seeds = itertools.chain(*(range(start, start + FEW // 8) for start in starts))
    found = list(itertools.islice(failures(seeds, processes(), machines_are_in_racks), 5))
    assert not found, "\n".join(f"seed {seed}, in racks: {why}" for seed, why in found)


def test_short_schedules_about_leaders() -> None:
    found = list(itertools.islice(failures(range(SCHEDULES // 2), processes(), leaders=True), 5))
    assert not found, "\n".join(f"seed {seed} (--leaders --repeat {seed}): {why}" for seed, why in found)


@pytest.mark.parametrize("seed", FAILED_ONCE)
def test_what_failed_once(seed: int) -> None:
    assert failure(seed) is None


@pytest.mark.parametrize("seed", FAILED_ONCE_ABOUT_LEADERS)
def test_what_failed_once_about_leaders(seed: int) -> None:
    assert failure(seed, leaders=True) is None


def check_found(mutation: Callable[[], None], *seeds: Iterable[int], leaders: bool = False) -> None:
    """Some schedule fails with it. The seed that is known to is tried first."""
    known = [FOUND_BY[mutation.__name__]] if mutation.__name__ in FOUND_BY else []
    tried = itertools.chain(known, *seeds)
    found = next(iter(failures(tried, processes(), mutation, leaders)), None)
    assert found is not None, f"nothing of it was noticed: {mutation.__doc__}"


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_found(name: str) -> None:
    check_found(MUTATIONS[name], FAILED_ONCE, range(5 * SCHEDULES))


@pytest.mark.parametrize("name", DRAINED)
def test_a_mutation_of_what_keeps_a_drain_from_costing_anything_is_found(name: str) -> None:
    starts = DRAINS + SLOWS, DRAINS + SICK, DRAINS + NOTICED, DRAINS
    rounds = (
        range(start + many, start + many + FEW) for many in range(0, 5 * SCHEDULES, FEW) for start in starts
    )
    check_found(DRAINED[name], *rounds)


@pytest.mark.parametrize("name", READY_MADE)
def test_a_mutation_of_when_a_ready_standby_is_of_use_is_found(name: str) -> None:
    check_found(READY_MADE[name], range(READY, READY + 5 * SCHEDULES))


@pytest.mark.parametrize("name", LADDERS)
def test_a_mutation_of_the_ladder_is_found(name: str) -> None:
    check_found(LADDERS[name], range(LADDER, LADDER + 5 * SCHEDULES))


@pytest.mark.parametrize("name", DERIVED)
def test_a_mutation_of_what_is_derived_is_found(name: str) -> None:
    check_found(DERIVED[name], range(DERIVES, DERIVES + SCHEDULES))


@pytest.mark.parametrize("name", FLIPPED)
def test_a_mutation_of_what_keeps_a_flipped_bit_from_spreading_is_found(name: str) -> None:
    check_found(FLIPPED[name], range(FLIPS, FLIPS + SCHEDULES))


@pytest.mark.parametrize("name", CHECKS)
def test_a_mutation_of_what_is_checked_of_nodes_that_join_is_found(name: str) -> None:
    check_found(CHECKS[name], range(DRAINS + CHECKED, DRAINS + CHECKED + SCHEDULES))


@pytest.mark.parametrize("name", ELECTED)
def test_a_mutation_of_what_keeps_leaders_apart_is_found(name: str) -> None:
    check_found(ELECTED[name], range(SCHEDULES), leaders=True)


def test_a_schedule_is_repeated_by_its_seed() -> None:
    assert simulate(3).events == simulate(3).events
