"""Initialisation that waits for a restore: nobody can tell, and what the restore overwrites is not done."""

from __future__ import annotations

import copy
import io
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from core.putting_off import check, flat, plainly, putting_off, same
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from ft_core.state import mersenne
from ft_core.state.deferred import Deferred

SHAPES = [(0,), (1,), (3,), (15,), (16,), (5, 7), (31, 33), (129, 257)]
LARGE = (1031, 2053)
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


FILLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "normal": partial(nn.init.normal_, std=0.02),
    "uniform": partial(nn.init.uniform_, a=-0.3, b=0.7),
    "trunc_normal": partial(nn.init.trunc_normal_, std=0.02),
    "xavier_normal": nn.init.xavier_normal_,
    "xavier_uniform": nn.init.xavier_uniform_,
    "kaiming_normal": nn.init.kaiming_normal_,
    "kaiming_uniform": partial(nn.init.kaiming_uniform_, a=5**0.5),
    "orthogonal": nn.init.orthogonal_,
    "sparse": partial(nn.init.sparse_, sparsity=0.3),
    "method": lambda t: t.normal_(0.1, 2.0),
    "exponential": lambda t: t.exponential_(),
    "bernoulli": lambda t: t.bernoulli_(0.3),
    "random": lambda t: t.random_(),
}
PLAIN_DIMENSIONS = {"normal", "uniform", "trunc_normal", "method", "exponential", "bernoulli", "random"}


@pytest.mark.parametrize("name", FILLS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_function_of_each_shape(name: str, dtype: torch.dtype) -> None:
    fill = FILLS[name]
    if name == "orthogonal" and dtype.itemsize < 4:
        pytest.skip("torch has no QR decomposition of that type")

    def script(shape: tuple[int, ...], lead: int) -> list[torch.Tensor]:
        made = [torch.empty(lead, dtype=dtype), torch.empty(shape, dtype=dtype), torch.empty(33, dtype=dtype)]
        with torch.no_grad():
            made[0].normal_()  # fewer than 16: drawn in pairs, so that one may be kept
            fill(made[1])
            made[2].normal_()
        return [*made, torch.rand(3)]

    for shape in SHAPES if name in PLAIN_DIMENSIONS else [(4, 8), (5, 7), (31, 33)]:
        for lead in (1, 16):
            expected, state = plainly(partial(script, shape, lead))
            with putting_off() as deferred:
                found, left = plainly(partial(script, shape, lead))
                assert torch.equal(left, state)
                deferred.complete("the test wants to see it")
            same(found, expected)


@pytest.mark.parametrize("fill", ["normal", "uniform", "trunc_normal", "kaiming_uniform"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_large_one(fill: str, dtype: torch.dtype) -> None:
    """More than torch would give to one thread, were it to divide it: as many draws as few numbers say."""
    check(lambda: FILLS[fill](torch.empty(LARGE, dtype=dtype)), put_off=fill != "trunc_normal")


def test_not_contiguous() -> None:
    """Drawn number by number: it is not put off."""

    def script() -> list[torch.Tensor]:
        tensor = torch.zeros(40, 50)
        nn.init.normal_(tensor.t())
        nn.init.normal_(tensor[:, ::2])
        return [tensor, torch.empty(64, 3).t().uniform_()]

    check(script, put_off=False)


def test_generators_of_its_own() -> None:
    """They are not touched, and nothing of them is put off."""

    def script() -> list[torch.Tensor]:
        own = torch.Generator()
        own.manual_seed(3)
        return [torch.empty(100).normal_(generator=own), own.get_state()]

    check(script, put_off=False)


def test_a_seed_that_is_set_again() -> None:
    """Draws that are owed are owed by a generator that is gone."""

    def script() -> list[torch.Tensor]:
        first = torch.empty(1000).normal_()
        torch.manual_seed(5)  # the very state that it had
        second = torch.empty(100).normal_()
        torch.default_generator.manual_seed(7)
        return [first, second, torch.empty(100).uniform_(), torch.tensor(torch.initial_seed())]

    check(script)


def test_states_that_are_saved_and_put_back() -> None:
    """As Megatron's tracker does around each layer."""

    def script() -> list[torch.Tensor]:
        made = []
        saved = torch.get_rng_state()
        for _ in range(4):
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(saved)
                made.append(torch.empty(300, 70).normal_())
                saved = torch.get_rng_state()
            made.append(torch.empty(50).uniform_())
        return [*made, saved]

    check(script)


def test_text_that_nobody_reads() -> None:
    """It is no reason to initialise what it is of. All other text has the content."""
    with putting_off() as deferred:
        tensor = torch.empty(2000).normal_()
        with deferred.text_unread():
            assert str([tensor]) == "[tensor(..., size=(2000,))]" and not deferred.done
        assert "..., " in str(tensor) and deferred.done == 2000


class Net(nn.Module):
    """What models are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 32, padding_idx=3)
        self.linear = nn.Linear(32, 48)
        self.conv = nn.Conv1d(8, 8, 3)
        self.norm = nn.LayerNorm(48)
        self.lstm = nn.LSTM(16, 24)
        self.attention = nn.MultiheadAttention(32, 4)
        self.out = nn.Linear(32, 100, bias=False)
        self.out.weight = self.embedding.weight  # tied


def test_modules() -> None:
    check(Net)


def test_weights_that_are_scaled_cast_joined_and_cut() -> None:
    """As Megatron makes the shards of a weight, DDP its buffers, optimizers their main parameters."""

    def script() -> list[torch.Tensor]:
        whole = nn.init.normal_(torch.empty(64, 48)).to(torch.bfloat16)
        part = torch.cat(torch.split(whole, 8, dim=0)[1::2], dim=0)
        weight = nn.Parameter(torch.empty(32, 48, dtype=torch.bfloat16))
        weight.data.copy_(part)
        other = nn.Parameter(torch.empty(10).uniform_())
        with torch.no_grad():
            other.mul_(0.5).add_(1.0)
            other[2:4].fill_(9.0)
        buffer = torch.zeros(32 * 48 + 10 + 6)
        views = [buffer[: 32 * 48].view(32, 48), buffer[32 * 48 : -6]]
        for parameter, view in zip((weight, other), views, strict=True):
            view.copy_(parameter.data)
        torch._foreach_copy_([buffer[:10]], [other.detach()])
        main = weight.detach().view(-1)[100:300].clone().float()
        flat = torch.cat([other.detach(), torch.zeros(6)])
        flat[8:12].copy_(torch.from_numpy(np.arange(4, dtype=np.float32)))
        return [weight, other, buffer, main, flat, copy.deepcopy(weight)]

    check(script)


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a norm": lambda w: w.norm().item(),
    "a list": lambda w: w.tolist(),
    "numpy": lambda w: w.detach().numpy().copy().sum().item(),
    "a copy of the object": lambda w: copy.deepcopy(w.detach()),
    "a file": lambda w: torch.load(_saved(w)),
    "a comparison": lambda w: bool((w > 0).any()),
    "a product": lambda w: w.t() @ w,
    "in another order": lambda w: w.detach()[torch.randperm(w.shape[0])],
    "itself": lambda w: w.data.div_(w.data.norm()),
    "memory that is given back": lambda w: _given_back(w),
}


def _saved(tensor: torch.Tensor) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(tensor.detach(), file)
    file.seek(0)
    return file


def _given_back(tensor: torch.Tensor) -> torch.Tensor:
    kept = tensor.detach().clone()
    tensor.untyped_storage().resize_(0)
    tensor.untyped_storage().resize_(kept.nbytes)
    tensor.data.copy_(kept)
    return kept


def test_memory_that_somebody_else_reads() -> None:
    """No operation is seen when numpy reads its own array, or another process what it was given."""

    def script() -> list[Any]:
        own, lent, shared = np.zeros(100, np.float32), torch.zeros(100), torch.zeros(100).share_memory_()
        view, source = lent.numpy(), torch.empty(100)
        torch.from_numpy(own).normal_()
        lent.uniform_()
        shared.normal_()
        found = [own.copy(), view.copy()]
        source.normal_()
        lent.copy_(source)
        return [*map(torch.from_numpy, [*found, view.copy()]), shared]

    check(script, put_off=False)


@pytest.mark.parametrize("name", READS)
def test_whoever_reads_finds_it_initialised(name: str) -> None:
    def script() -> list[Any]:
        layers = [nn.Linear(40, 30), nn.Linear(30, 20)]
        return [READS[name](layers[0].weight), layers[1], torch.empty(60).normal_(), layers[0]]

    check(script)


def test_gradients_of_what_was_put_off() -> None:
    """A forward pass keeps the weights that it has read; that they were drawn meanwhile is no change."""

    def script() -> list[torch.Tensor]:
        net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
        net(torch.ones(2, 16)).square().sum().backward()
        return [p.grad for p in net.parameters() if p.grad is not None]

    check(script, put_off=False)


@pytest.mark.parametrize("norm", [spectral_norm, weight_norm])
def test_parametrisations_that_read_their_weight(norm: Callable[[nn.Module], nn.Module]) -> None:
    check(lambda: norm(nn.Linear(24, 36)))


def restored(deferred: Deferred, restore: Callable[[], None]) -> int:
    """How often the state was restored."""
    if not deferred.restoring(restore):
        return 1
    restore()
    return 2


def newcomer(
    make: Callable[[], nn.Module], load: Callable[[nn.Module, list[torch.Tensor]], None]
) -> tuple[list[torch.Tensor], int, Deferred]:
    """A module that was made by a newcomer, and restored to where another has trained; with how often that
    was restored."""
    torch.manual_seed(11)
    trained = [torch.randn(t.shape, dtype=t.dtype) if t.is_floating_point() else t for t in flat(make())]
    with putting_off() as deferred:
        torch.manual_seed(5)
        module = make()
        times = restored(deferred, lambda: load(module, trained))
    return flat(module), times, deferred


def load_all(module: nn.Module, values: list[torch.Tensor]) -> None:
    """Everything."""
    with torch.no_grad():
        for tensor, value in zip(flat(module), values, strict=True):
            tensor.data.copy_(value)


def test_what_is_restored_is_never_drawn() -> None:
    found, times, deferred = newcomer(Net, load_all)
    torch.manual_seed(11)
    expected = [torch.randn(t.shape, dtype=t.dtype) if t.is_floating_point() else t for t in flat(Net())]
    same(found, expected)
    assert times == 1
    assert deferred.skipped > 0 and not deferred.done


def test_masters_that_are_gone_need_not_be_restored() -> None:
    def make() -> nn.Module:
        linear = nn.Linear(32, 16)
        master = nn.init.normal_(torch.empty(64, 32))
        linear.weight.data.copy_(master[16:32])
        return linear

    _, times, deferred = newcomer(make, load_all)
    assert times == 1 and not deferred.done


@pytest.mark.parametrize("kind", ["a weight that is not state", "half of one", "one that is derived"])
def test_what_the_restore_leaves_is_drawn(kind: str) -> None:
    """And the state, over which that was written, is restored again."""

    class Left(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(40, 10)
            self.more = nn.Linear(10, 10)
            self.derived = self.more.weight.detach().clone()

    def load(module: nn.Module, values: list[torch.Tensor]) -> None:
        assert isinstance(module, Left)
        with torch.no_grad():
            module.linear.weight.copy_(values[0])
            module.linear.bias.copy_(values[1])
            if kind == "half of one":
                module.more.weight[:5].copy_(values[2][:5])
                module.derived.zero_()
            elif kind == "one that is derived":
                module.more.weight.copy_(values[2])
                module.more.bias.copy_(values[3])

    torch.manual_seed(11)
    values = [torch.randn_like(t) for t in flat(Left())]
    torch.manual_seed(5)
    plain = Left()
    load(plain, values)
    with putting_off() as deferred:
        torch.manual_seed(5)
        module = Left()
        assert restored(deferred, lambda: load(module, values)) == 2
    same([module, module.derived], [plain, plain.derived])


def test_a_restore_that_reads_what_it_has_not_restored() -> None:
    def load(module: nn.Module, values: list[torch.Tensor]) -> None:
        with torch.no_grad():
            weight, bias = module.parameters()
            bias.copy_(weight.sum(1))
            weight.copy_(values[0])

    def script(restore: Callable[[Callable[[], None]], object]) -> nn.Module:
        torch.manual_seed(5)
        module = nn.Linear(8, 6)
        restore(lambda: load(module, [torch.ones(6, 8)]))
        return module

    expected = script(lambda restore: restore())
    torch.manual_seed(5)
    first = nn.Linear(8, 6)
    with putting_off() as deferred:
        torch.manual_seed(5)
        module = nn.Linear(8, 6)
        assert deferred.restoring(lambda: load(module, [torch.ones(6, 8)]))
        same(module, first)  # as it was before the restore
        load(module, [torch.ones(6, 8)])
    same(module, expected)


def test_a_restore_that_derives_weights_from_what_it_has_restored() -> None:
    def load(module: nn.Module, values: list[torch.Tensor]) -> None:
        with torch.no_grad():
            weight, bias = module.parameters()
            weight.copy_(values[0])
            bias.copy_(weight.sum(1))

    found, times, _ = newcomer(partial(nn.Linear, 8, 6), load)
    assert times == 1
    same(found[1].detach(), found[0].detach().sum(1))


def test_what_an_adapter_makes_afterwards_is_not_drawn() -> None:
    """As Megatron gathers parameters of which each role has restored a part."""
    with putting_off() as deferred:
        weight, other = torch.empty(300).normal_(), torch.empty(40).normal_()

        def restore() -> None:
            weight[:100].zero_()
            deferred.follow([weight])
            other.zero_()

        assert restored(deferred, restore) == 1
        deferred.follow([weight])  # nothing is being restored
    assert not deferred.done and not weight[:100].any() and not other.any()


def test_a_restore_that_fails() -> None:
    """The next one, or whoever finds that nothing is restored, meets what it would have met."""
    torch.manual_seed(5)
    expected = nn.Linear(30, 20)

    def fail(module: nn.Linear) -> None:
        module.weight.data.zero_()
        raise RuntimeError("the epoch is over")

    for second in (False, True):
        with putting_off() as deferred:
            torch.manual_seed(5)
            module = nn.Linear(30, 20)
            with pytest.raises(RuntimeError):
                deferred.restoring(partial(fail, module))
            if second:
                assert restored(deferred, lambda: load_all(module, flat(expected))) == 1  # noqa: B023
            else:
                deferred.end("nothing is restored")
        same(module, expected)


def test_a_generator_that_is_not_known(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of another torch: everything is done at once."""
    monkeypatch.setattr(mersenne, "_NBYTES", 1)
    with putting_off() as deferred:
        assert torch.empty(100).normal_().isfinite().all()
    assert not deferred.skipped and "another generator" in caplog.text


def test_nothing_of_it_is_left() -> None:
    before = torch.Tensor.numpy, torch.get_rng_state, torch.UntypedStorage.resize_
    with putting_off() as deferred:
        tensor = torch.empty(100).normal_()
        deferred.end("nothing is restored")
        deferred.end("twice")
    assert (torch.Tensor.numpy, torch.get_rng_state, torch.UntypedStorage.resize_) == before
    assert tensor.isfinite().all()


def test_tensors_of_another_class_are_initialised() -> None:
    """What they consist of is not seen."""

    class Wrapped(torch.Tensor):
        pass

    check(lambda: torch.empty(100).as_subclass(Wrapped).normal_().as_subclass(torch.Tensor), put_off=False)


def test_memory_of_what_is_put_off_can_be_there_before_it_is_overwritten() -> None:
    """Neither is anything drawn for that, nor does what is drawn later differ."""
    size = 1 << 24  # so large that it is nobody's memory yet
    torch.manual_seed(5)
    expected = torch.randn(size)
    torch.manual_seed(5)
    deferred = Deferred()
    deferred.begin()
    weight = torch.empty(size)
    weight.normal_()
    gone = torch.empty(size).normal_()
    del gone
    before = resident()
    deferred.prepare()
    assert resident() - before >= 3 * size and not deferred.done
    deferred.end("it is needed", logging.DEBUG)
    assert torch.equal(weight, expected)


def resident() -> int:
    """Bytes of this process's own memory that the kernel has given it."""
    text = Path("/proc/self/status").read_text()
    return 1024 * int(text.partition("RssAnon:")[2].split()[0])
