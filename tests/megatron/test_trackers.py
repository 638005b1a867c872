"""What Megatron has gathered for the log goes from a worker to its successor, in whichever class it lies."""

from __future__ import annotations

import importlib
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from ft_core.state.envelope import decode, encode
from ft_megatron import trackers

NAMES = {
    "megatron.core.transformer.multi_token_prediction": "MTPLossLoggingHelper",
    "megatron.core.transformer.experimental_attention_variant.dsa": "DSAIndexerLossLoggingHelper",
}


@pytest.fixture(params=NAMES)
def tracker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    module = pytest.importorskip(request.param, exc_type=ImportError)
    found: dict[str, Any] = {}
    monkeypatch.setattr(getattr(module, NAMES[request.param]), "tracker", found)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    return found


def test_a_successor_has_what_was_gathered(tracker: dict[str, Any]) -> None:
    tracker |= {"values": torch.tensor([1.5, 2.5]), "reduce_group": None}
    saved = decode(encode(trackers.capture()))
    tracker.clear()
    tracker["later"] = torch.ones(1)
    trackers.restore(saved, lambda group: group)
    assert tracker.keys() == {"values", "reduce_group"}
    assert tracker["values"].tolist() == [1.5, 2.5] and tracker["reduce_group"] is None


def test_one_that_is_imported_later_is_as_new(tracker: dict[str, Any]) -> None:
    tracker["values"] = torch.ones(2)
    trackers.restore({"experts": {}}, lambda group: group)
    assert not tracker


@pytest.mark.parametrize("flag", ["num_experts", "mtp_num_layers", "experimental_attention_variant"])
def test_what_differs_from_replica_to_replica(flag: str) -> None:
    assert trackers.of_each_role(SimpleNamespace(**{flag: 2}))
    assert not trackers.of_each_role(SimpleNamespace(**{flag: None}))


def test_an_abandoned_step_leaves_no_lengths_and_no_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    training: Any = ModuleType("training")
    trackers.forget_lengths(training)
    training._seqlen_stats_in_iteration, training._seqlen_stats_active = torch.ones(2), True
    trackers.forget_lengths(training)
    assert not training._seqlen_stats_active and training._seqlen_stats_in_iteration.tolist() == [0, 0]
    trackers.forget_hooks()
    try:
        logging: Any = importlib.import_module("megatron.training.dgrad_logging")
    except ImportError:
        pytest.skip("megatron.training comes with megatron-core 0.17 and Python 3.12")
    removed: list[str] = []
    monkeypatch.setattr(logging, "_LOGGER", SimpleNamespace(remove_hooks=lambda: removed.append("hooks")))
    trackers.forget_hooks()
    assert removed == ["hooks"]
